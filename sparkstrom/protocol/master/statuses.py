"""Statuses: what the master takes from a node's own words, whoever handed them on."""

from __future__ import annotations

from collections.abc import Iterable

from sparkstrom.base.identity import NodeId, Position
from sparkstrom.codec.messages import Status
from sparkstrom.observe.telemetry import SlowLink, from_wire
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.common.ignored import Ignored, Reason
from sparkstrom.protocol.common.slow_links import in_words
from sparkstrom.protocol.master.closed_notices import ClosedNotices
from sparkstrom.protocol.master.commit_order import CommitOrder
from sparkstrom.protocol.master.members import Member, Members
from sparkstrom.protocol.master.phases import Phases
from sparkstrom.protocol.master.placement import Placement

LAG_LEAST = 32  # commits; less is a pause that passes


class Statuses:
    """The newest of each member, and what people were told of the slow ones."""

    def __init__(
        self,
        *,
        members: Members,
        phases: Phases,
        order: CommitOrder,
        placement: Placement,
        notices: ClosedNotices,
        ignored: Ignored,
    ) -> None:
        self._members, self._phases, self._order = members, phases, order
        self._placement, self._notices, self._ignored = placement, notices, ignored
        self.slow: dict[NodeId, str] = {}  # whose links upwards are too slow, as people were told

    def on_status(self, status: Status, now_s: float) -> list[Effect]:
        """The newest words of a node count, and confirm the edge that they came by."""
        member = self._members.live.get(status.node)
        if member is None:
            self._notices.still_speaks(status.node, now_s)
            return []
        if status.age <= member.age:
            return []
        member.age = status.age
        self._placement.confirm(member, status.edge)
        member.steps = max(member.steps, status.steps)
        member.is_at(status.activity)
        self._order.is_at(member, status.after_seq, Position(status.epoch, status.batch))
        member.final = status.final
        member.is_source, member.whole = status.lends, status.whole
        if status.audit is not None:
            self._on_audit(member, status, now_s)
        effects: list[Effect] = []
        if status.stats is not None:
            effects += self._on_counters(member, status)
        if member.node not in self.slow:
            effects += _report_lag(member, status.lag)
        return effects

    def _on_audit(self, member: Member, status: Status, now_s: float) -> None:
        assert status.audit is not None
        if member.audit is None:
            self._phases.progressed(now_s)
            checkpoint = status.audit.checkpoint
            self._members.checkpoints.keep(member.join.executor, member.node, checkpoint)
        member.audit = status.audit

    def _on_counters(self, member: Member, status: Status) -> list[Effect]:
        assert status.stats is not None
        counters = from_wire(status.stats)
        if counters.unknown:
            self._ignored.count(status, Reason.UNKNOWN)
        effects: list[Effect] = [ev.Observed(member.node, counters)]
        if counters.node is not None and counters.node.slow_link is not None:
            effects += self.report_slow([counters.node.slow_link])
        return effects

    @property
    def slow_links(self) -> tuple[str, ...]:
        """All that were reported so far."""
        return tuple(self.slow.values())

    def report_slow(self, found: Iterable[SlowLink]) -> list[Effect]:
        """Each link that is too slow, once."""
        effects: list[Effect] = []
        for link in found:
            node = NodeId(link.node)
            member = self._members.live.get(node)
            if member is not None and node not in self.slow:
                self.slow[node] = in_words(link, member.join.host)
                effects.append(ev.Note(self.slow[node]))
        return effects


def _report_lag(member: Member, lag: int) -> list[Effect]:
    """Say who is slow, and again when it has become four times worse."""
    if lag < max(LAG_LEAST, 4 * member.lag):
        return []
    member.lag = lag
    where = f"partition {member.join.partition} on {member.join.host}"
    return [ev.Note(f"node {member.node} ({where}) is slow: {lag} updates behind, and more")]
