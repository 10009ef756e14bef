"""Controller task: the master of a fit in a Spark task of its own, on an executor.

The same master thread as in the driver program, with its replica and its media driver. The driver
program talks to it over a TCP connection, where the task can make one; without it the fit runs all
the same, and what it has to say comes with the task's result.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import SetupError, SparkstromError, WireError
from sparkstrom.base.identity import Endpoint
from sparkstrom.base.import_archives import keep_unchanged_archives
from sparkstrom.runtime.master_thread import MasterThread
from sparkstrom.spark.controller.control_words import (
    Answered,
    Asked,
    ControllerOrder,
    ControllerPlace,
    ControllerResult,
    ControllerState,
    EndWanted,
    GiveUpWanted,
    LineOrder,
    NotHere,
    SnapshotWanted,
    StopWanted,
    UpdatersWanted,
    in_parts,
    packed_word,
    unpacked_word,
)
from sparkstrom.spark.driver.controller_choice import ControllerChoice
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.driver.master_setup import controller_transport, limits_of, plan_of
from sparkstrom.spark.driver.settings import local_ip
from sparkstrom.spark.executor.entry import Unopened
from sparkstrom.spark.executor.interfaces import need_library, resolve
from sparkstrom.spark.executor.task_place import executor_name, here, is_again
from sparkstrom.transport.addresses import choose_address, listed_addresses
from sparkstrom.transport.aeron.ports import candidate_ports, none_free
from sparkstrom.transport.sealed_stream import SealedStream

log = logging.getLogger(__name__)

TELL_S = 0.2  # between two looks that the driver program gets
BEAT_S = 1.0  # so often it hears something in any case
SERVE_S = 0.05
CONNECT_S, AGAIN_S = 3.0, 5.0  # for one attempt, and between two
LEAVE_S = 15.0  # how long workers may take to leave a fit that is over
ABSENT_S = 60.0  # a driver program that had a connection may be without one at the end


def look_at_place(
    void: VoidConfiguration, choice: ControllerChoice, items: Iterable[Any]
) -> Iterator[ControllerPlace | NotHere]:
    """What the executor of this task can offer. Raise SetupError where it has no such address."""
    place, executor, listed = here(), executor_name(), listed_addresses()
    host = executor.host or place.host
    if not choice.suits((host, place.host), listed):
        yield NotHere(host, again=False)
        return
    address = choose_address(
        mask=void.network_mask,
        explicit=choice.address_among(listed),
        listed=listed,
        fallback=local_ip(os.environ) or resolve(host),
    )
    ports = choice.ports(void)
    port = next(candidate_ports(address, ports, None), None)
    if not port:
        raise SetupError(none_free(address, ports))
    process = f"{place.host}/{place.jvm}"
    endpoint = Endpoint(address, port)
    yield ControllerPlace(process, executor.number, host, endpoint, str(place.scratch))


def enter_controller(
    way: LineOrder, wanted: str, unopened: Unopened, index: int, items: Iterable[Any]
) -> Iterator[bytes]:
    """Be the controller, in the process that is wanted; the result comes in parts.

    Raise SetupError where this host has no Aeron library.
    """
    keep_unchanged_archives()
    need_library()
    place = here()
    process = f"{place.host}/{place.jvm}"
    if is_again() or process != wanted:
        return in_parts(NotHere(process, is_again()))
    line = ControllerLine(way, SystemClock())
    line.connect()  # what follows may import and compile for a minute
    order: ControllerOrder = pickle.loads(unopened.job)
    return in_parts(ControllerSession(order, line).run())


class ControllerSession:
    """One fit's."""

    def __init__(self, order: ControllerOrder, line: ControllerLine) -> None:
        from sparkstrom.encoding.backends import warm_up
        from sparkstrom.spark.executor.interfaces import warm_up_transport
        from sparkstrom.spark.executor.tasks import initial_theta

        warm_up()
        warm_up_transport()
        job, place = order.job, order.place
        theta = initial_theta(job)
        void = job.master.void
        self.master = MasterThread(
            plan_of(job.spec, theta, job.model, void.max_chunk_size, order.kept, job.join_stream),
            limits_of(job.master, job.spec.workers, job.spec.n_params),
            theta,
            open_transport=controller_transport(
                job.spec, void, place.endpoint, Path(place.scratch)
            ),
            seal=job.seal(),
            clock=SystemClock(),
        )
        self._line = line
        line.master = self.master

    def run(self) -> ControllerResult:
        """Until the fit is over and all have left, or the driver program ends it."""
        self.master.start()
        try:
            while not self._is_over():
                self._line.serve()
        finally:
            self.master.end()
            self._line.close()
        state = self._line.state()
        done = state.finished and state.failure is None
        return ControllerResult(
            state, self.master.outcome() if done else None, self.master.snapshot()
        )

    def _is_over(self) -> bool:
        line, master = self._line, self.master
        if line.ended:
            return True
        if not master.finished.is_set():
            return False
        passed_s = time.monotonic() - line.finished_s
        if line.is_open:
            return passed_s > LEAVE_S + ABSENT_S
        if line.was_open and passed_s < ABSENT_S:  # it comes back, to say that it is over
            return False
        return not master.workers or passed_s > LEAVE_S


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
