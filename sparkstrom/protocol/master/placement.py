"""Placement: who stands under whom, ordered from the top down, and who is asked whether it lives.

The tree changes at once; the nodes follow. A node is told its place when the one above it is
confirmed, so that no circle ever exists, and again until its parent has said that it is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sparkstrom.base.identity import MASTER, EdgeNo, Endpoint, NodeId
from sparkstrom.codec.messages import Adopt, Disown, Join, Probe, Silent
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.common.leases import Leases
from sparkstrom.protocol.common.stages import NOT_HEARD, PLACED, SUSPECT, Cause
from sparkstrom.protocol.common.topology import Topology
from sparkstrom.protocol.master.master_limits import MasterLimits
from sparkstrom.protocol.master.members import Member, Members, answer
from sparkstrom.protocol.master.welcomes import Welcomes

ORDER_RETRY_S = 0.5
PROBE_SPACING_S = 0.5
QUIET_PER_LEASE = 8  # who has spoken so lately is not asked: joiners ask by themselves


class Placement:
    """The tree as it is to be, and how far each member is on its way there.

    ``leases``: of whoever stands right under the master, is on the move, or is in doubt; the
    others' are with their parents. ``endpoint``: where the master listens.
    """

    def __init__(
        self,
        limits: MasterLimits,
        endpoint: Endpoint,
        *,
        members: Members,
        leases: Leases,
        children: Children,
        welcomes: Welcomes,
        now_s: float,
    ) -> None:
        self._members, self._leases, self._children = members, leases, children
        self._welcomes, self._endpoint = welcomes, endpoint
        self._quiet_s = limits.lease_s / QUIET_PER_LEASE
        self._attaching = Leases(limits.attach_s, now_s)  # who was ordered a place, unconfirmed
        self.tree = Topology(limits.fan_out, limits.depth)
        self.moving: dict[NodeId, None] = {}  # nodes whose place is not confirmed
        self.suspects: dict[NodeId, float] = {}  # node -> when it was last asked

    # -- the tree --------------------------------------------------------------------------------

    def find(self, node: NodeId, executor: str) -> None:
        """Under a task of the same executor where one has room. Raise UsageError if all is full."""
        near = None
        if self.tree.depth_max > 1:
            neighbours = [n for n in self._members.neighbours.get(executor, []) if n in self.tree]
            near = min(neighbours, key=self.tree.places.__getitem__, default=None)
        self.tree = self.tree.attach(node, near)

    def detach(self, gone: Collection[NodeId]) -> list[NodeId]:
        """Without these; return who has another parent now, and must be moved, from the top."""
        before, self.tree = self.tree, self.tree.detach(gone, self.suspects)
        near = {child for node in gone for child in before.children(node)}
        freed = [before.places[node] for node in gone]
        near |= {self.tree.nodes[place] for place in freed if place in self.tree.nodes}
        return sorted(near & self.tree.places.keys(), key=self.tree.depth)

    def forget(self, member: Member) -> list[Effect]:
        """Its id is closed; the tree is without it already."""
        node = member.node
        assert node not in self.tree, f"node {node} still has a place"
        self._leases.drop(node)
        self._attaching.drop(node)
        self.moving.pop(node, None)
        self.suspects.pop(node, None)
        member.becomes(Cause.EXPELLED)
        return self._children.disown(node)

    def move(self, member: Member, now_s: float) -> None:
        """Its edge upwards is gone, or leads to somebody else now: it needs another one."""
        self._leases.renew(member.node, now_s)
        member.order = None
        member.becomes(Cause.MOVED)
        self.moving[member.node] = None

    def move_all(self, nodes: Iterable[NodeId], now_s: float) -> None:
        """Each of these."""
        for node in nodes:
            self.move(self._members.live[node], now_s)

    def reopen_all(self, endpoint: Endpoint, now_s: float) -> list[Effect]:
        """The edges here went with the media driver; everybody who stood on one gets another."""
        self._endpoint = endpoint
        effects: list[Effect] = []
        for node in list(self.tree.children(MASTER)):
            effects += self._children.disown(node)
            self.move(self._members.live[node], now_s)
        return effects

    # -- orders ----------------------------------------------------------------------------------

    def order_all(self, now_s: float) -> list[Effect]:
        """Tell everybody whose place is not confirmed, but not before the place above is.

        That may take a while, and until then nobody but the master can know whether they live.
        """
        effects: list[Effect] = []
        for node in list(self.moving):
            effects += self.order(self._members.live[node], now_s)
        return effects

    def order(self, member: Member, now_s: float) -> list[Effect]:
        """The same for one of them."""
        node, live = member.node, self._members.live
        assert not member.placed, f"node {node} has its place"
        self.suspects.setdefault(node, now_s)
        if now_s < member.order_s + ORDER_RETRY_S and member.order is not None:
            return []
        parent = self.tree.parent(node)
        if parent != MASTER and not live[parent].placed:
            self._attaching.drop(node)
            return []
        has_answer = parent == MASTER or live[parent].whole
        if not (has_answer and self._attaching.holds(node)):
            self._attaching.renew(node, now_s)  # a parent without a replica has nothing for it
        return self._tell(member, parent, now_s)

    def _tell(self, member: Member, parent: NodeId, now_s: float) -> list[Effect]:
        if member.order is None:
            at = self._endpoint if parent == MASTER else self._members.live[parent].join.address
            member.order = self._welcomes.make(member, parent, at.host, at.port)
            member.becomes(Cause.ORDERED)
        member.order_s = now_s
        order = member.order
        assert order.parent == parent, f"node {member.node} was ordered under {order.parent}"
        adopt = Adopt(node=member.node, edge=order.edge, local=order.up, peer=member.join.address)
        if parent == MASTER:
            effects = self._children.adopt(adopt, now_s)
        else:
            effects = [self._members.live[parent].answer(adopt)]
        return [*effects, answer(member.join, order)]

    def confirm(self, member: Member, edge: EdgeNo) -> None:
        """Its parent has it, by this edge; from now on that one holds its lease."""
        if member.order is None or edge != member.order.edge or member.placed:
            return
        member.becomes(Cause.CONFIRMED)
        self.moving.pop(member.node, None)
        self._attaching.drop(member.node)
        self.suspects.pop(member.node, None)
        if self.tree.parent(member.node) != MASTER:
            self._leases.drop(member.node)

    def unattached(self, now_s: float) -> dict[NodeId, str]:
        """Who was ordered its place long ago, lives, and never came there; and what to look at.

        Its process may come back under another id, once: who has not said a word over an edge
        under its present one would end there again, and fails, so that Spark tries elsewhere.
        """
        reasons: dict[NodeId, str] = {}
        for node, waited_s in self._attaching.expire(now_s):
            member, parent = self._members.live[node], self.tree.parent(node)
            above = "the driver program"
            if parent != MASTER:
                above = f"node {parent} on {self._members.live[parent].join.host}"
            reasons[node] = NO_EDGE.format(member.join.host, above, waited_s)
            if member.age == (0, 0):
                self._members.failed[node] = reasons[node]
        return reasons

    # -- who lives -------------------------------------------------------------------------------

    def heard(self, member: Member, now_s: float) -> None:
        """It has asked for a place; where the master holds its lease, that shows that it lives."""
        if self._leases.holds(member.node):
            self._leases.renew(member.node, now_s)

    def on_silent(self, silent: Silent, now_s: float) -> list[Effect]:
        """A parent does not hear its child: is it gone, or only the edge?"""
        member = self._members.live.get(silent.child)
        above = self._members.live[silent.node]
        if member is None or member.order is None or member.order.edge != silent.edge:
            return [above.answer(Disown(silent.child, silent.edge))]
        member.becomes(Cause.COMPLAINED)
        return self._doubt(silent.child, now_s)

    def _doubt(self, node: NodeId, now_s: float) -> list[Effect]:
        """Ask it and all below it directly; who is silent for a lease is gone."""
        effects: list[Effect] = []
        for asked in (node, *self.tree.below(node)):
            member = self._members.live[asked]
            if not self._leases.holds(asked):
                self._leases.renew(asked, now_s)
                self.suspects[asked] = now_s
                if member.stage is PLACED:
                    member.becomes(Cause.DOUBTED)
                effects.append(answer(member.join, Probe(asked)))
        return effects

    def ask_again(self, now_s: float) -> list[Effect]:
        """Questions may get lost."""
        effects: list[Effect] = []
        for node, asked_s in self.suspects.items():
            spoke = self._leases.silence(node, now_s) < self._quiet_s
            if now_s >= asked_s + PROBE_SPACING_S and not spoke:
                self.suspects[node] = now_s
                effects.append(answer(self._members.live[node].join, Probe(node)))
        return effects

    def is_here(self, member: Member, now_s: float) -> None:
        """It has spoken to the master itself: its parent may hold its lease again."""
        self._leases.renew(member.node, now_s)
        self.suspects.pop(member.node, None)
        if member.stage in NOT_HEARD:
            self.move(member, now_s)
            return
        if member.stage is SUSPECT:
            member.becomes(Cause.SPOKE)
        if member.placed and self.tree.parent(member.node) != MASTER:
            self._leases.drop(member.node)

    def on_another_request(self, member: Member, join: Join, now_s: float) -> list[Effect]:
        """It wants another edge; whoever was above it may be gone, and below it, if it is alone."""
        assert join.request > member.join.request, "a lower request is an older one"
        before, parent = member.order, self.tree.parent(member.node)
        member.join = join
        self.suspects.pop(member.node, None)
        self.move(member, now_s)
        if join.alone:
            self.move_all(self.tree.children(member.node), now_s)
        doubtful = before is not None and parent != MASTER and before.parent == parent
        effects = self._doubt(parent, now_s) if doubtful else []
        return effects + self.order(member, now_s)


NO_EDGE = (
    "{} and {} have had no edge for {:.0f} s, although both speak with the master: does UDP get "
    "through between them in both directions (ports, security group)?"
)
