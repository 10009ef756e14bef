"""Start, monitor and replace the worker processes of a ParallelWrapper, and send them tasks.

Each worker process increments a heartbeat counter in shared memory, which the calling process
polls. A suspended process (SIGSTOP, a debugger, a thrashing machine) keeps its socket open, so only
the counter shows that it is not running. In the worker, a separate thread increments the counter,
so that a training step may take as long as necessary. That thread also checks steps' time limit.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sparkstrom.base.child_processes import count_cores, make_child_environment, start_module
from sparkstrom.base.errors import SetupError, SparkstromError, TrainingError, UsageError
from sparkstrom.local.data import RowFile
from sparkstrom.protocol.common.process_pause import PauseDetector
from sparkstrom.worker.task_environment import (
    TaskEnvironment,
    free_last_model,
    unpickle_without_collecting,
)

log = logging.getLogger(__name__)

HOST = "localhost"  # name of the host in messages
WORKER_MODULE = "sparkstrom.local.worker_main"
LOG_TAIL_BYTES = 2000  # how much of a dead worker's output the error contains
EXIT_TIMEOUT_S = 5.0  # how long an idle process may take to exit
CLOSED_MESSAGE = (
    "this ParallelWrapper was closed while it trained; what was learned in this fit is lost"
)
FAILURES_MAX = 4  # failures of one partition that end the fit, like Spark's spark.task.maxFailures
POLL_S = 0.1
DIED_TOO_OFTEN = "the process of worker {} has died {} times; the last one {}"
COUNTER_BYTES = 8  # u64, little endian
HEARTBEAT_S = 0.2  # between two heartbeats
FIRST_HEARTBEAT_S = 60.0  # limit for the first heartbeat: the interpreter must import modules
TRACE_CHARS_MAX = 8_000  # maximum length of a stack trace in an error


class WorkerPool:
    """The worker processes of one ParallelWrapper, which stay alive between its fits.

    A process starts when it is first requested. A dead process is replaced at the next request.
    """

    def __init__(self, workers: int, scratch: Path, lease_s: float) -> None:
        """Create a pool of ``workers`` processes, none of which runs yet.

        ``scratch``: directory for the processes' logs; ``lease_s``: seconds without a heartbeat
        after which a process counts as unresponsive.
        """
        self._slots: list[WorkerProcess | None] = [None] * workers
        self._lease_s = lease_s
        self._scratch = scratch
        # Number of threads that each worker's numeric libraries may use.
        self.threads = max(1, count_cores() // workers)
        self._started = 0  # number of processes started so far
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._slots)

    def get_or_start(self, index: int) -> WorkerProcess:
        """Return the process at an index; start a process if none is alive.

        Raise SetupError if a process cannot be started, and TrainingError if the pool is closed.
        """
        self.check_open()
        process = self._slots[index]
        if process is not None and process.is_alive:
            return process
        self.drop(index)
        self._started += 1
        log = self._scratch / f"worker-{self._started}.log"
        try:
            process = WorkerProcess(log, self.threads, self._lease_s)
        except OSError as error:
            raise SetupError(f"worker process {index} cannot be started: {error}") from error
        self._slots[index] = process
        if self.is_closed:  # by another thread meanwhile, which does not end this process
            self.drop(index)
        self.check_open()
        return process

    def pids(self) -> list[int]:
        """Return the ids of the processes that are alive, in order of index."""
        return [each.pid for each in self._slots if each is not None and each.is_alive]

    def drop(self, index: int) -> None:
        """Kill the process at an index and forget it; do nothing if there is none."""
        process, self._slots[index] = self._slots[index], None
        if process is not None:
            process.kill()

    def check_open(self) -> None:
        """Raise TrainingError if another thread has closed the pool."""
        if self.is_closed:
            raise TrainingError(CLOSED_MESSAGE)

    @contextmanager
    def translate_closing_errors(self) -> Iterator[None]:
        """Convert OSError and ValueError of a ``with`` block to TrainingError if now closed."""
        try:
            yield
        except (OSError, ValueError) as error:  # from closed sockets or deleted files
            if self.is_closed:
                raise TrainingError(CLOSED_MESSAGE) from error
            raise

    def close(self) -> None:
        """End all processes. Idempotent."""
        self.is_closed = True
        slots, self._slots = self._slots, [None] * len(self._slots)
        processes = [process for process in slots if process is not None]
        for process in processes:  # so that all exit at the same time
            process.connection.close()
        for process in processes:
            process.close()


class ActiveWorkers:
    """The worker processes of one fit, one per partition. Counts their failures and attempts."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._processes: dict[int, WorkerProcess] = {}
        self._failures = Counter[int]()
        self.attempts = Counter[int]()  # number of the current attempt, from 0, by partition

    def begin(self) -> range:
        """Start the processes that are not running; return all partitions.

        Raise SetupError if a process cannot be started.
        """
        partitions = range(len(self._pool))
        for partition in partitions:
            self._processes[partition] = self._pool.get_or_start(partition)
        return partitions

    def send(self, partition: int, task: WorkerTask) -> None:
        """Send a task to a partition's worker. If it is dead, ``answers`` will report that."""
        with self._pool.translate_closing_errors():
            self._processes[partition].send(task)

    def answers(self, partitions: Collection[int]) -> Iterator[tuple[int, WorkerAnswer | None]]:
        """Wait up to POLL_S seconds; yield (partition, answer) for answers of these partitions.

        None in place of an answer means that the partition's process must be replaced, because it
        has died or is unresponsive.
        """
        waited = {self._processes[partition].connection: partition for partition in partitions}
        with self._pool.translate_closing_errors():
            for ready in connection.wait(list(waited), POLL_S):
                partition = waited.pop(ready)  # type: ignore[call-overload]
                yield partition, self._processes[partition].receive()
            for partition in waited.values():
                if self._processes[partition].is_unresponsive:
                    yield partition, None

    def count_failure(self, partition: int) -> bool:
        """Count a failure of the partition; return True if it has failed too often."""
        self._failures[partition] += 1
        return self._failures[partition] >= FAILURES_MAX

    def replace(self, partition: int) -> str:
        """Replace a partition's process and begin another attempt.

        Return how the old process ended, as text. Raise TrainingError if the partition's processes
        have died too often.
        """
        process = self._processes[partition]
        with self._pool.translate_closing_errors():
            how, tail = process.collect_exit(was_unresponsive=process.is_unresponsive)
        log.warning("worker %d is replaced, its process %s", partition, how)
        if self.count_failure(partition):
            raise TrainingError(DIED_TOO_OFTEN.format(partition, FAILURES_MAX, how), trace=tail)
        self._pool.drop(partition)
        self.start_attempt(partition)
        return how

    def start_attempt(self, partition: int) -> None:
        """Begin another attempt at a partition, in the same process if it is alive."""
        self.attempts[partition] += 1
        self._processes[partition] = self._pool.get_or_start(partition)

    def drop(self, partitions: Collection[int]) -> None:
        """Kill the processes of these partitions, even in the middle of a task."""
        for partition in list(partitions):
            self._pool.drop(partition)


class WorkerProcess:
    """One worker process, started by the constructor.

    The process inherits only the heartbeat memory and one end of a socket pair.
    """

    def __init__(self, log: Path, threads: int, lease_s: float) -> None:
        """Start the process, whose stdout and stderr go to the file ``log``.

        ``threads``: for its numeric libraries; ``lease_s``: seconds without a heartbeat after which
        it counts as unresponsive.
        """
        self._log, self._heartbeats = log, HeartbeatMonitor(lease_s)
        self._is_stuck = False  # whether it was suspended in the middle of a message
        ours, theirs = socket.socketpair()
        with ours, theirs, log.open("wb") as output:
            descriptors = theirs.fileno(), self._heartbeats.descriptor
            self._process = start_module(
                WORKER_MODULE, descriptors, output=output, env=make_child_environment(threads)
            )
            self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether the process has not yet ended."""
        return self._process.poll() is None

    @property
    def is_unresponsive(self) -> bool:
        """Whether the process sends no heartbeats, or was suspended in the middle of a message."""
        return self._is_stuck or self._heartbeats.is_silent()

    def send(self, task: WorkerTask) -> None:
        """Send a task. No error is raised if the process is dead or suspended."""
        self._set_socket_timeout(self._heartbeats.limit_s)
        try:
            self.connection.send_bytes(pickle.dumps(task))
        except BlockingIOError:
            self._is_stuck = True
        except (BrokenPipeError, ConnectionResetError):
            pass  # ``receive`` reports it

    def receive(self) -> WorkerAnswer | None:
        """Return the next answer; None if the process died or was suspended while sending it.

        Call this only when ``connection`` is readable.
        """
        try:
            answer: WorkerAnswer = self.connection.recv()
        except BlockingIOError:
            self._is_stuck = True
            return None
        except (EOFError, ConnectionResetError):
            return None
        return answer

    def collect_exit(self, *, was_unresponsive: bool) -> tuple[str, str]:
        """Wait until the process ends; kill it first if it was unresponsive.

        Return how the process ended, as text, and the last part of its log.
        """
        if was_unresponsive:
            self._process.kill()
        status = self._process.wait()
        how = f"ended with exit status {status}"
        if was_unresponsive:
            how = f"gave no sign of life for {self._heartbeats.limit_s:g} s"
        elif status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        return how, self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()

    def kill(self) -> None:
        """End the process at once and release its resources. Idempotent."""
        self._process.kill()
        self._process.wait()
        self.connection.close()
        self._heartbeats.close()

    def close(self) -> None:
        """Let an idle process exit, or kill it after EXIT_TIMEOUT_S; release its resources.

        Calling this again has no effect.
        """
        self.connection.close()
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self.kill()

    def _set_socket_timeout(self, seconds: float) -> None:
        """Set the timeout after which a send or receive that has begun fails."""
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))  # a timeval
        with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as copy:
            for name in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                copy.setsockopt(socket.SOL_SOCKET, name, limit)


class WorkerTask(Protocol):
    """A task that the calling process sends to a worker process."""

    def run(self) -> Any:
        """Do the work and return a report, which must be picklable."""
        ...


class WorkerAnswer(NamedTuple):
    """The result of a task: its report, or the error that ended it."""

    report: Any  # the value that the task returned
    failure: str = ""  # message of the task's error; "" if the task succeeded
    trace: str = ""  # traceback of the error
    is_superseded: bool = False  # whether the fit rejects this attempt but may accept another
    kind: str = ""  # name of the error's class
    host: str = HOST  # the worker's host

    def as_error(self, partition: int) -> SparkstromError:
        """Return the exception that the calling process raises for a failed task."""
        match self.kind:
            case "UsageError":
                return UsageError(self.failure)
            case "SetupError":
                return SetupError(self.failure)
        return TrainingError(self.failure, self.host, partition, self.trace)


@dataclass(frozen=True, slots=True)
class GradientSharingTask:
    """Task: train one partition by gradient sharing, as a Spark task does."""

    job: bytes  # a pickled LocalTrainingJob
    place: TaskEnvironment  # partition, attempt and resources of the worker
    rows: RowFile  # the partition's rows

    def run(self) -> str:
        """Join the fit, train, leave, and return the report as JSON."""
        from sparkstrom.worker.training_task import run_training_task

        free_last_model()
        job = unpickle_without_collecting(self.job)
        return run_training_task(job, self.place, self.rows.blocks())


class HeartbeatMonitor:
    """Polls one worker process's heartbeat counter in the calling process.

    ``lease_s``: seconds without a heartbeat after which the process counts as unresponsive.
    """

    def __init__(self, lease_s: float) -> None:
        self.descriptor = os.memfd_create("sparkstrom-life")
        os.ftruncate(self.descriptor, COUNTER_BYTES)
        self._memory = mmap.mmap(self.descriptor, COUNTER_BYTES)
        self._lease_s = lease_s
        self._count, self._since_s = 0, time.monotonic()
        self._pauses = PauseDetector(lease_s, self._since_s)

    @property
    def limit_s(self) -> float:
        """Maximum number of seconds without a heartbeat; it is larger until the first one."""
        return self._lease_s if self._count else max(self._lease_s, FIRST_HEARTBEAT_S)

    def is_silent(self) -> bool:
        """Read the heartbeat counter; return whether it was unchanged for more than ``limit_s``.

        Call this regularly: time without calls, for instance because the calling process was
        suspended together with its workers, does not count.
        """
        count, now_s = int.from_bytes(self._memory, "little"), time.monotonic()
        if pause := self._pauses.pause_before(now_s):
            self._since_s = pause.shift(self._since_s)
        if count != self._count:
            self._count, self._since_s = count, now_s
        return now_s - self._since_s > self.limit_s

    def close(self) -> None:
        """Release the shared memory. Idempotent."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.descriptor)


class HeartbeatSender:
    """Increments the heartbeat counter of this worker process."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, COUNTER_BYTES)
        self._count = 0

    def beat(self) -> None:
        """Increment the counter."""
        self._count += 1
        self._memory[:] = self._count.to_bytes(COUNTER_BYTES, "little")


class RunningStep:
    """One running training step, with its time limit; steps are compared by object identity."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds  # time limit


class StepLimit:
    """Limits the time of training steps: one thread starts steps, another polls for overdue steps.

    A step that hangs cannot report this itself, but the heartbeat thread still runs and polls.
    """

    def __init__(self, poll_s: float) -> None:
        self._poll_s = poll_s
        self._step: RunningStep | None = None  # written only by the training thread
        self._seen: RunningStep | None = None  # the running step at the latest poll
        self._polls = 0  # consecutive polls that saw the same step

    @property
    def seconds(self) -> float:
        """The running step's time limit in seconds; infinity if no step is running."""
        step = self._step
        return math.inf if step is None else step.seconds

    def start_step(self, seconds: float) -> None:
        """Start a step that may take ``seconds``; it replaces a step that is still running."""
        self._step = RunningStep(seconds)

    def end_step(self) -> None:
        """End the running step; do nothing if no step is running."""
        self._step = None

    def check_overdue(self) -> bool:
        """Return True if the running step exceeds its limit. Call it every ``poll_s`` seconds.

        Time is measured in calls, so that it does not pass while the whole process is suspended.
        """
        step = self._step
        self._polls = self._polls + 1 if step is self._seen else 0
        self._seen = step
        return step is not None and self._polls * self._poll_s > step.seconds

    @property
    def is_still_running(self) -> bool:
        """Whether the step seen by the latest poll is still running."""
        return self._step is self._seen


step_limit = StepLimit(HEARTBEAT_S)  # limit on this process's steps, polled in worker processes


def format_main_thread_stack() -> str:
    """Return the main thread's current stack as text, formatted like a traceback."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame))[-TRACE_CHARS_MAX:] if frame else ""
