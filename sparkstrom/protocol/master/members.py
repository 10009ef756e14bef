"""Define the master's limits, and its records of partitions, residual checkpoints and members.

A member is a worker process that has joined the fit under an id. The master closes the id, for
good, when the worker leaves, is silent or is replaced; a process that returns gets a new one. A
position (epoch, batch) is how far a partition has been trained. A residual checkpoint is a file
with changes that a worker learned and did not send; a worker of the next fit takes them over.

A join message has a ``token``, which identifies the process, and a ``count``, which rises with each
id that the process requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sparkstrom.base.identity import EdgeNo, NodeId, Position, Seq
from sparkstrom.codec.messages import (
    Activity,
    AuditAnswer,
    Join,
    Message,
    ResidualCheckpoint,
    Welcome,
)
from sparkstrom.protocol.common.children import DEFAULT_FLOW_LIMITS, FlowLimits
from sparkstrom.protocol.common.events_and_effects import (
    OptimizerCopyRequest,
    SendToProcess,
    TaskEnding,
)
from sparkstrom.protocol.common.fit_spec import FitSpec, PartitionStart
from sparkstrom.protocol.common.stages import (
    CLOSED_ID,
    IN_PLACE,
    WAITING,
    MemberStage,
    Trigger,
    next_stage,
)
from sparkstrom.protocol.common.topology import FLAT


@dataclass(frozen=True, slots=True)
class MasterLimits:
    """Limits of the master. Times are in seconds, sizes in bytes."""

    lease_s: float = 10.0  # a member that is silent for so long is suspected, then closed
    start_s: float = 60.0  # from the first join until training begins with the workers present
    workers_min: int = 1  # a fit does not begin with fewer
    attach_s: float = 120.0  # from sending a member its place until the parent confirms it
    rejoin_s: float = 300.0  # how long a partition may be without a worker, while nobody trains
    release_s: float = 10.0  # how long a partition waits before a finished worker gives up its slot
    end_s: float = 60.0  # longest time without progress in draining or in the audit
    log_bytes: int = 64 << 20  # of the newest commits, kept for children that lack them
    flow_limits: FlowLimits = DEFAULT_FLOW_LIMITS  # on data under way to the master's children
    fan_out: int = FLAT[0]  # children per node, at most
    depth: int = FLAT[1]  # levels below the master, at most
    # Optimizer states to copy before the fit is done, for the last checkpoint; None: none.
    last_copies: OptimizerCopyRequest | None = None


@dataclass(slots=True)
class Partition:
    """One partition of the data: its owner, and how much of it has been trained so far.

    A minibatch counts as trained when a position beyond it is committed. A position that came
    with an update counts with the update's commit. A position from a status counts once the update
    that the status names is committed; the position is dropped if the node's id closes first.
    """

    index: int
    epochs: int  # to train in this fit
    rows: int = -1  # -1: unknown until the first attempt has read the partition
    checksum: int = 0  # of the rows' content, as the first attempt read it
    batches: int = 0  # minibatches per epoch
    position: Position = field(default_factory=lambda: Position(0, 0))  # committed; only grows
    start: Position = Position(0, 0)  # where this fit began in this partition
    attempt: int = -1  # Spark's taskAttemptId of the newest owner; only grows
    is_resumed: bool = False  # rows, checksum and batches come from a checkpoint
    owner: NodeId | None = None  # the live node that trains it
    last_owner: NodeId | None = None  # the current owner, or the one before
    unowned_s: float = 0.0  # time since which it has had no owner

    def resume_from(self, start: PartitionStart) -> None:
        """Take the position, and the rows to expect, from ``start``, the end of an earlier fit."""
        self.start = self.position = min(start.position, self.end)
        self.rows, self.checksum, self.batches = start.rows, start.checksum, start.batches
        self.is_resumed = True

    def as_start(self) -> PartitionStart:
        """Return where a later fit continues in this partition."""
        return PartitionStart(self.position, self.rows, self.checksum, self.batches)

    @property
    def end(self) -> Position:
        """Return the position after the last epoch."""
        return Position(self.epochs, 0)

    @property
    def trained(self) -> bool:
        """Return whether every minibatch of every epoch is committed; True if there are no rows."""
        return self.rows == 0 or (self.rows > 0 and self.position >= self.end)

    @property
    def minibatches(self) -> int:
        """Return the number of committed minibatches, including those of earlier fits."""
        return self.position.epoch * self.batches + self.position.batch

    @property
    def minibatches_resumed(self) -> int:
        """Return how many minibatches were committed before this fit."""
        return self.start.epoch * self.batches + self.start.batch

    def advance(self, position: Position) -> int:
        """Move to ``position`` unless it is older; return the number of minibatches added."""
        before = self.minibatches
        self.position = max(self.position, position)
        return self.minibatches - before

    def record_or_compare_rows(self, rows: int, checksum: int, batches: int) -> bool:
        """Return whether an attempt read the same data as the first attempt, or as the checkpoint.

        The first call of a new fit records the values. Once an attempt matches, the values no
        longer count as a checkpoint's (``is_resumed``).
        """
        if self.rows < 0:
            self.rows, self.checksum, self.batches = rows, checksum, batches
        same = (rows, checksum, batches) == (self.rows, self.checksum, self.batches)
        self.is_resumed &= not same
        return same


class Partitions(tuple[Partition, ...]):
    """All partitions of a fit, by index. A tuple, because it is often scanned."""

    __slots__ = ()

    @classmethod
    def from_spec(cls, spec: FitSpec, now_s: float) -> Partitions:
        """Return a fit's partitions, each at its start and without an owner since ``now_s``."""
        made = cls(Partition(i, spec.epochs, unowned_s=now_s) for i in range(spec.workers))
        for partition, start in zip(made, spec.starts, strict=bool(spec.starts)):
            partition.resume_from(start)
        return made

    def has_newer_attempt(self, index: int, attempt: int) -> bool:
        """Return whether a newer attempt than this one has owned the partition with this index."""
        return index < len(self) and self[index].attempt > attempt

    def as_starts(self) -> tuple[PartitionStart, ...]:
        """Return the start of each partition for a later fit that resumes from here."""
        return tuple(partition.as_start() for partition in self)

    @property
    def minibatches(self) -> int:
        """Return the number of committed minibatches in all partitions."""
        return sum(partition.minibatches for partition in self)

    @property
    def epochs_finished(self) -> int:
        """Return the number of epochs that every non-empty partition has finished."""
        return min((partition.position.epoch for partition in self if partition.rows), default=0)

    @property
    def minibatches_resumed(self) -> int:
        """Return how many minibatches were committed before this fit."""
        return sum(partition.minibatches_resumed for partition in self)

    @property
    def minibatches_expected(self) -> int:
        """Return the number of minibatches in all epochs of the partitions read so far."""
        return sum(partition.epochs * partition.batches for partition in self)

    def minibatches_estimated(self) -> tuple[int, bool]:
        """Return the fit's expected minibatches, and whether every partition has been read.

        A partition that no worker has read yet counts as the mean of those that were read.
        """
        read = [partition for partition in self if partition.rows >= 0]
        expected = sum(partition.epochs * partition.batches for partition in read)
        if read:
            expected += -(-expected // len(read)) * (len(self) - len(read))
        return expected, len(read) == len(self)


# Executor -> path of a file -> mass, the sum of absolute residuals in the file.
CheckpointFiles = dict[str, dict[str, float]]


class ResidualCheckpoints:
    """Residual files of the last fit, with their new owners, and those that this fit leaves.

    A file of the last fit is granted at most once, to one process that joins on its executor. A
    file whose owner died, or that was never granted, counts as lost mass (sum of absolute values).
    ``kept`` are the files of the last fit.
    """

    def __init__(self, kept: CheckpointFiles) -> None:
        self._free = {executor: dict(files) for executor, files in kept.items()}  # not granted
        self._granted: dict[NodeId, dict[str, float]] = {}  # owner -> path -> mass
        self.files: CheckpointFiles = {}  # left by workers of this fit
        self.lost_mass = 0.0  # sum of absolute residuals that no worker will add
        self.granted_files = 0  # number of files granted so far

    def grant(self, executor: str, node: NodeId) -> None:
        """Grant a new process one file of its executor, if one is left."""
        files = self._free.get(executor)
        if files:
            path = min(files)
            self._granted[node] = {path: files.pop(path)}
            self.granted_files += 1

    def record(self, executor: str, node: NodeId, kept: ResidualCheckpoint | None) -> None:
        """Record the file that a worker left on its executor for the next fit; None: it left none.

        The file also contains the changes from a file that the worker took over from the previous
        fit; that file is marked as used.
        """
        if kept is not None:
            self.files.setdefault(executor, {})[kept.path] = kept.mass
            self.mark_grants_used(node)

    def transfer_grant(self, former: NodeId, node: NodeId) -> None:
        """Transfer grants from a closed id to the new id of the same process."""
        if former in self._granted:
            self._granted[node] = self._granted.pop(former)

    def grants_of(self, node: NodeId) -> tuple[str, ...]:
        """Return the paths of the files granted to this node."""
        return tuple(self._granted.get(node, ()))

    def mark_grants_used(self, node: NodeId) -> None:
        """Mark the files granted to this node as used: the node has taken over their changes."""
        self._granted.pop(node, None)

    def count_used_and_lost(self, live: Iterable[NodeId]) -> None:
        """Count files granted to ``live`` nodes as used and all others as lost, as the fit ends."""
        for node in live:
            self.mark_grants_used(node)
        self.count_lost()

    def count_lost(self) -> None:
        """Add the mass of all files that are not marked as used to the lost mass; forget them."""
        for files in (*self._free.values(), *self._granted.values()):
            self.lost_mass += sum(files.values())
        self._free.clear()
        self._granted.clear()


@dataclass(slots=True)
class Member:
    """The master's record of one live node."""

    node: NodeId
    join: Join  # its newest join message under this id
    own_ids: frozenset[NodeId]  # every id that its process has had

    # Its place in the tree, which only ``Placement`` changes.
    stage: MemberStage = WAITING
    placed: bool = False  # ``stage`` is one of IN_PLACE: its parent has confirmed the edge
    order: Welcome | None = None  # newest message about its place and edge; None while WAITING
    order_s: float = -1.0  # when the order was last sent

    # What the member has reported, in statuses and with updates.
    age: tuple[EdgeNo, int] = (EdgeNo(0), 0)  # ``Status.age`` of the newest status
    pending: tuple[Seq, Position] | None = None  # the position counts once the seq is committed
    steps: int = 0  # training steps of the worker; only grows
    activity: Activity = Activity.CATCHING_UP  # never goes back to CATCHING_UP
    final: Seq | None = None  # seq of its last update; None: more may follow
    audit: AuditAnswer | None = None  # hash of its replica; None: not reported yet
    is_source: bool = False  # others may copy its optimizer state
    whole: bool = False  # it has a replica for children; not while it fetches a snapshot
    lag: int = 0  # commits behind its parent, as last noted for the user

    releasing: str | None = None  # why it must give up its task slot; None: it need not

    def advance_stage(self, trigger: Trigger) -> None:
        """Move the member's place to the stage that follows from ``trigger``."""
        self.stage = next_stage(self.stage, trigger)
        self.placed = self.stage in IN_PLACE
        assert (self.order is None) == (self.stage is WAITING) or self.stage is CLOSED_ID, (
            f"node {self.node} is {self.stage} with the order {self.order}"
        )

    def send(self, message: Message) -> SendToProcess:
        """Return the effect that sends a message to the member's process.

        The process drops the message if it has been given another id in the meantime.
        """
        return SendToProcess(self.join.address, self.join.token, message, self.node)

    def set_activity(self, activity: Activity) -> None:
        """Record a reported activity; ignore CATCHING_UP, and any activity after FINISHED.

        A newer report has overtaken those: no member returns to CATCHING_UP, and FINISHED is final.
        """
        if activity is not Activity.CATCHING_UP and self.activity is not Activity.FINISHED:
            self.activity = activity

    @property
    def is_training(self) -> bool:
        """Return whether the member has a replica and rows left to train on."""
        return self.activity in (Activity.WAITING, Activity.STEPPING)


def send_to_process(join: Join, message: Message) -> SendToProcess:
    """Return the effect that sends a message to the process that sent ``join``, whatever its id."""
    return SendToProcess(join.address, join.token, message)


@dataclass(slots=True)
class Departure:
    """Record of a node that has left the fit, for the fit's summary."""

    node: NodeId  # the id that was closed
    partition: int  # index of its partition
    host: str  # name of its host
    reason: str  # human-readable
    at_s: float  # on the controller's clock
    ending: TaskEnding = TaskEnding.OTHER  # the reason as an enum member, for code


class Members:
    """All live members by id, and a record of every join that was answered."""

    def __init__(self, partitions: Partitions, checkpoints: ResidualCheckpoints) -> None:
        self.partitions, self.checkpoints = partitions, checkpoints
        self.live: dict[NodeId, Member] = {}
        self.executors: dict[NodeId, str] = {}  # every id ever given -> its executor
        self.neighbours: dict[str, list[NodeId]] = {}  # executor -> live nodes there
        self.closed_joins: dict[NodeId, Join] = {}  # closed id -> its newest join
        self.failed: dict[NodeId, str] = {}  # closed ids whose process may not return, and why
        self.departures: list[Departure] = []  # in their order
        self.next_id = NodeId(1)  # ids are never reused
        self.slowest = 0  # steps of the slowest training worker, as far as is known
        self._at_slowest = 0  # training workers with ``slowest`` steps; the others have more
        self._ids: dict[tuple[int, int], NodeId] = {}  # (token, count) -> id
        self._counts: dict[int, int] = {}  # token -> its highest count
        self._former: dict[int, list[NodeId]] = {}  # token -> all ids of its process

    def id_of(self, join: Join) -> NodeId | None:
        """Return the id with which this join (token and count) was answered; None if it was not."""
        return self._ids.get((join.token, join.count))

    def former_ids(self, token: int) -> list[NodeId]:
        """Return all ids that the process with this token has had."""
        return self._former.get(token, [])

    def has_newer_join(self, join: Join) -> bool:
        """Return whether the process has since been admitted with a higher count."""
        return self._counts.get(join.token, 0) > join.count

    def partition_of(self, member: Member) -> Partition:
        """Return the partition that this member trains."""
        return self.partitions[member.join.partition]

    def add(self, join: Join) -> Member:
        """Admit a process under a new id as its partition's owner; return the new member.

        A process that returns keeps its residual files; any other is granted one, if one is left.
        """
        node, former = self.next_id, self.former_ids(join.token)
        partition = self.partitions[join.partition]
        assert node not in self.executors, f"node {node} again: nonces begin with a node's id"
        assert partition.owner is None, f"partition {partition.index} is {partition.owner}'s"
        for id_before in former:
            self.checkpoints.transfer_grant(id_before, node)
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
        """End a membership: record the departure, then free the member's partition and return it.

        ``released``: whether the member left on request. Its granted residual files then count as
        used, because the residual that it saved contains them.
        """
        node, partition = member.node, self.partition_of(member)
        assert self.live[node] is member, f"node {node} is not a member"
        del self.live[node]
        self.closed_joins[node] = member.join
        self.neighbours[member.join.executor].remove(node)
        host, ending = member.join.host, TaskEnding.from_text(reason)
        self.departures.append(Departure(node, partition.index, host, reason, now_s, ending))
        if partition.owner == node:
            partition.owner, partition.unowned_s = None, now_s
        if released:
            self.checkpoints.mark_grants_used(node)
        return partition

    def hosts(self) -> dict[int, str]:
        """Return the host of every node that ever joined, by id."""
        living = {node: member.join for node, member in self.live.items()}
        return {node: join.host for node, join in (self.closed_joins | living).items()}

    def advance(self, member: Member, steps: int) -> None:
        """Record a member's step count unless a higher one is known; update ``slowest``."""
        if steps <= member.steps:
            return
        self._at_slowest -= member.steps <= self.slowest and member.is_training
        member.steps = steps
        if self._at_slowest <= 0:
            self.refresh_slowest()

    def refresh_slowest(self) -> None:
        """Set ``slowest`` to the steps of the slowest training worker; without any, keep it."""
        steps = [member.steps for member in self.live.values() if member.is_training]
        self.slowest = min(steps, default=self.slowest)
        self._at_slowest = steps.count(self.slowest)

    def count_training(self) -> int:
        """Return the number of workers that are training."""
        return sum(m.is_training for m in self.live.values())
