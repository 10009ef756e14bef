"""Children: a node's children: their edges, their leases, and what each still has to get.

The master has one, and so has every worker in a mesh; both serve it from a ``History``. A child
gets what its link takes: the commits one by one, or, where it does not take all of them, their
sum. What it has no room for stays in the history; nothing is sent again while the edge lives.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import TypeGuard

import msgspec

from sparkstrom.base.identity import CommitNo, EdgeNo, NodeId, Seq
from sparkstrom.codec.messages import (
    NOTHING,
    Adopt,
    Again,
    Attach,
    Attached,
    Behind,
    Committed,
    Heartbeat,
    State,
    Update,
)
from sparkstrom.observe.telemetry import SlowLink
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.child import Child, ResendRequest, Serving
from sparkstrom.protocol.common.events import Effect, Send
from sparkstrom.protocol.common.history import Entry, History, adds, entries_in, last_of
from sparkstrom.protocol.common.leases import Leases
from sparkstrom.protocol.common.send_window import (
    HEADER_BYTES,
    QUEUE_S,
    SendWindow,
    entries_in_sum,
    sum_weight,
    weight,
)
from sparkstrom.protocol.common.stages import PROBE, REPLICATE, SNAPSHOT, Cause

STATE_SPACING_S = 0.005
AGAIN_FIRST_S = 1.0  # an origin answers at once, through links that may be slow
AGAIN_LONGEST_S = 60.0
WAIT_MS_MAX = 3_600_000


class Children:
    """Children by node."""

    def __init__(self, serving: Serving, history: History, leases: Leases) -> None:
        self._serving, self._history, self.leases = serving, history, leases
        self.by_node: dict[NodeId, Child] = {}
        self._under_way = 0  # bytes, to all
        self.narrow: list[SlowLink] = []  # found so far; whoever tells takes them out
        self.is_brief = False  # some child hears the state within STATE_SPACING_S, by the next tick
        self._short = False  # somebody had to wait because of what is under way to the others

    # -- edges -----------------------------------------------------------------------------------

    def adopt(self, order: Adopt, now_s: float) -> list[Effect]:
        """Open an edge for this child, unless it is there already or an older one."""
        known = self.by_node.get(order.node)
        if known is not None and known.edge >= order.edge:
            return []
        self._forget(order.node)
        link = SendWindow(self._serving.window_max, now_s)
        self.by_node[order.node] = Child(order.node, order.edge, order.peer, link)
        self.leases.renew(order.node, now_s)
        return [ev.OpenEdge(order.node, order.edge, order.local, order.peer)]

    def disown(self, node: NodeId, edge: EdgeNo | None = None) -> list[Effect]:
        """Close the edge, if it is this one or an older one."""
        child = self.by_node.get(node)
        if child is None or (edge is not None and child.edge > edge):
            return []
        self._forget(node)
        self.leases.drop(node)
        return [ev.CloseEdge(node)]

    def _forget(self, node: NodeId) -> None:
        child = self.by_node.pop(node, None)
        if child is not None:
            self._under_way -= child.link.under_way

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
            child.own, child.sent, child.base = frozenset(attach.ids), base, base
            child.becomes(Cause.COPIES if attach.catching or not follows else Cause.FOLLOWS)
        return [Send(child.node, answer), *self.feed(child, now_s)]

    # -- down ------------------------------------------------------------------------------------

    def on_report(self, child: Child, report: Heartbeat, now_s: float) -> list[Effect]:
        """It has received so much; and its news up to a stamp."""
        before = child.link.under_way
        child.link.on_ack(report.bytes_received, report.bytes_received, now_s)
        self._under_way -= before - child.link.under_way
        child.received = max(child.received, report.received)
        child.stamp = max(child.stamp, report.stamp)
        if report.catching and child.stage is REPLICATE:
            child.becomes(Cause.COPIES)
        elif child.stage is SNAPSHOT and not report.catching:
            child.becomes(Cause.HAS_COPY)
        child.state_due = True
        return self._feed_in_turn(child, now_s)

    def on_ask_after(self, child: Child, commit: CommitNo, now_s: float) -> list[Effect]:
        """A gap that the child names: a stream broke off, and what was on it is gone."""
        child.sent = commit
        return self._feed_in_turn(child, now_s)

    def on_ask_chunk(self, child: Child, index: int, now_s: float) -> list[Effect]:
        """A chunk goes as soon as the link has room."""
        if index not in child.chunk_requests:
            child.chunk_requests.append(index)
        return self._feed_in_turn(child, now_s)

    def _feed_in_turn(self, child: Child, now_s: float) -> list[Effect]:
        """This one, unless somebody waits because of what is under way to all."""
        return self.feed_all(now_s) if self._short else self.feed(child, now_s)

    def feed_all(self, now_s: float) -> list[Effect]:
        """What has come since goes to all, as far as this node's memory reaches.

        Nobody overtakes one who waits for memory, or a large sum would never find room; and who
        was fed comes last the next time.
        """
        self._short = False
        out: list[Effect] = []
        fed: list[Child] = []
        head = self._history.log.head
        for child in list(self.by_node.values()):
            if child.sent >= head and not child.chunk_requests:
                continue
            if effects := self.feed(child, now_s):
                out += effects
                fed.append(child)
            if self._short:
                for last in fed:
                    self.by_node[last.node] = self.by_node.pop(last.node)
                break
        return out

    def feed(self, child: Child, now_s: float) -> list[Effect]:
        """Send down what this child misses and has room for."""
        log = self._history.log
        if child.stage is PROBE or not (child.sent < log.head or child.chunk_requests):
            return []
        out: list[Effect] = []
        while child.sent < log.head or self._serves_chunks(child):
            if not log.reaches(child.sent):
                return [*out, *self._fall_behind(child)]
            if not self._has_room(child, HEADER_BYTES):
                break
            if self._serves_chunks(child):
                if not self._has_room(child, HEADER_BYTES + self._serving.chunk_bytes):
                    break
                out += self._send_copy(child, now_s)
                continue
            if (entries := self._cheaper_summed(child, log.head)) is not None:
                if not self._has_room(child, self._weight_of_sum(entries)):
                    break
                out.append(self._send_merged(child, entries, now_s))
                continue
            entry = self._next(child)
            if not self._has_room(child, weight(entry, 0)):
                break
            out.append(self._send_next(child, entry, now_s))
        return out

    def _has_room(self, child: Child, size: int) -> bool:
        """Does its link take so much, and the node's memory?"""
        if self._under_way and self._under_way + size > self._serving.total_max:
            self._short = True
            return False
        return child.link.has_room(size)

    def _hand(self, child: Child, size: int, now_s: float) -> None:
        child.link.on_sent(size, now_s)
        self._under_way += size

    # -- one by one, or as a sum -----------------------------------------------------------------

    def _next(self, child: Child) -> Entry:
        entry = self._history.log.next(child.sent)
        return number_only(entry) if _is_own(entry, child) else entry

    def _send_next(self, child: Child, entry: Entry, now_s: float) -> Effect:
        self._hand(child, weight(entry, 0), now_s)
        child.sent = entry.commit
        return Send(child.node, entry)

    def _cheaper_summed(self, child: Child, upto: CommitNo) -> tuple[Entry, ...] | None:
        """What waits for this child up to a commit, if it is more than its link takes soon and
        one sum takes less."""
        log = self._history.log
        if upto - child.sent <= 1 or log.bytes_after(child.sent) <= child.link.window:
            return None
        entries = tuple(self._summable(child.sent, upto))
        singly = sum(HEADER_BYTES if _is_own(e, child) else weight(e, 0) for e in entries)
        if len(entries) <= 1 or self._weight_of_sum(entries) >= singly:
            return None
        return entries

    def _summable(self, after: CommitNo, upto: CommitNo) -> Iterator[Entry]:
        """From there on, up to the first entry that does not add to parameters."""
        waiting = self._history.log.after(after)
        return takewhile(lambda entry: adds(entry) and entry.commit <= upto, waiting)

    def _weight_of_sum(self, entries: tuple[Entry, ...]) -> int:
        return sum_weight(self._entries_of(entries), last_of(entries))

    def _entries_of(self, entries: tuple[Entry, ...]) -> int:
        return entries_in_sum(sum(map(entries_in, entries)), self._serving.n_params)

    def _send_merged(self, child: Child, entries: tuple[Entry, ...], now_s: float) -> Effect:
        self._hand(child, self._weight_of_sum(entries), now_s)
        after, child.sent = child.sent, entries[-1].commit
        child.summed = child.sent
        last, count = last_of(entries), self._entries_of(entries)
        return ev.SendMerged(child.node, after, child.sent, last, count, entries)

    # -- snapshots -------------------------------------------------------------------------------

    def _serves_chunks(self, child: Child) -> bool:
        """A chunk is asked for, and what is here now is not older than the child's copy.

        Nor inside of a sum that it was sent: half of that would be in the chunk, for nothing.
        """
        history = self._history
        if not child.chunk_requests or not history.whole:
            return False
        return history.applied >= max(history.merged, child.base, child.summed)

    def _send_copy(self, child: Child, now_s: float) -> list[Effect]:
        """Everything up to now, in one go with the chunks, so that no sum is half in a chunk.

        What the replica has applied may go as a sum; a chunk is of that or of a later commit. As
        many chunks as weigh what went before them: a link that is slow brings chunks, too.
        """
        log, applied = self._history.log, self._history.applied
        before, out = child.link.sent, []
        while child.sent < log.head:
            entries = self._cheaper_summed(child, applied) if child.sent < applied else None
            if entries is not None:
                out.append(self._send_merged(child, entries, now_s))
            else:
                out.append(self._send_next(child, self._next(child), now_s))
        spent, size = child.link.sent - before, HEADER_BYTES + self._serving.chunk_bytes
        for _ in range(min(len(child.chunk_requests), max(1, spent // size))):
            self._hand(child, size, now_s)
            out.append(ev.SendChunk(child.node, child.chunk_requests.popleft()))
        return out

    def _fall_behind(self, child: Child) -> list[Effect]:
        history = self._history
        if not history.whole:
            return []  # it is behind itself; the child will ask again
        child.sent = child.base = history.base
        child.becomes(Cause.COPIES)
        child.chunk_requests.clear()
        return [Send(child.node, Behind(child.base, history.last_at(child.base)))]

    # -- up --------------------------------------------------------------------------------------

    def on_update(self, child: Child, update: Update) -> int:
        """One more has come by this edge; return its weight."""
        size = weight(update, 0)
        child.bytes_received, child.arriving, child.state_due = child.bytes_received + size, 0, True
        return size

    def arriving(self, child: Child, size: int) -> None:
        """So much of a message is here: its stream lives."""
        child.arriving, child.state_due = size, True

    def again(self, child: Child, origin: NodeId, after: Seq, now_s: float) -> list[Effect]:
        """Ask for what an origin has not committed: its updates came with a gap.

        Those that were under way come with the same gap, so the same question waits, and longer
        each time.
        """
        asked = child.resend_requests.get(origin)
        if asked is not None and asked.after == after:
            if now_s < asked.next_s:
                return []
            asked.wait_s = min(2 * asked.wait_s, AGAIN_LONGEST_S)
            asked.next_s = now_s + asked.wait_s
        else:
            child.resend_requests[origin] = ResendRequest(
                after, now_s + AGAIN_FIRST_S, AGAIN_FIRST_S
            )
        return [Send(child.node, Again(origin))]

    # -- time ------------------------------------------------------------------------------------

    @property
    def wait_s(self) -> float:
        """How much longer than usual what is made now takes over the slowest link, by its rate."""
        longest_s = 0.0
        for child in self.by_node.values():
            if child.link.rate and (wait_s := self._wait_s(child)) > longest_s:
                longest_s = wait_s
        return longest_s

    def _wait_s(self, child: Child) -> float:
        log, link = self._history.log, child.link
        if child.stage is not REPLICATE or not log.reaches(child.sent):
            return 0.0
        queued = link.under_way + log.bytes_after(child.sent)
        return queued / link.rate - QUEUE_S

    def tick(self, state: State, now_s: float) -> list[Effect]:
        """Feed them; tell the state, with what there is here, if due."""
        out = self.feed_all(now_s)
        head = self._history.log.head if self._history.whole else 0
        self.is_brief, waits_s = False, -1.0
        for child in self.by_node.values():
            self._look_at_link(child, now_s)
            if not child.state_due:
                continue
            if now_s < child.state_s + STATE_SPACING_S:
                self.is_brief = True
            else:
                child.state_due, child.state_s = False, now_s
                waits_s = self.wait_s if waits_s < 0 else waits_s
                told = {
                    "head": head,
                    "wait_ms": max(state.wait_ms, min(int(waits_s * 1000), WAIT_MS_MAX)),
                    "sent": child.sent,
                    "stamp": child.stamp,
                    "bytes_received": child.bytes_received + child.arriving,
                    "bytes_forwarded": child.bytes_forwarded,
                }
                out.append(Send(child.node, msgspec.structs.replace(state, **told)))
        return out

    def _look_at_link(self, child: Child, now_s: float) -> None:
        log = self._history.log
        waits = child.stage is REPLICATE and child.sent < log.head
        needed = child.backlog.looks(waits, log.appended, child.link.rate, now_s)
        if needed is not None:
            behind = log.head - child.received
            self.narrow.append(
                SlowLink(child.node, child.link.rate, needed, behind, child.summed > 0)
            )

    def announce(self) -> None:
        """There is a new state."""
        for child in self.by_node.values():
            child.state_due = True


def _is_own(entry: Entry, child: Child) -> TypeGuard[Committed]:
    """Its process has made this itself, and needs the number alone."""
    return isinstance(entry, Committed) and entry.origin in child.own and adds(entry)


def number_only(committed: Committed) -> Committed:
    """What the origin gets of its own update: it has the payload."""
    return msgspec.structs.replace(committed, payload=NOTHING)
