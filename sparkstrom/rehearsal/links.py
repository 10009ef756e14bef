"""Hosts with links of limited rate, and edges between processes of a rehearsed (simulated) fit.

An edge is the connection between two neighbours in the tree of the master and the workers.

A host sends its data messages one after the other at its link's rate, and the receiving host gets
them one after the other at the rate of its link. Aeron serves control and data streams in turn. A
control message therefore waits only for earlier control messages of its host, while later data wait
for it. A newer heartbeat or state message replaces one that still waits to be sent, as in the
outbox of a real process.
Aeron's own buffers are not modelled: the protocol's windows limit how much data is in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sparkstrom.base.identity import MASTER, EdgeNo, NodeId
from sparkstrom.codec.messages import Address, Message
from sparkstrom.codec.sealed_frames import OVERHEAD_BYTES
from sparkstrom.codec.wire import is_data
from sparkstrom.planning.scaling import HOP_S, WIRE_OVERHEAD
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.runtime.message_endpoint import (
    CONTROL_TRAFFIC,
    SUPERSEDING_MESSAGES,
    TRAFFIC_KINDS,
)
from sparkstrom.simulation.links import estimate_body_bytes
from sparkstrom.simulation.virtual_clock import VirtualClock


@dataclass(eq=False, slots=True)
class Host:
    """A machine with one network interface."""

    name: str
    sends_until_s: float = 0.0  # when all that is queued has been sent
    controls_until_s: float = 0.0  # when all queued control messages have been sent
    receives_until_s: float = 0.0  # when all data in flight has been received
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    by_kind: Counter[str] = field(default_factory=Counter)  # kind of message -> bytes sent


class SimulatedProcess(Protocol):
    """A process that sends and receives messages."""

    name: str
    host: Host
    edges: dict[NodeId, Edge]

    @property
    def node(self) -> NodeId | None:
        """The process's current id in the fit; None until it has one."""

    @property
    def alive(self) -> bool:
        """Whether the process can receive messages."""
        ...

    def handle(self, event: ev.Event) -> None:
        """Pass an event to the process's protocol machine and perform the effects."""


@dataclass(eq=False, slots=True)
class QueuedMessage:
    """A message that a newer one replaces, unless it has already left its host."""

    message: Message
    leaves_s: float  # virtual time at which it leaves the sending host


@dataclass(eq=False, slots=True)
class Edge:
    """One end of the connection to a neighbour in the tree."""

    number: EdgeNo  # number of the edge, which its other end also has
    target: SimulatedProcess  # the process at the other end
    # Latest arrival of a control message, and of a data message.
    latest_arrivals_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    # The newest message of each type that newer ones replace.
    queued: dict[type[Message], QueuedMessage] = field(default_factory=dict)


class VirtualNetwork:
    """Delivers the messages of one rehearsed fit.

    Args:
        time: Virtual time.
        link_bits_s: Rate of each host's link in each direction, in bits per second.
        latency_s: Delay of a message between hosts, in addition to the time that its bytes take.
    """

    def __init__(self, time: VirtualClock, link_bits_s: float, latency_s: float) -> None:
        self._time, self._rate, self._latency_s = time, link_bits_s / 8, latency_s
        self._processes: dict[str, SimulatedProcess] = {}
        self.hosts: dict[str, Host] = {}

    def host(self, name: str) -> Host:
        """Return the host with this name, created on first use."""
        return self.hosts.setdefault(name, Host(name))

    def add(self, process: SimulatedProcess) -> None:
        """Make a process reachable by its name."""
        self._processes[process.name] = process

    def process(self, name: str) -> SimulatedProcess:
        """Return the process with this name."""
        return self._processes[name]

    def open_edge(self, owner: SimulatedProcess, effect: ev.OpenEdge) -> None:
        """Open the owner's end of an edge to the process that ``effect`` names."""
        owner.edges[effect.node] = Edge(effect.edge, self._processes[effect.peer.host])

    def close_edge(self, owner: SimulatedProcess, node: NodeId) -> None:
        """Close the owner's end of the edge to the neighbour ``node``."""
        owner.edges.pop(node, None)

    def send(self, owner: SimulatedProcess, to: NodeId, message: Message) -> None:
        """Send a message to a neighbour; drop it if the owner has no id, or no edge to ``to``.

        If an earlier message of a type that newer ones replace still waits, replace that message.
        """
        edge, sender = owner.edges.get(to), owner.node
        if edge is None or sender is None:
            return
        data, target, kind = is_data(message), edge.target, type(message)
        waiting = edge.queued.get(kind)
        if waiting is not None and waiting.leaves_s > self._time.now_s:
            waiting.message = message
            return
        leaves_s, arrives_s = self._transmit(owner.host, target.host, message, data=data)
        edge.latest_arrivals_s[data] = arrives_s = max(arrives_s, edge.latest_arrivals_s[data])
        queued = QueuedMessage(message, leaves_s)
        if kind in SUPERSEDING_MESSAGES:
            edge.queued[kind] = queued
        self._time.at(arrives_s, self._deliver, target, sender, edge.number, queued)

    def send_direct(
        self, owner: SimulatedProcess, to: Address, message: Message, accepts: Callable[[], bool]
    ) -> None:
        """Send a message to the process at ``to`` without an edge.

        When it arrives, drop it if the process is dead or ``accepts`` returns False.
        """
        target = self._processes[to.host]
        sender = MASTER if owner.node == MASTER else None
        _, arrives_s = self._transmit(owner.host, target.host, message, data=False)
        self._time.at(arrives_s, self._deliver_direct, target, sender, message, accepts)

    def _transmit(
        self, source: Host, target: Host, message: Message, *, data: bool
    ) -> tuple[float, float]:
        """Count a message's bytes; return the times at which it leaves its host and arrives.

        ``data``: whether it is a data message, not a control message.
        """
        now_s = self._time.now_s
        if source is target:
            return now_s, now_s + HOP_S
        size = WIRE_OVERHEAD * (estimate_body_bytes(message) + OVERHEAD_BYTES)
        source.sent_bytes += size
        target.received_bytes += size
        source.by_kind[TRAFFIC_KINDS.get(type(message), CONTROL_TRAFFIC)] += round(size)
        took_s = size / self._rate
        leaves_s = source.sends_until_s = max(now_s, source.sends_until_s) + took_s
        if not data:
            leaves_s = source.controls_until_s = max(now_s, source.controls_until_s) + took_s
        comes_s = leaves_s + self._latency_s
        taken_s = target.receives_until_s = max(comes_s, target.receives_until_s + took_s)
        return leaves_s, (taken_s if data else comes_s) + HOP_S

    def _deliver(
        self, target: SimulatedProcess, sender: NodeId, edge: EdgeNo, queued: QueuedMessage
    ) -> None:
        """Deliver a message if the receiver is alive and still has this edge."""
        mine = target.edges.get(sender)
        if target.alive and mine is not None and mine.number == edge:
            target.handle(ev.Received(sender, queued.message))

    def _deliver_direct(
        self,
        target: SimulatedProcess,
        sender: NodeId | None,
        message: Message,
        accepts: Callable[[], bool],
    ) -> None:
        """Deliver a direct message if the receiver is alive and ``accepts`` returns True."""
        if target.alive and accepts():
            target.handle(ev.Received(sender, message))
