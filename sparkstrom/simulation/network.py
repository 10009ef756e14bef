"""A simulated computer network: edges between neighbours, and messages to and from the master.

An edge connects a node with its parent in the tree, by a control and a data stream each way. Like
Aeron's, a stream is ordered and reliable. It survives an outage shorter than its liveness timeout;
a longer outage breaks the stream, and later messages are lost. The simulation is stricter than
Aeron: any single direct message, or control message that is repeated until it is answered, may also
get lost, arrive twice or be overtaken.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sparkstrom.base.identity import MASTER, EdgeNo, NodeId
from sparkstrom.codec.messages import (
    Address,
    Attach,
    AttachReply,
    Direct,
    Heartbeat,
    Message,
    State,
)
from sparkstrom.codec.wire import decode_untrusted, encode, is_data
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.simulation.process import EdgeEnd, Outage, SentTraffic, SimProcess
from sparkstrom.simulation.run_options import Faults
from sparkstrom.simulation.virtual_clock import VirtualClock, WorldView

DELAY_S_MIN = 0.0005
LATE_S_MAX = 0.5
MASTER_HOST = "master"
CONTROL_BYTES = 100  # about the size of a message without payload
LIVENESS_S = 1.0  # liveness timeout of streams: half a lease, like Aeron's 5 s of 10 s
REPEATED_MESSAGES = (Attach, AttachReply, Heartbeat, State)  # on edges; resent until answered

# Target, sender, edge, message.
ArrivalHandler = Callable[[SimProcess | None, NodeId | None, int, Message], None]


@dataclass(frozen=True, slots=True)
class NetworkPartition:
    """A set of workers that reach each other but no other process, for some time."""

    until_s: float  # virtual time of its end
    apart: frozenset[SimProcess]  # the workers


class Network:
    """The simulated computer network of one run, which delivers messages in virtual time.

    Args:
        time: the run's virtual clock.
        faults: delays, losses and duplicates of messages.
        to_master: called with sender and message when one arrives at the master.
        encodes_messages: encode and decode all messages; a failure to decode ends the run.
        counts_traffic: count messages and their bytes per pair of processes.
        poll_s: interval at which each process polls its streams, not all at the same times; 0:
            messages are handled when they arrive.
        liveness_s: outages longer than this break the streams concerned.
    """

    def __init__(
        self,
        time: VirtualClock,
        faults: Faults,
        to_master: Callable[[NodeId | None, Message], None],
        *,
        encodes_messages: bool = False,
        counts_traffic: bool = False,
        poll_s: float = 0.0,
        liveness_s: float = LIVENESS_S,
    ) -> None:
        self._time, self._faults, self._to_master = time, faults, to_master
        self._processes: dict[str, SimProcess] = {}  # by the host part of their addresses
        self._master_slots: dict[NodeId, EdgeEnd] = {}
        self._random, self._delay_s_max = time.rng.random, faults.delay_ms_max / 1000
        self._counts_traffic, self._poll_s, self._liveness_s = counts_traffic, poll_s, liveness_s
        self._encodes_messages = encodes_messages
        self._poll_phases_s: dict[SimProcess, float] = {}
        self._last_encoded_size: tuple[Message | None, int] = None, 0
        self.master_links: dict[SimProcess | None, SentTraffic] = {}
        self._free_s: dict[SimProcess | None, float] = {}  # when all queued messages have been sent
        self._broken: set[tuple[EdgeNo, SimProcess | None, bool]] = set()  # edge, sender, data
        self._splits: list[NetworkPartition] = []
        self.quiet = not (faults.loss or faults.repeat or faults.late)

    def add(self, process: SimProcess) -> None:
        """Add a new process."""
        self._processes[process.name] = process
        self._poll_phases_s[process] = zlib.crc32(process.name.encode()) / 2**32 * self._poll_s

    def process(self, host: str) -> SimProcess:
        """Return the process whose addresses have this host."""
        return self._processes[host]

    def _slots_of(self, owner: SimProcess | None) -> dict[NodeId, EdgeEnd]:
        """Return the open edges of ``owner`` (None: the master), by neighbour."""
        return self._master_slots if owner is None else owner.slots

    def open_streams(self, process: SimProcess) -> Address:
        """Open new streams of a process and return their address; the old ones are closed."""
        process.port += 1
        return Address(process.name, process.port, 1, 2)

    def open_edge(self, owner: SimProcess | None, effect: ev.OpenEdge) -> None:
        """Open an edge from ``owner`` (None: the master) to a neighbour."""
        host = effect.peer.host
        target = None if host == MASTER_HOST else self._processes[host]
        self._slots_of(owner)[effect.node] = EdgeEnd(effect.edge, target, self._time.now_s)

    def close_edge(self, owner: SimProcess | None, node: NodeId) -> None:
        """Close the owner's end of the edge to the neighbour ``node``."""
        self._slots_of(owner).pop(node, None)

    def lose_media_driver(self, owner: SimProcess | None) -> None:
        """Break and close all edges of an owner whose media driver has died."""
        slots = self._slots_of(owner)
        for slot in slots.values():
            self._break(slot.edge, owner)
            self._break(slot.edge, slot.target)
        slots.clear()

    @property
    def master_edges(self) -> dict[NodeId, EdgeNo]:
        """The master's open edges, by node."""
        return {node: slot.edge for node, slot in self._master_slots.items()}

    def break_stream(self, process: SimProcess, *, up: bool, data: bool) -> None:
        """Break one stream of the edge between a process and its parent for good.

        Args:
            process: the lower end of the edge.
            up: break a stream to the parent; otherwise one from the parent.
            data: break the data stream; otherwise the control stream.
        """
        parent = process.node.link.parent
        slot = None if parent is None else process.slots.get(parent)
        if slot is not None:
            self._broken.add((slot.edge, process if up else slot.target, data))

    def _break(self, edge: EdgeNo, sender: SimProcess | None) -> None:
        """Break both streams of an edge from ``sender``."""
        self._broken |= {(edge, sender, False), (edge, sender, True)}

    def check_during_run(self, world: WorldView) -> None:
        """Check invariants of the network during the run; this network has none."""

    def check_at_end(self) -> None:
        """Check invariants of the network after the fit; this network has none."""

    def send(self, owner: SimProcess | None, to: NodeId, message: Message) -> None:
        """Send a message to a neighbour; drop it if no intact edge exists."""
        slot = self._slots_of(owner).get(to)
        if slot is None:
            return
        if self._broken and (slot.edge, owner, is_data(message)) in self._broken:
            return
        sender = MASTER if owner is None else owner.me
        assert sender is not None, "a node with an edge has an id"
        arrive = self._deliver_to_root if slot.target is None else self._deliver_to_worker
        self._transmit(owner, slot.target, arrive, sender, slot.edge, message)

    def send_to_master(self, process: SimProcess, message: Direct) -> None:
        """Send a direct message from a process to the master's join stream."""
        self._transmit(process, None, self._deliver_to_master, None, 0, message, direct=True)

    def send_to_process(self, answer: ev.SendToProcess) -> None:
        """Send a direct message from the master to one process, or to one node id of it."""
        target = self._processes[answer.address.host]
        arrive = partial(self._deliver_direct, answer.token, answer.node)
        port, message = answer.address.port, answer.message
        self._transmit(None, target, arrive, MASTER, port, message, direct=True)

    def _traffic_to(self, owner: SimProcess | None, target: SimProcess | None) -> SentTraffic:
        """Return the counts of the messages from ``owner`` to ``target``."""
        links = self.master_links if owner is None else owner.links
        link = links.get(target)
        if link is None:
            link = links[target] = SentTraffic()
        return link

    def stop_message_faults(self) -> None:
        """Deliver every message once and in time from now on."""
        self.quiet = True

    def begin_outage(self, process: SimProcess, outage: Outage) -> None:
        """Begin an outage of a process; messages on its edges wait until the outage ends."""
        process.cut = outage
        self._time.after(self._liveness_s, self._break_timed_out_streams, process)

    def _break_timed_out_streams(self, process: SimProcess) -> None:
        """Break a process's streams if its outage has not ended.

        This method is called when the liveness timeout has passed since the outage began. Streams
        that were opened during the outage are not broken; they connect after it.
        """
        cut = process.cut
        if cut is None or cut.until_s <= self._time.now_s:
            return
        for slot in self._long_open_edges(process):
            if cut.up:
                self._break(slot.edge, process)
            if cut.down:
                self._break(slot.edge, slot.target)

    def begin_partition(self, split: NetworkPartition) -> None:
        """Begin a network partition."""
        self._splits.append(split)
        if split.until_s > self._time.now_s + self._liveness_s:
            self._time.after(self._liveness_s, self._break_partitioned_streams, split)

    def _break_partitioned_streams(self, split: NetworkPartition) -> None:
        """Break streams across a partition that has lasted as long as their liveness timeout."""
        for process in split.apart:
            for slot in self._long_open_edges(process):
                if slot.target not in split.apart:
                    self._break(slot.edge, process)
                    self._break(slot.edge, slot.target)

    def _long_open_edges(self, process: SimProcess) -> list[EdgeEnd]:
        """Return a process's edges that were open ``liveness_s`` seconds ago."""
        until_s = self._time.now_s - self._liveness_s
        return [slot for slot in process.slots.values() if slot.opened_s <= until_s]

    def is_unreachable(self, process: SimProcess) -> bool:
        """Return True if a process has an outage or is on either side of a partition."""
        cut, now_s = process.cut, self._time.now_s
        if any(s.until_s > now_s and process in s.apart for s in self._splits):
            return True
        return cut is not None and cut.until_s > now_s

    def _outage_end_s(self, owner: SimProcess | None, target: SimProcess | None) -> float:
        """Return when a message sent now can leave for the target; 0 if no outage prevents it."""
        until_s = 0.0
        if self._splits:
            until_s = self._partition_end_s(owner, target)
        if (
            owner is not None
            and owner.cut is not None
            and self._count_if_blocked(owner.cut, up=True)
        ):
            until_s = max(until_s, owner.cut.until_s)
        return until_s

    def _transmit(
        self,
        owner: SimProcess | None,
        target: SimProcess | None,
        arrive: ArrivalHandler,
        sender: NodeId | None,
        edge: int,
        message: Message,
        *,
        direct: bool = False,
    ) -> None:
        """Schedule a message's arrival; a message that may get lost arrives never, once or twice.

        A stream keeps the order of its messages, but those that may get lost may also be late.
        ``arrive`` is called on arrival. ``direct``: the message uses no edge.
        """
        if self._encodes_messages:
            message = decode_untrusted(*encode(message))
        link, data = self._traffic_to(owner, target), is_data(message)
        start_s, cut_s = self._time.now_s, self._outage_end_s(owner, target)
        if cut_s:
            if direct or cut_s == math.inf:
                return
            start_s = cut_s  # Aeron resends what the other end did not receive
        if self._counts_traffic:
            if message is not self._last_encoded_size[0]:  # encode once what goes to several
                self._last_encoded_size = message, len(encode(message)[1])
            link.messages += 1
            link.bytes += self._last_encoded_size[1]
        if self._faults.bandwidth:
            start_s = max(start_s, self._departure_s(owner, message))
        lossy = not self.quiet and (direct or isinstance(message, REPEATED_MESSAGES))
        copies = self._draw_copies() if lossy else 1
        for _ in range(copies):
            at_s = start_s + DELAY_S_MIN + self._random() * self._delay_s_max
            if lossy and self._random() < self._faults.late:
                self._time.faults["late"] += 1
                at_s += self._random() * LATE_S_MAX
            else:
                if at_s < link.newest_s[data]:
                    at_s = link.newest_s[data]
                link.newest_s[data] = at_s
            if self._poll_s and target is not None:
                at_s = self._next_poll_s(target, at_s)
            self._time.at(at_s, arrive, target, sender, edge, message)

    def _draw_copies(self) -> int:
        """Draw how often a message that may get lost arrives: 0, 1 or 2 times."""
        luck = self._random()
        if luck >= self._faults.loss + self._faults.repeat:
            return 1
        if luck < self._faults.loss:
            self._time.faults["lost"] += 1
            return 0
        self._time.faults["repeated"] += 1
        return 2

    def _next_poll_s(self, target: SimProcess, at_s: float) -> float:
        """Return the target's first poll at or after ``at_s``."""
        phase_s = self._poll_phases_s[target]
        return phase_s + math.ceil((at_s - phase_s) / self._poll_s) * self._poll_s

    def _departure_s(self, owner: SimProcess | None, message: Message) -> float:
        """Return the virtual time at which a message will have left the host of ``owner``.

        The host sends one message after another at a limited rate, and is busy until that time.
        """
        size = len(getattr(message, "payload", b"")) + CONTROL_BYTES
        begins_s = max(self._time.now_s, self._free_s.get(owner, 0.0))
        self._free_s[owner] = begins_s + size / self._faults.bandwidth
        return self._free_s[owner]

    def _deliver_to_master(
        self, target: SimProcess | None, sender: NodeId | None, edge: int, message: Message
    ) -> None:
        """Deliver a direct message, which uses no edge, to the master; use only ``message``."""
        self._to_master(None, message)

    def _deliver_to_root(
        self, target: SimProcess | None, sender: NodeId | None, edge: int, message: Message
    ) -> None:
        """Deliver a message to the master over the edge from ``sender``.

        Drop the message if the master no longer has this edge, or if its stream is broken.
        ``target`` is not used.
        """
        assert sender is not None, "a node with an edge has an id"
        slot = self._master_slots.get(sender)
        if slot is None or slot.edge != edge:
            return
        if not self._broken or (edge, slot.target, is_data(message)) not in self._broken:
            self._to_master(sender, message)

    def _deliver_to_worker(
        self, target: SimProcess | None, sender: NodeId | None, edge: int, message: Message
    ) -> None:
        """Deliver a message to a worker, after any outage or pause.

        Drop it unless the worker has this edge and the stream is intact.
        """
        if target is None or not target.alive:
            return
        now_s, ready_s = self._time.now_s, target.paused_until_s
        if target.cut is not None and self._count_if_blocked(target.cut, up=False):
            ready_s = max(ready_s, target.cut.until_s)
        if now_s < ready_s:
            if ready_s < math.inf:
                self._time.at(ready_s, self._deliver_to_worker, target, sender, edge, message)
            return
        assert sender is not None, "a node with an edge has an id"
        slot = target.slots.get(sender)
        if slot is None or slot.edge != edge:
            return
        if not self._broken or (edge, slot.target, is_data(message)) not in self._broken:
            target.handle(ev.Received(sender, message), now_s)

    def _deliver_direct(
        self,
        token: int,
        node: NodeId | None,
        target: SimProcess | None,
        sender: NodeId | None,
        port: int,
        message: Message,
    ) -> None:
        """Deliver a direct message after any pause, if token, node id and port still match."""
        if target is None or not self._is_reachable(target):
            return
        now_s = self._time.now_s
        if now_s < target.paused_until_s:
            again = partial(self._deliver_direct, token, node)
            self._time.at(target.paused_until_s, again, target, sender, port, message)
        elif port == target.port and target.accepts_direct(token, node):
            target.handle(ev.Received(MASTER, message), now_s)

    def _is_reachable(self, process: SimProcess) -> bool:
        """Return True if a process is alive and no outage blocks messages to it.

        Count the message if an outage blocks it.
        """
        if not process.alive:
            return False
        return process.cut is None or not self._count_if_blocked(process.cut, up=False)

    def _partition_end_s(self, source: SimProcess | None, target: SimProcess | None) -> float:
        """Return the end of the network partition between two processes; 0 without one.

        Count the message that it delays.
        """
        until_s, now_s = 0.0, self._time.now_s
        for split in self._splits:
            if split.until_s > now_s and (source in split.apart) != (target in split.apart):
                self._time.faults["split off"] += 1
                until_s = max(until_s, split.until_s)
        return until_s

    def _count_if_blocked(self, cut: Outage, *, up: bool) -> bool:
        """Return True if an outage blocks this direction now, and count the blocked message."""
        if cut.until_s <= self._time.now_s or not (cut.up if up else cut.down):
            return False
        self._time.faults["cut off"] += 1
        return True
