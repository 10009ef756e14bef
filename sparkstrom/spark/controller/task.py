"""Run the controller of a fit, that is, its master thread, in a Spark task on an executor.

The task runs the same master thread as the driver program would, with a replica of the parameters
and a media driver (the Aeron process that handles its network traffic). If the task can open a TCP
connection to the driver program, the driver program receives progress and sends requests over this
connection. Otherwise the fit runs to its end without them. In both cases the final state and the
parameters are the task's result.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import SetupError, WireError
from sparkstrom.base.identity import Endpoint
from sparkstrom.encoding.backends import warm_up
from sparkstrom.fit.master_setup import MediaDriverConfig, make_master_limits, make_master_plan
from sparkstrom.options.network import ControllerChoice, VoidConfiguration
from sparkstrom.options.resolution import local_ip
from sparkstrom.runtime.master_thread import MasterThread
from sparkstrom.spark.controller.driver_messages import (
    ControlEndpoint,
    ControllerPlace,
    ControllerResult,
    ControllerSetup,
    ControllerState,
    ControlRequest,
    ControlResponse,
    EndController,
    GetOptimizerStates,
    GetSnapshot,
    GiveUp,
    PlacementMismatch,
    RequestStop,
    pack_message,
    split_message,
    unpack_message,
)
from sparkstrom.spark.controller.reachability import UdpEchoServer
from sparkstrom.spark.executor.entry_points import LazyPickle, get_task_context, is_retry
from sparkstrom.transport.aeron.driver_process import candidate_ports, no_free_port_message
from sparkstrom.transport.aeron.media_driver import ensure_driver
from sparkstrom.transport.bind_address import choose_address, list_interface_addresses
from sparkstrom.transport.encrypted_tcp import EncryptedStream
from sparkstrom.worker.network_setup import (
    require_library,
    resolve_host,
    transport_opener,
    warm_up_transport,
)
from sparkstrom.worker.task_environment import read_executor_info
from sparkstrom.worker.training_task import load_initial_theta

log = logging.getLogger(__name__)

STATE_INTERVAL_S = 0.2  # minimum time between two states that are sent
HEARTBEAT_S = 1.0  # a state is sent this often even if nothing has changed
SERVE_POLL_S = 0.05
CONNECT_TIMEOUT_S, RECONNECT_S = 3.0, 5.0  # of one attempt; minimum time between two attempts


class DriverConnection:
    """The task's connection to the driver program. The connection may be missing at any time."""

    def __init__(self, endpoint: ControlEndpoint, clock: SystemClock) -> None:
        """Prepare a connection to ``endpoint``; nothing is opened yet."""
        self._server, self._key, self._clock = endpoint.server, endpoint.key, clock
        self._stream: EncryptedStream | None = None
        # Earliest times to connect, to send a changed state, and to send an unchanged one.
        self._next_connect_s = self._next_state_s = self._beat_s = -1.0
        self._sent: object = None  # the progress that was last sent
        self._answered: dict[int, Any] = {}  # responses by number: repeated requests run only once
        self._copies: dict[int, Future[Any]] = {}  # snapshots and optimizer states to send
        # Whether a connection was ever open, and whether the driver program ended the controller.
        self.was_open = self.ended = False
        self.finished_s = float("inf")  # when the master finished; inf before

    @property
    def is_open(self) -> bool:
        """Whether the task is connected to the driver program now."""
        return self._stream is not None

    def state(self, master: MasterThread) -> ControllerState:
        """Return the master's current state."""
        finished = master.finished.is_set()
        failure = master.failure if finished else None
        return ControllerState(master.progress, finished, failure, self._clock.monotonic_s())

    def serve(self, master: MasterThread) -> None:
        """Exchange the messages that are due, reconnecting if necessary, and wait briefly."""
        if master.finished.is_set():
            self.finished_s = min(self.finished_s, time.monotonic())
        if self._stream is None:
            self.connect()
        if self._stream is None:
            master.finished.wait(SERVE_POLL_S)
            if master.finished.is_set():
                time.sleep(SERVE_POLL_S)
            return
        try:
            self._exchange(self._stream, master)
        except WireError as error:
            log.warning("the connection to the driver program: %s", error)
            self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None

    def connect(self) -> None:
        """Try to connect, unless the last attempt was less than ``RECONNECT_S`` ago."""
        now_s = time.monotonic()
        if self._server is None or now_s < self._next_connect_s:
            return
        self._next_connect_s = now_s + RECONNECT_S
        try:
            connection = socket.create_connection(self._server, CONNECT_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._stream = EncryptedStream(connection, self._key, is_opener=True)
        except (OSError, WireError) as error:
            log.warning("no TCP connection to the driver program at %s: %s", self._server, error)
            return
        self.was_open, self._sent, self._beat_s = True, None, -1.0

    def _exchange(self, stream: EncryptedStream, master: MasterThread) -> None:
        """Handle incoming requests; send the responses and states that are due."""
        while stream.wait_for_data(SERVE_POLL_S):
            self._handle_request(unpack_message(stream.receive()), master)
        for number in [n for n, copies in self._copies.items() if copies.done()]:
            copies = self._copies[number]
            stream.send(
                pack_message(ControlResponse(number, copies.exception() or copies.result()))
            )
            del self._copies[number]  # not before it is sent: the request may come again
        now_s = time.monotonic()
        has_changed = master.progress is not self._sent or master.finished.is_set()
        if (has_changed and now_s >= self._next_state_s) or now_s >= self._beat_s:
            self._sent = master.progress
            self._next_state_s, self._beat_s = now_s + STATE_INTERVAL_S, now_s + HEARTBEAT_S
            stream.send(pack_message(self.state(master)))

    def _handle_request(self, message: ControlRequest, master: MasterThread) -> None:
        """Execute a request and send the response; a repeated request gets the same response.

        A request for a snapshot or optimizer states only starts the copy, and ``_exchange`` sends
        the response later, so that the driver program still receives heartbeats. These copies are
        large and are not kept after they are sent, so a repeated request for one that was sent is
        executed again.
        """
        assert self._stream is not None, "the request arrived on it"
        if message.number in self._answered:
            self._stream.send(
                pack_message(ControlResponse(message.number, self._answered[message.number]))
            )
            return
        if isinstance(message.request, GetSnapshot | GetOptimizerStates):
            if message.number not in self._copies:
                self._copies[message.number] = self._execute(message.request, master)
            return
        answer = self._answered[message.number] = self._execute(message.request, master)
        self._stream.send(pack_message(ControlResponse(message.number, answer)))

    def _execute(self, request: Any, master: MasterThread) -> Any:
        """Execute a request and return its result, which for copies is a future."""
        handlers: dict[type, Callable[[Any], Any]] = {
            RequestStop: lambda message: master.request_stop(message.reason),
            GiveUp: lambda message: master.give_up(message.reason),
            GetSnapshot: lambda message: master.request_snapshot(),
            GetOptimizerStates: lambda message: master.copy_optimizer_states(
                everybody=message.everybody
            ),
            EndController: lambda message: self._mark_ended(),
        }
        return handlers[type(request)](request)

    def _mark_ended(self) -> None:
        """Record that the driver program ended the controller."""
        self.ended = True


WORKERS_LEAVE_S = 15.0  # how long workers may take to leave a completed fit
FAILURE_NOTICE_S = 8.0  # how long to notify a failed fit's workers, which do not leave in order
RECONNECT_MAX_S = 60.0  # how long to wait for a reconnection before the result is returned


class ControllerTaskRun:
    """Runs one fit's master thread in the controller's task, connected to the driver program."""

    def __init__(
        self, setup: ControllerSetup, connection: DriverConnection, media: MediaDriverConfig
    ) -> None:
        """Create the master and its replica; open a transport over the media driver ``media``."""
        warm_up()
        warm_up_transport()
        job = setup.job
        theta = load_initial_theta(job)
        self.master = MasterThread(
            make_master_plan(
                job.spec, theta, job.model, job.master, setup.checkpoints, job.join_stream
            ),
            make_master_limits(job.master, job.spec.workers, job.spec.n_params),
            theta,
            open_transport=transport_opener(media.key, media.options),
            seal=job.seal(),
            clock=SystemClock(),
        )
        self._connection = connection

    def run(self) -> ControllerResult:
        """Run until the fit is over and all workers have left, or the driver program ends the fit.

        Return the result for the driver program.
        """
        try:
            self.master.start()
            while not self._is_over():
                self._connection.serve(self.master)
        finally:
            self.master.end()
            self._connection.close()
        state = self._connection.state(self.master)
        has_succeeded = state.finished and state.failure is None
        return ControllerResult(
            state,
            self.master.outcome() if has_succeeded else None,
            self.master.snapshot(),
            self.master.optimizer_copies,
        )

    def _is_over(self) -> bool:
        """Return whether the task may end.

        It may end if the driver program has ended the controller. Otherwise it may end some time
        after the fit is over, so that workers can leave and a lost connection can be reopened.
        """
        connection, master = self._connection, self.master
        if connection.ended:
            return True
        if not master.finished.is_set():
            return False
        passed_s = time.monotonic() - connection.finished_s
        if connection.is_open:
            return passed_s > WORKERS_LEAVE_S + RECONNECT_MAX_S
        if connection.was_open and passed_s < RECONNECT_MAX_S:  # it reconnects to end the fit
            return False
        if master.failure is not None:
            return passed_s > FAILURE_NOTICE_S
        return not master.is_needed or passed_s > WORKERS_LEAVE_S


PROBE_WAIT_S = 300.0  # how long to wait for a probe; the probing task may have to wait for a slot


def propose_place(
    void: VoidConfiguration, choice: ControllerChoice, items: Iterable[Any]
) -> Iterator[ControllerPlace | PlacementMismatch]:
    """Yield a place for the controller on this task's executor.

    Yield a PlacementMismatch instead if ``choice`` names another host. Raise SetupError if this
    host has no suitable address or port. ``items`` is not used.
    """
    place, executor, listed = get_task_context(), read_executor_info(), list_interface_addresses()
    host = executor.host or place.host
    if not choice.matches_host((host, place.host), listed):
        yield PlacementMismatch(host, is_retry=False)
        return
    explicit, fallback = choice.find_address(listed, void.network_mask), None
    if explicit is None and void.network_mask is None:
        fallback = local_ip(os.environ) or choice.resolve_address(listed) or resolve_host(host)
    address = choose_address(
        mask=void.network_mask, explicit=explicit, addresses=listed, fallback=fallback
    )
    ports = choice.ports(void.controller_ports())
    reversed_ports = ports and ports[::-1]  # workers' media drivers search from the start
    port = next(candidate_ports(address, reversed_ports, None), None)
    if not port:
        raise SetupError(no_free_port_message(address, ports))
    process = f"{place.host}/{place.jvm}"
    endpoint = Endpoint(address, port)
    yield ControllerPlace(process, executor.id, host, endpoint, str(place.scratch))


def run_controller_task(
    routes: tuple[ControlEndpoint, MediaDriverConfig],
    process: str,
    setup: LazyPickle,
    items: Iterable[Any],
) -> Iterator[bytes]:
    """Run the controller and return its result in parts.

    On a different executor than the requested one, or in a retry, return a PlacementMismatch.

    Args:
        routes: How to reach the driver program, and the media driver to start.
        process: The requested executor, as in ``ControllerPlace.process``.
        setup: The pickled ``ControllerSetup``.
        items: The task's row; not used.

    Raises:
        SetupError: This host has no Aeron library.
    """
    require_library()
    place = get_task_context()
    here = f"{place.host}/{place.jvm}"
    if is_retry() or here != process:
        return split_message(PlacementMismatch(here, is_retry()))
    control, media = routes
    await_probe(control.token, setup.route.endpoint)
    with closing(ensure_driver(media.key, media.options)):
        connection = DriverConnection(control, SystemClock())
        connection.connect()  # unpickling may import and compile for a minute
        controller_setup: ControllerSetup = pickle.loads(setup.job)
        return split_message(ControllerTaskRun(controller_setup, connection, media).run())


def await_probe(token: bytes, endpoint: Endpoint) -> None:
    """Wait for the UDP probe that asks whether this task has started, and answer it.

    ``endpoint`` is the address that the probe will use; afterwards its port is free again for the
    media driver. If ``token`` is empty there is no probe, and this returns at once. After
    ``PROBE_WAIT_S`` without a probe, this returns as well.
    """
    if not token:
        return
    port = range(endpoint.port, endpoint.port + 1)
    with closing(UdpEchoServer(endpoint.host, port, token)) as echo:
        echo.was_reached.wait(PROBE_WAIT_S)
