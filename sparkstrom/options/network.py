"""Define VoidConfiguration, the options of the network between the workers, named as in DL4J.

``ControllerChoice`` is the parsed value of the option ``controller``.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparkstrom.base.errors import UsageError, first_line
from sparkstrom.base.option_types import (
    BYTES_MAX,
    COUNT_MAX,
    Refused,
    check_options,
    custom,
    is_whole,
    one_of,
    parse_number,
    seconds,
    shown,
    text,
    whole,
)
from sparkstrom.options.common import given_field, option, option_class, require
from sparkstrom.protocol.common.topology import DEPTH, FAN_OUT, FLAT, Topology
from sparkstrom.transport.bind_address import InterfaceAddress

AUTO, DRIVER, EXECUTOR = CONTROLLER_CHOICES = ("auto", "driver", "executor")
PORT_MAX = 65535
PORTS_PER_HOST = 64  # number of ports from unicast_port on, enough for the executors of a host
FAN_OUT_MAX = 65536  # number of children of a node
DEPTH_MAX = 1024  # number of levels of a mesh; an update passes through a node on each level
CHUNK_BYTES_MAX = 16 << 20  # Aeron's longest message
CHUNK_BYTES_MIN = 1024  # in smaller frames, headers and encryption take more room than content

MESH_BUILD_MODES = ("plain", "mesh", "auto")
AUTO_PLAIN_WORKERS = 32  # with more workers than this, "auto" builds a mesh

_NO_MULTICAST = "there is no multicast; every edge is unicast to the neighbour's own port"
_NO_SHARDS = "DL4J reserved it and never used it; the master in the driver is the only authority"
_NO_V1 = "it chose between DL4J's first server's algorithms, which do not exist here"
_NO_TIMEOUT = "DL4J never used it; see lease_s, and the master's start_timeout and step_timeout"

# Maps DL4J's names that have no meaning here to the reason.
REFUSED: dict[str, str] = {
    "stream_id": "stream ids are agreed edge by edge; jobs are told apart by their own key",
    "unicast_controller_port": "unicast_port is the controller's port",
    "port_supplier": "write unicast_port or port_range, or set SPARKSTROM_UNICAST_PORT",
    "transport_type": "there is one transport: Aeron, UDP between executors and IPC inside one",
    "execution_mode": "DL4J's training master overrides it; there is one mode",
    "fault_tolerance_strategy": "it is always on; lease_s says after how long a node is lost",
    "number_of_shards": _NO_SHARDS,
    "shard_addresses": _NO_SHARDS,
    "backup_addresses": _NO_SHARDS,
    "multicast_port": _NO_MULTICAST,
    "multicast_network": _NO_MULTICAST,
    "multicast_interface": _NO_MULTICAST,
    "ttl": _NO_MULTICAST,
    "forced_role": "the driver is the master and every Spark task a worker",
    "use_hs": _NO_V1,
    "use_ns": _NO_V1,
    "retransmit_timeout": "a full publication is tried again at once, nobody sleeps",
    "response_timeframe": _NO_TIMEOUT,
    "response_timeout": _NO_TIMEOUT,
    "chunks_buffer_size": "what is being put together is bounded by window_bytes and log_bytes",
    "max_failures_per_node": "Spark counts them: spark.task.maxFailures, spark.excludeOnFailure",
}

_PORT = f"a UDP port is between 1 and {PORT_MAX}; leave it out for one that the system picks"
_PORTS = f"is (first, last): two UDP ports between 1 and {PORT_MAX}, first must not be above last"


def _check_port(value: object) -> int | None:
    """Return a UDP port or None. Raise Refused for anything else."""
    if value is None:
        return None
    if not (is_whole(value) and 1 <= int(value) <= PORT_MAX):
        raise Refused(_PORT)
    return int(value)


def _check_port_range(value: object) -> tuple[int, int] | None:
    """Return the first and last port of a range, or None. Raise Refused for anything else."""
    if value is None:
        return None
    if not (isinstance(value, tuple | list) and len(value) == 2):
        raise Refused(_PORTS)
    try:
        first, last = (_check_port(port) for port in value)
    except Refused:
        raise Refused(_PORTS) from None
    if first is None or last is None or first > last:
        raise Refused(_PORTS)
    return first, last


def _parse_port_range(key: str, text: str) -> tuple[int, int]:
    """Parse a port range FIRST-LAST. Raise UsageError, naming the option ``key``, if invalid."""
    first, dash, last = text.partition("-")
    if not (dash and first.strip().isdecimal() and last.strip().isdecimal()):
        raise UsageError(f"{key}={text!r}: is not a range of ports; write 40123-40186")
    return int(first), int(last)


def _check_controller(value: object) -> str:
    """Return the option ``controller`` unchanged. Raise UsageError if it is invalid."""
    parse_controller(value)
    return str(value)


def _check_network_mask(value: object) -> str | None:
    """Return a network mask or None. Raise Refused or UsageError if it is invalid."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise Refused("write a network like 10.0.0.0/16 or fd00::/8")
    _require_network(value)
    return str(value)


@option_class(refused=REFUSED, aliases={})
@dataclass(frozen=True, slots=True, kw_only=True)
class VoidConfiguration:
    """Options of the network between the workers: addresses, ports, topology and time limits.

    The class has DL4J's name. The defaults work on one machine and on most clusters.
    ``network_mask`` is for hosts with several network interfaces, the ports are for firewalls. The
    constructor raises UsageError if a value, name or combination is invalid.
    """

    unicast_port: int | None = option(
        None,
        custom(
            _check_port,
            _PORT,
            parse=parse_number,
            accepts=f"a UDP port from 1 to {PORT_MAX:,}, or None",
        ),
        "the controller's UDP port; None: a port that the system picks",
        when="Set ``unicast_port``, together with ``port_range``, if a firewall opens only some UDP"
        " ports.",
        local=False,
    )
    port_range: tuple[int, int] | None = option(
        None,
        custom(
            _check_port_range,
            _PORTS,
            parse=_parse_port_range,
            accepts="a pair of UDP ports such as (40123, 40186), in text 40123-40186; or None",
        ),
        "first and last UDP port that executors may bind; None: ``unicast_port`` and the 63 ports"
        " after it, or ports that the system picks. With ``port_range`` but no ``unicast_port``,"
        " the controller takes the first free port of the range",
        when="Set ``port_range`` if a firewall opens only some UDP ports. On each host, every"
        " executor of every application needs two ports, because the previous fit's port may still"
        " be in use.",
        local=False,
    )
    network_mask: str | None = option(
        None,
        custom(
            _check_network_mask,
            "a network, such as 10.0.0.0/16",
            accepts="a network in CIDR notation, such as 10.0.0.0/16 or fd00::/8; or None",
        ),
        "network in CIDR notation; every host uses its interface in this network",
        when="Set ``network_mask`` if hosts have several interfaces. Each host, including the"
        " driver's, must have exactly one interface in the network.",
        local=False,
    )
    controller_address: str | None = option(
        None,
        text(
            "is empty or no text; name the driver's host or leave it out",
            (None,),
            accepts="a host name or an IP address, or None",
        ),
        "host name or IP address of the driver's interface",
        when="Set ``controller_address`` if executors must use a different address of the driver"
        " than the one in ``network_mask`` or the one that Spark advertises. ``controller_address``"
        " is rarely needed.",
        local=False,
    )
    controller: str = option(
        AUTO,
        custom(
            _check_controller,
            "driver, executor, auto, HOST or HOST:PORT",
            accepts='"auto", "driver", "executor", HOST or HOST:PORT, IPv6 as [fd00::1]:40123',
        ),
        'process that numbers the updates: the "driver" program, a task on an "executor", or a task'
        ' on the machine HOST or HOST:PORT; "auto": the driver program if executors can reach it,'
        " otherwise a task on an executor",
        when='"auto" checks whether executors reach the driver by UDP; "driver" skips the check.'
        ' Use "executor" or HOST if the driver program runs where executors cannot send UDP, such'
        " as on a laptop or gateway. A controller on an executor takes a task slot.",
        local=False,
    )
    controller_restarts: int = option(
        3,
        whole(0, COUNT_MAX, unit="restarts", remedy="; as a rule 3"),
        "how many lost controller tasks a fit survives; each time, the fit resumes from a copy that"
        " the driver program keeps. 0: the fit ends, and no copies are made",
        when="Raise ``controller_restarts`` if executors are often taken away during a fit. Set"
        " ``controller_restarts=0`` if the driver program has no room for the copies.",
        local=False,
    )
    mesh_build_mode: str = option(
        "plain",
        one_of(MESH_BUILD_MODES),
        '"plain" connects every worker to the controller. "mesh" builds a tree in which no node has'
        ' more than ``mesh_fan_out`` children. "auto" builds a mesh for more than'
        f" {AUTO_PLAIN_WORKERS} workers",
        when='Use "mesh" or "auto" if many workers overload the driver\'s link. A mesh needs UDP'
        " between all executors.",
        local=False,
    )
    mesh_fan_out: int = option(
        FAN_OUT,
        whole(1, FAN_OUT_MAX, unit="nodes", remedy="; 8 suits most networks"),
        "largest number of children of a node in a mesh",
        when="Lower ``mesh_fan_out`` if a node cannot relay all updates to so many children. Raise"
        " ``mesh_fan_out`` for fewer levels, or for more workers than the mesh has places.",
        local=False,
    )
    mesh_depth: int = option(
        DEPTH,
        whole(1, DEPTH_MAX, unit="levels", remedy="; 5 levels of 8 have 37,448 workers"),
        "largest number of levels of a mesh",
        when="Raise ``mesh_depth`` if a fit has more workers than the mesh has places; 5 levels"
        " with 8 children per node have 37,448 places.",
        local=False,
    )
    max_chunk_size: int = option(
        65536,
        whole(CHUNK_BYTES_MIN, CHUNK_BYTES_MAX, unit="bytes", remedy="; 65536 suits most networks"),
        "bytes of payload that one frame may have",
        when="There is rarely a reason to change ``max_chunk_size``. In small frames, headers and"
        " encryption take more bytes than the content.",
        local_rounds=False,
    )
    lease_s: float = option(
        10.0,
        seconds(", as a rule 10"),
        "seconds of silence after which a worker counts as lost and its partition is free for"
        " another worker",
        when="Raise ``lease_s`` if live workers can be silent for longer, as when virtual machines"
        " are suspended or a C extension holds Python's interpreter lock. Lower ``lease_s`` to"
        " replace lost workers sooner.",
    )
    window_bytes: int = option(
        8 << 20,
        whole(1, BYTES_MAX, unit="bytes"),
        "bytes of other workers' updates that may wait for the next step before they are summed"
        " into one. If ``publish_every`` is a number, the option also limits a worker's own"
        " uncommitted updates, beyond which the worker waits",
        when="Lower ``window_bytes`` if memory is short: each worker needs up to twice this size."
        " Raise ``window_bytes`` if ``publish_every`` is a number and workers wait for commits of"
        " their own updates.",
        local_rounds=False,
    )
    log_bytes: int = option(
        64 << 20,
        whole(1, BYTES_MAX, unit="bytes"),
        "bytes of recent commits that the controller and each worker keep for workers that missed"
        " the commits",
        when="Raise ``log_bytes`` if replicas that fell behind never catch up. Lower ``log_bytes``"
        " if memory is short: the controller and each worker need this memory.",
        local_rounds=False,
    )
    given: frozenset[str] = given_field()

    def __post_init__(self) -> None:
        check_options(self)
        self._check_addresses()
        require(
            self.log_bytes >= self.window_bytes,
            "log_bytes",
            self.log_bytes,
            f"a log smaller than one worker's window_bytes={self.window_bytes} turns every pause "
            "into a snapshot; raise it or lower the window",
        )

    def executor_ports(self) -> range | None:
        """Return the UDP ports that an executor tries to bind, in order.

        None means a port that the system picks.
        """
        if self.port_range is not None:
            return range(self.port_range[0], self.port_range[1] + 1)
        if self.unicast_port is None:
            return None
        return range(self.unicast_port, min(self.unicast_port + PORTS_PER_HOST, PORT_MAX + 1))

    def controller_ports(self) -> range | None:
        """Return the UDP ports that the controller tries to bind, in order.

        None means a port that the system picks.
        """
        if self.unicast_port is None:
            return self.executor_ports()
        return range(self.unicast_port, self.unicast_port + 1)

    def topology(self, workers: int) -> Topology:
        """Return the tree, still empty, in which a fit's workers will be connected.

        Raise UsageError if the tree has fewer than ``workers`` places.
        """
        mode = self.mesh_build_mode
        if mode == "auto":
            mode = "mesh" if workers > AUTO_PLAIN_WORKERS else "plain"
        if mode == "plain":
            return Topology(*FLAT)
        tree = Topology(self.mesh_fan_out, self.mesh_depth)
        if workers > tree.capacity:
            raise UsageError(
                f"{workers} workers, but a mesh with mesh_fan_out={tree.fan_out} and "
                f"mesh_depth={tree.depth_max} has {tree.capacity:,} places: worker "
                f"{tree.capacity + 1} has none; raise them, or have fewer partitions"
            )
        return tree

    def _check_addresses(self) -> None:
        """Raise UsageError if ``controller_address`` is given for a controller in a task."""
        is_in_task = parse_controller(self.controller).is_in_task
        reason = (
            f"names an address of the driver's machine, and controller={self.controller!r} is on "
            "another one: leave it out; network_mask, or controller='HOST', says which address"
        )
        require(
            not (is_in_task and self.controller_address),
            "controller_address",
            self.controller_address,
            reason,
        )


@dataclass(frozen=True, slots=True)
class ControllerChoice:
    """Where a fit's controller should run: auto, driver, executor, or on a named host."""

    word: str  # one of CONTROLLER_CHOICES; "" if a host is named
    host: str = ""  # name or address of the host; "" if none is named
    port: int | None = None  # UDP port; None if none is named

    @property
    def is_in_task(self) -> bool:
        """Whether the controller certainly runs in a Spark task, which takes a task slot."""
        return self.word not in (AUTO, DRIVER)

    def matches_host(self, names: Iterable[str], addresses: Sequence[InterfaceAddress]) -> bool:
        """Return whether a machine with these names and addresses is the chosen host.

        If no host was chosen, any machine matches.
        """
        if not self.host or self.host in names:
            return True
        return self.find_address(addresses) is not None or bool(_resolve_host(self.host, addresses))

    def find_address(
        self, addresses: Sequence[InterfaceAddress], mask: str | None = None
    ) -> str | None:
        """Return the address that the user gave as the host, or None if the machine lacks it.

        ``addresses`` are the machine's. The result is also None if the host is a name, and if the
        address is outside the network ``mask``: the address then only identifies the machine, and
        the mask selects another address.
        """
        inside = (
            each.address for each in addresses if mask is None or _is_in_network(mask, each.address)
        )
        return next((each for each in inside if _is_same_address(each, self.host)), None)

    def resolve_address(self, addresses: Sequence[InterfaceAddress]) -> str | None:
        """Return the first of these addresses to which the host's name resolves, or None.

        Loopback addresses do not count, because other machines cannot reach them.
        """
        found = _resolve_host(self.host, addresses) if self.host else []
        return next((each for each in found if not ipaddress.ip_address(each).is_loopback), None)

    def ports(self, default: range | None) -> range | None:
        """Return the UDP ports to try: the chosen port, or ``default`` if none was chosen."""
        return default if self.port is None else range(self.port, self.port + 1)


def parse_controller(text: object) -> ControllerChoice:
    """Parse the option ``controller``. Raise UsageError if it is invalid."""
    reason = (
        'must be "driver", "executor", "auto", or HOST or HOST:PORT of a machine with executors, '
        'IPv6 as "[fd00::1]:40123"'
    )
    if not isinstance(text, str) or not text.strip():
        raise UsageError(f"controller={shown(text)}: {reason}")
    word = text.strip()
    if word in CONTROLLER_CHOICES:
        return ControllerChoice(word)
    if word.lower() in CONTROLLER_CHOICES:
        raise UsageError(f'controller={shown(text)}: {reason}; write "{word.lower()}"')
    host, port = word, ""
    if word.startswith("["):
        host, bracket, rest = word[1:].partition("]")
        if not bracket or rest[:1] not in ("", ":"):
            raise UsageError(f"controller={shown(text)}: {reason}")
        port = rest[1:]
        if rest == ":":
            port = ":"
    elif word.count(":") == 1:
        host, _, port = word.partition(":")
        port = port or ":"
    if not host or any(letter.isspace() for letter in host):
        raise UsageError(f"controller={shown(text)}: {reason}")
    if port and not (port.isdecimal() and 1 <= int(port) <= PORT_MAX):
        raise UsageError(f"controller={shown(text)}: a UDP port is between 1 and {PORT_MAX}")
    return ControllerChoice("", host, int(port) if port else None)


def master_name(text: object) -> str:
    """Return what messages call the controller's process, "controller" or "driver".

    ``text`` is the value of the option ``controller``.
    """
    return "controller" if parse_controller(text).is_in_task else "driver"


def _is_same_address(address: str, text: str) -> bool:
    """Return whether ``text`` is the same IP address, possibly spelled differently."""
    try:
        return ipaddress.ip_address(address) == ipaddress.ip_address(text)
    except ValueError:
        return False


def _is_in_network(mask: str, address: str) -> bool:
    """Return whether an IP address is in a network in CIDR notation."""
    return ipaddress.ip_address(address) in ipaddress.ip_network(mask, strict=False)


def _resolve_host(host: str, addresses: Sequence[InterfaceAddress]) -> list[str]:
    """Return those of ``addresses`` to which a host name resolves."""
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:
        return []
    own = [each.address for each in addresses]
    return [address for address in own if any(_is_same_address(address, each) for each in found)]


def _require_network(mask: str) -> None:
    """Raise UsageError unless ``mask`` is a network in CIDR notation with a prefix length."""
    try:
        network = ipaddress.ip_network(mask, strict=False)
    except ValueError as error:
        raise UsageError(
            f"network_mask={shown(mask)}: {first_line(error)}; write a network like"
            " 10.0.0.0/16 or fd00::/8"
        ) from None
    if "/" not in mask:
        likely = ipaddress.ip_interface(f"{mask}/{24 if network.version == 4 else 64}").network
        raise UsageError(
            f"network_mask={mask!r}: without a prefix length only the host {mask} would match; "
            f"write the network, such as {likely}"
        )
