"""Fitting: one fit from the driver's side: master thread, Spark job, and who of them ends first."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sparkstrom.base.errors import SetupError, TrainingError
from sparkstrom.codec.messages import Phase
from sparkstrom.runtime.fit_state import Progress
from sparkstrom.runtime.master_control import MasterControl
from sparkstrom.spark.data.job_errors import cause_of
from sparkstrom.spark.driver.fit_listeners import FitEvents, FitListener

log = logging.getLogger(__name__)

LOOK_S = 0.1
END_S = 15.0  # how long finished tasks may take to return
FAILURE_GRACE_S = 2.0  # a worker's own words may be on their way when Spark reports its task
FAREWELL_S = 0.5  # workers that Spark does not end hear from the master that it is over
QUEUED_S = 10.0  # how often a job that waits for slots says so
SETTLE_S = 90.0  # a controller elsewhere may take so long to end, once all tasks have returned
RUNNING = "RUNNING"  # a task, in Spark's words
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


IS_CANCELLED = (
    "the job was cancelled: {}; network.parameters hold what was learnt until then, unless a"
    " warning says otherwise"
)
CANCELLED = re.compile(r"\bjob \d+ (was )?cancell?ed\b", re.IGNORECASE)  # in Spark's words


class FitCancelled(TrainingError):
    """Somebody ended the Spark job, in its UI or by ``cancelAllJobs``."""


def cancelled_by(error: Exception) -> FitCancelled | None:
    """What to raise where a job's error is that somebody ended it; None: it is another one."""
    if CANCELLED.search(str(error)):
        return FitCancelled(IS_CANCELLED.format(cause_of(str(error))))
    return None


@dataclass(slots=True)
class SparkJob:
    """A Spark job of a fit, in a thread of its own."""

    context: Any
    group: str
    runner: Callable[[], list[Any]]
    words: str = "sparkstrom training"  # in Spark's UI
    reports: list[Any] = field(default_factory=list)  # of the tasks, once all have returned
    error: Exception | None = None
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Submit."""
        from pyspark import InheritableThread

        self.thread = InheritableThread(target=self._run, name=f"{self.group}-job", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.context.setJobGroup(self.group, self.words, interruptOnCancel=True)
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
        errors = (task.errorMessage() for task in self._tasks())
        error = next((each for each in errors if each.isDefined()), None)
        return "" if error is None else cause_of(error.get())

    def executors(self) -> set[str]:
        """Ids of those that run tasks of it now."""
        return {str(task.executorId()) for task in self._tasks() if task.status() == RUNNING}

    def _tasks(self) -> Iterator[Any]:
        """As Spark's status store has them."""
        store = self.context._jsc.sc().statusStore()
        for stage in self._stages():
            tasks = store.taskList(stage.stageId, stage.currentAttemptId, TASKS_LOOKED_AT)
            yield from (tasks.apply(i) for i in range(tasks.size()))

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

    def __init__(self, master: MasterControl, job: SparkJob, events: FitEvents) -> None:
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
        error = self._job.error
        if error is not None and (cancelled := cancelled_by(error)) is not None:
            raise cancelled
        if self._master.finished.wait(FAILURE_GRACE_S):
            return
        if error is None:
            self._await_settling()
            return
        cause = cause_of(str(error))
        raise_if_refused(cause)
        remedy = f". {CODE_IS_MISSING}" if NO_MODULE in cause else ""
        raise TrainingError(f"the Spark job failed: {cause}{remedy}", trace=str(error))

    def _await_settling(self) -> None:
        """All tasks have returned; a controller elsewhere may not have told its end yet."""
        until_s = time.monotonic() + SETTLE_S
        while self._master.settles and time.monotonic() < until_s:
            if self._master.finished.wait(LOOK_S):
                return
        if not self._master.finished.is_set():
            raise TrainingError("the Spark job ended before training was done")

    def _end(self) -> None:
        """Tasks return by themselves; those that do not are ended, and failures do not count."""
        if not self._job.wait(END_S):
            log.warning("some tasks did not return within %g s; ending them", END_S)
            self._job.cancel()
            self._job.wait(END_S)


def raise_if_refused(cause: str) -> None:
    """Where a task refused to begin because of its machine: its SetupError, here."""
    if cause.startswith(SETUP):
        raise SetupError(cause.removeprefix(SETUP))
