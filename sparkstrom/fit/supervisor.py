"""Supervise a fit: run its controller and its tasks until either finishes or fails.

The controller is the process or thread that coordinates the workers: it gives their updates
numbers, or trains in rounds. The workers run in the tasks. ``FitSupervisor`` starts controller and
tasks, dispatches events to listeners, and cancels one if the other fails. ``FitJob`` is the
interface of the tasks. ``find_cause`` extracts the cause from Spark's long error texts.
"""

from __future__ import annotations

import logging
import re
import time
from typing import Any, Protocol

from sparkstrom.base.errors import (
    NetworkError,
    SetupError,
    SparkstromError,
    TrainingError,
    first_line,
)
from sparkstrom.fit.events import FitEvents
from sparkstrom.runtime.master_control import MasterControl

log = logging.getLogger(__name__)


SETUP_ERRORS = {  # error class by its name in a traceback
    f"{refusal.__module__}.{refusal.__name__}: ": refusal for refusal in (SetupError, NetworkError)
}

MISSING_MODULE = "ModuleNotFoundError"
MISSING_CODE_HINT = (
    "Executors lack code that the model or the rows are made of: send it (spark-submit --py-files, "
    "sc.addPyFile), install it there, or define it in the script or notebook itself"
)

POLL_S = 0.1
TASKS_END_S = 15.0  # time for finished tasks to return
CANCELS_MAX = 15  # attempts to cancel a job, within TASKS_END_S
FAILURE_GRACE_S = 2.0  # a worker's own message may arrive after Spark reports its task's failure
ABORT_NOTICE_S = 0.5  # time for the controller to inform workers whose tasks Spark did not end
CONTROLLER_END_S = 90.0  # time for a controller task to end after all other tasks have returned
STAGE_FAILED = "has failed the maximum allowable number of times"  # Spark's text about a stage

STAGE_ATTEMPTS_HINT = (
    "When executors die Spark makes the rows that they had shuffled again, but not more often than"
    " spark.stage.maxConsecutiveAttempts says, 4 times by default: find out why they die, and set"
    " --conf spark.stage.maxConsecutiveAttempts=100"
)

CANCELLED_MESSAGE = (
    "the job was cancelled: {}; network.parameters hold what was learned until then, unless a"
    " warning says otherwise"
)

CANCELLED_PATTERN = re.compile(
    r"\bjob \d+ (was )?cancell?ed\b|OPERATION_CANCELED", re.IGNORECASE
)  # Spark's texts


class FitSupervisor:
    """Runs a fit's controller and job until they finish or fail, and dispatches its events."""

    def __init__(self, master: MasterControl, job: FitJob, events: FitEvents) -> None:
        self._master, self._job, self._events = master, job, events

    def run(self) -> None:
        """Run the fit; when this returns or raises, controller and job have ended.

        Raise the error that ended the fit early.
        """
        self._events.begin()
        self._master.start()
        try:
            self._job.start()
            self._wait_for_end()
            self._end()
        except BaseException as error:
            self._master.give_up(type(error).__name__)
            cancel_job(self._job)
            time.sleep(ABORT_NOTICE_S)
            raise
        finally:
            self._master.end()
        self._events.end(self._master.outcome(), self._job.reports)

    def _wait_for_end(self) -> None:
        """Wait until the controller has finished. Raise its failure or the job's."""
        while not self._master.finished.wait(POLL_S):
            self._observe()
            if not self._job.running:
                self._handle_early_end()
        if self._master.failure is not None:
            self._events.dispatch_output(self._master.progress)
            raise self._master.failure
        self._observe()

    def _observe(self) -> None:
        """Dispatch the newest progress to the listeners, and acknowledge it to the controller."""
        progress = self._master.progress
        self._master.acknowledge(progress)
        self._events.dispatch(progress)

    def _handle_early_end(self) -> None:
        """Handle a job that ended before the controller did.

        Return if the controller finishes shortly afterwards, or fails with the error that a worker
        has sent. Otherwise raise the job's failure, as an error with cause and remedy. If the job
        was cancelled, raise FitCancelled at once.
        """
        error = self._job.error
        if error is not None and (cancelled := as_cancellation(error)) is not None:
            raise cancelled
        if self._master.finished.wait(FAILURE_GRACE_S):
            return
        if error is None:
            self._wait_for_controller()
            return
        if isinstance(error, SparkstromError):
            raise error
        cause = find_cause(str(error))
        if (setup_error := setup_error_in(cause)) is not None:
            raise setup_error
        remedy, what = self._find_remedy(cause), cause.removesuffix(".")
        text = f"the Spark job failed: {what}" + (f". {remedy}" if remedy else "")
        raise TrainingError(text, trace=str(error))

    def _find_remedy(self, cause: str) -> str:
        """Return a remedy for the cause of a job's failure; "" if none is known."""
        if MISSING_MODULE in cause:
            return MISSING_CODE_HINT
        if killed := self._job.killed_for_memory():
            return capitalize_sentence(killed[-1])
        return STAGE_ATTEMPTS_HINT if STAGE_FAILED in cause else ""

    def _wait_for_controller(self) -> None:
        """Wait at most CONTROLLER_END_S until a controller in a Spark task reports its end.

        Call this after all other tasks have returned. A controller in this process is not waited
        for. Raise TrainingError if the controller has not finished then.
        """
        until_s = time.monotonic() + CONTROLLER_END_S
        while self._master.drains_after_tasks and time.monotonic() < until_s:
            if self._master.finished.wait(POLL_S):
                return
        if not self._master.finished.is_set():
            raise TrainingError("the tasks of the fit ended before training was done")

    def _end(self) -> None:
        """Wait for the tasks to return, at most TASKS_END_S, then cancel them; ignore failures."""
        if not self._job.wait(TASKS_END_S):
            log.warning("some tasks did not return within %g s; ending them", TASKS_END_S)
            cancel_job(self._job)


class FitCancelled(TrainingError):
    """The Spark job was cancelled, in Spark's UI or by ``cancelAllJobs``."""


class FitJob(Protocol):
    """The tasks of a fit: a Spark job, or processes on this machine."""

    error: Exception | None  # why the job failed; ``fit`` raises a SparkstromError unchanged

    @property
    def reports(self) -> list[Any]:
        """The tasks' results, after all have returned."""
        ...

    def start(self) -> None:
        """Start the tasks and return at once."""

    @property
    def running(self) -> bool:
        """Whether the job was started and has not ended."""
        ...

    def cancel(self) -> None:
        """End the tasks that still run."""

    def wait(self, seconds: float) -> bool:
        """Wait until the job has ended, at most ``seconds``; return whether it has."""
        ...

    def killed_for_memory(self) -> list[str]:
        """Return a message with a remedy for each task that was killed for its use of memory."""
        ...


def cancel_job(job: FitJob) -> None:
    """Cancel the job repeatedly until it ends, for at most TASKS_END_S seconds.

    One attempt may not suffice: Spark ignores it for a job group that is not registered yet.
    """
    for _ in range(CANCELS_MAX):
        job.cancel()
        if job.wait(TASKS_END_S / CANCELS_MAX):
            return


def as_cancellation(error: Exception) -> FitCancelled | None:
    """Return FitCancelled if a job's error says that the job was cancelled, else None."""
    if CANCELLED_PATTERN.search(str(error)):
        return FitCancelled(CANCELLED_MESSAGE.format(find_cause(str(error))))
    return None


def capitalize_sentence(text: str) -> str:
    """Return the text with a capital first letter."""
    return text[:1].upper() + text[1:]


def setup_error_in(cause: str) -> SetupError | None:
    """Return the SetupError or NetworkError with which a task's error text begins, or None."""
    for prefix, kind in SETUP_ERRORS.items():
        if cause.startswith(prefix):
            return kind(cause.removeprefix(prefix))
    return None


OWN_ERRORS = "sparkstrom."  # start of a line with this package's errors, which are not shortened
PY4J_PREFIX = "An error occurred while calling "  # the cause is on the next line
JAVA_CLASS = re.compile(r"^: (?:[\w.$]+: )?")
EXECUTOR_LOST = "ExecutorLostFailure "  # after the names of job, stage and task
RECENT_FAILURE = " Most recent failure reason:"  # the reason is on the next lines


def find_cause(text: str) -> str:
    """Return the cause from Spark's error text: the line of the Python exception, if it has one.

    A Python traceback comes before the first Java frame; its last lines contain the exception.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    java = next((i for i, line in enumerate(lines) if line.strip().startswith("at ")), len(lines))
    text_lines = lines[:java]
    if any("Traceback (most recent call last)" in line for line in text_lines):
        frames = [i for i, line in enumerate(text_lines) if line.startswith('  File "')]
        after = text_lines[frames[-1] + 1 :] if frames else text_lines[-1:]
        return _shorten(next((line for line in after if not line.startswith(" ")), text_lines[-1]))
    if len(text_lines) > 1 and text_lines[0].startswith(PY4J_PREFIX):
        text_lines = [JAVA_CLASS.sub("", text_lines[1])]
    if not text_lines:
        return "no reason given"
    line = text_lines[0]
    if EXECUTOR_LOST in line:
        line = line[line.find(EXECUTOR_LOST) :]
    return _shorten(line.partition(RECENT_FAILURE)[0])


def _shorten(line: str) -> str:
    """Return a line of an error text, shortened unless it is an error of this package."""
    line = line.strip()
    return line if line.startswith(OWN_ERRORS) else first_line(line)
