"""Control door: the driver program's end of the connection that a controller's task makes to it.

It listens where Spark's own driver does, on a port of ``unicast_port`` or ``port_range`` where one
is given. Only the task has the fit's key; whoever else connects is sent away. A task that lost its
connection makes another; what was asked and not answered is asked again there.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from sparkstrom.base.errors import SetupError, SparkstromError, WireError
from sparkstrom.spark.controller.control_words import (
    Answered,
    Asked,
    ControllerState,
    packed_word,
    unpacked_word,
)
from sparkstrom.transport.sealed_stream import SealedStream

log = logging.getLogger(__name__)

LOOK_S = 0.2
SILENT_S = 15.0  # the task says something every second; a connection without it is a dead one
WAITING_MAX = 8  # connections that nobody has looked at
GUESTS_MAX = 16  # at once: strangers have three seconds each to show that they are none


class ControlDoor:
    """Open from its making to ``close``. ``hear``: of each state, in this one's thread."""

    def __init__(
        self,
        key: bytes,
        address: str,
        ports: range | None,
        hear: Callable[[ControllerState], None],
    ) -> None:
        """Raise SetupError where no port can be had."""
        self._key, self._hear = key, hear
        self._listening = _listen(address, ports)
        self.port: int = self._listening.getsockname()[1]
        self._stream: SealedStream | None = None
        self._lock = threading.Lock()  # over all below, and over sending
        self._unanswered: dict[int, tuple[Asked, Future[Any]]] = {}
        self._number = 0
        self._closing = threading.Event()
        self.met = threading.Event()  # the task has been here
        self.heard_s = math.inf  # from the first state on; a task takes its time to begin
        self._guests: list[threading.Thread] = []
        self._thread = threading.Thread(target=self._run, name="sparkstrom-door", daemon=True)
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Is there a connection now?"""
        return self._stream is not None

    def ask(self, what: Any) -> Future[Any]:
        """The answer, whenever it comes; an error that is the answer is raised by the future."""
        answer: Future[Any] = Future()
        with self._lock:
            self._number += 1
            asked = Asked(self._number, what)
            self._unanswered[asked.number] = asked, answer
            self._say(asked)
        return answer

    def close(self) -> None:
        """Idempotent. What was not answered is cancelled."""
        self._closing.set()
        self._thread.join()
        self._listening.close()
        with self._lock:
            for _, answer in self._unanswered.values():
                answer.cancel()
            self._unanswered.clear()

    # -- the threads: one that accepts, and one for each connection -------------------------------

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                connection, peer = self._listening.accept()
            except TimeoutError:
                continue
            self._guests = [guest for guest in self._guests if guest.is_alive()]
            if len(self._guests) >= GUESTS_MAX:
                connection.close()
                continue
            guest = threading.Thread(
                target=self._meet, args=(connection, peer[0]), name="sparkstrom-guest", daemon=True
            )
            self._guests.append(guest)
            guest.start()
        for guest in self._guests:
            guest.join()

    def _meet(self, connection: socket.socket, host: str) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = SealedStream(connection, self._key, opens=False)
        except (OSError, WireError) as error:
            log.warning("somebody at %s is not the controller: %s", host, error)
            return
        with closing(stream):
            self._follow(stream)

    def _follow(self, stream: SealedStream) -> None:
        """One connection, to its end, or until the task has made another."""
        with self._lock:
            self._stream = stream
            for asked, _ in self._unanswered.values():
                self._say(asked)
        self.heard_s = max(self.heard_s, time.monotonic())
        self.met.set()
        begun_s = time.monotonic()
        try:
            while self._stream is stream and not self._closing.is_set():
                if stream.waits(LOOK_S):
                    self._take(unpacked_word(stream.receive()))
                elif time.monotonic() - max(begun_s, self.heard_s) > SILENT_S:
                    log.warning("the connection to the controller: silent for %.0f s", SILENT_S)
                    break
        except WireError as error:
            log.warning("the connection to the controller: %s", error)
        with self._lock:
            if self._stream is stream:
                self._stream = None

    def _take(self, word: ControllerState | Answered) -> None:
        if isinstance(word, ControllerState):
            self.heard_s = time.monotonic()
            self._hear(word)
            return
        with self._lock:
            _, answer = self._unanswered.pop(word.number, (None, None))
        if answer is None:
            return
        if isinstance(word.value, SparkstromError):
            answer.set_exception(word.value)
        else:
            answer.set_result(word.value)

    def _say(self, asked: Asked) -> None:
        if self._stream is None:
            return
        try:
            self._stream.send(packed_word(asked))
        except WireError as error:  # the thread sees it, too; the next connection has it again
            log.warning("the connection to the controller: %s", error)


def _listen(address: str, ports: range | None) -> socket.socket:
    why: OSError | None = None
    for port in ports or (0,):
        try:
            family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            made = socket.create_server(where[:2], family=family, backlog=WAITING_MAX)
        except OSError as error:
            why = error
            continue
        made.settimeout(LOOK_S)
        return made
    raise SetupError(
        f"no TCP port of {address} could be had for the controller's connection to this program: "
        f"{why}; widen port_range, or set spark.driver.bindAddress to an address of this machine"
    )


def door_address(context: Any) -> tuple[str, str]:
    """Where the door stands, and what executors call it: as with Spark's own driver."""
    conf = context._conf
    host = str(conf.get("spark.driver.host", "127.0.0.1"))
    return str(conf.get("spark.driver.bindAddress", host)), host
