"""Members: the live nodes of a fit as the master knows them, and what each owns."""

from __future__ import annotations

from dataclasses import dataclass

from sparkstrom.base.identity import EdgeNo, NodeId, Position, Seq
from sparkstrom.codec.messages import Activity, AuditAnswer, Join, Message, Welcome
from sparkstrom.protocol.common.events import Answer
from sparkstrom.protocol.common.stages import (
    CLOSED_ID,
    IN_PLACE,
    WAITING,
    Cause,
    MemberStage,
    after,
)
from sparkstrom.protocol.master.partitions import Partition, Partitions
from sparkstrom.protocol.master.residual_checkpoints import ResidualCheckpoints


@dataclass(slots=True)
class Member:
    """One live node."""

    node: NodeId
    join: Join  # its newest
    own: frozenset[NodeId]  # every id that its process has had

    # its place: ``Placement`` alone changes it
    stage: MemberStage = WAITING
    placed: bool = False  # its parent has confirmed its edge, whatever became of that since
    order: Welcome | None = None  # the newest, with the edge that it is to open
    order_s: float = -1.0  # when it was last sent

    # what it said of itself: ``Statuses``, and what came with updates
    age: tuple[EdgeNo, int] = (EdgeNo(0), 0)
    pending: tuple[Seq, Position] | None = None  # counts once this seq is committed
    steps: int = 0
    activity: Activity = Activity.CATCHING_UP
    final: Seq | None = None
    audit: AuditAnswer | None = None
    is_source: bool = False  # others may take its optimizer's state
    whole: bool = False  # it has a replica; who takes a snapshot, also another one, has none
    lag: int = 0  # commits behind its parent, as people were told

    releasing: str | None = None  # why it is to give up its slot: ``Vacancies``

    def becomes(self, cause: Cause) -> None:
        """The place's next stage."""
        self.stage = after(self.stage, cause)
        self.placed = self.stage in IN_PLACE
        assert (self.order is None) == (self.stage is WAITING) or self.stage is CLOSED_ID, (
            f"node {self.node} is {self.stage} with the order {self.order}"
        )

    def answer(self, message: Message) -> Answer:
        """Say this directly to whoever has its id."""
        return Answer(self.join.address, self.join.token, message, self.node)

    def is_at(self, activity: Activity) -> None:
        """Nobody catches up again or unlearns: such a report was overtaken by a newer one."""
        if activity is not Activity.CATCHING_UP and self.activity is not Activity.FINISHED:
            self.activity = activity

    @property
    def unfinished(self) -> bool:
        return self.activity in (Activity.WAITING, Activity.STEPPING)


def answer(join: Join, message: Message) -> Answer:
    """Say this directly to the process that has joined so, whether it knows its id or not."""
    return Answer(join.address, join.token, message)


@dataclass(slots=True)
class Departure:
    """Somebody who is no member any more, for the summary."""

    node: NodeId
    partition: int
    host: str
    reason: str
    at_s: float  # on the driver's clock


class Members:
    """Live nodes by id, and every (token, count) that ever joined; with what they own."""

    def __init__(self, partitions: Partitions, checkpoints: ResidualCheckpoints) -> None:
        self.partitions, self.checkpoints = partitions, checkpoints
        self.live: dict[NodeId, Member] = {}
        self.executors: dict[NodeId, str] = {}  # of every id: where it ran
        self.neighbours: dict[str, list[NodeId]] = {}  # executor -> live nodes there
        self.closed_joins: dict[NodeId, Join] = {}  # of ids that are closed: the newest
        self.failed: dict[NodeId, str] = {}  # ids that no other may follow, and why
        self.departures: list[Departure] = []
        self.next_id = NodeId(1)
        self._ids: dict[tuple[int, int], NodeId] = {}  # (token, count) -> id
        self._counts: dict[int, int] = {}  # token -> its highest count
        self._former: dict[int, list[NodeId]] = {}  # token -> its ids

    def of(self, join: Join) -> NodeId | None:
        """The id that this very join was answered with, if it was."""
        return self._ids.get((join.token, join.count))

    def former(self, token: int) -> list[NodeId]:
        """All ids that this process has had."""
        return self._former.get(token, [])

    def has_returned(self, join: Join) -> bool:
        """Has its process come back under another id since?"""
        return self._counts.get(join.token, 0) > join.count

    def partition_of(self, member: Member) -> Partition:
        """The rows that it trains on."""
        return self.partitions[member.join.partition]

    # -- changing --------------------------------------------------------------------------------

    def add(self, join: Join) -> Member:
        """A new id, which owns the partition; what the process was granted goes along."""
        node, former = self.next_id, self.former(join.token)
        partition = self.partitions[join.partition]
        assert node not in self.executors, f"node {node} again: nonces begin with a node's id"
        assert partition.owner is None, f"partition {partition.index} is {partition.owner}'s"
        for id_before in former:
            self.checkpoints.returned(id_before, node)
        if not former:
            self.checkpoints.grant(join.executor, node)
        partition.owner = partition.last_owner = node
        partition.attempt = join.attempt
        self.live[node] = member = Member(node, join, frozenset([*former, node]))
        self.executors[node] = join.executor
        self._ids[join.token, join.count] = node
        self._counts[join.token] = join.count
        self._former.setdefault(join.token, []).append(node)
        self.neighbours.setdefault(join.executor, []).append(node)
        self.next_id = NodeId(node + 1)
        return member

    def remove(self, member: Member, reason: str, now_s: float, *, released: bool) -> Partition:
        """It is a member no more, and owns nothing; its id stays known. Return its partition."""
        node, partition = member.node, self.partition_of(member)
        assert self.live[node] is member, f"node {node} is no member"
        del self.live[node]
        self.closed_joins[node] = member.join
        self.neighbours[member.join.executor].remove(node)
        self.departures.append(Departure(node, partition.index, member.join.host, reason, now_s))
        if partition.owner == node:
            partition.owner, partition.unowned_s = None, now_s
        if released:
            self.checkpoints.used(node)
        return partition

    # -- looking ---------------------------------------------------------------------------------

    def hosts(self) -> dict[int, str]:
        """Where each node runs or ran that ever joined."""
        living = {node: member.join for node, member in self.live.items()}
        return {node: join.host for node, join in (self.closed_joins | living).items()}

    def slowest(self) -> int | None:
        """Steps of the slowest live, unfinished worker that holds a replica."""
        return min((m.steps for m in self.live.values() if m.unfinished), default=None)

    def training(self) -> int:
        """How many live, unfinished workers hold a replica."""
        return sum(m.unfinished for m in self.live.values())
