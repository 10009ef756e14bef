"""Tasks: the named functions that run in Spark's Python workers.

Nothing here is swallowed: what goes wrong is told to the master, which ends the whole fit, and
then raised, so that Spark's own log has it, too.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
import traceback
from collections.abc import Iterable, Iterator
from typing import Any, TypedDict

import numpy as np

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import SetupError, UsageError, reason_of
from sparkstrom.base.version import __version__
from sparkstrom.codec.messages import ResidualCheckpoint
from sparkstrom.encoding.backends import Backend, warm_up
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.thresholds import AUTO, algorithm_of
from sparkstrom.models.base import Placeable, Share
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.endings import Ending
from sparkstrom.protocol.common.events import Order
from sparkstrom.protocol.worker.node import Identity, NodeLimits
from sparkstrom.runtime.batches import Batches
from sparkstrom.runtime.failures import CHECKING
from sparkstrom.runtime.freed_memory import kept_for_the_next_step
from sparkstrom.runtime.lent_state import load_all
from sparkstrom.runtime.node_thread import Copying, Meeting, NodePlan, NodeThread
from sparkstrom.runtime.optimizer_lending import OptimizerLender
from sparkstrom.runtime.replica import Replica
from sparkstrom.runtime.theta import Theta
from sparkstrom.runtime.trainer import Schedule, Trainer
from sparkstrom.runtime.trainer_channel import TrainerChannel
from sparkstrom.runtime.trainer_inbox import TrainerInbox
from sparkstrom.runtime.worker_output import WorkerOutput, captured
from sparkstrom.spark.data.row_blocks import Block
from sparkstrom.spark.data.shuffle_blocks import Blocks
from sparkstrom.spark.driver.initial_parameters import unpack
from sparkstrom.spark.driver.training_master import SharedTrainingMaster
from sparkstrom.spark.executor import residual_files
from sparkstrom.spark.executor.devices import backend_of
from sparkstrom.spark.executor.interfaces import opener, warm_up_transport
from sparkstrom.spark.executor.job import TrainingJob, serving_of
from sparkstrom.spark.executor.own_rows import batches_of
from sparkstrom.spark.executor.task_place import TaskPlace, here, spare_collections

log = logging.getLogger(__name__)

TRACE_CHARS_MAX = 8_000
HEARD_S = 8.0  # how long a failing task waits for the master to have heard why
AGE = 24  # the fit's minibatches: what is stable is a number of these, not of a worker's steps
PUBLICATIONS_MAX = 1  # of a worker under way: the next one goes when the link has carried it


def run_partition(
    job: TrainingJob, blocks: Blocks, index: int, items: Iterable[Any]
) -> Iterator[str]:
    """Train on one partition, whatever its rows come from."""
    yield run(job, here(), blocks(index, items))


def run(job: TrainingJob, place: TaskPlace, blocks: Iterator[Block]) -> str:
    """Join, train, leave; return a report as JSON. The driver hears what the model prints."""
    output = WorkerOutput(SystemClock())
    with captured(output):
        return _run(job, place, blocks, output)


def _run(job: TrainingJob, place: TaskPlace, blocks: Iterator[Block], output: WorkerOutput) -> str:
    began_s = time.monotonic()
    warm_up()
    warm_up_transport()
    spare_collections()
    failure: UsageError | SetupError | None = None
    output.phase = lambda: CHECKING
    try:
        settle(job, place)
        batches = batches_of(job, place, blocks)
    except (UsageError, SetupError) as error:  # anything else is Spark's: a stage to repeat
        failure = error
        batches = batches_of(job, place, None)
    session = Session(job, place, batches)
    session.channel.said, output.phase = output.take, session.channel.doing
    if failure is not None:
        is_usage = isinstance(failure, UsageError)
        session.report(failure, CHECKING if is_usage else "preparing")
    session.thread.start()
    try:
        if failure is not None:
            raise failure
        with kept_for_the_next_step():
            reason = session.trainer.run()
    except Exception as error:
        if error is not failure:
            session.report(error, session.channel.doing())
        session.wait_until_heard()
        raise
    finally:
        session.thread.stop()
        batches.close()
    seconds = time.monotonic() - began_s
    is_dismissed = Ending.of(reason) is Ending.DISMISSED
    dismissed = session.replica.unsent_mass() if is_dismissed else 0.0
    report = {"partition": place.partition, "ended": reason, "seconds": seconds}
    report["mass_dismissed"] = dismissed
    return json.dumps(report | {"epochs": session.trainer.epochs.report()})


def settle(job: TrainingJob, place: TaskPlace) -> None:
    """Tell a model that asks for it what this task has of the machine."""
    if isinstance(job.model, Placeable):
        chance = (job.master.rng_seed, place.partition, job.spec.first_epoch)
        seed = int(np.random.SeedSequence(chance).generate_state(1, np.uint64)[0] >> np.uint64(1))
        job.model.place(Share(place.cpus, place.gpu, seed))


class Session:
    """One task's node and trainer."""

    def __init__(self, job: TrainingJob, place: TaskPlace, batches: Batches) -> None:
        self._job, self._place = job, place
        theta = initial_theta(job, backend_of(job.model))
        self.replica = replica = make_replica(job, theta)
        if state := job.state_of(place.partition):
            load_all(replica, state)
        inbox = TrainerInbox(job.master.void.window_bytes, theta.begin_sum)
        self.channel, lender = TrainerChannel(inbox), OptimizerLender(SystemClock())
        self.thread = NodeThread(
            NodePlan(
                identity_of(job, place, batches),
                limits_of(job),
                Meeting(job.endpoint, job.join_stream),
                message_bytes_max=job.message_bytes_max,
                chunk_bytes_max=job.master.void.max_chunk_size,
            ),
            open_transport=self._opener(),
            seal=job.seal(),
            channel=self.channel,
            copying=Copying(replica.chunk, theta.merge, lender),
            clock=SystemClock(),
        )
        self.trainer = Trainer(
            self.channel,
            replica,
            batches,
            schedule_of(job, place.partition, place.attempt),
            keep=self._keep,
            grant=self._restore,
            lender=lender,
        )

    def _opener(self) -> Any:
        way, place = self._job.way, self._place
        return opener(way.driver_key(place), way.driver_options(place))

    def report(self, error: Exception, doing: str) -> None:
        """Say why training has failed; before the thread starts: instead of joining."""
        trace = "".join(traceback.format_exception(error))[-TRACE_CHARS_MAX:]
        self.channel.post(ev.TrainerFailed(reason_of(error), trace, doing))

    def wait_until_heard(self) -> None:
        """The master ends the job for all."""
        until_s = time.monotonic() + HEARD_S
        while time.monotonic() < until_s and self.thread.is_alive():
            if self.channel.command.order in (Order.FAIL, Order.END):
                return
            time.sleep(0.05)

    def _keep(self, replica: Replica) -> ResidualCheckpoint | None:
        if not self._job.keep:
            return None
        return residual_files.keep(replica, self._place.scratch, self._job.network)

    def _restore(self, replica: Replica, paths: tuple[str, ...]) -> None:
        for path in paths:
            residual_files.restore(replica, path)


def schedule_of(job: TrainingJob, partition: int = 0, attempt: int = 0) -> Schedule:
    """How far and how often this worker trains and publishes."""
    master = job.master
    return Schedule(
        job.spec.epochs,
        None if isinstance(master.publish_every, str) else master.publish_every,
        master.debug_longer_iterations,
        show_residual=master.encoding_debug_mode,
        metric=job.spec.metric,
        partition=partition,
        attempt=attempt,
        minibatches_before=job.spec.minibatches_before if master.horizon == "fit" else None,
    )


def initial_theta(job: TrainingJob, backend: Backend | None = None) -> Theta:
    """The parameters and buffers that the fit begins with, where the job brings them."""
    theta = Theta(job.spec.n_params, job.k, job.layers, backend)
    if job.initial is not None:
        values, theta.buffers = unpack(job.initial.value, job.spec.n_params, job.k)
        theta.load(values)
    return theta


def make_replica(job: TrainingJob, theta: Theta) -> Replica:
    """This worker's model, theta and encoder, all of them on theta's backend."""
    master = job.master
    encoder = Encoder(
        job.spec.n_params,
        job.k,
        algorithm_of(master.threshold),
        master.residual_post_processor,
        train_on=master.train_on,
        aggregation=master.aggregation,
        workers=job.spec.workers,
        backend=theta.backend,
        layer_of=job.model.layer_of,
        warm_up=master.warm_up,
        shake_frequency=master.shake_frequency,
        layers=job.layers,
    )
    return Replica(job.model, theta, encoder, local=master.train_on == "local")


def identity_of(job: TrainingJob, place: TaskPlace, batches: Batches) -> Identity:
    """What this process says of itself when it joins."""
    return Identity(
        token=secrets.randbits(63),
        partition=place.partition,
        attempt=place.attempt,
        rows=batches.rows,
        checksum=batches.checksum,
        batches=batches.per_epoch,
        host=place.host,
        executor=f"{place.host}/{place.jvm}",
        pid=os.getpid(),
        version=__version__,
        start=job.spec.start_of(place.partition),
        whole=job.initial is not None,
    )


def limits_of(job: TrainingJob) -> NodeLimits:
    """The node's deadlines and sizes, from the user's options."""
    void = job.master.void
    return NodeLimits(
        lease_s=void.lease_s,
        master_silent_s=(3 if job.tree.depth_max == 1 else 6) * void.lease_s,
        step_s=job.master.step_timeout,
        window_bytes=void.window_bytes,
        log_bytes=void.log_bytes,
        serving=serving_of(job.spec.n_params),
        publications_max=PUBLICATIONS_MAX if job.master.publish_every == AUTO else None,
        optimizer_wait_s=void.lease_s,
        **bounds_of(job.master),
    )


class Bounds(TypedDict):
    """How far workers may be apart; fields of ``NodeLimits``."""

    max_lead: int | None
    max_staleness: int | None
    age_of_updates: int
    steps_each: int


def bounds_of(master: SharedTrainingMaster) -> Bounds:
    """``max_lead`` and ``max_staleness`` in a worker's own steps, of which a publication may hold
    several.
    """
    every = 1 if isinstance(master.publish_every, str) else master.publish_every
    lead, rounds, age = master.max_lead, master.max_staleness, 0
    if isinstance(lead, str):
        lead = every
    if isinstance(rounds, str):
        rounds, age = 0, AGE
    return {
        "max_lead": lead,
        "max_staleness": None if rounds is None else rounds * every,
        "age_of_updates": age,
        "steps_each": every,
    }


def forget_kept(network: str, rows: Iterable[Any]) -> Iterator[int]:
    """Remove what workers of a network kept on this executor."""
    yield residual_files.forget(here().scratch, network)
