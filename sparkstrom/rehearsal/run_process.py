"""Simulate runs of a rehearsal in another process while the calling process simulates others.

A rehearsal simulates fits with several numbers of workers; a run is one of these fits, or a
baseline. The module ``rehearsal.runs`` starts the process as ``python -m
sparkstrom.rehearsal.run_process SOCKET``. The argument is the file descriptor of one end of a
socket pair; standard input is a file with the pickled simulator. The process receives one run at a
time. During the run, it repeatedly sends the completed fraction; at the end, it sends the result.
"""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from sparkstrom.base.child_processes import (
    CGROUP,
    THREAD_LIMIT_VARIABLES,
    make_child_environment,
    start_module,
)

if TYPE_CHECKING:
    from sparkstrom.rehearsal.fit import OnProgress, SimulatedFit

RunT = TypeVar("RunT")  # ``runs.Run``
MODULE = "sparkstrom.rehearsal.run_process"
# Set even if the calling process has more threads: the bits of sums may depend on their number.
ONE_THREAD = dict.fromkeys(THREAD_LIMIT_VARIABLES, "1")
PROGRESS_INTERVAL_S = 0.2  # between two messages about a run's progress


class Simulator(Protocol):
    """The interface of ``runs.RunSimulator`` that the process uses."""

    def simulate(self, run: Any, on_progress: OnProgress) -> SimulatedFit:
        """Simulate a run; return its result. Call ``on_progress`` with the completed fraction."""
        ...


class RunProcess(Generic[RunT]):
    """A process that simulates one run after the other until the calling process ends."""

    def __init__(self, simulator: bytes) -> None:
        """Start the process with a pickled Simulator. Raise OSError if that fails."""
        self.run: RunT  # the run that the process simulates, once ``begin`` was called
        self.fraction = 0.0  # completed fraction of this run
        ours, theirs = socket.socketpair()
        with ours, theirs, tempfile.TemporaryFile() as file:
            file.write(simulator)
            file.seek(0)
            self._process = start_module(
                MODULE,
                [theirs.fileno()],
                output=subprocess.DEVNULL,
                env=make_child_environment(1) | ONE_THREAD,
                stdin=file,
            )
            self.connection = Connection(ours.detach())

    def begin(self, run: RunT) -> None:
        """Send an idle process a run to simulate. If the process is dead, ``poll`` will raise."""
        self.run, self.fraction = run, 0.0
        with suppress(OSError):
            self.connection.send(run)

    def poll(self) -> SimulatedFit | None:
        """Read the process's messages: update ``fraction``, and return the result once it is there.

        Return None before that; never wait.

        Raise EOFError or OSError if the process has ended.
        """
        while self.connection.poll():
            message = self.connection.recv()
            if not isinstance(message, float):
                simulated: SimulatedFit = message
                return simulated
            self.fraction = message
        return None

    def kill(self) -> None:
        """End the process at once and release its resources. Idempotent."""
        self._process.kill()
        self._process.wait()
        self.connection.close()


def free_memory_bytes() -> float:
    """Return how many more bytes processes can allocate, within the host and its container."""
    host = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = float(host["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # no container, or one without a limit ("max")
        limit, used = (
            float((CGROUP / f"memory.{name}").read_text()) for name in ("max", "current")
        )
        free = min(free, limit - used)
    return free


def main(descriptor: int) -> int:
    """Simulate runs until the calling process closes the socket; return exit status 0.

    ``descriptor``: file descriptor of this process's end of the socket pair.
    """
    from sparkstrom.fit.trained_network import preserve_process_state
    from sparkstrom.rehearsal.fit import use_threads

    simulator: Simulator = pickle.load(sys.stdin.buffer)
    next_s = 0.0
    with Connection(descriptor) as connection, preserve_process_state(), use_threads(1):

        def send_progress(fraction: float) -> None:
            """Send the completed fraction of the run, at most once per PROGRESS_INTERVAL_S."""
            nonlocal next_s
            if (now_s := time.monotonic()) >= next_s:
                next_s = now_s + PROGRESS_INTERVAL_S
                connection.send(fraction)

        while True:
            try:
                run = connection.recv()
            except EOFError:
                return 0
            connection.send(simulator.simulate(run, send_progress))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
