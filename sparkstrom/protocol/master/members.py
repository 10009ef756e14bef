"""Members: the live nodes of a fit as the master knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkstrom.base.identity import EdgeNo, NodeId, Position, Seq
from sparkstrom.codec.messages import Activity, AuditAnswer, Join, Message, Welcome
from sparkstrom.protocol.common.events import Answer


@dataclass(slots=True)
class Member:
    """One live node."""

    node: NodeId
    join: Join  # its newest
    own: frozenset[NodeId]  # every id that its process has had

    # its place
    order: Welcome | None = None  # the newest, with the edge that it is to open
    order_s: float = -1.0  # when it was last sent
    placed: bool = False  # its parent has confirmed that edge
    broken: bool = False  # its parent does not hear it over that edge

    # what it said of itself
    age: tuple[EdgeNo, int] = (EdgeNo(0), 0)
    pending: tuple[Seq, Position] | None = None  # counts once this seq is committed
    steps: int = 0
    activity: Activity = Activity.CATCHING_UP
    final: Seq | None = None
    audit: AuditAnswer | None = None
    releasing: str | None = None
    lends: bool = False  # its updater's state
    whole: bool = False  # it has a replica; who takes a snapshot, also another one, has none
    lag: int = 0  # commits behind its parent, as people were told

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


@dataclass(slots=True)
class Members:
    """Live nodes by id, and every (token, count) that ever joined."""

    live: dict[NodeId, Member] = field(default_factory=dict)
    joins: dict[tuple[int, int], NodeId] = field(default_factory=dict)  # (token, count) -> id
    executors: dict[NodeId, str] = field(default_factory=dict)  # of every id: where it ran
    newest: dict[int, int] = field(default_factory=dict)  # token -> its highest count
    tokens: dict[int, list[NodeId]] = field(default_factory=dict)  # token -> its ids
    neighbours: dict[str, list[NodeId]] = field(default_factory=dict)  # executor -> live ids
    closed_joins: dict[NodeId, Join] = field(
        default_factory=dict
    )  # of ids that are closed: the newest
    failed: dict[NodeId, str] = field(default_factory=dict)  # ids that no other may follow, and why
    departures: list[Departure] = field(default_factory=list)
    next_id: NodeId = NodeId(1)

    def of(self, join: Join) -> NodeId | None:
        """The id that this very join was answered with, if it was."""
        return self.joins.get((join.token, join.count))

    def former(self, token: int) -> list[NodeId]:
        """All ids that this process has had."""
        return self.tokens.get(token, [])

    def add(self, member: Member) -> None:
        self.live[member.node] = member
        self.executors[member.node] = member.join.executor
        self.joins[member.join.token, member.join.count] = member.node
        self.newest[member.join.token] = member.join.count
        self.tokens.setdefault(member.join.token, []).append(member.node)
        self.neighbours.setdefault(member.join.executor, []).append(member.node)
        self.next_id = max(self.next_id, NodeId(member.node + 1))

    def remove(self, node: NodeId) -> None:
        """It is a member no more; its id stays known."""
        member = self.live.pop(node)
        self.closed_joins[node] = member.join
        self.neighbours[member.join.executor].remove(node)

    def slowest(self) -> int | None:
        """Steps of the slowest live, unfinished worker that holds a replica."""
        return min((m.steps for m in self.live.values() if m.unfinished), default=None)

    def training(self) -> int:
        """How many live, unfinished workers hold a replica."""
        return sum(m.unfinished for m in self.live.values())
