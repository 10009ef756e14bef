"""Placement: who stands under whom, ordered from the top down, and who is asked whether it lives.

The tree changes at once; the nodes follow. A node is told its place when the one above it is
confirmed, so that no circle ever exists, and again until its parent has said that it is there.
"""

from __future__ import annotations

from sparkstrom.base.identity import MASTER, EdgeNo, NodeId
from sparkstrom.codec.messages import (
    Address,
    Adopt,
    Closed,
    Disown,
    Join,
    LastSeqs,
    Probe,
    Welcome,
)
from sparkstrom.protocol.common.endings import Ending
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.master.fit import Fit, Goodbye
from sparkstrom.protocol.master.members import Member, answer

FIRST_STREAM = 1000  # up streams of edges; below is room for the join stream
STREAMS_PER_EDGE = 4  # control and data, by UDP and inside one media driver
ORDER_RETRY_S = 0.5
PROBE_SPACING_S = 0.5
QUIET_PER_LEASE = 8  # who has spoken so lately is not asked: joiners request by themselves


def find_place(fit: Fit, node: NodeId, executor: str) -> None:
    """Under a task of the same executor where one has room. Raise UsageError if all is full."""
    near = None
    if fit.tree.depth_max > 1:
        neighbours = [n for n in fit.members.neighbours.get(executor, []) if n in fit.tree]
        near = min(neighbours, key=fit.tree.places.__getitem__, default=None)
    fit.tree = fit.tree.attach(node, near)
    fit.moving[node] = None


def order_places(fit: Fit, now_s: float) -> list[Effect]:
    """Tell everybody whose place is not confirmed, but not before the place above is.

    That may take a while, and until then nobody but the master can know whether they live.
    """
    effects: list[Effect] = []
    for node in list(fit.moving):
        effects += order_place(fit, node, now_s)
    return effects


def order_place(fit: Fit, node: NodeId, now_s: float) -> list[Effect]:
    """The same for one of them."""
    member = fit.members.live[node]
    fit.suspects.setdefault(node, now_s)
    if now_s < member.order_s + ORDER_RETRY_S and member.order is not None:
        return []
    parent = fit.tree.parent(node)
    if parent != MASTER and not fit.members.live[parent].placed:
        fit.attaching.drop(node)
        return []
    return _order(fit, member, parent, now_s)


def _order(fit: Fit, member: Member, parent: NodeId, now_s: float) -> list[Effect]:
    has_answer = parent == MASTER or fit.members.live[parent].whole
    if not (has_answer and fit.attaching.holds(member.node)):
        fit.attaching.renew(member.node, now_s)  # a parent without a replica has nothing for it
    if member.order is None:
        member.order = _place(fit, member, parent)
    member.order_s = now_s
    order = member.order
    adopt = Adopt(node=member.node, edge=order.edge, local=order.up, peer=member.join.address)
    effects: list[Effect] = []
    if parent == MASTER:
        effects += fit.children.adopt(adopt, now_s)
    else:
        effects.append(fit.members.live[parent].answer(adopt))
    return [*effects, answer(member.join, order)]


def _place(fit: Fit, member: Member, parent: NodeId) -> Welcome:
    fit.edges = EdgeNo(fit.edges + 1)
    stream = FIRST_STREAM + STREAMS_PER_EDGE * fit.edges
    host, port = fit.endpoint.host, fit.endpoint.port
    if parent != MASTER:
        above = fit.members.live[parent].join.address
        host, port = above.host, above.port
    position = fit.partition_of(member).position
    return Welcome(
        token=member.join.token,
        count=member.join.count,
        request=member.join.request,
        node=member.node,
        parent=parent,
        edge=fit.edges,
        up=Address(host, port, stream, stream + 1),
        chunks=fit.chunks,
        closed=_closed(fit, member),
        epoch=position.epoch,
        batch=position.batch,
        steps=fit.slowest,
        grants=list(fit.checkpoints.granted(member.node)),
    )


def _closed(fit: Fit, member: Member) -> LastSeqs:
    closed = fit.sequencer.closed
    return [(node, closed[node]) for node in sorted(member.own) if node in closed]


def confirm(fit: Fit, member: Member, edge: EdgeNo) -> None:
    """Its parent has it, by this edge; from now on that one holds its lease."""
    if member.order is None or edge != member.order.edge or member.placed:
        return
    member.placed, member.broken = True, False
    fit.moving.pop(member.node, None)
    fit.attaching.drop(member.node)
    fit.suspects.pop(member.node, None)
    if fit.tree.parent(member.node) != MASTER:
        fit.leases.drop(member.node)


def close_unattached(fit: Fit, now_s: float) -> list[Effect]:
    """End the membership of who was ordered its place long ago, lives, and never came there.

    Its process may come back under another id, once: who has not said a word over an edge under
    its present one would end there again, and fails, so that Spark tries elsewhere.
    """
    reasons: dict[NodeId, str] = {}
    for node, waited_s in fit.attaching.expire(now_s):
        member, parent = fit.members.live[node], fit.tree.parent(node)
        above = "the driver program"
        if parent != MASTER:
            above = f"node {parent} on {fit.members.live[parent].join.host}"
        reasons[node] = NO_EDGE.format(member.join.host, above, waited_s)
        if member.age == (0, 0):
            fit.members.failed[node] = reasons[node]
    effects = fit.close_all(reasons, now_s) if reasons else []
    for node in reasons:
        fit.still_speaks(node, now_s)
    return effects


NO_EDGE = (
    "{} and {} have had no edge for {:.0f} s, although both speak with the master: does UDP get "
    "through between them in both directions (ports, security group)?"
)


def on_silent(fit: Fit, parent: NodeId, child: NodeId, edge: EdgeNo, now_s: float) -> list[Effect]:
    """A parent does not hear its child: is it gone, or only the edge?"""
    member = fit.members.live.get(child)
    above = fit.members.live.get(parent)
    if above is None:
        return []
    if member is None or member.order is None or member.order.edge != edge:
        return [above.answer(Disown(child, edge))]
    member.broken = True
    return doubt(fit, child, now_s)


def doubt(fit: Fit, node: NodeId, now_s: float) -> list[Effect]:
    """Ask it and all below it directly; who is silent for a lease is gone."""
    effects: list[Effect] = []
    for asked in (node, *fit.tree.below(node)):
        member = fit.members.live[asked]
        if not fit.leases.holds(asked):
            fit.leases.renew(asked, now_s)
            fit.suspects[asked] = now_s
            effects.append(answer(member.join, Probe(asked)))
    return effects


def ask_again(fit: Fit, now_s: float) -> list[Effect]:
    """Questions and goodbyes may get lost."""
    effects: list[Effect] = []
    for node, asked_s in fit.suspects.items():
        spoke = fit.leases.silence(node, now_s) < fit.limits.lease_s / QUIET_PER_LEASE
        if now_s >= asked_s + PROBE_SPACING_S and not spoke:
            fit.suspects[node] = now_s
            effects.append(answer(fit.members.live[node].join, Probe(node)))
    for node, goodbye in list(fit.goodbyes.items()):
        if now_s >= goodbye.next_s:
            effects += _say_goodbye(fit, node, goodbye, now_s)
    return effects


def _say_goodbye(fit: Fit, node: NodeId, goodbye: Goodbye, now_s: float) -> list[Effect]:
    goodbye.next_s = now_s + PROBE_SPACING_S
    if now_s > goodbye.until_s:
        del fit.goodbyes[node]
    above = None if goodbye.parent is None else fit.members.live.get(goodbye.parent)
    disown = [above.answer(Disown(node, goodbye.edge))] if above else []
    return [*disown, answer(goodbye.join, closed_answer(fit, node, goodbye.join))]


def closed_answer(fit: Fit, node: NodeId, join: Join) -> Closed:
    """What somebody whose id is closed must know."""
    partition, failed = fit.partitions[join.partition], fit.members.failed.get(node)
    free = partition.owner is None and partition.last_owner == node and failed is None
    ending = Ending.LEASE_OVER if free else Ending.SUPERSEDED
    return Closed(
        token=join.token,
        count=join.count,
        node=node,
        seq=fit.sequencer.closed[node],
        reason=failed or ending.value,
        free=free,
    )


def is_here(fit: Fit, member: Member, now_s: float) -> None:
    """It has spoken to the master itself: its parent may hold its lease again."""
    fit.leases.renew(member.node, now_s)
    fit.suspects.pop(member.node, None)
    if member.broken:
        member.broken = False
        fit.move(member.node, now_s)
    elif member.placed and fit.tree.parent(member.node) != MASTER:
        fit.leases.drop(member.node)


def on_another_request(fit: Fit, member: Member, now_s: float) -> list[Effect]:
    """It wants another edge; whoever was above it may be gone, and below it, if it is alone."""
    order, parent = member.order, fit.tree.parent(member.node)
    fit.suspects.pop(member.node, None)
    member.broken = False
    fit.move(member.node, now_s)
    if member.join.alone:
        for child in fit.tree.children(member.node):
            fit.move(child, now_s)
    if order is None or parent == MASTER or order.parent != parent:
        return []
    return doubt(fit, parent, now_s)
