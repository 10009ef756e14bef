"""Fit: what the master knows of the fit under way, and the one act that ends memberships."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sparkstrom.base.identity import MASTER, CommitNo, EdgeNo, Endpoint, NodeId
from sparkstrom.codec.messages import Join, State
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.child import SERVING, Serving
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.common.ignored import Ignored
from sparkstrom.protocol.common.leases import Leases
from sparkstrom.protocol.common.topology import FLAT, Topology
from sparkstrom.protocol.master.members import Departure, Member, Members
from sparkstrom.protocol.master.partitions import Partition
from sparkstrom.protocol.master.phases import Phases
from sparkstrom.protocol.master.residual_checkpoints import ResidualCheckpoints
from sparkstrom.protocol.master.sequencer import Sequencer
from sparkstrom.protocol.master.staleness import Staleness


@dataclass(frozen=True, slots=True)
class MasterLimits:
    """Times in seconds of the master's clock, sizes in bytes; each wait counts from progress."""

    lease_s: float = 10.0
    start_s: float = 60.0  # from the first join until training begins with those who came
    workers_min: int = 1
    attach_s: float = 120.0  # from the order of a place until its parent confirms it
    rejoin_s: float = 300.0  # how long a partition may be without a worker
    release_s: float = 10.0  # how long one waits before a finished worker gives up its slot
    end_s: float = 60.0  # draining or auditing without progress
    log_bytes: int = 64 << 20
    serving: Serving = SERVING
    fan_out: int = FLAT[0]
    depth: int = FLAT[1]


@dataclass(slots=True)
class Goodbye:
    """To somebody whose id is closed, and to the parent that may still have it."""

    join: Join
    parent: NodeId | None  # None: nobody knows who still has it
    edge: EdgeNo
    until_s: float
    next_s: float


@dataclass(slots=True)
class Fit:
    """The parts of the master's state; each guards its own rules."""

    spec: FitSpec
    chunks: int  # of a snapshot
    limits: MasterLimits
    endpoint: Endpoint  # where the master listens
    sequencer: Sequencer
    ignored: Ignored
    partitions: list[Partition]
    phases: Phases
    checkpoints: ResidualCheckpoints
    leases: Leases  # of whoever stands right under the master, is on the move, or is in doubt
    attaching: Leases  # of whoever was ordered a place that is not confirmed
    children: Children  # who stands right under the master
    tree: Topology
    members: Members = field(default_factory=Members)
    staleness: Staleness = field(default_factory=Staleness)
    edges: EdgeNo = EdgeNo(0)  # ordered so far
    released_s: float = 0.0  # when a finished worker was last asked to give up its slot
    slowest: int = 0  # steps of the slowest live, unfinished worker, as last told
    training: int = 0  # live, unfinished workers with a replica, as last told
    minibatches: int = 0  # committed, as last told
    beat: int = 0
    moving: dict[NodeId, None] = field(default_factory=dict)  # nodes whose place is not confirmed
    suspects: dict[NodeId, float] = field(default_factory=dict)  # node -> when it was last asked
    goodbyes: dict[NodeId, Goodbye] = field(default_factory=dict)
    narrow: set[NodeId] = field(default_factory=set)  # whose links upwards are told to be too slow
    lenders: dict[NodeId, NodeId] = field(default_factory=dict)  # who borrows a state -> whose

    def partition_of(self, member: Member) -> Partition:
        return self.partitions[member.join.partition]

    def look_around(self) -> bool:
        """How many train, and how far they are; is it news that cannot wait?"""
        slowest, training = self.members.slowest(), self.members.training()
        known = self.slowest, self.training
        self.slowest = self.slowest if slowest is None else slowest
        self.training = training
        self.minibatches = sum(partition.minibatches for partition in self.partitions)
        return known != (self.slowest, self.training)

    def state(self) -> State:
        """What everybody is told; each parent adds what is for its own edge."""
        return State(
            phase=self.phases.phase,
            beat=self.beat,
            head=self.sequencer.head,
            final=self.phases.final,
            slowest=self.slowest,
            nodes=len(self.members.live),
            training=self.training,
            minibatches=self.minibatches,
            wait_ms=0,
            closed=list(self.goodbyes),
            stamp=0,
            sent=CommitNo(0),
            bytes_received=0,
            bytes_forwarded=0,
        )

    def close(
        self, node: NodeId, reason: str, now_s: float, *, released: bool = False
    ) -> list[ev.Effect]:
        """End one membership."""
        return self.close_all({node: reason}, now_s, released=released)

    def close_all(
        self, reasons: Mapping[NodeId, str], now_s: float, *, released: bool = False
    ) -> list[ev.Effect]:
        """End these: each one's last seq and its partition's position are read in the same act.

        Whoever stood under one of them gets another parent. ``released``: they leave as they were
        asked to, with all that they were granted in what they have kept.
        """
        effects: list[ev.Effect] = []
        before, self.tree = self.tree, self.tree.detach(reasons, self.suspects)
        for node, reason in reasons.items():
            member, parent = self.members.live[node], before.parent(node)
            if parent != MASTER and member.order is not None:
                until_s = now_s + 2 * self.limits.lease_s
                edge = member.order.edge
                self.goodbyes[node] = Goodbye(member.join, parent, edge, until_s, now_s)
            effects += self._close(member, reason, now_s, released=released)
        for node in _moved(before, self.tree, reasons):
            self.move(node, now_s)
        return effects

    def still_speaks(self, node: NodeId, now_s: float) -> None:
        """Its id is closed, and whoever still has it below goes on feeding it: tell it again.

        All goodbyes may have been lost, and a node that hears of the master does not ask.
        """
        join = self.members.closed_joins.get(node)
        if join is None or node in self.goodbyes or self.members.newest[join.token] > join.count:
            return
        until_s = now_s + 2 * self.limits.lease_s
        self.goodbyes[node] = Goodbye(join, None, EdgeNo(0), until_s, now_s)

    def move(self, node: NodeId, now_s: float) -> None:
        """Its edge upwards is gone, or leads to somebody else now: it needs another one."""
        member = self.members.live[node]
        self.leases.renew(node, now_s)
        member.order, member.placed = None, False
        self.moving[node] = None

    def _close(
        self, member: Member, reason: str, now_s: float, *, released: bool
    ) -> list[ev.Effect]:
        node, partition = member.node, self.partition_of(member)
        self.sequencer.close(node)
        self.staleness.forget(node)
        self.leases.drop(node)
        self.attaching.drop(node)
        self.moving.pop(node, None)
        self.suspects.pop(node, None)
        self.members.remove(node)
        self.members.departures.append(Departure(node, partition.index, member.join.host, reason))
        if partition.owner == node:
            partition.owner, partition.unowned_s = None, now_s
        effects = self.children.disown(node)
        if released:
            self.checkpoints.used(node)
        else:
            where = f"partition {partition.index} on {member.join.host}"
            effects.append(ev.Note(f"node {node} ({where}) left: {reason}"))
        return effects


def _moved(before: Topology, after: Topology, gone: Iterable[NodeId]) -> list[NodeId]:
    """Who has another parent once these are gone: their children and their successors."""
    near = {child for node in gone for child in before.children(node)}
    freed = [before.places[node] for node in gone]
    near |= {after.nodes[place] for place in freed if place in after.nodes}
    return sorted(near & after.places.keys(), key=after.depth)
