"""Controller job: finds an executor for the controller, and begins its task there.

All of it through Spark, so that it works wherever Spark does: a short task says which address and
which free port its executor has; the controller's own task is then wanted there; and Spark's status
store tells on which executor it runs. A task that lands elsewhere does nothing, and the next short
task asks anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sparkstrom.base.errors import SetupError, TrainingError
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
from sparkstrom.spark.controller.control_words import (
    ControllerOrder,
    ControllerPlace,
    LineOrder,
    MediaOrder,
    NotHere,
    of_parts,
)
from sparkstrom.spark.controller.controller_entry import enter_controller, look_at_place
from sparkstrom.spark.data.job_errors import cause_of
from sparkstrom.spark.driver.controller_choice import ControllerChoice, parse_controller
from sparkstrom.spark.driver.fitting import END_S
from sparkstrom.spark.driver.master_setup import media_of
from sparkstrom.spark.driver.spark_job import SparkJob
from sparkstrom.spark.driver.start_watch import QUEUED_S, refusal_of
from sparkstrom.spark.executor.entry import Unopened
from sparkstrom.spark.executor.job import TrainingJob

TRIES = 20  # other tasks of the application may take the slot that was looked at
LOOK_S = 0.02
HOSTS_ASKED_MAX = 64  # for the one that was named
WAITS = (
    "sparkstrom waits: the controller needs a task slot of its own (controller={!r}), and none is "
    "free yet"
)
ELSEWHERE = (
    "the controller's task began on another executor than it was meant to, {tries} times: "
    "other jobs of this application take its slot; run them before or after the fit"
)


@dataclass(frozen=True, slots=True)
class PlacedController:
    """Its task has a slot there."""

    job: SparkJob
    place: ControllerPlace


@dataclass(frozen=True, slots=True)
class ControllerPlacing:
    """What is needed to find a place. ``say``: to people, while it waits."""

    context: Any
    training: TrainingJob
    kept: CheckpointFiles
    line: LineOrder
    say: Callable[[str], None]

    def run(self) -> PlacedController:
        """Raise SetupError where no executor can have it, TrainingError where its task fails."""
        for _ in range(TRIES):
            place = self._look()
            job = self._begin(place)
            try:
                if self._has_slot(job, place):
                    return PlacedController(job, place)
            except BaseException:
                job.cancel()
                job.wait(END_S)
                raise
        raise SetupError(ELSEWHERE.format(tries=TRIES))

    @property
    def _choice(self) -> ControllerChoice:
        return parse_controller(self.training.master.void.controller)

    def _begin(self, place: ControllerPlace) -> SparkJob:
        media, unopened = orders_at(place, self.training, self.kept)
        run = partial(enter_controller, (self.line, media), place.process, unopened)
        rows = one_row_at(self.context, f"executor_{place.host}_{place.executor}")
        job = self._job("controller", rows.mapPartitionsWithIndex(run).collect)
        job.start()
        return job

    def _job(self, what: str, runner: Callable[[], list[Any]]) -> SparkJob:
        group = f"sparkstrom-{self.training.spec.job:016x}-{what}"
        return SparkJob(self.context, group, runner, words=f"sparkstrom {what}")

    # -- which executor --------------------------------------------------------------------------

    def _look(self) -> ControllerPlace:
        if not self._choice.host:
            (anywhere,) = self._ask(self.context.parallelize([0], 1))
            place: ControllerPlace = anywhere
            return place
        names = self._executors()
        for name, host in names[:HOSTS_ASKED_MAX]:
            (found,) = self._ask(one_row_at(self.context, f"executor_{host}_{name}"))
            if isinstance(found, ControllerPlace):
                return found
        hosts = sorted({host for _, host in names})
        raise SetupError(
            f"controller={self.training.master.void.controller!r}: no executor of this application "
            f"is on that machine; they are on {', '.join(hosts) or 'none'}. Name one of these, or "
            "write controller='executor'"
        )

    def _ask(self, rows: Any) -> list[Any]:
        look = partial(look_at_place, self.training.master.void, self._choice)
        job = self._job("controller's place", rows.mapPartitions(look).collect)
        job.start()
        try:
            self._await(lambda: not job.running)
        except BaseException:
            job.cancel()
            job.wait(END_S)
            raise
        raise_what_failed(job)
        return job.reports

    def _executors(self) -> Sequence[tuple[str, str]]:
        """Ids and hosts, as Spark calls them; the one that was named first."""
        known = self.context._jsc.sc().statusStore().executorList(True)
        found = [known.apply(i) for i in range(known.size())]
        names = [(str(each.id()), str(each.hostPort()).rpartition(":")[0]) for each in found]
        local = [name for name in names if name[0] == "driver"]
        others = [name for name in names if name[0] != "driver"]
        return sorted(others or local, key=lambda name: name[1] != self._choice.host)

    # -- its slot --------------------------------------------------------------------------------

    def _has_slot(self, job: SparkJob, place: ControllerPlace) -> bool:
        """Does its task run there? False: it began elsewhere, and has returned."""
        self._await(lambda: not job.running or place.executor in job.executors())
        if job.running:
            return True
        raise_what_failed(job)
        return not isinstance(of_parts(job.reports), NotHere)

    def _await(self, condition: Callable[[], bool]) -> None:
        await_slot(condition, self.say, WAITS.format(self.training.master.void.controller))


def await_slot(condition: Callable[[], bool], say: Callable[[str], None], words: str) -> None:
    """Until it holds; people are told now and then what is waited for."""
    due_s = time.monotonic() + QUEUED_S
    while not condition():
        if time.monotonic() > due_s:
            due_s += QUEUED_S
            say(words)
        time.sleep(LOOK_S)


def orders_at(
    place: ControllerPlace, training: TrainingJob, kept: CheckpointFiles
) -> tuple[MediaOrder, Unopened]:
    """What the controller's task is told there: its media driver, and the rest, still packed."""
    training = replace(training, endpoint=place.endpoint)
    media = media_of(training.spec, training.master.void, place.endpoint, Path(place.scratch))
    return media, Unopened(ControllerOrder(training, kept, place), training.way)


def raise_what_failed(job: SparkJob) -> None:
    """Raise SetupError where a task refused its machine, TrainingError for all other failures."""
    if job.error is None:
        return
    cause = cause_of(str(job.error))
    if (refusal := refusal_of(cause)) is not None:
        raise refusal
    raise TrainingError(f"the controller's Spark job failed: {cause}", trace=str(job.error))


def one_row_at(context: Any, location: str) -> Any:
    """An RDD of one row that Spark would rather have at this place, which it knows by that name."""
    from pyspark import RDD
    from pyspark.serializers import CPickleSerializer

    serializer: Any = CPickleSerializer()
    jvm = context._jvm
    row = jvm.scala.Tuple2(serializer.dumps(0), jvm.PythonUtils.toSeq([location]))
    of_bytes = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
    made = context._jsc.sc().makeRDD(jvm.PythonUtils.toSeq([row]), of_bytes)
    return RDD(made.toJavaRDD(), context, serializer)
