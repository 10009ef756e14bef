"""Worker pool: the worker processes of one wrapper; they live from fit to fit."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from sparkstrom.base.errors import SetupError, TrainingError
from sparkstrom.local.life_signs import LifeSigns
from sparkstrom.local.orders import WorkerAnswer, WorkerOrder

MODULE = "sparkstrom.local.worker_main"
LOG_TAIL_BYTES = 2000
END_S = 5.0  # for a process that has nothing to do
THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
CLOSED = "this ParallelWrapper was closed while it trained; what was learnt in this fit is lost"


class WorkerProcess:
    """One of them, started at once. It has nothing of this process but its end of a socket."""

    def __init__(self, log: Path, threads: int, lease_s: float) -> None:
        """Silent for ``lease_s`` it counts as gone."""
        self._log, self._signs = log, LifeSigns(lease_s)
        self._is_stuck = False
        ours, theirs = socket.socketpair()
        with ours, theirs, log.open("wb") as output:
            descriptors = theirs.fileno(), self._signs.descriptor
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(threads),
                process_group=0,  # Ctrl-C is the calling process' to hear
                pass_fds=descriptors,
            )
            self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def stands_still(self) -> bool:
        """It lives, but has given no sign of it for too long, or is stuck in a message."""
        return self._is_stuck or self._signs.is_silent()

    def send(self, order: WorkerOrder) -> None:
        """It may be dead or stand still by now: then there is no answer."""
        self._give_up_after(self._signs.limit_s)
        try:
            self.connection.send_bytes(pickle.dumps(order))
        except BlockingIOError:
            self._is_stuck = True
        except (BrokenPipeError, ConnectionResetError):
            pass  # ``receive`` says so

    def receive(self) -> WorkerAnswer | None:
        """Its answer, once ``connection`` has something; None: it is dead, or stands still."""
        try:
            answer: WorkerAnswer = self.connection.recv()
        except BlockingIOError:
            self._is_stuck = True
            return None
        except (EOFError, ConnectionResetError):
            return None
        return answer

    def last_words(self, *, stood_still: bool) -> tuple[str, str]:
        """How it ended, or has to, and the end of what it wrote."""
        if stood_still:
            self._process.kill()
        status = self._process.wait()
        how = f"ended with exit status {status}"
        if stood_still:
            how = f"gave no sign of life for {self._signs.limit_s:g} s"
        elif status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        return how, self._log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()

    def kill(self) -> None:
        """At once. Idempotent."""
        self._process.kill()
        self._process.wait()
        self.connection.close()
        self._signs.close()

    def close(self) -> None:
        """Let it end by itself; it has no order. Idempotent."""
        self.connection.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self.kill()

    def _give_up_after(self, seconds: float) -> None:
        """In the middle of a message, where the other end goes no further."""
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))  # a timeval
        with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as same:
            for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                same.setsockopt(socket.SOL_SOCKET, way, limit)


class WorkerPool:
    """As many as asked for, each in its place; who died is replaced when it is asked for."""

    def __init__(self, workers: int, scratch: Path, lease_s: float) -> None:
        """Who gives no sign of life for ``lease_s`` counts as gone."""
        self._places: list[WorkerProcess | None] = [None] * workers
        self._lease_s = lease_s
        self._scratch, self._threads = scratch, max(1, cores() // workers)
        self._started = 0
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._places)

    @property
    def threads(self) -> int:
        """Of each."""
        return self._threads

    def living(self, place: int) -> WorkerProcess:
        """The one of a place, started if need be. Raise SetupError where none can be.

        Raise TrainingError after ``close``: nobody would end it.
        """
        self.need_open()
        known = self._places[place]
        if known is not None and known.is_alive:
            return known
        self.drop(place)
        self._started += 1
        log = self._scratch / f"worker-{self._started}.log"
        try:
            made = WorkerProcess(log, self._threads, self._lease_s)
        except OSError as error:
            raise SetupError(f"worker process {place} cannot be started: {error}") from error
        self._places[place] = made
        if self.is_closed:
            self.drop(place)
        self.need_open()  # still
        return made

    def pids(self) -> list[int]:
        """Of those that live, by place."""
        return [each.pid for each in self._places if each is not None and each.is_alive]

    def drop(self, place: int) -> None:
        """End whoever is there; nothing of it is left."""
        known, self._places[place] = self._places[place], None
        if known is not None:
            known.kill()

    def need_open(self) -> None:
        """Another thread may close it at any time: raise TrainingError then."""
        if self.is_closed:
            raise TrainingError(CLOSED)

    @contextmanager
    def while_open(self) -> Iterator[None]:
        """Raise TrainingError for what fails because another thread has closed it."""
        try:
            yield
        except (OSError, ValueError) as error:  # of what is closed or removed: sockets, files
            if self.is_closed:
                raise TrainingError(CLOSED) from error
            raise

    def close(self) -> None:
        """End all of them. Idempotent."""
        self.is_closed = True
        places, self._places = self._places, [None] * len(self._places)
        known = [each for each in places if each is not None]
        for each in known:
            each.connection.close()
        for each in known:
            each.close()


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def _environment(threads: int) -> dict[str, str]:
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    limits = {name: str(threads) for name in THREAD_LIMITS}
    return limits | os.environ | {"PYTHONPATH": path}
