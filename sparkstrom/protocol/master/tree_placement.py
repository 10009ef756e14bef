"""Assign members their places in the tree, and probe members that may be gone.

A member is a live worker, also called a node. Its place determines its parent; an edge is the
connection to that parent. ``Placement.tree`` is the intended tree and changes at once; the nodes
move to their new parents afterwards. The master tells a node its place, in a message called an
order, only once the place of the node's parent is confirmed, so that no cycle can form. The order
is repeated until the parent confirms the edge. A lease is the time for which a node counts as alive
after its last message; a parent watches the leases of its children. If a parent reports that a
child is silent, the master suspects this child and all nodes below it: it sends them probes, and
watches their leases itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sparkstrom.base.identity import MASTER, EdgeNo, Endpoint, NodeId
from sparkstrom.codec.messages import Adopt, ChildSilent, Disown, Join, Probe
from sparkstrom.protocol.common.children import Children, Leases
from sparkstrom.protocol.common.events_and_effects import Effect
from sparkstrom.protocol.common.stages import NOT_HEARD, PLACED, SUSPECT, Trigger
from sparkstrom.protocol.common.topology import Topology
from sparkstrom.protocol.master.announcements import WelcomeFactory
from sparkstrom.protocol.master.members import MasterLimits, Member, Members, send_to_process

ORDER_RETRY_S = 0.5  # between repeats of an order, which may be lost
PROBE_SPACING_S = 0.5  # likewise for a probe
QUIET_PER_LEASE = 8  # a member heard from within a lease / 8 is not probed


class Placement:
    """The intended tree, and each member's progress towards its place in the tree.

    ``leases`` holds the leases of the master's own children, and of members that move or are
    suspected. The parents of all other members hold theirs. ``endpoint`` is the master's address.
    """

    def __init__(
        self,
        limits: MasterLimits,
        endpoint: Endpoint,
        *,
        members: Members,
        leases: Leases,
        children: Children,
        welcomes: WelcomeFactory,
        now_s: float,
    ) -> None:
        self._members, self._leases, self._children = members, leases, children
        self._welcomes, self._endpoint = welcomes, endpoint
        self._quiet_s = limits.lease_s / QUIET_PER_LEASE
        self._attaching = Leases(limits.attach_s, now_s)  # members sent a place, not confirmed yet
        self.tree = Topology(limits.fan_out, limits.depth)  # exactly the live members
        self.moving: dict[NodeId, None] = {}  # members whose place is not confirmed, in order
        self.suspects: dict[NodeId, float] = {}  # moving or suspected member -> last probe

    def assign_place(self, node: NodeId, executor: str) -> None:
        """Add a node to the tree, below another node of the same executor if that one has room.

        Raise UsageError if the tree is full.
        """
        near = None
        if self.tree.depth_max > 1:
            neighbours = [n for n in self._members.neighbours.get(executor, []) if n in self.tree]
            near = min(neighbours, key=self.tree.places.__getitem__, default=None)
        self.tree = self.tree.attach(node, near)

    def detach(self, gone: Collection[NodeId]) -> list[NodeId]:
        """Remove nodes from the tree; return those that now have another parent, topmost first."""
        before, self.tree = self.tree, self.tree.detach(gone, self.suspects)
        near = {child for node in gone for child in before.children(node)}
        freed = [before.places[node] for node in gone]
        near |= {self.tree.nodes[place] for place in freed if place in self.tree.nodes}
        return sorted(near & self.tree.places.keys(), key=self.tree.depth)

    def forget(self, member: Member) -> list[Effect]:
        """Drop all records about a detached member whose id is closed; close the edge to it."""
        node = member.node
        assert node not in self.tree, f"node {node} still has a place"
        self._leases.drop(node)
        self._attaching.drop(node)
        self.moving.pop(node, None)
        self.suspects.pop(node, None)
        member.advance_stage(Trigger.EXPELLED)
        return self._children.disown(node)

    def move(self, member: Member, now_s: float) -> None:
        """Schedule a new edge for a member, because its old one is gone or its parent changes."""
        self._leases.renew(member.node, now_s)
        member.order = None
        member.advance_stage(Trigger.MOVED)
        self.moving[member.node] = None

    def move_each(self, nodes: Iterable[NodeId], now_s: float) -> None:
        """Schedule a new edge for each of these members."""
        for node in nodes:
            self.move(self._members.live[node], now_s)

    def reopen_all(self, endpoint: Endpoint, now_s: float) -> list[Effect]:
        """Schedule new edges for the master's children, whose streams ended with its media driver.

        ``endpoint`` is the address of the new driver, Aeron's process that sends and receives UDP.
        """
        self._endpoint = endpoint
        effects: list[Effect] = []
        for node in list(self.tree.children(MASTER)):
            effects += self._children.disown(node)
            self.move(self._members.live[node], now_s)
        return effects

    def send_due_orders(self, now_s: float) -> list[Effect]:
        """Send each unconfirmed member its place if its parent's place is confirmed.

        Until its place is confirmed, the master alone holds such a member's lease.
        """
        moving = [self._members.live[node] for node in self.moving]
        return [effect for member in moving for effect in self.send_order_if_due(member, now_s)]

    def send_order_if_due(self, member: Member, now_s: float) -> list[Effect]:
        """Send a member its order if its parent's place is confirmed and none was sent just now.

        The time limit for attaching runs only while the parent can answer, with a replica.
        """
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
        return self._send_order(member, parent, now_s)

    def _send_order(self, member: Member, parent: NodeId, now_s: float) -> list[Effect]:
        """Send the place to the member and to its parent; choose a new edge the first time."""
        if member.order is None:
            at = self._endpoint if parent == MASTER else self._members.live[parent].join.address
            member.order = self._welcomes.make(member, parent, at.host, at.port)
            member.advance_stage(Trigger.ORDERED)
        member.order_s = now_s
        order = member.order
        assert order.parent == parent, f"node {member.node} was ordered under {order.parent}"
        adopt = Adopt(node=member.node, edge=order.edge, local=order.up, peer=member.join.address)
        if parent == MASTER:
            effects = self._children.adopt(adopt, now_s)
        else:
            effects = [self._members.live[parent].send(adopt)]
        return [*effects, send_to_process(member.join, order)]

    def confirm(self, member: Member, edge: EdgeNo) -> None:
        """Record that the parent has the member as a child over this edge, and holds its lease.

        Ignore an edge that is not the member's newest one.
        """
        if member.order is None or edge != member.order.edge or member.placed:
            return
        member.advance_stage(Trigger.CONFIRMED)
        self.moving.pop(member.node, None)
        self._attaching.drop(member.node)
        self.suspects.pop(member.node, None)
        if self.tree.parent(member.node) != MASTER:
            self._leases.drop(member.node)

    def expired_attachments(self, now_s: float) -> dict[NodeId, str]:
        """Return live members that did not attach to their parent in time, each with a reason.

        The process of such a member may return under another id. But a process that never reported
        anything over an edge would end the same way again. It is recorded in ``Members.failed``, so
        that its task fails and Spark tries another executor.
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

    def renew_lease(self, member: Member, now_s: float) -> None:
        """Renew the lease of a member that asks for a place, if the master holds the lease."""
        if self._leases.holds(member.node):
            self._leases.renew(member.node, now_s)

    def on_child_silent(self, silent: ChildSilent, now_s: float) -> list[Effect]:
        """Process a report that a child is silent: suspect the child and all nodes below it.

        If the child has left or has another edge now, make the parent drop it instead.
        """
        member = self._members.live.get(silent.child)
        above = self._members.live[silent.node]
        if member is None or member.order is None or member.order.edge != silent.edge:
            return [above.send(Disown(silent.child, silent.edge))]
        member.advance_stage(Trigger.COMPLAINED)
        return self._suspect(silent.child, now_s)

    def _suspect(self, node: NodeId, now_s: float) -> list[Effect]:
        """Take over the leases of a node and of all nodes below it, and probe those nodes.

        Nodes whose leases the master already holds are left out.
        """
        effects: list[Effect] = []
        for asked in (node, *self.tree.descendants(node)):
            member = self._members.live[asked]
            if not self._leases.holds(asked):
                self._leases.renew(asked, now_s)
                self.suspects[asked] = now_s
                if member.stage is PLACED:
                    member.advance_stage(Trigger.DOUBTED)
                effects.append(send_to_process(member.join, Probe(asked)))
        return effects

    def probe_suspects(self, now_s: float) -> list[Effect]:
        """Probe again those suspected members that have not been heard from lately."""
        effects: list[Effect] = []
        for node, asked_s in self.suspects.items():
            spoke = self._leases.silence_s(node, now_s) < self._quiet_s
            if now_s >= asked_s + PROBE_SPACING_S and not spoke:
                self.suspects[node] = now_s
                effects.append(send_to_process(self._members.live[node].join, Probe(node)))
        return effects

    def on_probe_reply(self, member: Member, now_s: float) -> None:
        """Record that a member lives; schedule a new edge if its parent does not hear it."""
        self._leases.renew(member.node, now_s)
        self.suspects.pop(member.node, None)
        if member.stage in NOT_HEARD:
            self.move(member, now_s)
            return
        if member.stage is SUSPECT:
            member.advance_stage(Trigger.SPOKE)
        if member.placed and self.tree.parent(member.node) != MASTER:
            self._leases.drop(member.node)

    def on_new_request(self, member: Member, join: Join, now_s: float) -> list[Effect]:
        """Give a member another edge, which it requests with a newer join.

        Its old parent is probed, because that parent may be gone. If the member also lost the edges
        to its children, the children get new ones.
        """
        assert join.request > member.join.request, "a lower request is an older one"
        before, parent = member.order, self.tree.parent(member.node)
        member.join = join
        self.suspects.pop(member.node, None)
        self.move(member, now_s)
        if join.alone:
            self.move_each(self.tree.children(member.node), now_s)
        doubtful = before is not None and parent != MASTER and before.parent == parent
        effects = self._suspect(parent, now_s) if doubtful else []
        return effects + self.send_order_if_due(member, now_s)


NO_EDGE = (
    "{} and {} have had no edge for {:.0f} s, although both speak with the master: does UDP get "
    "through between them in both directions (ports, security group)?"
)
