"""Fitting: one fit from the driver's side: master thread, Spark job, and who of them ends first."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparkstrom.base.errors import SetupError, TrainingError
from sparkstrom.codec.messages import Phase
from sparkstrom.runtime.fit_state import Progress
from sparkstrom.runtime.master_thread import MasterThread
from sparkstrom.spark.data.job_errors import cause_of
from sparkstrom.spark.driver.container_memory import ContainerMemory
from sparkstrom.spark.driver.fit_listeners import FitEvents, FitListener

log = logging.getLogger(__name__)

LOOK_S = 0.1
END_S = 15.0  # how long finished tasks may take to return
FAILURE_GRACE_S = 2.0  # a worker's own words may be on their way when Spark reports its task
FAREWELL_S = 0.5  # workers that Spark does not end hear from the master that it is over
QUEUED_S = 10.0  # how often a job that waits for slots says so
TASKS_LOOKED_AT = 1000  # for the error of one that failed

NO_MODULE = "ModuleNotFoundError"
SETUP = f"{SetupError.__module__}.{SetupError.__name__}: "  # as a traceback writes it
CODE_IS_MISSING = (
    "Executors lack code that the model or the rows are made of: send it (spark-submit --py-files, "
    "sc.addPyFile), install it there, or define it in the script or notebook itself"
)
NETWORK_IS_CLOSED = (
    "If they heard nothing from the master: open UDP between executors and driver in both "
    "directions, and name the network that both share (network_mask, controller_address)"
)


TOO_OFTEN = "has failed the maximum allowable number of times"  # Spark, of a stage
ANOTHER_ATTEMPT = (
    "When executors die Spark makes the rows that they had shuffled again, but not more often than"
    " spark.stage.maxConsecutiveAttempts says, 4 times by default: find out why they die, and set"
    " --conf spark.stage.maxConsecutiveAttempts=100"
)

IS_CANCELLED = "the job was cancelled: {}; network.parameters hold what was learnt until then"
CANCELLED = re.compile(r"\bjob \d+ (was )?cancell?ed\b", re.IGNORECASE)  # in Spark's words


class FitCancelled(TrainingError):
    """Somebody ended the Spark job, in its UI or by ``cancelAllJobs``."""


@dataclass(slots=True)
class SparkJob:
    """The Spark job of a fit, in a thread of its own."""

    context: Any
    group: str
    runner: Callable[[], list[str]]
    memory: ContainerMemory
    reports: list[str] = field(default_factory=list)  # of the tasks, once all have returned
    error: Exception | None = None
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Submit."""
        from pyspark import InheritableThread

        self.thread = InheritableThread(target=self._run, name=f"{self.group}-job", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.context.setJobGroup(self.group, "sparkstrom training", interruptOnCancel=True)
            self.reports = self.runner()
        except Exception as error:  # handed to the main thread, which decides what it means
            self.error = error

    @property
    def running(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def cancel(self) -> None:
        """End whatever of it still runs."""
        self.context.cancelJobGroup(self.group)

    def wait(self, seconds: float) -> bool:
        """Until it has returned; at most so long."""
        assert self.thread is not None
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def tasks(self) -> tuple[int, int]:
        """Tasks that have a slot now, and tasks that have failed so far."""
        known = self._stages()
        return sum(s.numActiveTasks for s in known), sum(s.numFailedTasks for s in known)

    def task_error(self) -> str:
        """What a failed task raised, in one line; empty where Spark does not say."""
        store = self.context._jsc.sc().statusStore()
        for stage in self._stages():
            tasks = store.taskList(stage.stageId, stage.currentAttemptId, TASKS_LOOKED_AT)
            errors = (tasks.apply(i).errorMessage() for i in range(tasks.size()))
            if (error := next((e for e in errors if e.isDefined()), None)) is not None:
                return cause_of(error.get())
        return ""

    def newest(self) -> list[tuple[int, int, int]]:
        """By stage: the attempt at it that is under way, and how many tasks of that have failed."""
        return [(s.stageId, s.currentAttemptId, s.numFailedTasks) for s in self._stages()]

    def killed_for_memory(self) -> list[str]:
        """What to set, for each container that was; Spark names them in its tasks' errors."""
        store = self.context._jsc.sc().statusStore()
        java, known = self.context._jvm.java.util.List, self.context._jvm.org.apache.spark.status
        failed = java.of(known.api.v1.TaskStatus.FAILED)
        found: dict[str, None] = {}
        for stage, newest, _ in self.newest():
            for attempt in range(newest + 1):
                order = known.api.v1.TaskSorting.ID
                tasks = store.taskList(stage, attempt, 0, TASKS_LOOKED_AT, order, failed)
                for i in range(tasks.size()):
                    error = tasks.apply(i).errorMessage()
                    found[self.memory.explain(error.get() if error.isDefined() else "")] = None
        return [text for text in found if text]

    def _stages(self) -> list[Any]:
        tracker = self.context.statusTracker()
        jobs = map(tracker.getJobInfo, tracker.getJobIdsForGroup(self.group))
        stages = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
        return [stage for stage in stages if stage is not None]


class StartWatch(FitListener):
    """Says now and then what the start waits for; ends a fit whose tasks fail before it."""

    def __init__(self, job: SparkJob, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self._due_s = time.monotonic() + QUEUED_S
        self._said = ""

    def on_progress(self, progress: Progress) -> None:
        """Raise SetupError when tasks fail and nobody ever joined."""
        if progress.phase is not Phase.GATHERING or time.monotonic() <= self._due_s:
            return
        self._due_s = time.monotonic() + QUEUED_S
        running, failed = self._job.tasks()
        if failed and not progress.joined:
            error = self._job.task_error() or "Spark does not say why"
            raise_if_refused(error)
            remedy = CODE_IS_MISSING if NO_MODULE in error else NETWORK_IS_CLOSED
            if killed := self._job.killed_for_memory():
                remedy = sentence(killed[-1])
            raise SetupError(
                f"{failed} tasks failed before any worker joined: {error}"
                f" (more in the executors' logs: stderr in Spark's UI, `yarn logs`). {remedy}"
            )
        text = (
            f"sparkstrom waits: {progress.workers} of {progress.partitions} workers joined, "
            f"{running} tasks have a slot"
            + ("" if running else "; the job is queued behind others, or executors are missing")
        )
        if text != self._said:  # the same is no news: the phase with its seconds is shown anyway
            self._said = text
            self._say(text)


class Fitting:
    """Runs a fit to its end, good or bad; afterwards nothing of it runs any more."""

    def __init__(self, master: MasterThread, job: SparkJob, events: FitEvents) -> None:
        self._master, self._job, self._events = master, job, events

    def run(self) -> None:
        """Raise what ended the fit early."""
        self._events.begin()
        self._master.start()
        try:
            self._job.start()
            self._watch()
            self._end()
        except BaseException as error:
            self._master.give_up(type(error).__name__)
            self._job.cancel()
            self._job.wait(END_S)
            time.sleep(FAREWELL_S)
            raise
        finally:
            self._master.end()
        self._events.end(self._master.outcome(), self._job.reports)

    def _watch(self) -> None:
        """Until the master is done, it or Spark has failed."""
        while not self._master.finished.wait(LOOK_S):
            self._events.look(self._master.progress)
            if not self._job.running:
                self._job_ended_early()
        if self._master.failure is not None:
            self._events.hear(self._master.progress)
            raise self._master.failure
        self._events.look(self._master.progress)

    def _job_ended_early(self) -> None:
        """Before the audit is done, Spark's failure is the fit's."""
        if self._master.finished.wait(FAILURE_GRACE_S):
            return
        error = self._job.error
        if error is None:
            raise TrainingError("the Spark job ended before training was done")
        if CANCELLED.search(str(error)):
            raise FitCancelled(IS_CANCELLED.format(cause_of(str(error))))
        cause = cause_of(str(error))
        raise_if_refused(cause)
        remedy = self._remedy_of(cause)
        text = f"the Spark job failed: {cause.removesuffix('.')}" + (
            f". {remedy}" if remedy else ""
        )
        raise TrainingError(text, trace=str(error))

    def _remedy_of(self, cause: str) -> str:
        """What may help against it, as far as that is known."""
        if NO_MODULE in cause:
            return CODE_IS_MISSING
        if killed := self._job.killed_for_memory():
            return sentence(killed[-1])
        return ANOTHER_ATTEMPT if TOO_OFTEN in cause else ""

    def _end(self) -> None:
        """Tasks return by themselves; those that do not are ended, and failures do not count."""
        if not self._job.wait(END_S):
            log.warning("some tasks did not return within %g s; ending them", END_S)
            self._job.cancel()
            self._job.wait(END_S)


def sentence(text: str) -> str:
    """Which follows another one."""
    return text[:1].upper() + text[1:]


def raise_if_refused(cause: str) -> None:
    """Where a task refused to begin because of its machine: its SetupError, here."""
    if cause.startswith(SETUP):
        raise SetupError(cause.removeprefix(SETUP))
