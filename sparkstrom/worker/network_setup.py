"""Connect a worker or the controller to the network.

Choose the address to bind, open a transport over the media driver, and check that UDP gets through.
The media driver is Aeron's process, which sends and receives for all workers of an executor; the
driver program is the one that calls ``fit``. The controller is the process that coordinates a fit's
workers, in the driver program or in a Spark task.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from sparkstrom.base.errors import DriverLost, NetworkError, SetupError, UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.options.network import VoidConfiguration, master_name, parse_controller
from sparkstrom.options.resolution import local_ip
from sparkstrom.planning.memory import count_driver_edges
from sparkstrom.transport.aeron.library import load_library
from sparkstrom.transport.aeron.media_driver import (
    SHARED_MEMORY,
    DriverOptions,
    ensure_driver,
    find_log_space,
    is_driver_reachable,
)
from sparkstrom.transport.base import Transport
from sparkstrom.transport.bind_address import choose_address, list_interface_addresses
from sparkstrom.worker.task_environment import TaskEnvironment

if TYPE_CHECKING:  # tasks that do not train need no part of the protocol
    from sparkstrom.runtime.node_thread import OpenTransport

log = logging.getLogger(__name__)

Joined = TypeVar("Joined")

# A media driver may exit while a client joins it; the next attempt starts another one.
JOIN_ATTEMPTS: Final = 3

NO_PORT_LEFT: Final = (
    "port {0}: unicast_port and port_range allow executors no other port than the controller's, and"
    " both are on one host: set port_range to at least two more ports per executor of a host"
)
DISCARD_PORT: Final = 9  # used only to find a route; nothing is sent to it


def choose_driver_address(void: VoidConfiguration, spark_driver_host: str) -> str:
    """Return the IP address at which executors reach this machine, which runs the driver program.

    The first of these that is given decides: the options ``controller_address`` and
    ``network_mask`` of ``void``, an environment variable of ``options.resolution.LOCAL_IP``, and
    ``spark_driver_host``, the host that Spark uses for its driver.
    """
    explicit = resolve_host(void.controller_address) if void.controller_address else None
    is_given = explicit is not None or void.network_mask is not None
    return choose_address(
        mask=void.network_mask,
        explicit=explicit,
        addresses=list_interface_addresses(),
        fallback=None if is_given else local_ip(os.environ) or resolve_host(spark_driver_host),
    )


def choose_executor_address(void: VoidConfiguration, controller: Endpoint) -> str:
    """Return the IP address of this executor to bind.

    The first of these that is given decides: the option ``network_mask`` of ``void``, an
    environment variable of ``options.resolution.LOCAL_IP``, and the route to the controller.
    """
    is_given = void.network_mask is not None
    return choose_address(
        mask=void.network_mask,
        explicit=None,
        addresses=list_interface_addresses(),
        fallback=None if is_given else local_ip(os.environ) or local_address_towards(controller),
    )


def resolve_host(host: str) -> str:
    """Return the IP address of a host name, which may be an IPv6 address in brackets.

    Raise SetupError if the name cannot be resolved on this machine.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return str(socket.getaddrinfo(bare, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError as error:
        raise SetupError(
            f"controller address {host!r} cannot be resolved on this machine: {error}; "
            "write an IP address of the driver's machine"
        ) from None


def local_address_towards(controller: Endpoint) -> str:
    """Return the local address from which datagrams to the controller would leave.

    Raise NetworkError if there is no route.
    """
    family = socket.AF_INET6 if ":" in controller.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((controller.host, controller.port))
        except OSError as error:
            raise NetworkError(
                f"there is no route from {socket.gethostname()} to the controller at {controller}: "
                f"{error}; set network_mask to the network that driver and executors share"
            ) from None
        return str(probe.getsockname()[0])


def exclude_controller_port(ports: range | None, host: str, controller: Endpoint) -> range | None:
    """Return an executor's ``ports`` without the controller's port if ``host`` is its address too.

    Removing the port leaves two ranges, of which the longer is returned. None means any port. Raise
    SetupError if no port is left.
    """
    if ports is None or controller.host != host or controller.port not in ports:
        return ports
    if len(ports) == 1:
        raise SetupError(NO_PORT_LEFT.format(controller.port))
    index = ports.index(controller.port)
    return max(ports[:index], ports[index + 1 :], key=len)


def require_ports_on_one_host(void: VoidConfiguration) -> None:
    """Raise UsageError if executors on the controller's host would have no port."""
    ports = void.executor_ports()
    controllers = parse_controller(void.controller).ports(void.controller_ports())
    if ports is not None and len(ports) == 1 and ports == controllers:
        raise UsageError(NO_PORT_LEFT.format(ports[0]))


def transport_opener(key: str, options: DriverOptions) -> OpenTransport:
    """Return a function that opens a transport on the media driver named ``key``.

    The function takes the endpoint that the transport had before, or None, and reuses that
    endpoint's port if possible. With an endpoint, it raises DriverLost instead of SetupError if no
    media driver can be started, so that its caller can try again.
    """

    def open_transport(before: Endpoint | None) -> Transport:
        """Open a transport; ``before`` is the endpoint that it had before, or None."""
        if before is None:
            return join(options)
        try:
            return join(replace(options, port_preferred=before.port))
        except SetupError as error:
            # A media driver has run here before. The host may only be overloaded for a while, or
            # the port may not be free yet. The caller counts this as one more driver's death.
            raise DriverLost("starting another media driver", 0, str(error)) from error

    def join(chosen: DriverOptions) -> Transport:
        """Open a transport on the media driver; start one with these options if necessary."""
        return _join_repeatedly(lambda: connect_transport(key, chosen))

    return open_transport


def _join_repeatedly(join: Callable[[], Joined]) -> Joined:
    """Return the result of ``join``; call it up to JOIN_ATTEMPTS times if it raises DriverLost."""
    for _ in range(1, JOIN_ATTEMPTS):
        try:
            return join()
        except DriverLost as lost:
            log.warning("the media driver exited while this process connected to it (%s)", lost)
    return join()


def port_bounds(ports: range | None) -> tuple[int, int] | None:
    """Return the first and last port of a range; None if ``ports`` is None (any port)."""
    return (ports[0], ports[-1]) if ports is not None else None


def connect_transport(key: str, options: DriverOptions) -> Transport:
    """Return a transport on the media driver named ``key``; start that driver if necessary."""
    # imported late because it compiles kernels
    from sparkstrom.transport.aeron.client import AeronTransport

    return AeronTransport(ensure_driver(key, options))


def require_library() -> None:
    """Raise SetupError if this host has no Aeron library; later calls take almost no time.

    The message is one line with the host's name, because Spark shows only the last line of an
    error.
    """
    try:
        load_library()
    except SetupError as error:
        text = " ".join(str(error).split())
        raise SetupError(f"on {socket.gethostname()}: {text}") from None


def warm_up_transport() -> None:
    """Load the transport's compiled kernels now, so that no lease expires while they compile."""
    import sparkstrom.transport.aeron.client  # noqa: F401


ANSWER_TIMEOUT_S: Final = 4.0  # enough with 50 % loss: Aeron repeats its setup ten times a second
CONTROLLER_START_TIMEOUT_S: Final = 60.0
REACHED_MARKER: Final = "answered"  # file in the driver's directory that lets tasks skip the probe


@dataclass(frozen=True, slots=True)
class ControllerRoute:
    """How a fit's executors reach its controller, and how they configure their media drivers."""

    job: int  # number of the fit, in the headers of its frames
    endpoint: Endpoint  # the controller's address and port
    void: VoidConfiguration  # network options of the user
    edges: int  # number of neighbours on other media drivers, per executor
    local_edges: int  # number of neighbours on the same media driver, per executor
    is_controller_running: bool = True  # the controller has a media driver already

    @property
    def patience_s(self) -> float:
        """Seconds to wait for an answer; longer if a controller in a task may still be starting."""
        return ANSWER_TIMEOUT_S if self.is_controller_running else CONTROLLER_START_TIMEOUT_S

    def driver_key(self, environment: TaskEnvironment) -> str:
        """Return the name of the media driver that this task's executor uses."""
        return f"{self.job:016x}-{environment.jvm}"

    def driver_options(self, environment: TaskEnvironment) -> DriverOptions:
        """Return the options for the executor's media driver; they are equal for all its tasks."""
        address = choose_executor_address(self.void, self.endpoint)
        return DriverOptions(
            host=address,
            ports=port_bounds(
                exclude_controller_port(self.void.executor_ports(), address, self.endpoint)
            ),
            edges=self.edges,
            local_edges=self.local_edges,
            scratch=environment.scratch,
        )


def require_controller_reachable(route: ControllerRoute, environment: TaskEnvironment) -> None:
    """Raise NetworkError if no reply from the controller arrives within ``route.patience_s``.

    Spark sends tasks over TCP. Without this check, a firewall, mask or route that blocks UDP would
    show only as silence, after rows are read and kernels are compiled. If the controller runs on
    this host, nothing is checked.
    """
    options = route.driver_options(environment)
    if _is_same_host(route.endpoint, options.host):
        return
    own_endpoint = _join_repeatedly(lambda: _probe_controller(route, environment, options))
    if own_endpoint is not None:
        raise NetworkError(format_unreachable(route, own_endpoint, route.patience_s))


def _is_same_host(controller: Endpoint, host: str) -> bool:
    """Return whether the controller runs on this host, so that no probe is needed."""
    return controller.host == host or ipaddress.ip_address(controller.host).is_loopback


def _probe_controller(
    route: ControllerRoute, environment: TaskEnvironment, options: DriverOptions
) -> Endpoint | None:
    """Probe the controller; return None if it answered, else this executor's endpoint."""
    handle = ensure_driver(route.driver_key(environment), options)
    marker = handle.directory / REACHED_MARKER
    try:
        if not marker.exists():
            if not is_driver_reachable(handle, route.endpoint, route.patience_s):
                return handle.endpoint
            marker.touch()
        return None
    finally:
        handle.close()


def format_unreachable(route: ControllerRoute, own_endpoint: Endpoint, seconds: float) -> str:
    """Return the error message for blocked UDP, as one line because Spark shows only the last one.

    ``own_endpoint`` is this executor's; no answer came within ``seconds``.
    """
    peer, void, own = route.endpoint, route.void, own_endpoint
    peer_name = master_name(void.controller)
    return (
        f"UDP between the executor on {socket.gethostname()} at {own} and the {peer_name} at "
        f"{peer} is dropped: no answer within {seconds:g} s; in the firewalls (or security "
        f"groups) of both hosts, allow UDP from {own.host} to {peer.host} port "
        f"{peer.port}, and from {peer.host} to {own.host} "
        f"{format_executor_ports(void, own.port)}, with the answers to both"
        f"{_fixed_port_hint(void)}; or, if this is not the network they share, "
        "set network_mask to that network"
    )


def format_executor_ports(void: VoidConfiguration, port: int) -> str:
    """Return the executors' ports as text: the configured range, or the one port in use."""
    ports = void.executor_ports()
    return f"port {port}" if ports is None else f"ports {ports[0]} to {ports[-1]}"


def _fixed_port_hint(void: VoidConfiguration) -> str:
    """Return a hint to set ``unicast_port``; "" if it is set already."""
    if void.unicast_port is not None:
        return ""
    return " (ports change with each fit: fix them by unicast_port=40123)"


def check_driver_machine(
    void: VoidConfiguration,
    workers: int,
    spark_driver_host: str,
    shared_memory: Path = SHARED_MEMORY,
    scratch: Path | None = None,
) -> None:
    """Raise SetupError if the driver's machine lacks the library, an address or shared memory.

    The check takes some milliseconds and runs before any job. It is skipped if the controller runs
    in a Spark task. ``scratch`` is a directory for Aeron's files if ``shared_memory`` has no room
    for them; None: the directory for temporary files.
    """
    if parse_controller(void.controller).is_in_task:
        return
    require_library()
    address = choose_driver_address(void, spark_driver_host)
    edges = count_driver_edges(void.topology(workers), workers)
    scratch = scratch or Path(tempfile.gettempdir())
    find_log_space(
        DriverOptions(host=address, edges=edges, scratch=scratch, shared_memory=shared_memory)
    )
