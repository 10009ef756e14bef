"""Controller line: the task's end of its TCP connection to the driver program."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import SparkstromError, WireError
from sparkstrom.spark.controller.control_words import (
    Answered,
    Asked,
    ControllerState,
    EndWanted,
    GiveUpWanted,
    LineOrder,
    SnapshotWanted,
    StopWanted,
    UpdatersWanted,
    packed_word,
    unpacked_word,
)
from sparkstrom.transport.sealed_stream import SealedStream

if TYPE_CHECKING:
    from sparkstrom.runtime.master_thread import MasterThread

log = logging.getLogger(__name__)

TELL_S = 0.2  # between two looks that the driver program gets
BEAT_S = 1.0  # so often it hears something in any case
SERVE_S = 0.05
CONNECT_S, AGAIN_S = 3.0, 5.0  # for one attempt, and between two


class ControllerLine:
    """The task's end of the connection to the driver program; there may be none, at any time."""

    master: MasterThread

    def __init__(self, order: LineOrder, clock: SystemClock) -> None:
        self._door, self._key, self._clock = order.door, order.key, clock
        self._stream: SealedStream | None = None
        self._try_s = self._tell_s = self._beat_s = -1.0
        self._told: object = None
        self._answered: dict[int, Any] = {}  # what was asked again is not done again
        self._copies: dict[int, Future[tuple[bytes, ...]]] = {}
        self.was_open = self.ended = False
        self.finished_s = float("inf")

    @property
    def is_open(self) -> bool:
        """Is there a connection now?"""
        return self._stream is not None

    def state(self) -> ControllerState:
        """Of this moment."""
        master = self.master
        finished = master.finished.is_set()
        failure = master.failure if finished else None
        return ControllerState(master.progress, finished, failure, self._clock.monotonic_s())

    def serve(self) -> None:
        """What is due, and a short rest."""
        if self.master.finished.is_set():
            self.finished_s = min(self.finished_s, time.monotonic())
        if self._stream is None:
            self.connect()
        if self._stream is None:
            self.master.finished.wait(SERVE_S)
            if self.master.finished.is_set():
                time.sleep(SERVE_S)
            return
        try:
            self._exchange(self._stream)
        except WireError as error:
            log.warning("the connection to the driver program: %s", error)
            self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def connect(self) -> None:
        """Try, where it is time to."""
        now_s = time.monotonic()
        if self._door is None or now_s < self._try_s:
            return
        self._try_s = now_s + AGAIN_S
        try:
            connection = socket.create_connection(self._door, CONNECT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stream = SealedStream(connection, self._key, opens=True)
        except (OSError, WireError) as error:
            log.warning("no TCP connection to the driver program at %s: %s", self._door, error)
            return
        self.was_open, self._told, self._beat_s = True, None, -1.0

    def _exchange(self, stream: SealedStream) -> None:
        while stream.waits(SERVE_S):
            self._take(unpacked_word(stream.receive()))
        for number in [n for n, copies in self._copies.items() if copies.done()]:
            self._answered[number] = self._copies.pop(number).result()
            stream.send(packed_word(Answered(number, self._answered[number])))
        now_s = time.monotonic()
        news = self.master.progress is not self._told or self.master.finished.is_set()
        if (news and now_s >= self._tell_s) or now_s >= self._beat_s:
            self._told = self.master.progress
            self._tell_s, self._beat_s = now_s + TELL_S, now_s + BEAT_S
            stream.send(packed_word(self.state()))

    def _take(self, asked: Asked) -> None:
        assert self._stream is not None, "it came over it"
        if asked.number in self._answered:
            self._stream.send(packed_word(Answered(asked.number, self._answered[asked.number])))
            return
        if isinstance(asked.what, UpdatersWanted):
            if asked.number not in self._copies:
                everybody = asked.what.everybody
                self._copies[asked.number] = self.master.copy_updaters(everybody=everybody)
            return
        answer = self._do(asked.what)
        if not isinstance(asked.what, SnapshotWanted):  # large, and a later one will do
            self._answered[asked.number] = answer
        self._stream.send(packed_word(Answered(asked.number, answer)))

    def _do(self, what: Any) -> Any:
        ways: dict[type, Callable[[Any], Any]] = {
            StopWanted: lambda it: self.master.request_stop(it.reason),
            GiveUpWanted: lambda it: self.master.give_up(it.reason),
            SnapshotWanted: lambda it: self._snapshot(),
            EndWanted: lambda it: self._end(),
        }
        return ways[type(what)](what)

    def _snapshot(self) -> Any:
        try:
            return self.master.snapshot()
        except SparkstromError as error:
            return error

    def _end(self) -> None:
        self.ended = True
