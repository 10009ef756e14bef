"""Run a fit's Spark job in a thread, cancel it on Ctrl-C, and monitor its executors.

``SparkJob`` runs a job in a thread and reports on its tasks. ``translate_job_errors`` shortens the
errors of jobs, and ``cancel_jobs_on_interrupt`` replaces Spark's handler for Ctrl-C.
``OutOfMemoryMonitor`` warns about containers that were killed because they used too much memory,
and about Python processes that died: Spark replaces them, so users would only see a lost worker.
``DecommissionMonitor`` moves workers off executors that are about to be removed. ``StartMonitor``
shows what a fit is waiting for at its start, and ends a fit that cannot start. ``SlotMonitor``
shows that a fit in rounds waits for task slots.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sparkstrom.base.errors import NetworkError, SetupError, TrainingError
from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.messages import Phase
from sparkstrom.fit.events import FinishedFit, FitListener
from sparkstrom.fit.supervisor import (
    MISSING_CODE_HINT,
    MISSING_MODULE,
    capitalize_sentence,
    find_cause,
    setup_error_in,
)
from sparkstrom.options.network import VoidConfiguration, master_name
from sparkstrom.runtime.master_control import Progress
from sparkstrom.spark.executor_slots import is_enabled, live_conf
from sparkstrom.worker.network_setup import format_executor_ports


@contextlib.contextmanager
def translate_job_errors(doing: str) -> Iterator[None]:
    """Convert a Spark job's error during the block to a TrainingError with a one-line message.

    The message begins with ``doing``, such as "counting rows". The stack traces of Java and Python
    are kept in the error's ``trace``.
    """
    from py4j.protocol import Py4JJavaError

    try:
        yield
    except Py4JJavaError as error:
        text = str(error)
        raise TrainingError(f"{doing} failed: {find_cause(text)}", trace=text) from None


PY4J_INTERRUPTED = "KeyboardInterrupt while sending command."  # what Py4J logs on Ctrl-C


@contextlib.contextmanager
def cancel_jobs_on_interrupt(context: Any) -> Iterator[None]:
    """During the block, let Ctrl-C cancel all jobs of a SparkContext and raise KeyboardInterrupt.

    A signal handler that the user installed stays in place. Py4J's traceback is not logged.
    """
    # Spark's own signal handler calls the JVM. If the signal interrupts another call to the JVM,
    # users see a RuntimeError about reentrant calls and 40 lines of Py4J.
    original = signal.getsignal(signal.SIGINT)
    logging.getLogger().addFilter(_is_not_py4j_interrupt)  # Py4J logs it by the root logger
    replaced = threading.current_thread() is threading.main_thread() and _is_spark_handler(original)
    if replaced:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        context.cancelAllJobs()  # as Spark's own handler does
        raise
    finally:
        logging.getLogger().removeFilter(_is_not_py4j_interrupt)
        if replaced:
            signal.signal(signal.SIGINT, original)


def _is_not_py4j_interrupt(record: logging.LogRecord) -> bool:
    """Return False for the log record that Py4J writes on Ctrl-C; serves as a logging filter."""
    return record.msg != PY4J_INTERRUPTED


def _is_spark_handler(handler: Any) -> bool:
    """Return whether a signal handler is pyspark's own."""
    return getattr(handler, "__module__", "").startswith("pyspark.")


TASK_RUNNING, TASK_FAILED = "RUNNING", "FAILED"  # a task's status in Spark's status store
JOB_RUNNING = "RUNNING"  # the status of a submitted job, even if none of its tasks has a slot
TASKS_MAX = 2**31 - 1  # all tasks of a stage
# Newest Spark jobs of a fit that are looked at. Training in rounds has hundreds, and to read one
# takes some ten calls into the JVM. Between two polls, it starts about ten.
JOBS_MAX = 20
FAILED_TASKS_MAX = 1000  # newest ones per stage; to read more would slow down each poll
PYTHON_WORKER_EXITED = "Python worker exited unexpectedly"  # in the error of Spark's task
PYTHON_WORKER_DIED = (
    "the Python process of partition {} on {} died in attempt {} of its task, which Spark may"
    " repeat: the executor's stderr has the reason, or the host's dmesg if its memory ran out"
)


@dataclass(frozen=True, slots=True)
class RunningTask:
    """One running attempt of a task."""

    attempt: int  # Spark's taskAttemptId
    partition: int  # index of the partition that the task computes
    executor: str  # Spark's id of the executor that runs it


@dataclass(slots=True)
class SparkJob:
    """A Spark job of a fit, executed in its own thread."""

    context: Any  # SparkContext
    group: str  # Spark's job group, used to cancel the job
    runner: Callable[[], list[Any]]  # runs the job and returns the items its tasks yielded
    # Returns why a container was killed, given a task's error; "" if no container was killed.
    explain_kill: Callable[[str], str] | None = None
    description: str = "sparkstrom training"  # shown in Spark's UI
    reports: list[Any] = field(default_factory=list)  # the result of ``runner``, once it returned
    error: Exception | None = None  # the exception with which the job failed
    thread: threading.Thread | None = None  # None before ``start``

    def start(self) -> None:
        """Submit the job from a new thread."""
        from pyspark import InheritableThread

        self.thread = InheritableThread(target=self._run, name=f"{self.group}-job", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        """Run the job in this thread; store its results or its error."""
        try:
            self.join_group()
            self.reports = self.runner()
        except Exception as error:  # the main thread decides what it means
            self.error = error
        except BaseException as error:  # the thread would end silently
            self.error = TrainingError(f"the job's thread failed: {error!r}")
            self.error.__cause__ = error

    def join_group(self) -> None:
        """Make ``cancel`` also cancel the jobs that the calling thread starts from now on."""
        self.context.setJobGroup(self.group, self.description, interruptOnCancel=True)

    @property
    def running(self) -> bool:
        """Whether the job's thread is alive, that is, the job has not ended."""
        return self.thread is not None and self.thread.is_alive()

    def cancel(self) -> None:
        """Cancel all running stages of the job."""
        self.context.cancelJobGroup(self.group)

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the job to end; return whether it has ended."""
        assert self.thread is not None
        self.thread.join(seconds)
        return not self.thread.is_alive()

    def count_tasks(self) -> tuple[int | None, int]:
        """Return (number of running tasks, number of failed tasks).

        Running tasks of all stages are counted; None means that their number is unknown. Failed
        tasks are counted only in the newest attempt of the job's last stage, because earlier stages
        compute the user's data.
        """
        failed = sum(stage.numFailedTasks for stage in self._stages(only_last=True))
        return sum(stage.numActiveTasks for stage in self._stages()), failed

    def task_errors(self, first_attempt: int = 0) -> list[str]:
        """Return the distinct errors of the last stage's failed tasks, each as one line.

        Attempts of a task are numbered from 0; those before ``first_attempt`` are skipped.
        """
        tasks = self._tasks(self._stages(only_last=True), TASK_FAILED, FAILED_TASKS_MAX)
        errors = [task.errorMessage() for task in tasks if task.attempt() >= first_attempt]
        return list(dict.fromkeys(find_cause(each.get()) for each in errors if each.isDefined()))

    def is_queued(self) -> bool:
        """Return whether the newest of the Spark jobs is running, but none of its tasks is."""
        running = [job for job in self._jobs()[-1:] if job.status == JOB_RUNNING]
        return bool(running) and self.count_tasks()[0] == 0

    def executors(self) -> set[str]:
        """Return the ids of the executors on which tasks of the job are running."""
        return {
            str(task.executorId()) for task in self._tasks(self._stages(), TASK_RUNNING, TASKS_MAX)
        }

    def running_tasks(self, executors: Collection[str]) -> list[RunningTask]:
        """Return the job's running task attempts on these executors, given by Spark's ids."""
        return [
            RunningTask(int(task.taskId()), int(task.partitionId()), executor)
            for task in self._tasks(self._stages(), TASK_RUNNING, TASKS_MAX)
            if (executor := str(task.executorId())) in executors
        ]

    def _tasks(self, stages: Iterable[Any], status: str, limit: int) -> Iterator[Any]:
        """Yield what Spark's status store records about tasks of ``stages`` with this ``status``.

        ``limit``: the largest number of tasks per stage; the newest are taken.
        """
        for stage in stages:
            yield from self._attempt_tasks(stage.stageId, stage.currentAttemptId, status, limit)

    def _attempt_tasks(self, stage: int, attempt: int, status: str, limit: int) -> Iterator[Any]:
        """Yield the records of one attempt of a stage; see ``_tasks``."""
        api = self.context._jvm.org.apache.spark.status.api.v1
        statuses = self.context._jvm.java.util.List.of(api.TaskStatus.valueOf(status))
        store, order = self.context._jsc.sc().statusStore(), api.TaskSorting.ID
        tasks = store.taskList(stage, attempt, 0, TASKS_MAX, order, statuses)
        count = tasks.size()
        yield from (tasks.apply(i) for i in range(max(0, count - limit), count))

    def stage_attempts(self) -> list[tuple[int, int, int]]:
        """Return (stage id, current attempt, failed tasks of that attempt) for each stage."""
        return [(s.stageId, s.currentAttemptId, s.numFailedTasks) for s in self._stages()]

    def killed_for_memory(self) -> list[str]:
        """Return messages about containers that were killed because they used too much memory.

        Each distinct message names the setting to change. Spark reports such containers in the
        error messages of their tasks.
        """
        if self.explain_kill is None:
            return []
        remedies = dict.fromkeys(self.explain_kill(text) for _, text in self._failed_tasks())
        return [text for text in remedies if text]

    def dead_python_workers(self) -> list[str]:
        """Return a message for each task whose Python process died, for whatever reason.

        Without it, the only message would be that another attempt has taken the partition over.
        """
        return [
            PYTHON_WORKER_DIED.format(task.partitionId(), task.host(), task.attempt())
            for task, text in self._failed_tasks()
            if PYTHON_WORKER_EXITED in text
        ]

    def _failed_tasks(self) -> Iterator[tuple[Any, str]]:
        """Yield (task, error) of the failed tasks in all attempts of all stages."""
        for stage, attempts, failed in self.stage_attempts():
            for attempt in range(attempts + 1 if attempts or failed else 0):
                for task in self._attempt_tasks(stage, attempt, TASK_FAILED, FAILED_TASKS_MAX):
                    error = task.errorMessage()
                    yield task, error.get() if error.isDefined() else ""

    def _jobs(self) -> list[Any]:
        """Return the status of all running and of the newest JOBS_MAX Spark jobs, oldest first.

        Jobs that Spark has forgotten are left out.
        """
        tracker = self.context.statusTracker()
        ids = sorted(tracker.getJobIdsForGroup(self.group))
        older, newest = ids[:-JOBS_MAX], ids[-JOBS_MAX:]
        if older:  # a query with many shuffles runs one job for each at the same time
            active = set(tracker.getActiveJobsIds())
            newest = [job for job in older if job in active] + newest
        return [job for job in map(tracker.getJobInfo, newest) if job]

    def _stages(self, *, only_last: bool = False) -> list[Any]:
        """Return the status of all stages of ``_jobs``, except those that Spark has forgotten.

        If ``only_last`` is True, return only the last stage of each Spark job. It has the highest
        id, because Spark numbers the stages on which it depends first.
        """
        tracker = self.context.statusTracker()
        ids = [sorted(job.stageIds)[-1 if only_last else 0 :] for job in self._jobs()]
        stages = [tracker.getStageInfo(stage) for of_job in ids for stage in of_job]
        return [stage for stage in stages if stage is not None]


MEMORY_POLL_S = 2.0  # a poll is several calls into the JVM


class OutOfMemoryMonitor(FitListener):
    """A listener that warns of containers killed for their memory, and of dead Python processes.

    Args:
        job: The fit's job.
        warn: Shows a warning immediately and again in the summary.
    """

    def __init__(self, job: SparkJob, warn: Callable[[str], None]) -> None:
        self._job, self._warn = job, warn
        self._due_s = 0.0  # time.monotonic() of the next poll
        self._seen: list[tuple[int, int, int]] = []  # stage attempts at the last poll
        self._reported: set[str] = set()  # warnings that were shown

    def on_progress(self, progress: Progress) -> None:
        """Look for newly killed containers, at most every ``MEMORY_POLL_S``; warn about them.

        Task errors, which contain the reason, are read only if the numbers of failed tasks changed.
        """
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + MEMORY_POLL_S
        stages = self._job.stage_attempts()
        if stages != self._seen and any(attempt or failed for _, attempt, failed in stages):
            self._report_killed()
        self._seen = stages

    def on_fit_end(self, end: FinishedFit) -> None:
        """Report containers that were killed since the last poll."""
        if self._job.stage_attempts() != self._seen:
            self._report_killed()

    def _report_killed(self) -> None:
        """Show warnings about containers and processes that were not shown before."""
        for text in self._job.killed_for_memory() + self._job.dead_python_workers():
            if text not in self._reported:
                self._reported.add(text)
                self._warn(text)


log = logging.getLogger(__name__)

DECOMMISSION_ENABLED = "spark.decommission.enabled"
DECOMMISSION_POLL_S = 1.0  # a poll is several calls into the JVM per executor
WORKER_MOVED = (
    "executor {executor} on {host} is being decommissioned: the worker of partition {partition} "
    "stops there and restarts on another executor"
)
NO_FREE_SLOT = (
    "executor {executor} on {host} is being decommissioned, and no other one has a free slot: its "
    "workers continue until it is gone or a slot is free"
)


@dataclass(frozen=True, slots=True)
class ExecutorState:
    """An executor as Spark reports it."""

    name: str  # Spark's id
    host: str  # the host on which it runs
    free_slots: int  # number of additional tasks that it can run now
    is_leaving: bool  # whether it is being decommissioned


class DecommissionMonitor(FitListener):
    """A listener that moves workers off executors that are being decommissioned.

    If ``spark.decommission.enabled`` is true, Spark learns in advance that an executor will go away
    (from a spot instance's notice or ``SIGPWR``) and starts no new task there. This monitor kills
    each of the fit's tasks on that executor as soon as another executor has a free slot. Spark
    restarts the task elsewhere, and the new attempt takes over the partition. Updates that were
    already committed are kept, so their rows are not trained twice.

    Args:
        job: The fit's job.
        warn: Shows a message immediately and again in the summary.
    """

    def __init__(self, job: SparkJob, warn: Callable[[str], None]) -> None:
        self._job, self._warn = job, warn
        conf = live_conf(job.context)
        self._enabled = is_enabled(conf, DECOMMISSION_ENABLED)
        self._due_s = 0.0  # time.monotonic() of the next poll
        self._killed: set[int] = set()  # ids of task attempts
        self._without_slot: set[str] = set()  # executors for which NO_FREE_SLOT was shown

    def on_progress(self, progress: Progress) -> None:
        """Move workers off decommissioned executors, while workers can still be replaced.

        The executors are checked at most every ``DECOMMISSION_POLL_S``.
        """
        is_training = progress.phase in (Phase.GATHERING, Phase.RUNNING)
        if not self._enabled or not is_training or time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + DECOMMISSION_POLL_S
        executors = list_executors(self._job.context)
        leaving = {each.name: each for each in executors if each.is_leaving}
        if leaving:
            self._move_workers(
                leaving, sum(each.free_slots for each in executors if not each.is_leaving)
            )

    def _move_workers(self, leaving: dict[str, ExecutorState], free_slots: int) -> None:
        """Kill the fit's tasks on decommissioned executors, at most one per free slot elsewhere.

        ``leaving`` contains the decommissioned executors by Spark's id. ``free_slots`` is the
        number of free task slots on the other executors; if there are none, show a warning once per
        executor.
        """
        for task in self._job.running_tasks(leaving.keys()):
            if task.attempt in self._killed:
                continue
            executor = leaving[task.executor]
            fields = {"executor": executor.name, "host": executor.host, "partition": task.partition}
            if free_slots <= 0:
                if executor.name not in self._without_slot:
                    self._without_slot.add(executor.name)
                    self._warn(NO_FREE_SLOT.format(**fields))
                continue
            free_slots -= 1
            self._killed.add(task.attempt)
            text = WORKER_MOVED.format(**fields)
            self._warn(text)
            self._job.context._jsc.sc().killTaskAttempt(task.attempt, True, text)


def list_executors(context: Any) -> list[ExecutorState]:
    """Return the active executors of a SparkContext, without the driver."""
    scala = context._jsc.sc()
    scheduler, found = scala.taskScheduler(), scala.statusStore().executorList(True)
    listed = [found.apply(i) for i in range(found.size())]
    return [
        ExecutorState(
            str(each.id()),
            str(each.hostPort()).rpartition(":")[0],
            int(each.maxTasks()) - int(each.activeTasks()),
            bool(scheduler.getExecutorDecommissionState(each.id()).isDefined()),
        )
        for each in listed
        if each.id() != "driver"
    ]


WAIT_MESSAGE_S = 10.0  # between two messages about what the fit waits for
NO_SLOT_HINT = "; the job is queued behind others, or executors are missing"
SETUP_POLL_S = 0.5  # between two checks for hosts that cannot take part
BLOCKED_NETWORK_HINT = (
    "If they heard nothing from the master: open UDP between executors and driver in both "
    "directions, and name the network that both share (network_mask, controller_address)"
)


class StartMonitor(FitListener):
    """Shows what a fit is waiting for at its start; ends the fit if it cannot start.

    Args:
        job: The Spark job.
        say: Shows a line to the user.
        controller: The host and port at which the workers reach the controller.
        void: Network options: addresses and ports.
    """

    def __init__(
        self,
        job: SparkJob,
        say: Callable[[str], None],
        controller: Endpoint,
        void: VoidConfiguration,
    ) -> None:
        self._job, self._say, self._controller, self._void = job, say, controller, void
        self._master_name = master_name(void.controller)
        self._due_s = time.monotonic() + WAIT_MESSAGE_S
        self._setup_due_s = time.monotonic() + SETUP_POLL_S
        self._failed = 0  # number of failed tasks at the last check
        self._last_message = ""

    def on_progress(self, progress: Progress) -> None:
        """Show at intervals what the fit waits for, until it trains.

        Raise NetworkError if a host is unreachable, SetupError if no worker can start.
        """
        if progress.phase is not Phase.GATHERING:
            return
        if time.monotonic() > self._setup_due_s:
            self._setup_due_s = time.monotonic() + SETUP_POLL_S
            self._check_setup_errors(progress)
        if time.monotonic() > self._due_s:
            self._due_s = time.monotonic() + WAIT_MESSAGE_S
            self._check_failed_tasks(progress)

    def _check_setup_errors(self, progress: Progress) -> None:
        """Raise NetworkError if a host is unreachable, because another attempt would also fail."""
        if progress.unresponsive_peers:
            here, there, who = self._controller, progress.unresponsive_peers[0], self._master_name
            raise NetworkError(
                f"the {who} at {here} hears the executor at {there}, which does not hear the "
                f"{who}: UDP from {here.host} to {there.host} is dropped; in the firewalls (or "
                "security groups) of both hosts, allow UDP from "
                f"{here.host} to {there.host} {format_executor_ports(self._void, there.port)}"
            )
        _, failed = self._job.count_tasks()
        if failed == self._failed:
            return
        self._failed = failed
        errors = [setup_error_in(error) for error in self._job.task_errors()]
        blocked = [str(each) for each in errors if isinstance(each, NetworkError)]
        if blocked:
            hosts = _describe_blocked_hosts(len(blocked), progress, self._master_name)
            raise NetworkError(blocked[0] + hosts)

    def _check_failed_tasks(self, progress: Progress) -> None:
        """Show how many workers have joined, if that has changed.

        Raise SetupError if tasks failed before any worker joined; see ``_raise_failures``.
        """
        running, failed = self._job.count_tasks()
        if failed and not progress.joined:
            self._raise_failures(failed)
        have = "task has" if running == 1 else "tasks have"
        text = (
            f"sparkstrom waits: {progress.workers} of {progress.partitions} workers joined"
            + ("" if running is None else f", {running} {have} a slot")
            + NO_SLOT_HINT * (running == 0)
        )
        if text != self._last_message:  # the progress display shows the elapsed time anyway
            self._last_message = text
            self._say(text)

    def _raise_failures(self, failed: int) -> None:
        """Raise a failed task's SetupError, or one that explains why a task failed twice.

        Return if no task has failed twice, because Spark starts a task again after its first
        failure. ``failed``: number of failures.
        """
        for setup_error in map(setup_error_in, self._job.task_errors()):
            if setup_error is not None:
                raise setup_error
        error = next(iter(self._job.task_errors(first_attempt=1)), None)
        if error is None:
            return
        remedy = MISSING_CODE_HINT if MISSING_MODULE in error else BLOCKED_NETWORK_HINT
        if killed := self._job.killed_for_memory():
            remedy = capitalize_sentence(killed[-1])
        raise SetupError(
            f"{failed} tasks failed before any worker joined: {error}"
            f" (more in the executors' logs: stderr in Spark's UI, `yarn logs`). {remedy}"
        )


def _describe_blocked_hosts(hosts: int, progress: Progress, who: str) -> str:
    """Return text that narrows down which host is the likely cause of blocked UDP.

    ``hosts``: number of hosts that report an unreachable controller; ``who``: what messages call
    the controller.
    """
    others = f"; {hosts - 1} more report this" if hosts > 1 else ""
    if not progress.joined:
        return f"{others}; no worker has joined so far"
    there = f"{progress.joined} of {progress.partitions} workers have joined"
    return f"{others}; {there}, so it is not the {who}'s host"


class SlotMonitor(FitListener):
    """Shows that a fit in rounds waits because none of its tasks has a slot.

    Args:
        job: The job whose thread trains the rounds.
        say: Shows a line to the user.
    """

    def __init__(self, job: SparkJob, say: Callable[[str], None]) -> None:
        self._job, self._say = job, say
        self._due_s = time.monotonic() + WAIT_MESSAGE_S
        self._waits_at: tuple[Phase, int] | None = None  # (phase, rounds) if no task had a slot
        self._said_at: tuple[Phase, int] | None = None  # where the newest message was shown

    def on_progress(self, progress: Progress) -> None:
        """Show a message if no task had a slot at two checks, and no round ended between them.

        The message is shown once for each wait.
        """
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + WAIT_MESSAGE_S
        place = (progress.phase, progress.commits)
        before, self._waits_at = self._waits_at, place if self._job.is_queued() else None
        if place == before == self._waits_at != self._said_at:
            self._said_at = place
            self._say(f"sparkstrom waits: no task of the fit has a slot{NO_SLOT_HINT}")
