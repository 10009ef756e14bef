"""Control door: the driver program's end of the connection that a controller's task makes to it.

It listens where Spark's own driver does, on a port of ``unicast_port`` or ``port_range`` where one
is given. Only the task has the fit's key; whoever else connects is sent away, and where many do,
those who have not shown the key make room for whoever comes next. A task that lost its connection
makes another; what was asked and not answered is asked again there.
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
WAITING_MAX = 64  # connections that nobody has looked at
GUESTS_MAX = 64  # at once that have not greeted: they have three seconds to show that they may
SAY_S = 60.0  # between two lines in the log about strangers of one host
HOSTS_MAX = 64  # that have lines of their own; those beyond share theirs


@dataclass(eq=False, slots=True)
class _Guest:
    """A connection, from ``accept`` to its end."""

    socket: socket.socket
    host: str
    greeted: bool = False

    def send_away(self) -> None:
        """End the connection: whoever reads it, or writes to it, is woken at once."""
        with suppress(OSError):  # it has ended already
            self.socket.shutdown(socket.SHUT_RDWR)


@dataclass(slots=True)
class Strangers:
    """Which lines about strangers go to the log: of each host one, and then one a minute.

    There may be any number of hosts; those beyond ``HOSTS_MAX`` count as one.
    """

    unsaid: dict[str, int] = field(default_factory=dict)
    next_s: dict[str, float] = field(default_factory=dict)

    def one_more(self, host: str, now_s: float) -> str | None:
        """How many were not told of, as a line's end; None where this one is not told of either."""
        if host not in self.next_s and len(self.next_s) >= HOSTS_MAX:
            host = "others"
        if now_s < self.next_s.get(host, -math.inf):
            self.unsaid[host] = self.unsaid.get(host, 0) + 1
            return None
        self.next_s[host] = now_s + SAY_S
        untold = self.unsaid.pop(host, 0)
        return f" (and {untold:,} more since the last such line)" if untold else ""


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
        self._guests: list[_Guest] = []  # the oldest first
        self._threads: set[threading.Thread] = set()
        self._guests_lock = threading.Lock()
        self._strangers = Strangers()
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
        with self._guests_lock:
            for guest in self._guests:
                guest.send_away()
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
            except OSError as error:  # no descriptor is free, or the other end has gone meanwhile
                self._cannot_accept(error)
                self._closing.wait(LOOK_S)
                continue
            self._make_room(GUESTS_MAX - 1)
            self._let_in(_Guest(connection, str(peer[0])))
        for thread in list(self._threads):
            thread.join()

    def _make_room(self, stay: int) -> None:
        """Send away, of those that have not greeted, the oldest, until so many are left.

        Of the host that has the most of them first: strangers of one host are no harm to another's.
        """
        with self._guests_lock:
            waiting = [guest for guest in self._guests if not guest.greeted]
            while len(waiting) > stay:
                (most, _), *_ = Counter(guest.host for guest in waiting).most_common(1)
                oldest = next(guest for guest in waiting if guest.host == most)
                waiting.remove(oldest)
                self._guests.remove(oldest)
                oldest.send_away()

    def _let_in(self, guest: _Guest) -> None:
        thread = threading.Thread(
            target=self._meet, args=(guest,), name="sparkstrom-guest", daemon=True
        )
        self._threads = {each for each in self._threads if each.is_alive()} | {thread}
        with self._guests_lock:
            self._guests.append(guest)
            if self._closing.is_set():
                guest.send_away()
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be had now; the task comes again
            self._threads.discard(thread)
            self._forget(guest)
            self._cannot_accept(error)

    def _cannot_accept(self, error: Exception) -> None:
        with self._guests_lock:
            waiting = sum(not guest.greeted for guest in self._guests)
        self._make_room(max(0, waiting - 1))  # one of them gives its descriptor and thread back
        more = self._more("", time.monotonic())
        if more is not None:
            log.warning("no connection of the controller can be accepted now: %s%s", error, more)

    def _meet(self, guest: _Guest) -> None:
        try:
            guest.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = SealedStream(guest.socket, self._key, opens=False)
        except (OSError, WireError) as error:
            self._forget(guest)
            more = self._more(guest.host, time.monotonic())
            if more is not None and not self._closing.is_set():
                log.warning("somebody at %s is not the controller: %s%s", guest.host, error, more)
            return
        with closing(stream):
            with self._guests_lock:
                guest.greeted = True
            self._follow(stream)
        self._forget(guest)

    def _forget(self, guest: _Guest) -> None:
        with self._guests_lock, suppress(ValueError):  # it was sent away
            self._guests.remove(guest)
        guest.socket.close()

    def _more(self, host: str, now_s: float) -> str | None:
        with self._guests_lock:
            return self._strangers.one_more(host, now_s)

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
