"""Family: a node's children: their edges, their leases, and what each still has to get.

The master has one, and so has every worker in a mesh; both serve it from a ``History``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

import msgspec

from sparkstrom.codec.messages import (
    BUFFERS,
    Address,
    Adopt,
    Again,
    Attach,
    Attached,
    Behind,
    Committed,
    MergedRange,
    Report,
    State,
)
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.events import Effect, Send
from sparkstrom.protocol.leases import Leases
from sparkstrom.protocol.replay import (
    HEADER_BYTES,
    Downlink,
    Entry,
    History,
    adds,
    cost,
    last_of,
)

STATE_SPACING_S = 0.005
AGAIN_SPACING_S = 0.05


@dataclass(slots=True)
class Child:
    """One child and the edge to it."""

    node: int
    edge: int
    peer: Address
    downlink: Downlink
    answer: Attached | None = None  # to what it said it holds
    own: frozenset[int] = frozenset()  # every id that its process has had
    catching: bool = False  # it takes a snapshot: commits one by one, no sums
    heard: int = 0  # stamp of its news
    taken: int = 0  # updates that came by this edge, repeats too
    state_due: bool = True
    state_s: float = -1.0
    again_s: dict[int, float] = field(default_factory=dict)  # origin -> not before


class Family:
    """Children by node. ``merged_bytes``: what the sum of any number of commits takes."""

    def __init__(
        self, window_bytes: int, merged_bytes: int, history: History, leases: Leases
    ) -> None:
        self._window_bytes, self._merged_bytes = window_bytes, merged_bytes
        self._history, self.leases = history, leases
        self.children: dict[int, Child] = {}

    # -- edges -----------------------------------------------------------------------------------

    def adopt(self, order: Adopt, now_s: float) -> list[Effect]:
        """Open an edge for this child, unless it is there already or an older one."""
        known = self.children.get(order.node)
        if known is not None and known.edge >= order.edge:
            return []
        downlink = Downlink(0, self._window_bytes, now_s)
        self.children[order.node] = Child(order.node, order.edge, order.peer, downlink)
        self.leases.renew(order.node, now_s)
        return [ev.OpenEdge(order.node, order.edge, order.local, order.peer)]

    def disown(self, node: int, edge: int | None = None) -> list[Effect]:
        """Close the edge, if it is this one or an older one."""
        child = self.children.get(node)
        if child is None or (edge is not None and child.edge > edge):
            return []
        del self.children[node]
        self.leases.drop(node)
        return [ev.CloseEdge(node)]

    def on_attach(self, child: Child, attach: Attach, now_s: float) -> list[Effect]:
        """Let it follow from where it is, or from a snapshot; the same words, the same answer."""
        history, answer = self._history, child.answer
        if answer is None:
            follows = (attach.whole or attach.catching) and history.log.reaches(attach.have)
            if not (follows or history.whole):
                return []  # there is nothing to copy yet; it will ask again
            base = attach.have if follows else history.base
            last = [] if follows else history.last_at(base)
            child.answer = answer = Attached(base=base, snapshot=not follows, last=last)
            child.own, child.catching = frozenset(attach.ids), attach.catching or not follows
            child.downlink.rewind(base, now_s)
        return [Send(child.node, answer), *self.feed(child, now_s)]

    # -- down ------------------------------------------------------------------------------------

    def on_report(self, child: Child, report: Report, now_s: float) -> list[Effect]:
        """It has received so much; and its news up to a stamp."""
        child.downlink.acknowledge(report.received, now_s)
        child.heard = max(child.heard, report.stamp)
        child.catching = report.catching
        child.state_due = True
        return self.feed(child, now_s)

    def feed_all(self, now_s: float) -> list[Effect]:
        """What has come since goes to all."""
        out: list[Effect] = []
        for child in self.children.values():
            out += self.feed(child, now_s)
        return out

    def feed(self, child: Child, now_s: float) -> list[Effect]:
        """Send down what this child misses and has room for."""
        log, downlink = self._history.log, child.downlink
        if child.answer is None or downlink.sent >= log.head:
            return []
        out: list[Effect] = []
        while downlink.sent < log.head:
            if not log.reaches(downlink.sent):
                return [*out, *self._fall_behind(child, now_s)]
            if log.head - downlink.sent > 1 and self._is_cheaper_merged(child):
                out.append(self._send_merged(child, now_s))
                continue
            entry = log.next(downlink.sent)
            if child.catching and isinstance(entry, MergedRange):
                return [*out, *self._fall_behind(child, now_s)]
            if not downlink.put(entry.commit, cost(entry), now_s):
                break
            if isinstance(entry, Committed) and _has_it(child, entry):
                entry = number_only(entry)
            out.append(Send(child.node, entry))
        return out

    def _is_cheaper_merged(self, child: Child) -> bool:
        """Does one sum take less than all that this child misses? Only if nothing is under way."""
        log, downlink = self._history.log, child.downlink
        if child.catching or not downlink.idle:
            return False
        if log.bytes_after(downlink.sent) <= HEADER_BYTES + self._merged_bytes:
            return False
        return sum(map(cost, self._summable(child))) > HEADER_BYTES + self._merged_bytes

    def _summable(self, child: Child) -> list[Entry]:
        """What this child misses, up to the first entry that does not add to parameters."""
        after = self._history.log.after(child.downlink.sent)
        return list(takewhile(adds, after))

    def _send_merged(self, child: Child, now_s: float) -> Effect:
        after, entries = child.downlink.sent, tuple(self._summable(child))
        commit = entries[-1].commit
        child.downlink.put(commit, HEADER_BYTES + self._merged_bytes, now_s)
        return ev.SendMerged(child.node, after, commit, last_of(entries), entries)

    def _fall_behind(self, child: Child, now_s: float) -> list[Effect]:
        if not self._history.whole:
            return []  # it is behind itself; the child will ask again
        base = self._history.base
        child.downlink.rewind(base, now_s)
        child.catching = True
        return [Send(child.node, Behind(base, self._history.last_at(base)))]

    def again(self, child: Child, origin: int, now_s: float) -> list[Effect]:
        """Ask for an origin's uncommitted updates, but not all the time."""
        if now_s < child.again_s.get(origin, -1.0):
            return []
        child.again_s[origin] = now_s + AGAIN_SPACING_S
        return [Send(child.node, Again(origin))]

    # -- time ------------------------------------------------------------------------------------

    def tick(self, state: State, now_s: float) -> list[Effect]:
        """Repeat what was not acknowledged; tell the state, with what there is here, if due."""
        out: list[Effect] = []
        head = self._history.log.head if self._history.whole else 0
        for child in self.children.values():
            if child.downlink.overdue(now_s):
                child.downlink.back_off(now_s)
            out += self.feed(child, now_s)
            if child.state_due and now_s >= child.state_s + STATE_SPACING_S:
                child.state_due, child.state_s = False, now_s
                told = {"head": head, "heard": child.heard, "taken": child.taken}
                out.append(Send(child.node, msgspec.structs.replace(state, **told)))
        return out

    def tell_all(self) -> None:
        """There is a new state."""
        for child in self.children.values():
            child.state_due = True


def _has_it(child: Child, entry: Committed) -> bool:
    """Has its process made this itself? Then it needs the number only."""
    return entry.origin in child.own and entry.form != BUFFERS


def number_only(committed: Committed) -> Committed:
    """What the origin gets of its own update: it has the payload."""
    return msgspec.structs.replace(committed, form=0, tau_quanta=0, count=0, payload=b"")
