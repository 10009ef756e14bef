"""Optimizer transfer: who joins in mid-training takes the updater's state of somebody who trains.

Momentum and second moments are worth having, but nobody waits for them beyond a deadline. A
parent that trains lends its own; otherwise the question goes up, and the master finds a lender.
All chunks are of one copy, whose number is a hash of it: those of another one begin anew, and so
do chunks that do not make the copy that they name. Who began in mid-training with a fresh state,
because nobody lent in time, lends none to the end of the fit: it is not what it is taken for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkstrom.base.identity import Position
from sparkstrom.codec.copies import number_of
from sparkstrom.codec.messages import AskUpdater, Phase, UpdaterChunk
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Effect, Send
from sparkstrom.protocol.worker.state import NodeState

ASKED_AT_ONCE = 4  # chunks under way, through links that carry the commits, too
RETRY_FIRST_S = 2.0  # a lender answers once its trainer has made a copy; no chunk tells of a loss


@dataclass(slots=True)
class OptimizerTransfer:
    """One copy on its way in."""

    patience_s: float  # without any progress
    until_s: float
    copy: int = 0  # which one; 0: any
    count: int = 1
    chunks: dict[int, bytes] = field(default_factory=dict)
    asked_s: dict[int, float] = field(default_factory=dict)
    taken_s: float = 0.0  # when a chunk came last
    moved_s: float = 0.0  # when something came last, or was coming
    retry_s: float = RETRY_FIRST_S  # doubles, and is twice what one took: late is not lost
    whole: bytes | None = None

    def take(self, chunk: UpdaterChunk, now_s: float) -> None:
        """Keep a chunk; one of another copy begins anew."""
        asked_s = self.asked_s.pop(chunk.index, now_s)
        self.retry_s = max(self.retry_s, 2 * (now_s - max(asked_s, self.taken_s)))
        self.taken_s = self.moved_s = now_s
        if chunk.copy != self.copy:
            self._begin(chunk.copy, chunk.count)
        if chunk.index < self.count and chunk.index not in self.chunks:
            self.chunks[chunk.index] = chunk.payload
            self.until_s = now_s + self.patience_s
        if len(self.chunks) < self.count:
            return
        content = b"".join(self.chunks[index] for index in range(self.count))
        if number_of(content) == self.copy:
            self.whole = content
        else:
            self._begin(0, 1)

    def _begin(self, copy: int, count: int) -> None:
        self.copy, self.count = copy, count
        self.chunks, self.asked_s = {}, {}

    def wanted(self, now_s: float) -> list[int]:
        """Chunks to ask for now."""
        missing = [index for index in range(self.count) if index not in self.chunks]
        oldest_s = min(self.asked_s.values(), default=now_s)
        if now_s > max(oldest_s, self.moved_s) + self.retry_s:
            self.asked_s.clear()
            self.retry_s *= 2
        waiting = [index for index in missing if index in self.asked_s]
        new = [i for i in missing if i not in waiting][: max(0, ASKED_AT_ONCE - len(waiting))]
        self.asked_s.update(dict.fromkeys(new, now_s))
        return new


def borrow_if_late(me: NodeState, now_s: float) -> None:
    """Its first replica is installed; has training begun without it?"""
    begun = me.steps > 0 or me.position > Position(0, 0)
    late = begun or (me.state is not None and me.state.slowest > 0)
    over = me.state is not None and me.state.phase is not Phase.RUNNING
    me.lends = not late
    if late and not over and me.limits.borrow_s:
        me.borrowing = OptimizerTransfer(me.limits.borrow_s, now_s + me.limits.borrow_s)


def borrow(me: NodeState, now_s: float) -> list[Effect]:
    """Ask on, until all is there or it has taken too long."""
    loan = me.borrowing
    if loan is None:
        return []
    if (whole := loan.whole) is not None or now_s > loan.until_s:
        me.borrowing, me.lends, me.news = None, whole is not None, True
        return [ev.InstallUpdater(whole)]
    if not me.attached:
        return []
    if me.arriving:  # a long message on a slow link, which is no loss
        loan.moved_s = now_s
    asks = [AskUpdater(me.node, loan.copy, index) for index in loan.wanted(now_s)]
    return [Send(me.parent, ask) for ask in asks]


def can_lend(me: NodeState) -> bool:
    """Has it trained, with a state that was never fresh in mid-training?

    What it borrowed is with its trainer for certain only once that has taken a step.
    """
    return me.lends and me.trained


def on_ask_updater(me: NodeState, ask: AskUpdater, to: int) -> list[Effect]:
    """Lend it, or let somebody above find a lender."""
    if can_lend(me):
        return [ev.SendUpdater(to, ask)]
    asked_from_below = to != me.parent
    return [Send(me.parent, ask)] if asked_from_below and me.attached else []


def on_updater(me: NodeState, chunk: UpdaterChunk, sender: int, now_s: float) -> list[Effect]:
    """A chunk for this node, or for one below it, or on its way up; never back where it was."""
    if chunk.asker == me.node:
        if me.borrowing is not None:
            me.borrowing.take(chunk, now_s)
        return borrow(me, now_s)
    via = me.ledger.via(chunk.asker)
    to = via if via in me.family.children else me.parent
    return [] if to == sender else [Send(to, chunk)]
