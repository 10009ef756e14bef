"""Start the controller's task, which coordinates a fit's workers, on an executor that can host it.

A short task first reports the address and a free port of its executor. Then the controller's own
task is submitted with a preference for that executor. If it starts on another executor, it returns
at once, and another short task proposes a place. No other service than Spark is needed.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sparkstrom.base.errors import SetupError, TrainingError
from sparkstrom.fit.master_setup import MediaDriverConfig, controller_media_driver
from sparkstrom.fit.supervisor import TASKS_END_S, find_cause, setup_error_in
from sparkstrom.options.network import ControllerChoice, parse_controller
from sparkstrom.protocol.master.members import CheckpointFiles
from sparkstrom.spark.controller.driver_messages import (
    ControlEndpoint,
    ControllerPlace,
    ControllerSetup,
    PlacedController,
    PlacementMismatch,
    join_message,
)
from sparkstrom.spark.controller.task import propose_place, run_controller_task
from sparkstrom.spark.executor.entry_points import LazyPickle
from sparkstrom.spark.jobs import WAIT_MESSAGE_S, SparkJob
from sparkstrom.worker.training_job import TrainingJob

PLACEMENT_TRIES = 20  # other tasks of the application may take the proposed slot
PLACING_POLL_S = 0.02
EXECUTORS_ASKED_MAX = 64  # executors to ask whether they are on the host that the user named
WAITING_NOTICE = (
    "sparkstrom waits: the controller needs a task slot of its own (controller={!r}), and none is "
    "free yet"
)
PLACEMENT_FAILED = (
    "the controller's task started on a different executor than requested, {tries} times: "
    "other jobs of this application take its slot; run them before or after the fit"
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """An executor that was proposed for the controller's task."""

    place: ControllerPlace  # where the controller would run
    rows: Any  # one row that Spark prefers to process on that executor
    token: bytes = b""  # token of the UDP probe that asks whether the task started; b"": no probe


@dataclass(frozen=True, slots=True)
class ControllerPlacer(ABC):
    """Finds an executor for the controller and starts the controller's task there.

    One subclass submits tasks with RDDs and one with DataFrames.
    """

    context: Any  # a SparkContext or a Spark Connect session
    training: TrainingJob  # what workers receive; the controller's endpoint is not yet set
    checkpoints: CheckpointFiles  # residual files that workers of the last fit left
    control: ControlEndpoint  # how the task connects to this program
    notify: Callable[[str], None]  # shows the user a line of text

    def run(self) -> PlacedController:
        """Start the controller's task; return its job and the place where it runs.

        If the task starts on a different executor than the proposed one, try again, in total
        ``PLACEMENT_TRIES`` times. Raise SetupError if no executor can host the controller, and
        TrainingError if its task fails.
        """
        for _ in range(PLACEMENT_TRIES):
            with self._propose() as candidate:
                job = self._start(candidate)
                try:
                    self._wait_for_start(job, candidate)
                    if job.running:
                        return PlacedController(job, candidate.place)
                    raise_job_error(job)
                    if not isinstance(join_message(job.reports), PlacementMismatch):
                        return PlacedController(job, candidate.place)
                except BaseException:
                    job.cancel()
                    job.wait(TASKS_END_S)
                    raise
        raise SetupError(PLACEMENT_FAILED.format(tries=PLACEMENT_TRIES))

    @abstractmethod
    def _propose(self) -> AbstractContextManager[Candidate]:
        """Return a context manager whose value is an executor that a short task proposed.

        The candidate is valid during the block.
        """

    @abstractmethod
    def _make_controller_job(
        self,
        candidate: Candidate,
        routes: tuple[ControlEndpoint, MediaDriverConfig],
        setup: LazyPickle,
    ) -> SparkJob:
        """Return an unstarted job whose one task runs the controller at the candidate's place.

        ``routes`` is how the task reaches the driver program, and the media driver that it starts.
        ``setup`` contains the ``ControllerSetup``.
        """

    @abstractmethod
    def _wait_for_start(self, job: SparkJob, candidate: Candidate) -> None:
        """Wait until the controller runs at the candidate's place, or its job has returned."""

    @property
    def _choice(self) -> ControllerChoice:
        """The user's choice of where the controller runs."""
        return parse_controller(self.training.master.void.controller)

    def _start(self, candidate: Candidate) -> SparkJob:
        """Submit the controller's task for the candidate's place; return its job."""
        place = candidate.place
        training = replace(self.training, endpoint=place.endpoint)
        media = controller_media_driver(
            training.spec, training.master.void, place.endpoint, Path(place.scratch)
        )
        setup = LazyPickle(ControllerSetup(training, self.checkpoints), training.controller_route)
        control = replace(self.control, token=candidate.token)
        job = self._make_controller_job(candidate, (control, media), setup)
        job.start()
        return job

    def _run_short_job(self, job: SparkJob) -> list[Any]:
        """Run a job to its end and return its results; notify the user if this takes long."""
        job.start()
        try:
            self._wait_until(lambda: not job.running)
        except BaseException:
            job.cancel()
            job.wait(TASKS_END_S)
            raise
        raise_job_error(job)
        return job.reports

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` returns True; notify the user repeatedly during a long wait."""
        due_s = time.monotonic() + WAIT_MESSAGE_S
        while not condition():
            if time.monotonic() > due_s:
                due_s += WAIT_MESSAGE_S
                self.notify(WAITING_NOTICE.format(self.training.master.void.controller))
            time.sleep(PLACING_POLL_S)


class ClassicControllerPlacer(ControllerPlacer):
    """Places the controller with a SparkContext, using preferred locations of RDDs."""

    @contextlib.contextmanager
    def _propose(self) -> Iterator[Candidate]:
        """Find a place; yield it with an RDD of one row that Spark prefers to process there."""
        place = self._find_place()
        yield Candidate(
            place, create_row_at(self.context, f"executor_{place.host}_{place.executor}")
        )

    def _make_controller_job(
        self,
        candidate: Candidate,
        routes: tuple[ControlEndpoint, MediaDriverConfig],
        setup: LazyPickle,
    ) -> SparkJob:
        """Return the job over ``candidate.rows``, which Spark prefers to run on that executor."""
        run = partial(run_controller_task, routes, candidate.place.process, setup)
        return self._make_job("controller", candidate.rows.mapPartitions(run).collect)

    def _wait_for_start(self, job: SparkJob, candidate: Candidate) -> None:
        """Wait until Spark reports that the task runs, or its job has ended."""
        self._wait_until(lambda: not job.running or candidate.place.executor in job.executors())

    def _make_job(self, name: str, runner: Callable[[], list[Any]]) -> SparkJob:
        """Return an unstarted job whose group contains ``name``."""
        group = f"sparkstrom-{self.training.spec.job:016x}-{name}"
        return SparkJob(self.context, group, runner, description=f"sparkstrom {name}")

    def _find_place(self) -> ControllerPlace:
        """Return a place on any executor, or on the host that the user named.

        Raise SetupError if no executor is on that host.
        """
        if not self._choice.host:
            (place,) = self._propose_on(self.context.parallelize([0], 1))
            assert isinstance(place, ControllerPlace), "every host suits"
            return place
        names = self._list_executors()
        asked = names[:EXECUTORS_ASKED_MAX]
        for name, host in asked:
            (place,) = self._propose_on(create_row_at(self.context, f"executor_{host}_{name}"))
            if isinstance(place, ControllerPlace):
                return place
        hosts = sorted({host for _, host in names})
        rest = f" (of {len(names)}, {len(asked)} were asked)" if len(names) > len(asked) else ""
        raise SetupError(
            f"controller={self.training.master.void.controller!r}: no executor of this application "
            f"is on that machine{rest}; they are on {', '.join(hosts) or 'none'}. Name one of "
            "these, or write controller='executor'"
        )

    def _propose_on(self, rows: Any) -> list[ControllerPlace | PlacementMismatch]:
        """Run one task that proposes its executor; ``rows`` determines where the task runs.

        Return a list of one item: the place, or a mismatch with the user's choice.
        """
        propose = partial(propose_place, self.training.master.void, self._choice)
        return self._run_short_job(
            self._make_job("controller's place", rows.mapPartitions(propose).collect)
        )

    def _list_executors(self) -> Sequence[tuple[str, str]]:
        """Return (id, host) of each executor, in the order in which to ask them."""
        stored = self.context._jsc.sc().statusStore().executorList(True)
        listed = [stored.apply(i) for i in range(stored.size())]
        names = [(str(each.id()), str(each.hostPort()).rpartition(":")[0]) for each in listed]
        local = [name for name in names if name[0] == "driver"]
        others = [name for name in names if name[0] != "driver"]
        return order_executors(others or local, self._choice.host)


def order_executors(names: Sequence[tuple[str, str]], wanted: str) -> list[tuple[str, str]]:
    """Order executors, (id, host), by how likely they are on the host that the user named.

    Those whose host has this name come first; then one of each host, because Spark may call the
    host by another name; then the others.
    """
    seen = Counter[str]()
    ranks = {}
    for name, host in names:
        ranks[name] = (host != wanted, seen[host])
        seen[host] += 1
    return sorted(names, key=lambda each: ranks[each[0]])


def raise_job_error(job: SparkJob) -> None:
    """Raise the error of a finished job; do nothing if the job succeeded.

    Raise SetupError if a task cannot run on its machine, and TrainingError for other failures.
    """
    if job.error is None:
        return
    cause = find_cause(str(job.error))
    if (error := setup_error_in(cause)) is not None:
        raise error
    raise TrainingError(f"the controller's Spark job failed: {cause}", trace=str(job.error))


def create_row_at(context: Any, location: str) -> Any:
    """Return an RDD of one row with a preferred location, such as ``executor_HOST_ID``."""
    from pyspark import RDD
    from pyspark.serializers import CPickleSerializer

    serializer: Any = CPickleSerializer()
    jvm = context._jvm
    row = jvm.scala.Tuple2(serializer.dumps(0), jvm.PythonUtils.toSeq([location]))
    of_bytes = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
    rdd = context._jsc.sc().makeRDD(jvm.PythonUtils.toSeq([row]), of_bytes)
    return RDD(rdd.toJavaRDD(), context, serializer)
