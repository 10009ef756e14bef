"""Connect application: fits over a session of Spark Connect; see ``driver.application``."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.averaging.round_job import AveragingJob
from sparkstrom.spark.averaging.rounds import Rounds
from sparkstrom.spark.averaging.rounds_control import RoundsControl
from sparkstrom.spark.connect import frame_engine
from sparkstrom.spark.connect.binary_rows import SCHEMA
from sparkstrom.spark.connect.connect_evaluation import evaluate_frame
from sparkstrom.spark.connect.connect_jobs import ConnectJob, answers_of, collected
from sparkstrom.spark.connect.connect_placing import ConnectPlacing
from sparkstrom.spark.connect.connect_spread import (
    FrameOfBlocks,
    batch_rows_of,
    small_batches,
    spread_frame,
)
from sparkstrom.spark.connect.connect_tasks import roll_call, run_task, run_worker
from sparkstrom.spark.connect.refusals import check_options, need_frame, refuse
from sparkstrom.spark.connect.roll_calling import roll_called
from sparkstrom.spark.connect.uploads import Uploads
from sparkstrom.spark.controller.control_words import LineOrder
from sparkstrom.spark.data.columns import Chosen
from sparkstrom.spark.data.partitioning import Spread
from sparkstrom.spark.driver.averaging_master import TrainingMaster
from sparkstrom.spark.driver.cluster import Slots, slots_by, workers_for
from sparkstrom.spark.driver.controller_choice import AUTO, EXECUTOR
from sparkstrom.spark.driver.evaluation import Evaluation, Wanted
from sparkstrom.spark.driver.fit_listeners import FitListener
from sparkstrom.spark.driver.initial_parameters import Handle, StateHandle, pack
from sparkstrom.spark.driver.pickling import keep_tasks_out_of_logs
from sparkstrom.spark.driver.settings import local_ip
from sparkstrom.spark.driver.spark_job import SparkJob
from sparkstrom.spark.driver.training_master import SharedTrainingMaster
from sparkstrom.spark.executor.entry import Unopened
from sparkstrom.spark.executor.job import TrainingJob
from sparkstrom.spark.executor.tasks import forget_kept

Say = Callable[[str], None]


class ConnectApplication:
    """Asks a session's server. ``conf`` is asked for whole, once per fit."""

    def __init__(self, session: Any) -> None:
        self._session, self._uploads = session, Uploads(session)
        keep_tasks_out_of_logs()
        self._slots: Slots | None = None  # of the newest fit

    @property
    def name(self) -> str:
        return str(self._session.session_id)

    @property
    def is_stopped(self) -> bool:
        return bool(getattr(self._session, "is_stopped", False))  # Spark 3.5 does not say

    @property
    def live_conf(self) -> Any:
        return self.conf()

    @property
    def host(self) -> str:
        """The address from which this program reaches the server."""
        return local_ip(os.environ) or _address_to(self._session.client.host)

    def conf(self) -> Mapping[str, str]:
        return all_of(self._session)

    def check(self, master: TrainingMaster) -> None:
        check_options(master)

    @property
    def has_workers_output(self) -> bool:
        return False

    def check_data(self, data: Any) -> None:
        need_frame(data, self._session)

    def need_rdds(self, what: str, instead: str) -> None:
        raise refuse(what, instead)

    def slots(self, seconds: float, say: Say) -> Slots:
        conf = self.conf()
        roll = partial(_once, partial(self._roll, seconds, say))
        there: list[list[str]] = []
        self._slots = slots_by(
            conf,
            conf.get("spark.master", ""),
            lambda: len(set(roll(there))),
            lambda: len(roll(there)),
        )
        return self._slots

    def _roll(self, seconds: float, say: Say) -> list[str]:
        """The executors of as many tasks as Spark begins by itself: one for each core."""
        run = partial(self._answers, roll_call, None, "counting executors")
        job = ConnectJob(self._session, f"sparkstrom-{secrets.token_hex(8)}", run)
        server = f"the Spark Connect server {self._session.client.host}"
        return roll_called(job, server, seconds, say)

    def settled(self, master: SharedTrainingMaster, slots: Slots, say: Say) -> SharedTrainingMaster:
        """In a task: nobody knows where this program is."""
        if master.void.controller == AUTO:
            void = replace(master.void, controller=EXECUTOR, controller_address=None)
            master = replace(master, void=void)
        workers_for(slots, master)
        return master

    def local_property(self, key: str) -> str | None:
        """There are none."""
        return None

    def thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=run, name=name)

    @contextlib.contextmanager
    def interrupts(self) -> Iterator[None]:
        """What this thread has asked for in the block has a tag, and is ended by that."""
        tag = f"sparkstrom-{secrets.token_hex(8)}"
        self._session.addTag(tag)
        try:
            yield
        except KeyboardInterrupt:
            self._session.interruptTag(tag)
            raise
        finally:
            self._session.removeTag(tag)

    def spread(self, data: Any, chosen: Chosen, workers: int, master: TrainingMaster) -> Spread:
        move = master.repartition == "always"
        with small_batches(self._session, batch_rows_of(data)):
            return spread_frame(data, chosen, workers, seed=master.rng_seed, move=move)

    @contextlib.contextmanager
    def travelling(self, theta: Theta, workers: int, state: bytes) -> Iterator[Handle]:
        yield self._uploads.handle(pack(theta, state))

    @contextlib.contextmanager
    def own_states(self, states: Mapping[int, bytes]) -> Iterator[dict[int, StateHandle]]:
        yield {partition: self._uploads.handle(state) for partition, state in states.items()}

    def training(self, job: TrainingJob, spread: Spread, need: Any) -> ConnectJob:
        run = partial(run_worker, Unopened(job, job.way), spread.blocks)
        made: FrameOfBlocks = spread.rdd
        task = made.frame.mapInArrow(run, SCHEMA)

        def runner() -> list[Any]:
            with small_batches(self._session, made.batch_rows):
                return collected(task)()

        return ConnectJob(self._session, f"sparkstrom-{job.spec.job:016x}", runner)

    def rounds(self, job: AveragingJob, spread: Spread, control: RoundsControl) -> ConnectJob:
        ours = replace(job, sizes=frame_engine.SIZES)
        engine = frame_engine.FrameEngine(self._session, ours, spread, lambda: control.given_up)
        group = f"sparkstrom-{job.spec.job:016x}"
        return ConnectJob(self._session, group, Rounds(engine, ours, control).run)

    def watches(self, job: SparkJob, warn: Say) -> list[FitListener]:
        """Nobody: what executors do is not told here."""
        return []

    def placing(
        self, training: TrainingJob, kept: CheckpointFiles, line: LineOrder, say: Say
    ) -> ConnectPlacing:
        return ConnectPlacing(self._session, training, kept, line, say)

    def door_address(self) -> tuple[str, str]:
        return self.host, self.host

    def ship(self, value: Any) -> Any:
        return self._uploads.handle(value)

    def evaluate(self, shipped: Any, wanted: Wanted, data: Any, chosen: Chosen) -> Evaluation:
        with small_batches(self._session, batch_rows_of(data)):
            return evaluate_frame(shipped, wanted, data, chosen)

    def forget(self, network: str) -> None:
        slots = self._slots.total if self._slots is not None else 1
        self._answers(partial(forget_kept, network), slots, "removing what workers kept")

    def _answers(self, task: Any, tasks: int | None, doing: str) -> list[Any]:
        """Of so many tasks; None: of as many as Spark begins by itself."""
        rows = self._session.range(0, tasks or 1 << 20, 1, tasks)
        return answers_of(rows.mapInArrow(partial(run_task, task), SCHEMA), doing)


def all_of(session: Any) -> dict[str, str]:
    """A session's configuration, its application's included; public since Spark 4."""
    conf = session.conf
    if hasattr(type(conf), "getAll"):
        return dict(conf.getAll)
    from pyspark.sql.connect import proto

    everything = proto.ConfigRequest.Operation(get_all=proto.ConfigRequest.GetAll())
    return dict(session.client.config(everything).pairs)


def _once(make: Callable[[], list[str]], made: list[list[str]]) -> list[str]:
    if not made:
        made.append(make())
    return made[0]


def _address_to(server: str) -> str:
    """Of this machine, as datagrams to the server would have it; nothing is sent."""
    host = server.rpartition(":")[0] if server.count(":") == 1 else server
    try:
        family, kind, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(f"no way to the Spark Connect server {server!r}: {error}") from None
