"""Run the TCP server in the driver program to which the controller's task connects.

The controller coordinates the workers of a fit; here it runs in a Spark task on an executor. The
server listens on the address of Spark's driver, on a port of ``unicast_port`` or ``port_range`` if
one of these options is set. A client must prove that it has the fit's key; other clients are
disconnected. The number of clients that have not proved it yet is limited. Beyond the limit, the
server disconnects clients of the host that has the most, the oldest client first. A task that lost
its connection opens a new one, and the server repeats the requests that have no response yet.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any

from sparkstrom.base.errors import SetupError, SparkstromError, WireError
from sparkstrom.spark.controller.driver_messages import (
    ControllerState,
    ControlRequest,
    ControlResponse,
    pack_message,
    unpack_message,
)
from sparkstrom.transport.encrypted_tcp import EncryptedStream

log = logging.getLogger(__name__)

POLL_S = 0.2
# The task sends its state every second, except while it sends a long response. So a connection
# over which nothing arrives for this long is dead.
SILENCE_MAX_S = 15.0
BACKLOG_MAX = 64  # number of connections that wait to be accepted
UNAUTHENTICATED_MAX = 64  # clients that have not proved the key; each has three seconds to do so
LOG_INTERVAL_S = 60.0  # between two log lines about rejected connections from one host
LOGGED_HOSTS_MAX = 64  # hosts beyond these share their log lines


@dataclass(eq=False, slots=True)
class _Connection:
    """An accepted TCP connection."""

    socket: socket.socket  # the accepted socket
    host: str  # address of the client
    is_authenticated: bool = False  # whether the client has proved that it has the key

    def shut_down(self) -> None:
        """End the connection and wake all threads that read from it or write to it."""
        with suppress(OSError):  # it has ended already
            self.socket.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)
class RejectionLog:
    """Decides which rejected connections to log: at most one per host and minute."""

    suppressed: dict[str, int] = field(default_factory=dict)  # rejections not logged, by host
    next_s: dict[str, float] = field(default_factory=dict)  # time of the next line, by host

    def record(self, host: str, now_s: float) -> str | None:
        """Count a rejection of ``host``; return None if it should not be logged.

        Otherwise return text to append to the log line, which tells how many rejections were not
        logged before; "" if there were none. ``now_s`` is a monotonic time.
        """
        if host not in self.next_s and len(self.next_s) >= LOGGED_HOSTS_MAX:
            host = "others"
        if now_s < self.next_s.get(host, -math.inf):
            self.suppressed[host] = self.suppressed.get(host, 0) + 1
            return None
        self.next_s[host] = now_s + LOG_INTERVAL_S
        suppressed = self.suppressed.pop(host, 0)
        return f" (and {suppressed:,} more since the last such line)" if suppressed else ""


class ControlServer:
    """Accepts the controller's connection and exchanges requests and responses over it.

    The server runs from its construction until ``close``. It calls ``on_state`` with each state
    that arrives, in one of its own threads.
    """

    def __init__(
        self,
        key: bytes,
        address: str,
        ports: range | None,
        on_state: Callable[[ControllerState], None],
    ) -> None:
        """Listen on a free port of ``address`` and start the server's thread.

        ``key`` is the fit's key. ``ports`` are the permitted ports; None permits all. Raise
        SetupError if none of them is free.
        """
        self._key, self._on_state = key, on_state
        self._listener = _open_listener(address, ports)
        self.port: int = self._listener.getsockname()[1]
        self._stream: EncryptedStream | None = None
        self._lock = threading.Lock()  # guards the stream, sending and the fields below
        self._unanswered: dict[int, tuple[ControlRequest, Future[Any]]] = {}  # by request number
        self._number = 0  # number of the newest request
        self._closing = threading.Event()
        self.was_connected = threading.Event()  # set once the task has connected
        self.heard_s = math.inf  # when the last record arrived; inf before the first
        self._connections: list[_Connection] = []  # oldest first
        self._threads: set[threading.Thread] = set()
        self._connections_lock = threading.Lock()
        self._rejections = RejectionLog()
        self._thread = threading.Thread(target=self._run, name="sparkstrom-control", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the controller's task is connected now."""
        return self._stream is not None

    def ask(self, request: Any) -> Future[Any]:
        """Send a request, now or when the task connects; return a future of its result or error."""
        response: Future[Any] = Future()
        with self._lock:
            self._number += 1
            message = ControlRequest(self._number, request)
            self._unanswered[message.number] = message, response
            self._send(message)
        return response

    def close(self) -> None:
        """Close all connections and cancel requests that have no response. Idempotent."""
        self._closing.set()
        with self._connections_lock:
            for connection in self._connections:
                connection.shut_down()
        self._thread.join()
        self._listener.close()
        with self._lock:
            for _, answer in self._unanswered.values():
                answer.cancel()
            self._unanswered.clear()

    def _run(self) -> None:
        """Accept connections until closed; serve each one in its own thread."""
        while not self._closing.is_set():
            try:
                connection, peer = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # no descriptor is free, or the client has disconnected
                self._report_accept_error(error)
                self._closing.wait(POLL_S)
                continue
            self._make_room(UNAUTHENTICATED_MAX - 1)
            self._start_connection(_Connection(connection, str(peer[0])))
        for thread in list(self._threads):
            thread.join()

    def _make_room(self, limit: int) -> None:
        """Close unauthenticated connections until at most ``limit`` are left.

        The oldest one of the host with the most such connections is closed first, so that one host
        cannot displace others.
        """
        with self._connections_lock:
            waiting = [
                connection for connection in self._connections if not connection.is_authenticated
            ]
            while len(waiting) > limit:
                (host, _), *_ = Counter(connection.host for connection in waiting).most_common(1)
                oldest = next(connection for connection in waiting if connection.host == host)
                waiting.remove(oldest)
                self._connections.remove(oldest)
                oldest.shut_down()

    def _start_connection(self, connection: _Connection) -> None:
        """Register a connection and start the thread that serves it."""
        thread = threading.Thread(
            target=self._serve_connection,
            args=(connection,),
            name="sparkstrom-control-connection",
            daemon=True,
        )
        self._threads = {each for each in self._threads if each.is_alive()} | {thread}
        with self._connections_lock:
            self._connections.append(connection)
            if self._closing.is_set():
                connection.shut_down()
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be started now; the task reconnects
            self._threads.discard(thread)
            self._remove_connection(connection)
            self._report_accept_error(error)

    def _report_accept_error(self, error: Exception) -> None:
        """Log a failed accept, at most once per minute; disconnect one unauthenticated client."""
        with self._connections_lock:
            waiting = sum(not connection.is_authenticated for connection in self._connections)
        self._make_room(max(0, waiting - 1))  # to free one descriptor and thread
        ending = self._count_rejection("", time.monotonic())
        if ending is not None:
            log.warning("cannot accept connections of the controller now: %s%s", error, ending)

    def _serve_connection(self, connection: _Connection) -> None:
        """Authenticate a connection and serve it until it ends."""
        try:
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = EncryptedStream(connection.socket, self._key, is_opener=False)
        except (OSError, WireError) as error:
            self._remove_connection(connection)
            ending = self._count_rejection(connection.host, time.monotonic())
            if ending is not None and not self._closing.is_set():
                log.warning(
                    "rejected a connection from %s, not the controller: %s%s",
                    connection.host,
                    error,
                    ending,
                )
            return
        with closing(stream):
            with self._connections_lock:
                connection.is_authenticated = True
            self._serve_stream(stream)
        self._remove_connection(connection)

    def _remove_connection(self, connection: _Connection) -> None:
        """Close a connection and remove it from the list."""
        with self._connections_lock, suppress(ValueError):  # removed by _make_room
            self._connections.remove(connection)
        connection.socket.close()

    def _count_rejection(self, host: str, now_s: float) -> str | None:
        """Count a rejection under a lock; see ``RejectionLog.record``."""
        with self._connections_lock:
            return self._rejections.record(host, now_s)

    def _serve_stream(self, stream: EncryptedStream) -> None:
        """Send unanswered requests again; then handle messages until the connection ends.

        The connection also ends if the task opens another one, or if nothing arrives for
        ``SILENCE_MAX_S``.
        """
        with self._lock:
            self._stream = stream
            for message, _ in self._unanswered.values():
                self._send(message)
        self.heard_s = max(self.heard_s, time.monotonic())
        self.was_connected.set()
        start_s = time.monotonic()
        try:
            while self._stream is stream and not self._closing.is_set():
                if stream.wait_for_data(POLL_S):
                    self._handle_message(unpack_message(stream.receive(self._note_record)))
                elif time.monotonic() - max(start_s, self.heard_s) > SILENCE_MAX_S:
                    log.warning(
                        "the connection to the controller: silent for %.0f s", SILENCE_MAX_S
                    )
                    break
        except WireError as error:
            log.warning("the connection to the controller: %s", error)
        with self._lock:
            if self._stream is stream:
                self._stream = None

    def _note_record(self) -> None:
        """Note that a record has arrived, which may be a part of a long message."""
        self.heard_s = time.monotonic()

    def _handle_message(self, message: ControllerState | ControlResponse) -> None:
        """Pass a state to ``on_state``, or a response to the future of its request."""
        if isinstance(message, ControllerState):
            self._on_state(message)
            return
        with self._lock:
            _, response = self._unanswered.pop(message.number, (None, None))
        if response is None:
            return
        if isinstance(message.value, SparkstromError):
            response.set_exception(message.value)
        else:
            response.set_result(message.value)

    def _send(self, message: ControlRequest) -> None:
        """Send a request. Without a connection, it will be sent when the task connects."""
        if self._stream is None:
            return
        try:
            self._stream.send(pack_message(message))
        except WireError as error:
            # The reading thread notices it too; the request is sent again over the next connection.
            log.warning("the connection to the controller: %s", error)


def _open_listener(address: str, ports: range | None) -> socket.socket:
    """Return a socket that listens on the first free port. Raise SetupError if none is free."""
    last_error: OSError | None = None
    for port in ports or (0,):
        try:
            family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            listener = socket.create_server(where[:2], family=family, backlog=BACKLOG_MAX)
        except OSError as error:
            last_error = error
            continue
        listener.settimeout(POLL_S)
        return listener
    raise SetupError(
        f"no TCP port of {address} is free for the controller's connection to this program: "
        f"{last_error}; widen port_range, or set spark.driver.bindAddress to one of this machine"
    )
