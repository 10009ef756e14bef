"""Where nodes listen and how they find each other: DL4J's VoidConfiguration, as far as it acts.

Every field has a default that works on one machine and on most clusters; the mask is for hosts
with several interfaces, the ports are for firewalls.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from sparkstrom.base.errors import UsageError
from sparkstrom.protocol.common.topology import DEPTH, FAN_OUT, FLAT, Topology
from sparkstrom.spark.driver.controller_choice import AUTO, parse_controller
from sparkstrom.spark.driver.options import need, need_one_of, need_seconds, need_whole, options

PORT_MAX = 65535
PORTS_PER_HOST = 64  # how many executors of a host find a port from unicast_port on
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


@options(refused=REFUSED, aliases={})
@dataclass(frozen=True, slots=True, kw_only=True)
class VoidConfiguration:
    """Addresses, ports and deadlines of the mesh.

    Raises UsageError for a value, name or combination that cannot work, and says what would.
    """

    unicast_port: int | None = None  # the controller's UDP port; None: one the system picks
    port_range: tuple[int, int] | None = None  # first and last UDP port executors may bind; with
    # unicast_port the default is that port and the 63 after it; without one the controller, too,
    # takes the first free one of the range, and no range means ports that the system picks
    network_mask: str | None = None  # CIDR network; every node binds its interface in it
    controller_address: str | None = None  # host or IP of the driver's interface
    controller: str = AUTO  # where the master runs: in the "driver" program, in a task of its own
    # on an "executor", on one at HOST or HOST:PORT; "auto": "driver" where executors reach it
    controller_restarts: int = 3  # how often a fit whose controller's task dies goes on with
    # another one, from a copy that the driver program keeps; 0: it ends, and no copies are made
    mesh_build_mode: str = "plain"  # "plain": every worker under the master; "mesh": under one
    # another, so that nobody has more than mesh_fan_out neighbours below; "auto": by their number
    mesh_fan_out: int = FAN_OUT  # children of a node in a mesh
    mesh_depth: int = DEPTH  # levels of a mesh
    max_chunk_size: int = 65536  # bytes of payload in one frame at most
    lease_s: float = 10.0  # a node silent for so long is lost and its partition is free again
    window_bytes: int = 8 << 20  # others' updates that wait for a step before they are summed; with
    # a number for publish_every also own updates not yet committed before the worker waits
    log_bytes: int = 64 << 20  # recent commits a node keeps for those who missed them
    given: frozenset[str] = field(init=False, repr=False, compare=False)  # fields the caller set

    def __post_init__(self) -> None:
        self._check_addresses()
        need_whole("controller_restarts", self.controller_restarts, 0, "; as a rule 3")
        need_one_of("mesh_build_mode", self.mesh_build_mode, MESH_BUILD_MODES)
        need_whole("mesh_fan_out", self.mesh_fan_out, 1, "; 8 suits most networks")
        need_whole("mesh_depth", self.mesh_depth, 1, "; 5 levels of 8 have 37,448 workers")
        need_whole(
            "max_chunk_size", self.max_chunk_size, CHUNK_BYTES_MIN, "; 65536 suits most networks"
        )
        need_seconds("lease_s", self.lease_s, ", as a rule 10")
        need_whole("window_bytes", self.window_bytes, 1)
        need_whole("log_bytes", self.log_bytes, 1)
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
        if self.unicast_port is not None:
            _need_port("unicast_port", self.unicast_port)
        if self.port_range is not None:
            need(len(self.port_range) == 2, "port_range", self.port_range, "is (first, last)")
            first, last = self.port_range
            reason = f"UDP ports are between 1 and {PORT_MAX}"
            need(first >= 1 and last <= PORT_MAX, "port_range", self.port_range, reason)
            need(first <= last, "port_range", self.port_range, "first must not be above last")
        if self.network_mask is not None:
            _need_network(self.network_mask)
        if self.controller_address is not None:
            named = bool(self.controller_address.strip())
            reason = "is empty; name the driver's host or leave it out"
            need(named, "controller_address", self.controller_address, reason)
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


def _need_port(option: str, port: int) -> None:
    reason = f"a UDP port is between 1 and {PORT_MAX}; leave it out for one that the system picks"
    need(isinstance(port, int) and 1 <= port <= PORT_MAX, option, port, reason)


def _need_network(mask: str) -> None:
    try:
        network = ipaddress.ip_network(mask, strict=False)
    except ValueError as error:
        raise UsageError(
            f"network_mask={mask!r}: {error}; write a network like 10.0.0.0/16 or fd00::/8"
        ) from None
    if "/" not in mask:
        likely = ipaddress.ip_interface(f"{mask}/{24 if network.version == 4 else 64}").network
        raise UsageError(
            f"network_mask={mask!r}: without a prefix length only the host {mask} would match; "
            f"write the network, such as {likely}"
        )
