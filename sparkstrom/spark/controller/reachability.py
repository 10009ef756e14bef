"""Probe by UDP whether executors reach the driver program; choose where the controller runs.

The controller coordinates the workers of a fit. This module resolves the training option
``controller="auto"`` to "driver" (in the driver program) or "executor" (in a Spark task).

The driver program echoes datagrams at an address and port that its media driver would use. (A media
driver is the Aeron process that sends and receives a host's datagrams.) A task on each executor
sends datagrams with a token that identifies the probe, and waits for the echo. This takes
milliseconds if UDP works, and at most ``PROBE_TIMEOUT_S``. Over Spark Connect, the controller's
task echoes in the same way before it starts its media driver, to show that it has started.

The controller runs in the driver program if at least one executor reaches the driver program. If
other hosts do not reach the driver program, their own firewalls are the likely cause, and the tasks
on these hosts will report it. No probe is needed in local mode or if the driver program runs inside
the cluster.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sparkstrom.base.descriptors import wait_until_readable
from sparkstrom.base.errors import NetworkError, SetupError, UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.fit.fit_context import TaskSlots
from sparkstrom.fit.strategy import GradientSharing
from sparkstrom.fit.supervisor import find_cause
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import AUTO, DRIVER, EXECUTOR, VoidConfiguration
from sparkstrom.spark.executor.entry_points import forget_spark_archive_importers
from sparkstrom.spark.executor_slots import count_workers, driver_host, live_conf
from sparkstrom.spark.jobs import SparkJob
from sparkstrom.transport.aeron.driver_process import candidate_ports, no_free_port_message
from sparkstrom.worker.network_setup import (
    check_driver_machine,
    choose_driver_address,
    choose_executor_address,
)

log = logging.getLogger(__name__)

TOKEN_BYTES = 16
RESEND_S, PROBE_TIMEOUT_S = 0.05, 2.0  # datagrams are resent because some may be lost
ECHO_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class ReachabilityProbe:
    """What a task on an executor needs to probe an echo server."""

    endpoint: Endpoint  # the echo server's address
    token: bytes  # content of the datagrams, ``TOKEN_BYTES`` long
    void: VoidConfiguration  # network options, which select executors' addresses and ports
    timeout_s: float = PROBE_TIMEOUT_S  # how long to wait for an echo


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of one task's probe."""

    host: str  # name of the executor's host
    heard: bool  # whether an echo arrived


class UdpEchoServer:
    """Returns each datagram that contains the token to its sender, until closed."""

    def __init__(self, address: str, ports: range | None, token: bytes = b"") -> None:
        """Bind a free port of ``address`` and start the thread that echoes datagrams.

        ``ports`` are the permitted ports; None permits all. Without ``token``, choose a random one.
        Raise SetupError if no port or address is available.
        """
        port = next(candidate_ports(address, ports, None), None)
        if port is None:
            raise SetupError(no_free_port_message(address, ports))
        self.token = token or secrets.token_bytes(TOKEN_BYTES)
        self.was_reached = threading.Event()  # set once a datagram was echoed
        self._socket = _bind_udp_socket(address, port)
        self.endpoint = Endpoint(address, self._socket.getsockname()[1])
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkstrom-echo", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop echoing and release the port."""
        self._closing.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        """Echo datagrams with the token until closed."""
        while not self._closing.is_set():
            if not wait_until_readable(self._socket, ECHO_POLL_S):
                continue
            datagram, sender = self._socket.recvfrom(2 * TOKEN_BYTES)
            if not secrets.compare_digest(datagram, self.token):
                continue
            try:
                self._socket.sendto(datagram, sender)
                self.was_reached.set()
            except OSError as error:  # this machine's firewall; the prober reports the failure
                log.info("cannot send an echo to %s: %s", sender[0], error)


def probe_controller(probe: ReachabilityProbe, rows: Iterable[Any]) -> Iterator[ProbeResult]:
    """Send datagrams to the echo server; yield one ProbeResult. ``rows`` is not used."""
    forget_spark_archive_importers()
    address = choose_executor_address(probe.void, probe.endpoint)
    port = next(candidate_ports(address, probe.void.executor_ports(), None), 0)
    with _bind_udp_socket(address, port) as sock:
        yield ProbeResult(socket.gethostname(), _receives_echo(sock, probe))


def _receives_echo(sock: socket.socket, probe: ReachabilityProbe) -> bool:
    """Send the token repeatedly; return whether an echo arrives before the timeout."""
    end_s = time.monotonic() + probe.timeout_s
    while (remaining_s := end_s - time.monotonic()) > 0:
        try:
            sock.sendto(probe.token, tuple(probe.endpoint))
            if wait_until_readable(sock, min(RESEND_S, remaining_s)):
                datagram, sender = sock.recvfrom(2 * TOKEN_BYTES)
                if datagram == probe.token and sender[1] == probe.endpoint.port:
                    return True
        except OSError:  # a firewall rejected it; the next datagram may pass
            time.sleep(min(RESEND_S, remaining_s))
    return False


def _bind_udp_socket(address: str, port: int) -> socket.socket:
    """Return a UDP socket that is bound to the address and port."""
    sock = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((address, port))
    return sock


PROBE_JOB_TIMEOUT_S = 8.0  # if some tasks are still waiting for a slot, the result is unknown
CANCEL_TIMEOUT_S = 1.0
HOSTS_LISTED_MAX = 4  # in a message
MOVED_NOTICE = (
    "sparkstrom: the controller moves to an executor (controller='auto'): {why}. There it takes "
    "one task slot; controller='driver' keeps it here"
)
HOSTS_UNREACHABLE = (
    "{hosts} get no answer by UDP from this program at {endpoint}; to keep the controller here, "
    "allow UDP in both directions, or name the network that both share (network_mask, "
    "controller_address)"
)

STAYS_WARNING = (
    "sparkstrom warns: the controller stays in this program (controller='auto'), as other "
    "executors reach it: {why}"
)
NO_SLOT_ERROR = "{why}. Or run the controller on an executor: {error}"


@dataclass(frozen=True, slots=True)
class ReachabilityKey:
    """Key of a cached result: the application, addresses and ports that were probed."""

    application: str  # id of the Spark application
    network_mask: str | None  # the option that selects executors' addresses
    controller_address: str | None  # the option that sets the controller's address
    ports: tuple[range | None, range | None]  # ports of the controller, and of executors


@dataclass(frozen=True, slots=True)
class ReachabilityResult:
    """Where the controller should run, and why."""

    place: str  # ``DRIVER`` or ``EXECUTOR``
    why: str = ""  # EXECUTOR: the reason; DRIVER: which hosts do not reach it, "" if all do


_results: dict[ReachabilityKey, ReachabilityResult] = {}


def resolve_controller(
    master: SharedTrainingMaster, context: Any, slots: TaskSlots, notify: Callable[[str], None]
) -> SharedTrainingMaster:
    """Return ``master`` with ``controller="auto"`` replaced by "driver" or "executor".

    If the user has chosen anything else than "auto", return ``master`` unchanged. The result is
    cached by application, addresses and ports. ``notify`` shows the user the reason if the
    controller moves to an executor, or which hosts do not reach the driver program. Raise
    NetworkError if the controller cannot run in the driver program and executors have no task slot
    left for it.
    """
    if master.void.controller != AUTO:
        return master
    void = master.void
    ports = void.controller_ports(), void.executor_ports()
    key = ReachabilityKey(
        str(context.applicationId), void.network_mask, void.controller_address, ports
    )
    result = ReachabilityResult(DRIVER) if _is_driver_in_cluster(context) else _results.get(key)
    is_new = result is None
    if result is None:
        result = _test_reachability(master, context, slots)
        if result is None:
            result = ReachabilityResult(DRIVER)  # unknown; the next network probes again
        else:
            _results[key] = result
    address = void.controller_address if result.place == DRIVER else None
    resolved = replace(
        master, void=replace(void, controller=result.place, controller_address=address)
    )
    if result.place == EXECUTOR:
        _require_slot(slots, resolved, result.why)
    if is_new and result.why:
        notify((MOVED_NOTICE if result.place == EXECUTOR else STAYS_WARNING).format(why=result.why))
    return resolved


def _require_slot(slots: TaskSlots, master: SharedTrainingMaster, why: str) -> None:
    """Raise NetworkError if no task slot is left for the controller; ``why`` is in the message."""
    try:
        count_workers(slots, GradientSharing(master))
    except UsageError as error:
        raise NetworkError(NO_SLOT_ERROR.format(why=why, error=error)) from None


def _is_driver_in_cluster(context: Any) -> bool:
    """Return whether the driver program runs inside the cluster, or Spark runs in local mode."""
    mode = str(live_conf(context).get("spark.submit.deployMode", "client"))
    return str(context.master).startswith("local") or mode == "cluster"


def _test_reachability(
    master: SharedTrainingMaster, context: Any, slots: TaskSlots
) -> ReachabilityResult | None:
    """Probe from all executors; return where the controller should run.

    An executor is also chosen if the driver program's machine has no suitable address or port.
    Return None if the probing job failed or was too slow.
    """
    try:
        check_driver_machine(master.void, slots.total, driver_host(context))
        address = choose_driver_address(master.void, driver_host(context))
        with closing(UdpEchoServer(address, master.void.controller_ports())) as port:
            answers = _run_probe_job(port, master, context, slots)
            endpoint = port.endpoint
    except SetupError as error:
        return ReachabilityResult(EXECUTOR, str(error))
    if answers is None:
        return None
    return choose_controller_place(answers, endpoint)


def choose_controller_place(
    answers: Sequence[ProbeResult], endpoint: Endpoint
) -> ReachabilityResult:
    """Choose where the controller runs: on an executor only if no host reaches this program.

    ``answers`` are the results of all probes, and ``endpoint`` is the address that was probed. The
    returned reason names the hosts that do not reach the driver program.
    """
    hearing = {each.host for each in answers if each.heard}
    unreachable = sorted({each.host for each in answers} - hearing)
    if not unreachable:
        return ReachabilityResult(DRIVER)
    hosts = ", ".join(unreachable[:HOSTS_LISTED_MAX]) + (
        " and others" if len(unreachable) > HOSTS_LISTED_MAX else ""
    )
    why = HOSTS_UNREACHABLE.format(hosts=hosts, endpoint=endpoint)
    return ReachabilityResult(DRIVER if hearing else EXECUTOR, why)


def _run_probe_job(
    port: UdpEchoServer, master: SharedTrainingMaster, context: Any, slots: TaskSlots
) -> list[ProbeResult] | None:
    """Run one probing task per task slot, so that Spark uses all executors; return the results.

    Return None if the job failed or did not finish in time.
    """
    probe = ReachabilityProbe(port.endpoint, port.token, master.void)
    runner = context.parallelize(range(slots.total), slots.total).mapPartitions(
        partial(probe_controller, probe)
    )
    group = f"sparkstrom-reach-{time.monotonic_ns()}"
    description = "sparkstrom: is this program reached by UDP?"
    job = SparkJob(context, group, runner.collect, description=description)
    job.start()
    try:
        done = job.wait(PROBE_JOB_TIMEOUT_S)
    finally:
        if job.running:
            job.cancel()
            job.wait(CANCEL_TIMEOUT_S)
    if done and job.error is None:
        return job.reports
    why = (
        find_cause(str(job.error))
        if job.error is not None
        else f"nothing within {PROBE_JOB_TIMEOUT_S:g} s"
    )
    log.warning("could not find out whether executors reach this program by UDP: %s", why)
    return None
