"""Network: edges between neighbours, and the way to the master, on which anything may happen.

An edge has a control and a data stream each way. As Aeron's, a stream is ordered and reliable
while it lives, and it lives through a cut shorter than its liveness; otherwise it breaks, and all
after that is lost. Control that is repeated anyway, and what is said directly, may also get lost,
come twice or be overtaken, one by one: harsher than Aeron is.
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
    Attached,
    Direct,
    Heartbeat,
    Message,
    State,
)
from sparkstrom.codec.wire import decode_untrusted, encode, is_data
from sparkstrom.protocol.common import events as ev
from sparkstrom.simulation.faults import Faults
from sparkstrom.simulation.scene import Scene
from sparkstrom.simulation.sim_process import Cut, EdgeEnd, SentCount, SimProcess
from sparkstrom.simulation.timeline import Timeline

DELAY_S_MIN = 0.0005
LATE_S_MAX = 0.5
MASTERS_HOST = "master"
CONTROL_BYTES = 100  # of a message without payload, about
LIVENESS_S = 1.0  # a stream without a sign for so long breaks: half a lease, as Aeron's 5 s of 10 s
REPEATED = (Attach, Attached, Heartbeat, State)  # on edges, until they are answered or for ever

Arrive = Callable[
    [SimProcess | None, NodeId | None, int, Message], None
]  # target, sender, edge, message


@dataclass(frozen=True, slots=True)
class Split:
    """These workers can speak with each other, and nobody else with them."""

    until_s: float
    apart: frozenset[SimProcess]


class Network:
    """``to_master`` takes what arrives there, with its sender. ``measured``: sizes are real.

    ``coded``: each message goes through its bytes; what cannot be read again ends the run.
    ``poll_s``: how often a process looks at its streams, each at moments of its own; 0: always.
    ``liveness_s``: a cut that lasts longer breaks the streams that it cuts.
    """

    def __init__(
        self,
        time: Timeline,
        faults: Faults,
        to_master: Callable[[NodeId | None, Message], None],
        *,
        coded: bool = False,
        measured: bool = False,
        poll_s: float = 0.0,
        liveness_s: float = LIVENESS_S,
    ) -> None:
        self._time, self._faults, self._to_master = time, faults, to_master
        self._processes: dict[str, SimProcess] = {}  # by the host part of their addresses
        self._master_slots: dict[NodeId, EdgeEnd] = {}
        self._random, self._delay_s_max = time.chance.random, faults.delay_ms_max / 1000
        self._measured, self._poll_s, self._liveness_s = measured, poll_s, liveness_s
        self._coded = coded
        self._phases_s: dict[SimProcess, float] = {}
        self._sized: tuple[Message | None, int] = None, 0
        self.masters_links: dict[SimProcess | None, SentCount] = {}
        self._free_s: dict[SimProcess | None, float] = {}  # when what one has sent is on its way
        self._broken: set[tuple[EdgeNo, SimProcess | None, bool]] = set()  # edge, sender, data
        self._splits: list[Split] = []
        self.quiet = not (faults.loss or faults.repeat or faults.late)

    def add(self, process: SimProcess) -> None:
        self._processes[process.name] = process
        self._phases_s[process] = zlib.crc32(process.name.encode()) / 2**32 * self._poll_s

    def process(self, host: str) -> SimProcess:
        return self._processes[host]

    def listen(self, process: SimProcess) -> Address:
        """On fresh streams; what was said to the former ones is not heard any more."""
        process.port += 1
        return Address(process.name, process.port, 1, 2)

    # -- edges -----------------------------------------------------------------------------------

    def open(self, owner: SimProcess | None, effect: ev.OpenEdge) -> None:
        """``owner`` (None: the master) speaks with this neighbour over this edge from now on."""
        slots = self._master_slots if owner is None else owner.slots
        host = effect.peer.host
        target = None if host == MASTERS_HOST else self._processes[host]
        slots[effect.node] = EdgeEnd(effect.edge, target, self._time.now_s)

    def close(self, owner: SimProcess | None, node: NodeId) -> None:
        slots = self._master_slots if owner is None else owner.slots
        slots.pop(node, None)

    def lose(self, owner: SimProcess | None) -> None:
        """Its media driver is gone, and all its edges with it."""
        self.break_edges(owner)
        (self._master_slots if owner is None else owner.slots).clear()

    @property
    def masters_edges(self) -> dict[NodeId, EdgeNo]:
        """By node, as they are open."""
        return {node: slot.edge for node, slot in self._master_slots.items()}

    def break_stream(self, process: SimProcess, *, up: bool, data: bool) -> None:
        """Nothing gets through on this stream of its present edge upwards any more."""
        parent = process.node.link.parent
        slot = None if parent is None else process.slots.get(parent)
        if slot is not None:
            self._broken.add((slot.edge, process if up else slot.target, data))

    def break_edges(self, owner: SimProcess | None) -> None:
        """The media driver of ``owner`` (None: the master) died: so did all streams there."""
        for slot in (self._master_slots if owner is None else owner.slots).values():
            self._break(slot.edge, owner)
            self._break(slot.edge, slot.target)

    def _break(self, edge: EdgeNo, sender: SimProcess | None) -> None:
        """Both streams of this edge from ``sender``."""
        self._broken |= {(edge, sender, False), (edge, sender, True)}

    def look(self, scene: Scene) -> None:
        """At what must hold of links now; here is none."""

    def at_end(self) -> None:
        """The same, once the fit is over."""

    # -- messages --------------------------------------------------------------------------------

    def send(self, owner: SimProcess | None, to: NodeId, message: Message) -> None:
        """To a neighbour, if there is an edge."""
        slot = (self._master_slots if owner is None else owner.slots).get(to)
        if slot is None:
            return
        if self._broken and (slot.edge, owner, is_data(message)) in self._broken:
            return
        sender = MASTER if owner is None else owner.me
        assert sender is not None, "who has an edge has an id"
        arrive = self._arrive_at_root if slot.target is None else self._arrive_at_edge
        self._transmit(owner, slot.target, arrive, sender, slot.edge, message)

    def tell(self, process: SimProcess, message: Direct) -> None:
        """To the master's join stream."""
        self._transmit(process, None, self._deliver_to_master, None, 0, message, direct=True)

    def answer(self, answer: ev.Answer) -> None:
        """From the master, directly: for one process, and for its id where that is named."""
        target = self._processes[answer.address.host]
        arrive = partial(self._arrive_directly, answer.token, answer.node)
        port, message = answer.address.port, answer.message
        self._transmit(None, target, arrive, MASTER, port, message, direct=True)

    def _link(self, owner: SimProcess | None, target: SimProcess | None) -> SentCount:
        links = self.masters_links if owner is None else owner.links
        link = links.get(target)
        if link is None:
            link = links[target] = SentCount()
        return link

    def calm_down(self) -> None:
        """From now on every message arrives, once and in time."""
        self.quiet = True

    # -- cuts ------------------------------------------------------------------------------------

    def cut(self, process: SimProcess, cut: Cut) -> None:
        """Out of reach from now on; what is sent over edges meanwhile waits for the end of it."""
        process.cut = cut
        self._time.after(self._liveness_s, self._break_cut, process)

    def _break_cut(self, process: SimProcess) -> None:
        """Nothing came for too long: these streams are over, unless the cut is.

        Those that were opened meanwhile were never connected, and will be.
        """
        cut = process.cut
        if cut is None or cut.until_s <= self._time.now_s:
            return
        for slot in self._old_slots(process):
            if cut.up:
                self._break(slot.edge, process)
            if cut.down:
                self._break(slot.edge, slot.target)

    def split(self, split: Split) -> None:
        self._splits.append(split)
        if split.until_s > self._time.now_s + self._liveness_s:
            self._time.after(self._liveness_s, self._break_split, split)

    def _break_split(self, split: Split) -> None:
        for process in split.apart:
            for slot in self._old_slots(process):
                if slot.target not in split.apart:
                    self._break(slot.edge, process)
                    self._break(slot.edge, slot.target)

    def _old_slots(self, process: SimProcess) -> list[EdgeEnd]:
        """Of edges that were there ``liveness_s`` ago."""
        until_s = self._time.now_s - self._liveness_s
        return [slot for slot in process.slots.values() if slot.opened_s <= until_s]

    def is_cut(self, process: SimProcess) -> bool:
        cut, now_s = process.cut, self._time.now_s
        if any(s.until_s > now_s and process in s.apart for s in self._splits):
            return True
        return cut is not None and cut.until_s > now_s

    def _cut_until_s(self, owner: SimProcess | None, target: SimProcess | None) -> float:
        """Until when nothing that is sent now leaves there and gets here; 0: it does."""
        until_s = 0.0
        if self._splits:
            until_s = self._split_until_s(owner, target)
        if owner is not None and owner.cut is not None and self._swallows(owner.cut, up=True):
            until_s = max(until_s, owner.cut.until_s)
        return until_s

    # -- the way ---------------------------------------------------------------------------------

    def _transmit(
        self,
        owner: SimProcess | None,
        target: SimProcess | None,
        arrive: Arrive,
        sender: NodeId | None,
        edge: int,
        message: Message,
        *,
        direct: bool = False,
    ) -> None:
        """Put a message on its way: once, or, where it may get lost, perhaps twice or never.

        A stream keeps the order; what is late of such messages is overtaken by what follows.
        """
        if self._coded:
            message = decode_untrusted(*encode(message))
        link, data = self._link(owner, target), is_data(message)
        start_s, cut_s = self._time.now_s, self._cut_until_s(owner, target)
        if cut_s:
            if direct or cut_s == math.inf:
                return
            start_s = cut_s  # Aeron sends again what the other end did not get
        if self._measured:
            if message is not self._sized[0]:  # what goes to several in turn is encoded once
                self._sized = message, len(encode(message)[1])
            link.messages += 1
            link.bytes += self._sized[1]
        if self._faults.bandwidth:
            start_s = max(start_s, self._leaves_s(owner, message))
        lossy = not self.quiet and (direct or isinstance(message, REPEATED))
        copies = self._copies() if lossy else 1
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
                at_s = self._polled_s(target, at_s)
            self._time.at(at_s, arrive, target, sender, edge, message)

    def _copies(self) -> int:
        """How many of a message that may get lost arrive."""
        luck = self._random()
        if luck >= self._faults.loss + self._faults.repeat:
            return 1
        if luck < self._faults.loss:
            self._time.faults["lost"] += 1
            return 0
        self._time.faults["repeated"] += 1
        return 2

    def _polled_s(self, target: SimProcess, at_s: float) -> float:
        """When the target looks next."""
        phase_s = self._phases_s[target]
        return phase_s + math.ceil((at_s - phase_s) / self._poll_s) * self._poll_s

    def _leaves_s(self, owner: SimProcess | None, message: Message) -> float:
        """When it has left, which takes its time on a narrow link."""
        size = len(getattr(message, "payload", b"")) + CONTROL_BYTES
        begins_s = max(self._time.now_s, self._free_s.get(owner, 0.0))
        self._free_s[owner] = begins_s + size / self._faults.bandwidth
        return self._free_s[owner]

    # -- arriving --------------------------------------------------------------------------------

    def _deliver_to_master(
        self, target: SimProcess | None, sender: NodeId | None, edge: int, message: Message
    ) -> None:
        self._to_master(None, message)

    def _arrive_at_root(
        self, target: SimProcess | None, sender: NodeId | None, edge: int, message: Message
    ) -> None:
        """Only where both ends mean the same edge, and its stream lives."""
        assert sender is not None, "who has an edge has an id"
        slot = self._master_slots.get(sender)
        if slot is None or slot.edge != edge:
            return
        if not self._broken or (edge, slot.target, is_data(message)) not in self._broken:
            self._to_master(sender, message)

    def _arrive_at_edge(
        self, target: SimProcess | None, sender: NodeId | None, edge: int, message: Message
    ) -> None:
        """The same below the root; what is cut off or asleep takes it afterwards."""
        if target is None or not target.alive:
            return
        now_s, ready_s = self._time.now_s, target.awake_s
        if target.cut is not None and self._swallows(target.cut, up=False):
            ready_s = max(ready_s, target.cut.until_s)
        if now_s < ready_s:
            if ready_s < math.inf:
                self._time.at(ready_s, self._arrive_at_edge, target, sender, edge, message)
            return
        assert sender is not None, "who has an edge has an id"
        slot = target.slots.get(sender)
        if slot is None or slot.edge != edge:
            return
        if not self._broken or (edge, slot.target, is_data(message)) not in self._broken:
            target.feed(ev.Received(sender, message), now_s)

    def _arrive_directly(
        self,
        token: int,
        node: NodeId | None,
        target: SimProcess | None,
        sender: NodeId | None,
        port: int,
        message: Message,
    ) -> None:
        if target is None or not self._is_reached(target):
            return
        now_s = self._time.now_s
        if now_s < target.awake_s:
            again = partial(self._arrive_directly, token, node)
            self._time.at(target.awake_s, again, target, sender, port, message)
        elif port == target.port and target.answers_to(token, node):
            target.feed(ev.Received(MASTER, message), now_s)

    def _is_reached(self, process: SimProcess) -> bool:
        """Does it live, and is nothing in between?"""
        if not process.alive:
            return False
        return process.cut is None or not self._swallows(process.cut, up=False)

    def _split_until_s(self, source: SimProcess | None, target: SimProcess | None) -> float:
        until_s, now_s = 0.0, self._time.now_s
        for split in self._splits:
            if split.until_s > now_s and (source in split.apart) != (target in split.apart):
                self._time.faults["split off"] += 1
                until_s = max(until_s, split.until_s)
        return until_s

    def _swallows(self, cut: Cut, *, up: bool) -> bool:
        if cut.until_s <= self._time.now_s or not (cut.up if up else cut.down):
            return False
        self._time.faults["cut off"] += 1
        return True
