"""Update the master's records with the statuses that nodes report.

A status contains a node's progress, activity, counters and, at the end, its audit (replica hash).
"""

from __future__ import annotations

from collections.abc import Iterable

from sparkstrom.base.identity import NodeId, Position
from sparkstrom.codec.messages import Status
from sparkstrom.observe.telemetry import SlowLink, from_wire
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Effect, IgnoredMessages, IgnoreReason
from sparkstrom.protocol.common.flow_control import describe_slow_link
from sparkstrom.protocol.master.announcements import ClosedNotices
from sparkstrom.protocol.master.commit_order import CommitOrder
from sparkstrom.protocol.master.members import Member, Members
from sparkstrom.protocol.master.phases import Phases
from sparkstrom.protocol.master.tree_placement import Placement

LAG_LEAST = 32  # commits; a smaller lag is only a short pause


class Statuses:
    """Applies statuses to members, and remembers which slow links were reported to the user."""

    def __init__(
        self,
        *,
        members: Members,
        phases: Phases,
        order: CommitOrder,
        placement: Placement,
        notices: ClosedNotices,
        ignored: IgnoredMessages,
    ) -> None:
        self._members, self._phases, self._order = members, phases, order
        self._placement, self._notices, self._ignored = placement, notices, ignored
        self.slow: dict[NodeId, str] = {}  # node whose link to its parent is slow -> reported text

    def on_status(self, status: Status, now_s: float) -> list[Effect]:
        """Apply a node's status if it is newer than the last one; confirm the edge that it names.

        If the node's id is closed, only notify its process of that again.
        """
        member = self._members.live.get(status.node)
        if member is None:
            self._notices.notify_closed(status.node, now_s)
            return []
        if status.age <= member.age:
            return []
        member.age = status.age
        self._placement.confirm(member, status.edge)
        self._members.advance(member, status.steps)
        member.set_activity(status.activity)
        self._order.on_position(member, status.after_seq, Position(status.epoch, status.batch))
        member.final = status.final
        member.is_source, member.whole = status.lends, status.whole
        if status.audit is not None:
            self._record_audit(member, status, now_s)
        effects: list[Effect] = []
        if status.stats is not None:
            effects += self._report_counters(member, status)
        if member.node not in self.slow:
            effects += _report_lag(member, status.lag)
        return effects

    def _record_audit(self, member: Member, status: Status, now_s: float) -> None:
        """Record the replica hash in a member's status and, once, the residual file left by it."""
        assert status.audit is not None
        if member.audit is None:
            self._phases.note_progress(now_s)
            checkpoint = status.audit.checkpoint
            self._members.checkpoints.record(member.join.executor, member.node, checkpoint)
        member.audit = status.audit

    def _report_counters(self, member: Member, status: Status) -> list[Effect]:
        """Report a member's counters, and a slow link if the counters contain one."""
        assert status.stats is not None
        counters = from_wire(status.stats)
        if counters.unknown:
            self._ignored.count(status, IgnoreReason.UNKNOWN)
        former = member.own_ids - {member.node}
        effects: list[Effect] = [ev.ReportCounters(member.node, counters, former)]
        if counters.node is not None and counters.node.slow_link is not None:
            effects += self.report_slow_links([counters.node.slow_link])
        return effects

    @property
    def slow_links(self) -> tuple[str, ...]:
        """Return the descriptions of all slow links reported so far."""
        return tuple(self.slow.values())

    def report_slow_links(self, found: Iterable[SlowLink]) -> list[Effect]:
        """Return a note for each of these links that was not reported before."""
        effects: list[Effect] = []
        for link in found:
            node = NodeId(link.node)
            member = self._members.live.get(node)
            if member is not None and node not in self.slow:
                self.slow[node] = describe_slow_link(link, member.join.host)
                effects.append(ev.Note(self.slow[node]))
        return effects


def _report_lag(member: Member, lag: int) -> list[Effect]:
    """Return a note when a member begins to lag, and again whenever its lag has grown fourfold."""
    if lag < max(LAG_LEAST, 4 * member.lag):
        return []
    member.lag = lag
    where = f"partition {member.join.partition} on {member.join.host}"
    return [ev.Note(f"node {member.node} ({where}) is slow: {lag} updates behind, and more")]
