"""Fitting: one fit from the driver's side: master thread, Spark job, and who of them ends first."""

from __future__ import annotations

import logging
import re
import time
from typing import Any, Protocol

from sparkstrom.base.errors import SparkstromError, TrainingError
from sparkstrom.runtime.master_control import MasterControl
from sparkstrom.spark.data.job_errors import cause_of
from sparkstrom.spark.driver.fit_listeners import FitEvents
from sparkstrom.spark.driver.start_watch import CODE_IS_MISSING, NO_MODULE, refusal_of, sentence

log = logging.getLogger(__name__)

LOOK_S = 0.1
END_S = 15.0  # how long finished tasks may take to return
CANCELS_MAX = 15  # in END_S
FAILURE_GRACE_S = 2.0  # a worker's own words may be on their way when Spark reports its task
FAREWELL_S = 0.5  # workers that Spark does not end hear from the master that it is over
SETTLE_S = 90.0  # a controller elsewhere may take so long to end, once all tasks have returned

TOO_OFTEN = "has failed the maximum allowable number of times"  # Spark, of a stage
ANOTHER_ATTEMPT = (
    "When executors die Spark makes the rows that they had shuffled again, but not more often than"
    " spark.stage.maxConsecutiveAttempts says, 4 times by default: find out why they die, and set"
    " --conf spark.stage.maxConsecutiveAttempts=100"
)

IS_CANCELLED = (
    "the job was cancelled: {}; network.parameters hold what was learnt until then, unless a"
    " warning says otherwise"
)
CANCELLED = re.compile(
    r"\bjob \d+ (was )?cancell?ed\b|OPERATION_CANCELED", re.IGNORECASE
)  # in Spark's words


class FitCancelled(TrainingError):
    """Somebody ended the Spark job, in its UI or by ``cancelAllJobs``."""


def cancelled_by(error: Exception) -> FitCancelled | None:
    """What to raise where a job's error is that somebody ended it; None: it is another one."""
    if CANCELLED.search(str(error)):
        return FitCancelled(IS_CANCELLED.format(cause_of(str(error))))
    return None


class FitJob(Protocol):
    """A fit's tasks: Spark's job, or the processes on this machine."""

    error: Exception | None  # why it has ended; one of ours is what ``fit`` raises

    @property
    def reports(self) -> list[Any]:
        """Of the tasks, once all have returned."""
        ...

    def start(self) -> None:
        """Begin; return at once."""

    @property
    def running(self) -> bool:
        """Has it begun, and not ended?"""
        ...

    def cancel(self) -> None:
        """End whatever of it still runs."""

    def wait(self, seconds: float) -> bool:
        """Until it has ended; at most so long."""
        ...

    def killed_for_memory(self) -> list[str]:
        """What to set, for each task that was."""
        ...


def end_job(job: FitJob) -> None:
    """Cancel it, and again: what Spark is being asked for now it knows only in the next moment."""
    for _ in range(CANCELS_MAX):
        job.cancel()
        if job.wait(END_S / CANCELS_MAX):
            return


class Fitting:
    """Runs a fit to its end, good or bad; afterwards nothing of it runs any more."""

    def __init__(self, master: MasterControl, job: FitJob, events: FitEvents) -> None:
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
            end_job(self._job)
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
        if isinstance(error, SparkstromError):
            raise error
        cause = cause_of(str(error))
        if (refusal := refusal_of(cause)) is not None:
            raise refusal
        remedy, what = self._remedy_of(cause), cause.removesuffix(".")
        text = f"the Spark job failed: {what}" + (f". {remedy}" if remedy else "")
        raise TrainingError(text, trace=str(error))

    def _remedy_of(self, cause: str) -> str:
        """What may help against it, as far as that is known."""
        if NO_MODULE in cause:
            return CODE_IS_MISSING
        if killed := self._job.killed_for_memory():
            return sentence(killed[-1])
        return ANOTHER_ATTEMPT if TOO_OFTEN in cause else ""

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
            end_job(self._job)
