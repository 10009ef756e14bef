"""Fit: what the master knows of the fit under way, and the one act that ends a membership."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkstrom.protocol import events as ev
from sparkstrom.protocol.keeping import Keeping
from sparkstrom.protocol.leases import Leases
from sparkstrom.protocol.members import Departure, Member, Members
from sparkstrom.protocol.partitions import Partition
from sparkstrom.protocol.phases import Phases
from sparkstrom.protocol.sequencer import Sequencer

GOOD_ENDS = ("done", "released")


@dataclass(frozen=True, slots=True)
class MasterLimits:
    """Times in seconds of the master's clock, sizes in bytes; each wait counts from progress."""

    lease_s: float = 10.0
    start_s: float = 60.0  # from the first join until training begins with those who came
    workers_min: int = 1
    rejoin_s: float = 300.0  # how long a partition may be without a worker
    release_s: float = 10.0  # how long one waits before a finished worker gives up its slot
    end_s: float = 60.0  # draining or auditing without progress
    log_bytes: int = 64 << 20
    downlink_bytes: int = 4 << 20


@dataclass(slots=True)
class Fit:
    """The parts of the master's state; each guards its own rules."""

    version: str
    chunks: int  # of a snapshot
    limits: MasterLimits
    host: str  # where the master listens
    port: int
    sequencer: Sequencer
    partitions: list[Partition]
    phases: Phases
    keeping: Keeping
    leases: Leases
    members: Members = field(default_factory=Members)
    edges: int = 0  # opened so far
    released_s: float = 0.0  # when a finished worker was last asked to give up its slot
    slowest: int = 0  # steps of the slowest live, unfinished worker, as last told

    def partition_of(self, member: Member) -> Partition:
        return self.partitions[member.join.partition]

    def last_of(self, nodes: list[int]) -> list[tuple[int, int]]:
        """Per id its newest committed seq."""
        known = {**self.sequencer.closed, **self.sequencer.last}
        return [(node, known[node]) for node in sorted(set(nodes))]

    def close(self, member: Member, reason: str, now_s: float) -> list[ev.Effect]:
        """End this id: its last seq and its partition's position are read in the same act."""
        node, partition = member.node, self.partition_of(member)
        self.sequencer.close(node)
        self.leases.drop(node)
        del self.members.live[node]
        self.members.departures.append(Departure(node, partition.index, member.join.host, reason))
        if partition.owner == node:
            partition.owner, partition.unowned_s = None, now_s
        effects: list[ev.Effect] = [ev.CloseEdge(node)]
        if reason in GOOD_ENDS:
            self.keeping.used(node)
        else:
            where = f"partition {partition.index} on {member.join.host}"
            effects.append(ev.Note(f"node {node} ({where}) left: {reason}"))
        return effects
