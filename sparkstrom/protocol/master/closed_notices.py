"""Closed notices: to whoever may not know that an id is closed, again and again, for a while.

They go to the process that had the id, and to the parent that may still have it below.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkstrom.codec.messages import Closed, Disown, Join
from sparkstrom.protocol.common.endings import Ending
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.master.members import Member, Members, answer
from sparkstrom.protocol.master.sequencer import Sequencer

SPACING_S = 0.5
LEASES = 2  # that long; whoever hears nothing for one asks


@dataclass(slots=True)
class ClosedNotice:
    """Of one id."""

    join: Join
    parent: int | None  # None: nobody knows who still has it
    edge: int
    until_s: float
    next_s: float


class ClosedNotices:
    """By closed id, as long as they are repeated."""

    def __init__(self, lease_s: float, members: Members, sequencer: Sequencer) -> None:
        self._patience_s, self._members, self._sequencer = LEASES * lease_s, members, sequencer
        self.by_node: dict[int, ClosedNotice] = {}

    def add(self, member: Member, parent: int, now_s: float) -> None:
        """It stood under this parent, who is to learn so, too."""
        assert member.order is not None, f"node {member.node} has stood nowhere"
        self._add(member.node, member.join, parent, member.order.edge, now_s)

    def still_speaks(self, node: int, now_s: float) -> None:
        """Its id is closed, and whoever still has it below goes on feeding it: say it again.

        All notices may have been lost, and a node that hears of the master does not ask.
        """
        join = self._members.closed_joins.get(node)
        if join is not None and node not in self.by_node and not self._members.has_returned(join):
            self._add(node, join, None, 0, now_s)

    def _add(self, node: int, join: Join, parent: int | None, edge: int, now_s: float) -> None:
        until_s = now_s + self._patience_s
        self.by_node[node] = ClosedNotice(join, parent, edge, until_s, now_s)

    def is_known(self, node: int) -> None:
        """It has left as it was asked to: nobody waits for this."""
        self.by_node.pop(node, None)

    def say_again(self, now_s: float) -> list[Effect]:
        """Any of them may get lost."""
        effects: list[Effect] = []
        for node, notice in list(self.by_node.items()):
            if now_s >= notice.next_s:
                effects += self._say(node, notice, now_s)
        return effects

    def _say(self, node: int, notice: ClosedNotice, now_s: float) -> list[Effect]:
        notice.next_s = now_s + SPACING_S
        if now_s > notice.until_s:
            del self.by_node[node]
        above = None if notice.parent is None else self._members.live.get(notice.parent)
        disown = [above.answer(Disown(node, notice.edge))] if above else []
        return [*disown, answer(notice.join, self.closed(node, notice.join))]

    def closed(self, node: int, join: Join) -> Closed:
        """What somebody whose id is closed must know."""
        partition, failed = self._members.partitions[join.partition], self._members.failed.get(node)
        free = partition.owner is None and partition.last_owner == node and failed is None
        ending = Ending.LEASE_OVER if free else Ending.SUPERSEDED
        return Closed(
            token=join.token,
            count=join.count,
            node=node,
            seq=self._sequencer.closed[node],
            reason=failed or ending.value,
            free=free,
        )
