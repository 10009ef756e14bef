"""Tests of the TCP connection between a controller's task and the driver program."""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, cast

import numpy as np
import pytest

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import SetupError, TrainingError, WireError
from sparkstrom.base.identity import Endpoint
from sparkstrom.runtime.master_control import Snapshot
from sparkstrom.runtime.master_thread import MasterThread
from sparkstrom.spark.controller import driver_server as control_door
from sparkstrom.spark.controller import task as controller_line
from sparkstrom.spark.controller.driver_messages import (
    ControlEndpoint,
    ControllerState,
    ControlResponse,
    EndController,
    GetOptimizerStates,
    GetSnapshot,
    RequestStop,
    pack_message,
    unpack_message,
)
from sparkstrom.spark.controller.driver_server import (
    LOG_INTERVAL_S,
    LOGGED_HOSTS_MAX,
    UNAUTHENTICATED_MAX,
    ControlServer,
    RejectionLog,
)
from sparkstrom.spark.controller.remote_controller import create_initial_progress
from sparkstrom.spark.controller.task import DriverConnection
from sparkstrom.transport.encrypted_tcp import (
    GREETING,
    GREETING_TIMEOUT_S,
    RECORD,
    RECORD_BYTES_MAX,
    SALT_BYTES,
    EncryptedStream,
)

KEY = bytes(range(32))
WAIT_S = 20


class FakeMasterThread:
    """A fake master thread that records what a DriverConnection requests of it."""

    def __init__(self) -> None:
        self.finished, self.failure = threading.Event(), None
        self.progress = create_initial_progress(3)
        self.said: list[str] = []
        self.busy, self.snapshots = False, list[Future[Snapshot]]()
        self.copies: Future[tuple[bytes, ...]] = Future()
        self.copied = Snapshot(7, np.arange(3_000_000, dtype=np.float32), b"buffers", ())

    def request_stop(self, reason: str) -> None:
        self.said.append(reason)

    def request_snapshot(self) -> Future[Snapshot]:
        answer = Future[Snapshot]()
        if self.finished.is_set():
            answer.set_exception(TrainingError("it has failed"))
        elif not self.busy:
            answer.set_result(self.copied)
        self.snapshots.append(answer)
        return answer

    def copy_optimizer_states(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        self.said.append(f"updaters of {'all' if everybody else 'one'}")
        return self.copies


class Task:
    """A DriverConnection that a thread serves until it has ended or is closed."""

    def __init__(self, port: int) -> None:
        self.master = FakeMasterThread()
        self.line = DriverConnection(
            ControlEndpoint(Endpoint("127.0.0.1", port), KEY), SystemClock()
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self.line.ended and not self._over.is_set():
            self.line.serve(cast(MasterThread, self.master))
        self.line.close()

    def close(self) -> None:
        self._over.set()
        self._thread.join()


class StateRecorder:
    """A callback that records the received states and lets tests wait for them."""

    def __init__(self) -> None:
        self.states: list[ControllerState] = []
        self._changed = threading.Condition()

    def __call__(self, state: ControllerState) -> None:
        with self._changed:
            self.states.append(state)
            self._changed.notify_all()

    def until(self, holds: Callable[[list[ControllerState]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self.states), WAIT_S)


@pytest.fixture
def recorder() -> StateRecorder:
    return StateRecorder()


@pytest.fixture
def control_server(recorder: StateRecorder) -> Iterator[ControlServer]:
    """Return a server for the task's connection; ``heard`` records the states that it receives."""
    made = ControlServer(KEY, "127.0.0.1", None, recorder)
    yield made
    made.close()


@pytest.fixture
def task(control_server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Task]:
    """Return a connected task that reconnects after 0.05 s."""
    monkeypatch.setattr(controller_line, "RECONNECT_S", 0.05)
    made = Task(control_server.port)
    yield made
    made.close()


def test_driver_receives_states_and_answers_to_requests(
    control_server: ControlServer, task: Task, recorder: StateRecorder
) -> None:
    """The driver program receives states and answers; a slow answer does not delay the next one."""
    recorder.until(lambda states: len(states) > 1)
    assert recorder.states[0].progress == task.master.progress
    assert control_server.ask(RequestStop("enough")).result(WAIT_S) is None
    copied: Any = control_server.ask(GetSnapshot()).result(WAIT_S)
    np.testing.assert_array_equal(copied.parameters, task.master.copied.parameters)
    assert (copied.commit, copied.buffers) == (7, b"buffers")
    late = control_server.ask(GetOptimizerStates(everybody=True))
    assert (
        control_server.ask(RequestStop("more")).result(WAIT_S) is None
    )  # it does not wait for the copies
    assert not late.done()
    task.master.copies.set_result((b"state",))
    assert late.result(WAIT_S) == (b"state",)
    assert task.master.said == ["enough", "updaters of all", "more"]
    # Answers are kept to be sent again, but not optimizer states: they are large and frequent.
    assert (b"state",) not in task.line._answered.values()


def test_response_counts_as_sign_of_life(
    control_server: ControlServer, recorder: StateRecorder
) -> None:
    """A response counts as a sign of life: during a long snapshot, the task sends no states."""
    connection = socket.create_connection(("127.0.0.1", control_server.port))
    with contextlib.closing(EncryptedStream(connection, KEY, is_opener=True)) as task:
        state = ControllerState(create_initial_progress(3), False, None, 0.0)
        task.send(pack_message(state))
        recorder.until(bool)
        control_server.heard_s = 0.0
        answer = control_server.ask(GetSnapshot())
        request = unpack_message(task.receive())
        task.send(pack_message(ControlResponse(request.number, bytes(2 * RECORD_BYTES_MAX))))
        assert len(answer.result(WAIT_S)) == 2 * RECORD_BYTES_MAX
        assert control_server.heard_s > 0.0


def test_states_arrive_while_snapshot_is_delayed(
    control_server: ControlServer, task: Task, recorder: StateRecorder
) -> None:
    """States arrive while a snapshot is delayed, as while the media driver is replaced."""
    task.master.busy = True
    late = control_server.ask(GetSnapshot())
    assert control_server.ask(RequestStop("enough")).result(WAIT_S) is None
    (answer,) = task.master.snapshots
    task.master.progress = create_initial_progress(4)
    recorder.until(lambda states: bool(states) and states[-1].progress.partitions == 4)
    answer.set_result(task.master.copied)
    copied: Any = late.result(WAIT_S)
    assert copied.commit == 7


def test_request_raises_error_of_task(
    control_server: ControlServer, task: Task, recorder: StateRecorder
) -> None:
    """The driver program's request raises the error that occurred in the task."""
    task.master.finished.set()
    recorder.until(lambda states: bool(states) and states[-1].finished)
    with pytest.raises(TrainingError, match="it has failed"):
        control_server.ask(GetSnapshot()).result(WAIT_S)
    control_server.ask(EndController()).result(WAIT_S)
    assert task.line.ended


def test_open_requests_are_resent_after_lost_connection(
    control_server: ControlServer, task: Task, recorder: StateRecorder
) -> None:
    """After a lost connection, open requests are sent again, but each is carried out once."""
    recorder.until(bool)
    late = control_server.ask(GetOptimizerStates(everybody=False))
    assert control_server.ask(RequestStop("once")).result(WAIT_S) is None
    stream = task.line._stream
    assert stream is not None
    stream._socket.shutdown(socket.SHUT_RDWR)  # as if a firewall dropped it
    count = len(recorder.states)
    recorder.until(lambda states: len(states) > count + 1)
    task.master.copies.set_result((b"state",))
    assert late.result(WAIT_S) == (b"state",)
    assert task.master.said == ["updaters of one", "once"]  # each was carried out once


def test_task_connects_despite_silent_or_invalid_connections(
    control_server: ControlServer, recorder: StateRecorder
) -> None:
    """The task connects without waiting for the timeout of strangers, whether silent or not."""
    strangers = [socket.create_connection(("127.0.0.1", control_server.port)) for _ in range(6)]
    for stranger, says in zip(strangers, (b"GET / HTTP/1.0\r\n\r\n" * 4, bytes(64)), strict=False):
        stranger.sendall(says)  # the other four send nothing
    began_s = time.monotonic()
    task = Task(control_server.port)
    try:
        recorder.until(bool)
    finally:
        task.close()
    for stranger in strangers:
        stranger.close()
    assert time.monotonic() - began_s < GREETING_TIMEOUT_S


def test_task_connects_despite_too_many_silent_connections(
    control_server: ControlServer, recorder: StateRecorder
) -> None:
    """The task connects in time although silent strangers exceed the limit of connections."""
    silent = [
        socket.create_connection(("127.0.0.1", control_server.port))
        for _ in range(3 * UNAUTHENTICATED_MAX)
    ]
    began_s = time.monotonic()
    task = Task(control_server.port)
    try:
        recorder.until(bool)
    finally:
        task.close()
        for stranger in silent:
            stranger.close()
    assert time.monotonic() - began_s < GREETING_TIMEOUT_S


class Relay:
    """A man in the middle without the key; after the greeting, it sends single bytes."""

    def __init__(self, port: int) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        self.dripped = threading.Event()
        self._over = threading.Event()
        self._door = socket.create_connection(("127.0.0.1", port))
        self._threads = [threading.Thread(target=run) for run in (self._there, self._back)]
        self._accepted = threading.Event()
        for thread in self._threads:
            thread.start()

    def _there(self) -> None:
        self.task, _ = self.listening.accept()
        self._accepted.set()
        left = SALT_BYTES + RECORD.size + len(GREETING) + 16
        while left:
            part = self.task.recv(left)
            self._door.sendall(part)
            left -= len(part)
        with contextlib.suppress(OSError):  # the server has closed the connection
            while not self._over.wait(0.02):
                self._door.sendall(b"\0" if not self.dripped.is_set() else b"\1")
                self.dripped.set()

    def _back(self) -> None:
        assert self._accepted.wait(WAIT_S)
        with contextlib.suppress(OSError):
            while part := self._door.recv(1 << 16):
                self.task.sendall(part)

    def close(self) -> None:
        self._over.set()
        for connection in (self._door, self.task):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (self._door, self.task, self.listening):
            each.close()


def test_close_is_not_delayed_by_connection_sending_single_bytes(recorder: StateRecorder) -> None:
    """``close`` ends within seconds although the connection receives single bytes."""
    door = ControlServer(KEY, "127.0.0.1", None, recorder)
    relay = Relay(door.port)
    task = Task(relay.port)
    try:
        assert relay.dripped.wait(WAIT_S)
        assert door.was_connected.wait(WAIT_S)
        closing = threading.Thread(target=door.close)
        closing.start()
        closing.join(5)
        assert not closing.is_alive()
    finally:
        relay.close()
        task.close()


def test_accept_is_retried_while_no_descriptor_is_free(
    recorder: StateRecorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If no file descriptor is free, accepting is retried, with one log message."""
    failing = itertools.repeat(OSError(errno.EMFILE, "Too many open files"), 3)
    real = socket.socket.accept

    def accept(listening: socket.socket) -> Any:
        for error in failing:
            raise error
        return real(listening)

    monkeypatch.setattr(socket.socket, "accept", accept)
    monkeypatch.setattr(control_door, "POLL_S", 0.01)
    door = ControlServer(KEY, "127.0.0.1", None, recorder)
    task = Task(door.port)
    try:
        recorder.until(bool)
    finally:
        task.close()
        door.close()
    said = [record.message for record in caplog.records if "cannot accept" in record.message]
    assert len(said) == 1
    assert "Too many open files" in said[0]


def test_rejections_are_logged_once_a_minute_per_host() -> None:
    """Rejections are logged once a minute per host, for a limited number of hosts."""
    strangers = RejectionLog()
    assert [strangers.record("here", at) for at in (0.0, 1.0, 59.0)] == ["", None, None]
    assert strangers.record("there", 1.0) == ""
    assert strangers.record("here", LOG_INTERVAL_S) == " (and 2 more since the last such line)"
    said = [strangers.record(f"10.0.0.{n}", LOG_INTERVAL_S) for n in range(10 * LOGGED_HOSTS_MAX)]
    assert len([each for each in said if each is not None]) == LOGGED_HOSTS_MAX - 2 + 1
    assert len(strangers.next_s) <= LOGGED_HOSTS_MAX + 1


def test_rejects_connection_with_another_fits_key(control_server: ControlServer) -> None:
    """A connection with another fit's key is rejected."""
    connection = socket.create_connection(("127.0.0.1", control_server.port))
    with pytest.raises(WireError, match=r"connection|seal|greeting"):
        EncryptedStream(connection, bytes(32), is_opener=True)
    assert not control_server.was_connected.is_set()


def test_close_cancels_open_requests(recorder: StateRecorder) -> None:
    """Open requests are cancelled when the server is closed."""
    made = ControlServer(KEY, "127.0.0.1", None, recorder)
    answer = made.ask(GetSnapshot())
    made.close()
    made.close()
    assert answer.cancelled()


def test_port_range_without_free_port_raises_setup_error() -> None:
    """If no port of the range is free, the error names the host."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=r"no TCP port of 127\.0\.0\.1"):
            ControlServer(KEY, "127.0.0.1", range(port, port + 1), lambda state: None)
