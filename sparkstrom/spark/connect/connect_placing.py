"""Connect placing: finds an executor for the controller, and begins its task there, by DataFrames.

As in ``controller_job``: a short task says which address and free port its executor has, and the
controller's own task is then wanted there. Spark Connect knows no preferred locations, but a task
goes where the partition that it reads is cached: so the row with the place is cached, and the
controller's task reads that. Whether it has begun another short task asks it by UDP: that works
wherever training does, also where no TCP gets to this program.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sparkstrom.base.errors import NetworkError, SetupError
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
from sparkstrom.spark.connect.binary_rows import SCHEMA
from sparkstrom.spark.connect.connect_jobs import ConnectJob, collected
from sparkstrom.spark.connect.connect_tasks import run_controller, run_task
from sparkstrom.spark.controller.control_words import (
    ControllerPlace,
    LineOrder,
    NotHere,
    of_parts,
)
from sparkstrom.spark.controller.controller_entry import look_at_place
from sparkstrom.spark.controller.controller_job import (
    ELSEWHERE,
    TRIES,
    PlacedController,
    await_slot,
    orders_at,
    raise_what_failed,
)
from sparkstrom.spark.controller.udp_reach import TOKEN_BYTES, ReachOrder, reaches
from sparkstrom.spark.driver.controller_choice import parse_controller
from sparkstrom.spark.driver.fitting import END_S
from sparkstrom.spark.executor.job import TrainingJob

WAITS = (
    "sparkstrom waits: for the controller's task, which needs a task slot of its own "
    "(controller={!r}); other jobs may have them all"
)
ASKS_S = 25.0  # a Python worker may have to begin first, on either side
UNHEARD = (
    "the executor on {host} has the controller at {place}, and an executor on {asking} gets no "
    "answer from it by UDP: allow UDP between executors in both directions, or name the network "
    "that they share (network_mask)"
)


@dataclass(frozen=True, slots=True)
class ConnectPlacing:
    """What is needed to find a place. ``say``: to people, while it waits."""

    session: Any
    training: TrainingJob
    kept: CheckpointFiles
    line: LineOrder
    say: Callable[[str], None]

    def run(self) -> PlacedController:
        """Raise SetupError where no executor can have it, TrainingError where its task fails."""
        for _ in range(TRIES):
            with self._looked() as (frame, place):
                token = secrets.token_bytes(TOKEN_BYTES)
                job = self._begin(frame, place, token)
                try:
                    if self._has_begun(job, place, token):
                        return PlacedController(job, place)
                except BaseException:
                    job.cancel()
                    job.wait(END_S)
                    raise
        raise SetupError(ELSEWHERE.format(tries=TRIES))

    @contextlib.contextmanager
    def _looked(self) -> Iterator[tuple[Any, ControllerPlace]]:
        """A place, and a cached row on its executor."""
        void = self.training.master.void
        look = partial(look_at_place, void, parse_controller(void.controller))
        frame = self._one_task(look).persist()
        try:
            job = self._job("controllers place", frame)
            job.start()
            try:
                self._await(lambda: not job.running)
            except BaseException:
                job.cancel()
                raise
            raise_what_failed(job)
            (place,) = job.reports
            yield frame, place
        finally:
            frame.unpersist()

    def _begin(self, frame: Any, place: ControllerPlace, token: bytes) -> ConnectJob:
        line = replace(self.line, token=token)
        media, unopened = orders_at(place, self.training, self.kept)
        run = partial(run_controller, (line, media), place.process, unopened)
        job = self._job("controller", frame.mapInArrow(run, SCHEMA))
        job.start()
        return job

    def _has_begun(self, job: ConnectJob, place: ControllerPlace, token: bytes) -> bool:
        """Is it at work there? False: it began elsewhere, and has returned."""
        void = self.training.master.void
        order = ReachOrder(place.endpoint, token, void.network_mask, void.executor_ports(), ASKS_S)
        asking = self._job("asking the controller", self._one_task(partial(reaches, order)))
        asking.start()
        try:
            self._await(lambda: not (asking.running and job.running))
        finally:
            asking.cancel()
            asking.wait(END_S)
        if not job.running:
            raise_what_failed(job)
            return not isinstance(of_parts(job.reports), NotHere)
        raise_what_failed(asking)
        (answer,) = asking.reports
        if not answer.heard:
            raise NetworkError(
                UNHEARD.format(host=place.host, place=place.endpoint, asking=answer.host)
            )
        return True

    def _one_task(self, task: Callable[[Iterable[Any]], Iterator[Any]]) -> Any:
        return self.session.range(0, 1, 1, 1).mapInArrow(partial(run_task, task), SCHEMA)

    def _job(self, what: str, frame: Any) -> ConnectJob:
        group = f"sparkstrom-{self.training.spec.job:016x}-{what.replace(' ', '-')}"
        return ConnectJob(self.session, group, collected(frame))

    def _await(self, condition: Callable[[], bool]) -> None:
        await_slot(condition, self.say, WAITS.format(self.training.master.void.controller))
