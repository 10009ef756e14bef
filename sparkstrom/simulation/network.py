"""Network: edges between neighbours, and the way to the master, on which anything may happen."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import Direct, Message
from sparkstrom.codec.wire import decode_untrusted, encode, is_data
from sparkstrom.protocol import events as ev
from sparkstrom.simulation.faults import Faults
from sparkstrom.simulation.process import Cut, Link, SimProcess, Slot
from sparkstrom.simulation.timeline import Timeline

DELAY_S_MIN = 0.0005
LATE_S_MAX = 0.5
NOBODY = -1  # who speaks in the master's lobby
MASTERS_HOST = "master"
CONTROL_BYTES = 100  # of a message without payload, about

Arrive = Callable[[SimProcess | None, int, int, Message], None]  # target, sender, edge, message


@dataclass(frozen=True, slots=True)
class Split:
    """These workers can speak with each other, and nobody else with them."""

    until_s: float
    apart: frozenset[SimProcess]


class Network:
    """``to_master`` takes what arrives there, with its sender. ``measured``: sizes are real.

    ``coded``: each message goes through its bytes; what cannot be read again ends the run.
    ``poll_s``: how often a process looks at its streams, each at moments of its own; 0: always.
    """

    def __init__(
        self,
        time: Timeline,
        faults: Faults,
        to_master: Callable[[int, Message], None],
        *,
        coded: bool = False,
        measured: bool = False,
        poll_s: float = 0.0,
    ) -> None:
        self._time, self._faults, self._to_master = time, faults, to_master
        self._processes: dict[str, SimProcess] = {}  # by the host part of their addresses
        self._master_slots: dict[int, Slot] = {}
        self._random = time.chance.random
        self._measured, self._poll_s = measured, poll_s
        self._coded = coded
        self._phases_s: dict[SimProcess, float] = {}
        self._sized: tuple[Message | None, int] = None, 0
        self.masters_links: dict[SimProcess | None, Link] = {}
        self._free_s: dict[SimProcess | None, float] = {}  # when what one has sent is on its way
        self._broken: set[tuple[int, bool, bool]] = set()  # edge, upwards, data
        self._splits: list[Split] = []
        self.quiet = not (faults.loss or faults.repeat or faults.late)

    def add(self, process: SimProcess) -> None:
        self._processes[process.name] = process
        self._phases_s[process] = zlib.crc32(process.name.encode()) / 2**32 * self._poll_s

    def process(self, host: str) -> SimProcess:
        return self._processes[host]

    # -- edges -----------------------------------------------------------------------------------

    def open(self, owner: SimProcess | None, effect: ev.OpenEdge) -> None:
        """``owner`` (None: the master) speaks with this neighbour over this edge from now on."""
        slots = self._master_slots if owner is None else owner.slots
        host = effect.peer.host
        target = None if host == MASTERS_HOST else self._processes[host]
        slots[effect.node] = Slot(effect.edge, target, self._link(owner, target))

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
        if self._broken:
            up = owner is not None and to == owner.node.standing.parent
            if (slot.edge, up, is_data(message)) in self._broken:
                return
        sender = MASTER if owner is None else owner.me
        arrive = self._arrive_at_root if slot.target is None else self._arrive_at_edge
        self._transmit(owner, slot.target, slot.link, arrive, sender, slot.edge, message)

    def tell(self, process: SimProcess, message: Direct) -> None:
        """To the master's lobby."""
        link = self._link(process, None)
        self._transmit(process, None, link, self._arrive_in_lobby, NOBODY, 0, message)

    def answer(self, answer: ev.Answer) -> None:
        """From the master, directly: for one process, and for its id where that is named."""
        target = self._processes[answer.address.host]
        arrive = partial(self._arrive_directly, answer.token, answer.node)
        port, message = answer.address.port, answer.message
        self._transmit(None, target, self._link(None, target), arrive, MASTER, port, message)

    def _link(self, owner: SimProcess | None, target: SimProcess | None) -> Link:
        links = self.masters_links if owner is None else owner.links
        return links.setdefault(target, Link())

    def calm_down(self) -> None:
        """From now on every message arrives, once and in time."""
        self.quiet = True

    def split(self, split: Split) -> None:
        self._splits.append(split)

    def is_cut(self, process: SimProcess) -> bool:
        cut, now_s = process.cut, self._time.now_s
        if any(s.until_s > now_s and process in s.apart for s in self._splits):
            return True
        return cut is not None and cut.until_s > now_s

    def _transmit(
        self,
        owner: SimProcess | None,
        target: SimProcess | None,
        link: Link,
        arrive: Arrive,
        sender: int,
        edge: int,
        message: Message,
    ) -> None:
        """Put a message on its way, once, twice, late or not at all.

        As Aeron's streams do, a link keeps the order; what is late is overtaken by what follows.
        """
        start_s = self._time.now_s
        if self._coded:
            message = decode_untrusted(*encode(message))
        if self._splits and self._separates(owner, target):
            return
        if self._measured:
            if message is not self._sized[0]:  # what goes to several in turn is encoded once
                self._sized = message, len(encode(message)[1])
            link.messages += 1
            link.bytes += self._sized[1]
        if self._faults.bandwidth:
            start_s = self._leaves_s(owner, message)
        if owner is not None and owner.cut is not None and self._swallows(owner.cut, up=True):
            return
        random, copies = self._random, 1
        luck = random()
        if not self.quiet and luck < self._faults.loss + self._faults.repeat:
            if luck < self._faults.loss:
                self._time.faults["lost"] += 1
                return
            self._time.faults["repeated"] += 1
            copies = 2
        for _ in range(copies):
            at_s = start_s + DELAY_S_MIN + random() * self._faults.delay_ms_max / 1000
            if not self.quiet and random() < self._faults.late:
                self._time.faults["late"] += 1
                at_s += random() * LATE_S_MAX
            elif at_s > link.newest_s:
                link.newest_s = at_s
            else:
                at_s = link.newest_s
            if self._poll_s and target is not None:
                at_s = self._polled_s(target, at_s)
            self._time.at(at_s, arrive, target, sender, edge, message)

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

    def _arrive_in_lobby(
        self, target: SimProcess | None, sender: int, edge: int, message: Message
    ) -> None:
        self._to_master(NOBODY, message)

    def _arrive_at_root(
        self, target: SimProcess | None, sender: int, edge: int, message: Message
    ) -> None:
        """Only where both ends mean the same edge."""
        slot = self._master_slots.get(sender)
        if slot is not None and slot.edge == edge:
            self._to_master(sender, message)

    def _arrive_at_edge(
        self, target: SimProcess | None, sender: int, edge: int, message: Message
    ) -> None:
        """The same below the root."""
        if target is None or not self._is_reached(target):
            return
        now_s = self._time.now_s
        if now_s < target.awake_s:
            self._time.at(target.awake_s, self._arrive_at_edge, target, sender, edge, message)
            return
        slot = target.slots.get(sender)
        if slot is not None and slot.edge == edge:
            target.feed(ev.Received(sender, message), now_s)

    def _arrive_directly(
        self,
        token: int,
        node: int | None,
        target: SimProcess | None,
        sender: int,
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

    def _separates(self, source: SimProcess | None, target: SimProcess | None) -> bool:
        now_s = self._time.now_s
        for split in self._splits:
            if split.until_s > now_s and (source in split.apart) != (target in split.apart):
                self._time.faults["split off"] += 1
                return True
        return False

    def _swallows(self, cut: Cut, *, up: bool) -> bool:
        if cut.until_s <= self._time.now_s or not (cut.up if up else cut.down):
            return False
        self._time.faults["cut off"] += 1
        return True
