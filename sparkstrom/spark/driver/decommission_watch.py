"""Decommission watch: workers on an executor that is told to go move ahead of it.

Spark learns of it (a spot notice, ``SIGPWR``) where ``spark.decommission.enabled`` is true, and
starts no task there any more. Each of our tasks there is ended as soon as another executor has a
slot for it: Spark starts it there, that attempt owns the partition from its first word on, and
nothing that was committed is trained again. As long as there is no slot, they train on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparkstrom.codec.messages import Phase
from sparkstrom.runtime.fit_state import Progress
from sparkstrom.spark.driver.cluster import live_conf
from sparkstrom.spark.driver.fit_listeners import FitListener
from sparkstrom.spark.driver.spark_job import SparkJob

log = logging.getLogger(__name__)

ENABLED = "spark.decommission.enabled"
LOOK_S = 1.0  # a look is some questions to the JVM for each executor
MOVES = (
    "executor {executor} on {host} is being decommissioned: the worker of partition {partition} is "
    "ended there and begins again on another executor"
)
STAYS = (
    "executor {executor} on {host} is being decommissioned, and no other one has a free slot: its "
    "workers train on until it is gone, or there is one"
)


@dataclass(frozen=True, slots=True)
class Executor:
    """As Spark knows it."""

    name: str
    host: str
    free: int  # slots
    leaves: bool


class DecommissionWatch(FitListener):
    """Of one fit. ``warn``: to people, now and in the summary."""

    def __init__(self, job: SparkJob, warn: Callable[[str], None]) -> None:
        self._job, self._warn = job, warn
        conf = live_conf(job.context)
        self._enabled = str(conf.get(ENABLED, "false")).lower() == "true"
        self._due_s = 0.0
        self._ended: set[int] = set()  # task attempts
        self._stays: set[str] = set()  # executors of which that was said

    def on_progress(self, progress: Progress) -> None:
        """Look now and then, while workers may still be replaced."""
        training = progress.phase in (Phase.GATHERING, Phase.RUNNING)
        if not self._enabled or not training or time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + LOOK_S
        known = executors_of(self._job.context)
        leaving = {each.name: each for each in known if each.leaves}
        if leaving:
            self._move(leaving, sum(each.free for each in known if not each.leaves))

    def _move(self, leaving: dict[str, Executor], free: int) -> None:
        for task in self._job.running_tasks():
            executor = leaving.get(task.executor)
            if executor is None or task.attempt in self._ended:
                continue
            about = {"executor": executor.name, "host": executor.host, "partition": task.partition}
            if free <= 0:
                if executor.name not in self._stays:
                    self._stays.add(executor.name)
                    self._warn(STAYS.format(**about))
                continue
            free -= 1
            self._ended.add(task.attempt)
            text = MOVES.format(**about)
            self._warn(text)
            self._job.context._jsc.sc().killTaskAttempt(task.attempt, True, text)


def executors_of(context: Any) -> list[Executor]:
    """Those that live, the driver program apart."""
    scala = context._jsc.sc()
    scheduler, found = scala.taskScheduler(), scala.statusStore().executorList(True)
    listed = [found.apply(i) for i in range(found.size())]
    return [
        Executor(
            str(each.id()),
            str(each.hostPort()).rpartition(":")[0],
            int(each.maxTasks()) - int(each.activeTasks()),
            bool(scheduler.getExecutorDecommissionState(each.id()).isDefined()),
        )
        for each in listed
        if each.id() != "driver"
    ]
