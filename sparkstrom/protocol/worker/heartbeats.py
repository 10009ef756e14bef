"""Heartbeats: a node renews its lease, acknowledges, and tells the news of all below it."""

from __future__ import annotations

import zlib

from sparkstrom.codec.messages import Direct, Heartbeat, Status
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Effect, Send
from sparkstrom.protocol.worker.optimizer_transfer import can_lend
from sparkstrom.protocol.worker.state import NodeState

REPORT_SPACING_S = 0.01  # news is told at once, but not more often than this
REPEAT_S = 0.25  # between repeats of what has not been shown to be heard


def report_if_due(me: NodeState, now_s: float) -> list[Effect]:
    """Report news at once, and otherwise when the lease wants it."""
    news_due = me.news and now_s >= me.report_due_s
    return report(me, now_s) if news_due or now_s >= me.lease_due_s else []


def report(me: NodeState, now_s: float) -> list[Effect]:
    """Renew the lease, with whatever may not have been heard beside it."""
    me.news = False
    me.reports += 1
    me.report_due_s = now_s + REPORT_SPACING_S
    put_own_status(me, now_s)
    direct = _unheard(me)
    me.lease_due_s = now_s + (REPEAT_S if direct or me.ledger.has_news else _pause_s(me))
    stamp, news = me.ledger.news()
    received = Heartbeat(
        received=me.received,
        taken=me.taken + me.arriving,
        catching=me.catchup is not None,
        stamp=stamp,
        news=news,
    )
    return [Send(me.parent, received), *(ev.Tell(message) for message in direct)]


def lag_of(me: NodeState, now_s: float) -> int:
    """Commits behind the parent, in powers of two, once that has lasted; 0 in normal running."""
    if not me.behind or me.state is None:
        me.level_s = now_s
    if now_s - me.level_s <= me.limits.lease_s / 2 or me.state is None:
        return 0
    return 1 << ((me.state.head - me.received).bit_length() - 1)


def put_own_status(me: NodeState, now_s: float) -> None:
    """What changed since it was told last is news."""
    known = me.status
    status = Status(
        node=me.node,
        edge=me.edge,
        count=known.count if known is not None else 1,
        after_seq=me.uplink.last_seq,
        epoch=me.position.epoch,
        batch=me.position.batch,
        steps=me.pace,
        activity=me.activity,
        lag=lag_of(me, now_s),
        final=me.final,
        audit=me.audit,
        stats=me.stats,
        lends=can_lend(me),
        whole=me.history.whole,
    )
    if status != known:
        me.status = Status(**{name: getattr(status, name) for name in _SAME}, count=me.reports)
        me.ledger.put(me.status, me.node)


_SAME = tuple(name for name in Status.__struct_fields__ if name != "count")


def _pause_s(me: NodeState) -> float:
    """Until the next renewal: no two nodes keep the same beat."""
    jitter = zlib.crc32(b"%d/%d" % (me.node, me.reports)) / 2**32
    return me.limits.lease_s / 4 * (0.5 + 0.5 * jitter)


def _unheard(me: NodeState) -> list[Direct]:
    """What the master itself must hear and has not shown to know."""
    return [message for message in (me.failed, me.leaving) if message is not None]
