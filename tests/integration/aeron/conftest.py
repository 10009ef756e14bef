"""Media drivers for tests: all processes and directories must be gone after a test."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.transport.aeron.client import AeronTransport
from sparkstrom.transport.aeron.driver_directories import identify_process
from sparkstrom.transport.aeron.driver_process import DRIVER_SETTINGS
from sparkstrom.transport.aeron.library import load_library
from sparkstrom.transport.aeron.media_driver import DriverOptions, MediaDriverHandle, ensure_driver
from sparkstrom.transport.base import ReceivedFrame, Sender, Transport
from tests.integration.running import is_running

DEADLINE_S = 30.0  # longer than even a busy machine needs: then something hangs or leaks
# If a driver is stopped for longer, its streams are lost.
STREAM_LIVES_S = dict(DRIVER_SETTINGS)["image_liveness_timeout_ns"] / 1e9
CYCLE_NS_MAX = 26  # Aeron's system counter: the longest time between two of a driver's duty cycles


def wait_until(condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Return the result of ``condition`` as soon as it is true; fail at the deadline."""
    end_s = time.monotonic() + deadline_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"still not so after {deadline_s} s"
        time.sleep(0.01)
    return found


def is_stopped(pid: int) -> bool:
    """Return whether all threads of a process are stopped."""
    try:
        threads = Path(f"/proc/{pid}/task").iterdir()
        return all(") T" in (thread / "stat").read_text() for thread in threads)
    except OSError:  # a thread has ended
        return False


class Drivers:
    """Starts media drivers under keys of one test, and records them."""

    wait_until = staticmethod(wait_until)
    is_running = staticmethod(is_running)

    def __init__(self) -> None:
        self._token = secrets.token_hex(4)
        self._handles: list[MediaDriverHandle] = []
        self._transports: list[AeronTransport] = []

    def key(self, name: str) -> str:
        """Return the key of the driver ``name`` in this test."""
        return f"test-{self._token}-{name}"

    def options(self, **given: Any) -> DriverOptions:
        """Return options; a driver ends 0.5 s after its last client or with this process."""
        return DriverOptions(**{"linger_s": 0.5, "watch": identify_process(os.getpid()), **given})

    def ensure(self, name: str = "a", **given: Any) -> MediaDriverHandle:
        """Start or join the driver ``name``."""
        handle = ensure_driver(self.key(name), self.options(**given))
        self._handles.append(handle)
        return handle

    def transport(self, name: str = "a", **given: Any) -> AeronTransport:
        """Open a transport on the driver ``name``."""
        transport = AeronTransport(self.ensure(name, **given))
        self._transports.append(transport)
        return transport

    def stop(self, pid: int) -> None:
        """Stop a media driver by SIGSTOP, and wait until all of its threads are stopped."""
        os.kill(pid, signal.SIGSTOP)
        self.wait_until(lambda: is_stopped(pid))

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        for handle in self._handles:
            handle.close()

    def left_behind(self) -> list[str]:
        """Return the remaining processes and paths of this object's drivers."""
        pids = [f"process {h.pid}" for h in self._handles if is_running(h.pid)]
        roots = {root for handle in self._handles for root in handle.home.roots}
        return pids + [str(path) for root in roots for path in root.glob(f"*{self._token}*")]

    def close_and_check(self) -> None:
        """Close all; fail unless processes and directories disappear."""
        self.close()
        end_s = time.monotonic() + DEADLINE_S
        while left := self.left_behind():
            assert time.monotonic() < end_s, f"left behind: {left}"
            time.sleep(0.01)


@pytest.fixture(scope="session", autouse=True)
def _aeron() -> None:
    """End the test run if the Aeron library is missing."""
    try:
        load_library()
    except SetupError as error:
        pytest.exit(f"these tests need the Aeron library: {error}", returncode=2)


@pytest.fixture
def drivers() -> Iterator[Drivers]:
    """Media drivers; the test fails if their processes or directories remain after it."""
    drivers = Drivers()
    yield drivers
    drivers.close_and_check()


@pytest.fixture(scope="module")
def shared_drivers() -> Iterator[Drivers]:
    """Media drivers that are shared by all tests of a module."""
    drivers = Drivers()
    yield drivers
    drivers.close_and_check()


Exchange = Callable[..., list[ReceivedFrame]]


def max_pause_s(*transports: Transport) -> float:
    """Return the longest time for which one of their media drivers has not run."""
    longest_ns = 0
    for transport in transports:
        if isinstance(transport, AeronTransport):
            lib = transport._aeron.lib
            reader = lib.aeron_counters_reader(transport._client)
            longest_ns = max(longest_ns, lib.aeron_counters_reader_addr(reader, CYCLE_NS_MAX)[0])
    return longest_ns / 1e9


@pytest.fixture
def exchange() -> Exchange:
    """A function (here, sender, frames, there) that offers frames until all have arrived."""

    def exchange(
        here: Transport,
        sender: Sender,
        frames: Sequence[bytes],
        there: Transport,
    ) -> list[ReceivedFrame]:
        sent, arrivals = 0, []
        end_s = time.monotonic() + DEADLINE_S
        while len(arrivals) < len(frames):
            assert time.monotonic() < end_s, (
                f"{sent} went, {len(arrivals)} came of {len(frames)}; one of the media drivers "
                f"was still for {max_pause_s(here, there):.1f} s, streams bear {STREAM_LIVES_S:g}"
            )
            sent += sender.offer(frames[sent:])[0]
            if here is not there:
                here.poll(0)  # it may still be opening the sender
            arrivals += there.poll(0.002)
        return arrivals

    return exchange
