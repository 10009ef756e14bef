"""Where nodes listen and how they find each other: DL4J's VoidConfiguration, as far as it acts.

Every field has a default that works on one machine and on most clusters; the mask is for hosts
with several interfaces, the ports are for firewalls.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from sparkstrom.base.errors import UsageError, first_line
from sparkstrom.base.option_types import (
    BYTES_MAX,
    COUNT_MAX,
    Refused,
    check_options,
    custom,
    is_whole,
    one_of,
    seconds,
    shown,
    text,
    whole,
)
from sparkstrom.protocol.common.topology import DEPTH, FAN_OUT, FLAT, Topology
from sparkstrom.spark.driver.controller_choice import AUTO, parse_controller
from sparkstrom.spark.driver.options import need, options

PORT_MAX = 65535
PORTS_PER_HOST = 64  # how many executors of a host find a port from unicast_port on
FAN_OUT_MAX = 65536  # children of a node
DEPTH_MAX = 1024  # levels: an update passes a node on each
CHUNK_BYTES_MAX = 16 << 20  # Aeron's longest message
CHUNK_BYTES_MIN = 1024  # below, headers and seals outweigh what they carry

MESH_BUILD_MODES = ("plain", "mesh", "auto")
AUTO_PLAIN_WORKERS = 32  # the driver sends every update to each of them, and has the links for it

_NO_MULTICAST = "there is no multicast; every edge is unicast to the neighbour's own port"
_NO_SHARDS = "DL4J reserved it and never used it; the master in the driver is the only authority"
_NO_V1 = "it chose between DL4J's first server's algorithms, which do not exist here"
_NO_TIMEOUT = "DL4J never used it; see lease_s, and the master's start_timeout and step_timeout"

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


def _port(value: object) -> int | None:
    if value is None:
        return None
    if not (is_whole(value) and 1 <= int(value) <= PORT_MAX):
        raise Refused(_PORT)
    return int(value)


def _port_range(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if not (isinstance(value, tuple | list) and len(value) == 2):
        raise Refused(_PORTS)
    try:
        first, last = (_port(port) for port in value)
    except Refused:
        raise Refused(_PORTS) from None
    if first is None or last is None or first > last:
        raise Refused(_PORTS)
    return first, last


def _controller(value: object) -> str:
    parse_controller(value)
    return str(value)


def _network_mask(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise Refused("write a network like 10.0.0.0/16 or fd00::/8")
    _need_network(value)
    return str(value)


@options(refused=REFUSED, aliases={})
@dataclass(frozen=True, slots=True, kw_only=True)
class VoidConfiguration:
    """Addresses, ports and deadlines of the mesh.

    Raises UsageError for a value, name or combination that cannot work, and says what would.
    """

    # the controller's UDP port; None: one the system picks
    unicast_port: int | None = field(default=None, metadata=custom(_port, _PORT))
    # first and last UDP port executors may bind; with unicast_port the default is that port and
    # the 63 after it; without one the controller, too, takes the first free one of the range, and
    # no range means ports that the system picks
    port_range: tuple[int, int] | None = field(default=None, metadata=custom(_port_range, _PORTS))
    # CIDR network; every node binds its interface in it
    network_mask: str | None = field(
        default=None, metadata=custom(_network_mask, "a network, such as 10.0.0.0/16")
    )
    # host or IP of the driver's interface
    controller_address: str | None = field(
        default=None,
        metadata=text("is empty or no text; name the driver's host or leave it out", (None,)),
    )
    # where the master runs: in the "driver" program, in a task of its own on an "executor", on one
    # at HOST or HOST:PORT; "auto": "driver" where executors reach it
    controller: str = field(
        default=AUTO, metadata=custom(_controller, "driver, executor, auto, HOST or HOST:PORT")
    )
    # how often a fit whose controller's task dies continues with another one, from a copy that the
    # driver program keeps; 0: it ends, and no copies are made
    controller_restarts: int = field(
        default=3, metadata=whole(0, COUNT_MAX, unit="restarts", remedy="; as a rule 3")
    )
    # "plain": every worker under the master; "mesh": under one another, so that nobody has more
    # than mesh_fan_out neighbours below; "auto": by their number
    mesh_build_mode: str = field(default="plain", metadata=one_of(MESH_BUILD_MODES))
    # children of a node in a mesh
    mesh_fan_out: int = field(
        default=FAN_OUT,
        metadata=whole(1, FAN_OUT_MAX, unit="nodes", remedy="; 8 suits most networks"),
    )
    # levels of a mesh
    mesh_depth: int = field(
        default=DEPTH,
        metadata=whole(1, DEPTH_MAX, unit="levels", remedy="; 5 levels of 8 have 37,448 workers"),
    )
    # bytes of payload in one frame at most
    max_chunk_size: int = field(
        default=65536,
        metadata=whole(
            CHUNK_BYTES_MIN, CHUNK_BYTES_MAX, unit="bytes", remedy="; 65536 suits most networks"
        ),
    )
    # a node silent for so long is lost and its partition is free again
    lease_s: float = field(default=10.0, metadata=seconds(", as a rule 10"))
    # others' updates that wait for a step before they are summed; with a number for publish_every
    # also own updates not yet committed before the worker waits
    window_bytes: int = field(default=8 << 20, metadata=whole(1, BYTES_MAX, unit="bytes"))
    # recent commits a node keeps for those who missed them
    log_bytes: int = field(default=64 << 20, metadata=whole(1, BYTES_MAX, unit="bytes"))
    given: frozenset[str] = field(init=False, repr=False, compare=False)  # fields the caller set

    def __post_init__(self) -> None:
        check_options(self)
        self._check_addresses()
        need(
            self.log_bytes >= self.window_bytes,
            "log_bytes",
            self.log_bytes,
            f"a log smaller than one worker's window_bytes={self.window_bytes} turns every pause "
            "into a snapshot; raise it or lower the window",
        )

    def executor_ports(self) -> range | None:
        """UDP ports an executor may bind, in the order to try; None: one the system picks."""
        if self.port_range is not None:
            return range(self.port_range[0], self.port_range[1] + 1)
        if self.unicast_port is None:
            return None
        return range(self.unicast_port, min(self.unicast_port + PORTS_PER_HOST, PORT_MAX + 1))

    def controller_ports(self) -> range | None:
        """UDP ports the controller may bind, in the order to try; None: one the system picks."""
        if self.unicast_port is None:
            return self.executor_ports()
        return range(self.unicast_port, self.unicast_port + 1)

    def topology(self, workers: int) -> Topology:
        """The empty tree for so many workers. Raise UsageError where they do not fit."""
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
        apart = parse_controller(self.controller).apart
        reason = (
            f"names an address of the driver's machine, and controller={self.controller!r} is on "
            "another one: leave it out; network_mask, or controller='HOST', says which address"
        )
        need(
            not (apart and self.controller_address),
            "controller_address",
            self.controller_address,
            reason,
        )


def _need_network(mask: str) -> None:
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
