"""Reporting: a node renews its lease and acknowledges, and repeats what may not have been heard."""

from __future__ import annotations

import zlib

from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import Message, Phase, Report
from sparkstrom.protocol.events import Effect, Send
from sparkstrom.protocol.standing import Standing

REPORT_SPACING_S = 0.01  # news is told at once, but not more often than this
REPEAT_S = 0.25  # between repeats of what the master has not shown to have heard


def report_if_due(me: Standing, now_s: float) -> list[Effect]:
    """Report news at once, and otherwise when the lease wants it."""
    news_due = me.news and now_s >= me.report_due_s
    return report(me, now_s) if news_due or now_s >= me.lease_due_s else []


def report(me: Standing, now_s: float) -> list[Effect]:
    """Renew the lease, with whatever the master may have missed beside it."""
    me.news = False
    me.reports += 1
    me.report_due_s = now_s + REPORT_SPACING_S
    unheard = _unheard(me)
    me.lease_due_s = now_s + (REPEAT_S if unheard else _pause_s(me))
    message = Report(
        edge=me.edge,
        received=me.received,
        after_seq=me.uplink.last_seq,
        epoch=me.position.epoch,
        batch=me.position.batch,
        steps=me.pace,
        activity=me.activity,
    )
    return [Send(MASTER, message), *(Send(MASTER, other) for other in unheard)]


def _pause_s(me: Standing) -> float:
    """Until the next renewal: no two nodes keep the same beat."""
    jitter = zlib.crc32(b"%d/%d" % (me.node, me.reports)) / 2**32
    return me.limits.lease_s / 4 * (0.5 + 0.5 * jitter)


def _unheard(me: Standing) -> list[Message]:
    """What the master must know and has not shown to know."""
    phase = me.state.phase if me.state is not None else Phase.GATHERING
    out: list[Message] = []
    if me.final is not None and phase < Phase.AUDIT:
        out.append(me.final)
    if me.audit is not None and phase < Phase.DONE:
        out.append(me.audit)
    if me.failed is not None:
        out.append(me.failed)
    if me.leaving is not None:
        out.append(me.leaving)
    return out
