"""Network: edges between neighbours, and the way to the master, on which anything may happen."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import Address, Data, Direct, Message
from sparkstrom.codec.wire import encode
from sparkstrom.protocol import events as ev
from sparkstrom.simulation.faults import Faults
from sparkstrom.simulation.process import SimProcess, Slot
from sparkstrom.simulation.timeline import Timeline

DELAY_S_MIN = 0.0005
LATE_S_MAX = 0.5
NOBODY = -1  # who speaks in the master's lobby
MASTERS_HOST = "master"
CONTROL_BYTES = 100  # of a message without payload, about


@dataclass(frozen=True, slots=True)
class Cut:
    """A worker is out of reach."""

    until_s: float
    up: bool  # what it sends is lost
    down: bool  # what is sent to it is lost


@dataclass(frozen=True, slots=True)
class Split:
    """These workers can speak with each other, and nobody else with them."""

    until_s: float
    hosts: frozenset[str]


@dataclass(slots=True)
class Traffic:
    """What one host sent and received."""

    messages: int = 0
    bytes: int = 0


class Network:
    """``to_master`` takes what arrives there, with its sender. ``measured``: sizes are real."""

    def __init__(
        self,
        time: Timeline,
        faults: Faults,
        to_master: Callable[[int, Message], None],
        *,
        measured: bool = False,
    ) -> None:
        self._time, self._faults, self._to_master = time, faults, to_master
        self._processes: dict[str, SimProcess] = {}  # by the host part of their addresses
        self._master_slots: dict[int, Slot] = {}
        self._cuts: dict[SimProcess, Cut] = {}
        self._measured = measured
        self._sized: tuple[Message | None, int] = None, 0
        self.traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
        self._free_s: dict[str, float] = {}  # when what a host has sent is on its way
        self._broken: set[tuple[int, bool, bool]] = set()  # edge, upwards, data
        self._newest_s: dict[tuple[str, str], float] = {}  # arrivals: in order, but for late ones
        self._splits: list[Split] = []
        self.quiet = not (faults.loss or faults.repeat or faults.late)

    def add(self, process: SimProcess) -> None:
        self._processes[process.name] = process

    def process(self, host: str) -> SimProcess:
        return self._processes[host]

    # -- edges -----------------------------------------------------------------------------------

    def open(self, owner: SimProcess | None, effect: ev.OpenEdge) -> None:
        """``owner`` (None: the master) speaks with this neighbour over this edge from now on."""
        slots = self._master_slots if owner is None else owner.slots
        slots[effect.node] = Slot(effect.edge, effect.peer)

    def close(self, owner: SimProcess | None, node: int) -> None:
        slots = self._master_slots if owner is None else owner.slots
        slots.pop(node, None)

    def break_stream(self, process: SimProcess, *, up: bool, data: bool) -> None:
        """Nothing gets through on this stream of its present edge upwards any more."""
        self._broken.add((process.node.standing.edge, up, data))

    # -- messages --------------------------------------------------------------------------------

    def send(self, owner: SimProcess | None, to: int, message: Message) -> None:
        """To a neighbour, if there is an edge."""
        slot = (self._master_slots if owner is None else owner.slots).get(to)
        if slot is None:
            return
        sender = MASTER if owner is None else owner.node.node
        up = owner is not None and to == owner.node.standing.parent
        if self._broken and (slot.edge, up, isinstance(message, Data)) in self._broken:
            return
        self._transmit(owner, slot.peer.host, self._arrive_at_edge, sender, slot.edge, message)

    def tell(self, process: SimProcess, message: Direct) -> None:
        """To the master's lobby."""
        self._transmit(process, MASTERS_HOST, self._arrive_in_lobby, NOBODY, 0, message)

    def answer(self, address: Address, message: Message) -> None:
        """From the master, directly."""
        self._transmit(None, address.host, self._arrive_directly, MASTER, address.port, message)

    def calm_down(self) -> None:
        """From now on every message arrives, once and in time."""
        self.quiet = True

    def cut(self, process: SimProcess, cut: Cut) -> None:
        self._cuts[process] = cut

    def split(self, split: Split) -> None:
        self._splits.append(split)

    def is_cut(self, process: SimProcess) -> bool:
        cut, now_s = self._cuts.get(process), self._time.now_s
        if any(s.until_s > now_s and process.name in s.hosts for s in self._splits):
            return True
        return cut is not None and cut.until_s > now_s

    def _transmit(
        self,
        owner: SimProcess | None,
        host: str,
        arrive: Callable[[str, int, int, Message], None],
        sender: int,
        edge: int,
        message: Message,
    ) -> None:
        """Put a message on its way, once, twice, late or not at all.

        As Aeron's streams do, a link keeps the order; what is late is overtaken by what follows.
        """
        time, faults, quiet = self._time, self._faults, self.quiet
        start_s = time.now_s
        source = MASTERS_HOST if owner is None else owner.name
        if self._splits and self._separates(source, host):
            return
        if self._measured or faults.bandwidth:
            start_s = self._count(source, host, message)
        if self._cuts and owner is not None and self._swallows(owner, up=True):
            return
        random = time.chance.random
        luck = random()
        if not quiet and luck < faults.loss:
            time.faults["lost"] += 1
            return
        copies = 1
        if not quiet and luck < faults.loss + faults.repeat:
            time.faults["repeated"] += 1
            copies = 2
        for _ in range(copies):
            at_s = start_s + DELAY_S_MIN + random() * faults.delay_ms_max / 1000
            if not quiet and random() < faults.late:
                time.faults["late"] += 1
                at_s += random() * LATE_S_MAX
            else:
                at_s = max(at_s, self._newest_s.get((source, host), 0.0))
                self._newest_s[source, host] = at_s
            time.at(at_s, arrive, host, sender, edge, message)

    def _count(self, source: str, target: str, message: Message) -> float:
        """Note what travels; return when it has left, which takes its time on a narrow link."""
        if self._measured:
            size = self._size_of(message)
            for host in (source, target):
                traffic = self.traffic[host]
                traffic.messages += 1
                traffic.bytes += size
        now_s, bandwidth = self._time.now_s, self._faults.bandwidth
        if not bandwidth:
            return now_s
        size = len(getattr(message, "payload", b"")) + CONTROL_BYTES
        self._free_s[source] = max(now_s, self._free_s.get(source, 0.0)) + size / bandwidth
        return self._free_s[source]

    def _size_of(self, message: Message) -> int:
        """Encoded; what goes on unchanged from node to node is looked at once."""
        if message is not self._sized[0]:
            self._sized = message, len(encode(message)[1])
        return self._sized[1]

    # -- arriving --------------------------------------------------------------------------------

    def _arrive_in_lobby(self, host: str, sender: int, edge: int, message: Message) -> None:
        self._to_master(NOBODY, message)

    def _arrive_at_edge(self, host: str, sender: int, edge: int, message: Message) -> None:
        """Only where both ends mean the same edge."""
        if host == MASTERS_HOST:
            slot = self._master_slots.get(sender)
            if slot is not None and slot.edge == edge:
                self._to_master(sender, message)
            return
        process = self._reached(host)
        if process is None:
            return
        if self._time.now_s < process.awake_s:
            self._time.at(process.awake_s, self._arrive_at_edge, host, sender, edge, message)
            return
        slot = process.slots.get(sender)
        if slot is not None and slot.edge == edge:
            process.feed(ev.Received(sender, message), self._time.now_s)

    def _arrive_directly(self, host: str, sender: int, port: int, message: Message) -> None:
        process = self._reached(host)
        if process is None:
            return
        if self._time.now_s < process.awake_s:
            self._time.at(process.awake_s, self._arrive_directly, host, sender, port, message)
        elif port == process.port:
            process.feed(ev.Received(MASTER, message), self._time.now_s)

    def _reached(self, host: str) -> SimProcess | None:
        process = self._processes[host]
        if not process.alive or (self._cuts and self._swallows(process, up=False)):
            return None
        return process

    def _separates(self, source: str, target: str) -> bool:
        now_s = self._time.now_s
        for split in self._splits:
            if split.until_s > now_s and (source in split.hosts) != (target in split.hosts):
                self._time.faults["split off"] += 1
                return True
        return False

    def _swallows(self, process: SimProcess, *, up: bool) -> bool:
        cut = self._cuts.get(process)
        if cut is None or cut.until_s <= self._time.now_s:
            return False
        if cut.up if up else cut.down:
            self._time.faults["cut off"] += 1
            return True
        return False
