"""Closing: how memberships end, each with its last number and its partition's position.

That is read in the same act, so what the next owner begins with is all that ever counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from sparkstrom.base.identity import MASTER, NodeId
from sparkstrom.codec.messages import Closed, Join
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.common.leases import Leases
from sparkstrom.protocol.master.closed_notices import ClosedNotices
from sparkstrom.protocol.master.commit_order import CommitOrder
from sparkstrom.protocol.master.members import Member, Members
from sparkstrom.protocol.master.placement import Placement


class Closing:
    """For whoever is silent, leaves, is superseded, or holds up the others."""

    def __init__(
        self,
        lease_s: float,
        *,
        members: Members,
        leases: Leases,
        placement: Placement,
        order: CommitOrder,
        notices: ClosedNotices,
    ) -> None:
        self._lease_s, self._members, self._leases = lease_s, members, leases
        self._placement, self._order, self._notices = placement, order, notices

    def close(
        self, node: NodeId, reason: str, now_s: float, *, released: bool = False
    ) -> list[Effect]:
        """End one membership."""
        return self.close_all({node: reason}, now_s, released=released)

    def close_all(
        self, reasons: Mapping[NodeId, str], now_s: float, *, released: bool = False
    ) -> list[Effect]:
        """End these; whoever stood under one of them gets another parent.

        ``released``: they leave as they were asked to, with all that they were granted in what
        they have kept.
        """
        effects: list[Effect] = []
        before = self._placement.tree
        moved = self._placement.detach(reasons.keys())
        for node, reason in reasons.items():
            member, parent = self._members.live[node], before.parent(node)
            if parent != MASTER and member.order is not None:
                self._notices.add(member, parent, now_s)
            effects += self._close(member, reason, now_s, released=released)
        self._placement.move_all(moved, now_s)
        return effects

    def _close(self, member: Member, reason: str, now_s: float, *, released: bool) -> list[Effect]:
        self._order.close(member.node)
        partition = self._members.remove(member, reason, now_s, released=released)
        effects = self._placement.forget(member)
        if not released:
            where = f"partition {partition.index} on {member.join.host}"
            text = f"node {member.node} ({where}) left: {reason}"
            effects.append(ev.Note(text, departure=True))
        return effects

    def closed(self, node: NodeId, join: Join) -> Closed:
        """What somebody who asks again under a closed id must know."""
        return self._notices.closed(node, join)

    def tick(self, now_s: float) -> list[Effect]:
        """End the membership of who was silent for a lease, and of who never attached."""
        silent = {
            node: f"silent for {silent_s:.1f} s (lease {self._lease_s:g} s)"
            for node, silent_s in self._leases.expire(now_s)
        }
        effects = self.close_all(silent, now_s) if silent else []
        unattached = self._placement.unattached(now_s)
        if unattached:
            effects += self.close_all(unattached, now_s)
        for node in unattached:
            self._notices.still_speaks(node, now_s)
        return effects
