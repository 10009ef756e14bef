"""Hosts with links of limited rate, and edges between processes of a rehearsed (simulated) fit.

An edge is the connection between two neighbours in the tree of the master and the workers.

A host sends its data messages one after the other at its link's rate, and the receiver's link takes
them likewise. Aeron serves the streams of control and data in turn. A control message therefore
waits only for earlier control messages of its host, but data that follow wait for it. A newer
heartbeat or state message replaces one that still waits, as in the outbox of a real process.
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
from sparkstrom.simulation.timeline import Timeline


@dataclass(eq=False, slots=True)
class Host:
    """A machine with one network interface."""

    name: str
    sends_until_s: float = 0.0  # when all that is queued has been sent
    controls_until_s: float = 0.0  # when all queued control messages have been sent
    receives_until_s: float = 0.0  # when all data in flight has been received
    sent_bytes: float = 0.0
    received_bytes: float = 0.0
    by_kind: Counter[str] = field(default_factory=Counter)  # bytes sent


class Endpoint(Protocol):
    """A process that sends and receives messages."""

    name: str
    host: Host
    edges: dict[NodeId, Edge]

    @property
    def node(self) -> NodeId | None:
        """Its present id; None until it has one."""

    @property
    def alive(self) -> bool:
        """Whether it can receive messages."""
        ...

    def handle(self, event: ev.Event) -> None:
        """Pass an event to its protocol machine and perform the effects."""


@dataclass(eq=False, slots=True)
class QueuedMessage:
    """A message that has not left its host yet, and may be replaced by a newer one."""

    message: Message
    leaves_s: float


@dataclass(eq=False, slots=True)
class Edge:
    """One end of the connection to a neighbour in the tree."""

    number: EdgeNo
    target: Endpoint  # the process at the other end
    newest_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # arrivals: control, data
    queued: dict[type[Message], QueuedMessage] = field(default_factory=dict)  # the newest, by type


class VirtualNetwork:
    """Delivers the messages of one rehearsed fit.

    Args:
        time: Virtual time.
        link_bits_s: Bit rate of each host's link, each way.
        latency_s: Of a message from host to host, beside the time that its bytes take.
    """

    def __init__(self, time: Timeline, link_bits_s: float, latency_s: float) -> None:
        self._time, self._rate, self._latency_s = time, link_bits_s / 8, latency_s
        self._endpoints: dict[str, Endpoint] = {}
        self.hosts: dict[str, Host] = {}

    def host(self, name: str) -> Host:
        """Return the host with this name, created on first use."""
        return self.hosts.setdefault(name, Host(name))

    def add(self, endpoint: Endpoint) -> None:
        """Make a process reachable by its name."""
        self._endpoints[endpoint.name] = endpoint

    def endpoint(self, name: str) -> Endpoint:
        """Return the process with this name."""
        return self._endpoints[name]

    def open_edge(self, owner: Endpoint, effect: ev.OpenEdge) -> None:
        """Open the owner's end of an edge."""
        owner.edges[effect.node] = Edge(effect.edge, self._endpoints[effect.peer.host])

    def close_edge(self, owner: Endpoint, node: NodeId) -> None:
        """Close the owner's end of the edge to a neighbour."""
        owner.edges.pop(node, None)

    def send(self, owner: Endpoint, to: NodeId, message: Message) -> None:
        """Send a message to a neighbour; drop it without an edge."""
        edge, sender = owner.edges.get(to), owner.node
        if edge is None or sender is None:
            return
        data, target, kind = is_data(message), edge.target, type(message)
        waiting = edge.queued.get(kind)
        if waiting is not None and waiting.leaves_s > self._time.now_s:
            waiting.message = message
            return
        leaves_s, arrives_s = self._transmit(owner.host, target.host, message, data=data)
        edge.newest_s[data] = arrives_s = max(arrives_s, edge.newest_s[data])
        queued = QueuedMessage(message, leaves_s)
        if kind in SUPERSEDING_MESSAGES:
            edge.queued[kind] = queued
        self._time.at(arrives_s, self._deliver, target, sender, edge.number, queued)

    def send_direct(
        self, owner: Endpoint, to: Address, message: Message, accepts: Callable[[], bool]
    ) -> None:
        """Send a message without an edge; drop it if ``accepts`` returns False when it arrives."""
        target = self._endpoints[to.host]
        sender = MASTER if owner.node == MASTER else None
        _, arrives_s = self._transmit(owner.host, target.host, message, data=False)
        self._time.at(arrives_s, self._deliver_direct, target, sender, message, accepts)

    def _transmit(
        self, source: Host, target: Host, message: Message, *, data: bool
    ) -> tuple[float, float]:
        """Count a message's bytes; return when it leaves its host, and when it arrives."""
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
        self, target: Endpoint, sender: NodeId, edge: EdgeNo, queued: QueuedMessage
    ) -> None:
        """Deliver a message if the receiver still has this edge."""
        mine = target.edges.get(sender)
        if target.alive and mine is not None and mine.number == edge:
            target.handle(ev.Received(sender, queued.message))

    def _deliver_direct(
        self,
        target: Endpoint,
        sender: NodeId | None,
        message: Message,
        accepts: Callable[[], bool],
    ) -> None:
        """Deliver a direct message if it is still accepted."""
        if target.alive and accepts():
            target.handle(ev.Received(sender, message))
