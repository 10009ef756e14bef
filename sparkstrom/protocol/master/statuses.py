"""Statuses: what the master takes from a node's own words, whoever handed them on."""

from __future__ import annotations

from sparkstrom.base.identity import NodeId, Position
from sparkstrom.codec.messages import AskUpdater, Status
from sparkstrom.observe.telemetry import SlowLink, from_wire
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.common.ignored import Reason
from sparkstrom.protocol.common.slow_links import in_words
from sparkstrom.protocol.master.fit import Fit
from sparkstrom.protocol.master.members import Member
from sparkstrom.protocol.master.placement import confirm

LAG_LEAST = 32  # commits; less is a pause that passes


def on_status(fit: Fit, status: Status, now_s: float) -> list[Effect]:
    """The newest words of a node count, and confirm the edge that they came by."""
    member = fit.members.live.get(status.node)
    if member is None:
        fit.still_speaks(status.node, now_s)
        return []
    if status.age <= member.age:
        return []
    member.age = status.age
    confirm(fit, member, status.edge)
    member.steps = max(member.steps, status.steps)
    member.is_at(status.activity)
    position = Position(status.epoch, status.batch)
    if member.pending is None or member.pending <= (status.after_seq, position):
        member.pending = (status.after_seq, position)
    count_pending(fit, member)
    member.final = status.final
    member.lends, member.whole = status.lends, status.whole
    if status.audit is not None:
        if member.audit is None:
            fit.phases.progress_s = now_s
            fit.checkpoints.keep(member.join.executor, member.node, status.audit.checkpoint)
        member.audit = status.audit
    effects: list[Effect] = []
    if status.stats is not None:
        counters = from_wire(status.stats)
        if counters.unknown:
            fit.ignored.count(status, Reason.UNKNOWN)
        effects.append(ev.Observed(member.node, counters))
        if counters.node is not None and counters.node.slow_link is not None:
            effects += tell_narrow(fit, [counters.node.slow_link])
    if member.node not in fit.narrow:
        effects += _tell_lag(member, status.lag)
    return effects


def tell_narrow(fit: Fit, found: list[SlowLink]) -> list[Effect]:
    """Each link that is too slow, once."""
    effects: list[Effect] = []
    for narrow in found:
        node = NodeId(narrow.node)
        member = fit.members.live.get(node)
        if member is not None and node not in fit.narrow:
            fit.narrow.add(node)
            effects.append(ev.Note(in_words(narrow, member.join.host)))
    return effects


def _tell_lag(member: Member, lag: int) -> list[Effect]:
    """Say who is slow, and again when it has become four times worse."""
    if lag < max(LAG_LEAST, 4 * member.lag):
        return []
    member.lag = lag
    where = f"partition {member.join.partition} on {member.join.host}"
    return [ev.Note(f"node {member.node} ({where}) is slow: {lag} updates behind, and more")]


def count_pending(fit: Fit, member: Member) -> None:
    """A position counts once the update that it names is committed."""
    if member.pending is None:
        return
    after_seq, position = member.pending
    if fit.sequencer.last[member.node] >= after_seq:
        fit.staleness.sent_nothing(member.node, fit.partition_of(member).advance(position))
        member.pending = None


def find_lender(fit: Fit, ask: AskUpdater) -> list[Effect]:
    """Hand the question to somebody who lends; always to the same one, while it lives."""
    members = fit.members.live
    lender = members.get(fit.lenders[ask.asker]) if ask.asker in fit.lenders else None
    if lender is None:
        able = [m for m in members.values() if m.lends and m.node != ask.asker]
        if not able:
            fit.ignored.count(ask, Reason.UNSERVED)
            return []
        lender = max(able, key=lambda member: (member.steps, -member.node))
        fit.lenders[ask.asker] = lender.node
    return [lender.answer(ask)]
