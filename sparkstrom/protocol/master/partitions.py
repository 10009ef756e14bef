"""Partitions: who owns each, and how much of it is trained.

A minibatch counts as trained when a position at or after it is committed. A position that came
with an update counts with the update's commit; one that came with a report counts once the
update it names is committed, and is dropped when its node's id closes before that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkstrom.base.identity import NodeId, Position
from sparkstrom.protocol.common.fit_spec import FitSpec, PartitionStart


@dataclass(slots=True)
class Partition:
    """One partition of the data, through all its owners."""

    index: int
    epochs: int
    rows: int = -1  # unknown until the first attempt has read it
    checksum: int = 0
    batches: int = 0  # minibatches per epoch
    position: Position = field(default_factory=lambda: Position(0, 0))
    start: Position = Position(0, 0)  # where this fit began with it
    attempt: int = -1  # Spark's taskAttemptId of the newest owner
    is_resumed: bool = False  # what it is known of comes from a checkpoint
    owner: NodeId | None = None  # the live node that trains it
    last_owner: NodeId | None = None
    unowned_s: float = 0.0  # since when nobody owns it

    def begin(self, start: PartitionStart) -> None:
        """Go on from there, with the same rows; beyond the last epoch there is nothing to do."""
        self.start = self.position = min(start.position, self.end)
        self.rows, self.checksum, self.batches = start.rows, start.checksum, start.batches
        self.is_resumed = True

    def as_start(self) -> PartitionStart:
        """For a fit that goes on with it."""
        return PartitionStart(self.position, self.rows, self.checksum, self.batches)

    @property
    def end(self) -> Position:
        return Position(self.epochs, 0)

    @property
    def trained(self) -> bool:
        """Is every minibatch of every epoch committed? An empty partition has none."""
        return self.rows == 0 or (self.rows > 0 and self.position >= self.end)

    @property
    def minibatches(self) -> int:
        """How many minibatches are committed."""
        return self.position.epoch * self.batches + self.position.batch

    @property
    def minibatches_resumed(self) -> int:
        """How many of them in the fit that this one goes on with."""
        return self.start.epoch * self.batches + self.start.batch

    def advance(self, position: Position) -> int:
        """How many minibatches that adds: positions only grow, what is reported late adds none."""
        before = self.minibatches
        self.position = max(self.position, position)
        return self.minibatches - before

    def seen_before(self, rows: int, checksum: int, batches: int) -> bool:
        """Take the first attempt's data as the truth; is this the same data?"""
        if self.rows < 0:
            self.rows, self.checksum, self.batches = rows, checksum, batches
        same = (rows, checksum, batches) == (self.rows, self.checksum, self.batches)
        self.is_resumed &= not same
        return same


class Partitions(tuple[Partition, ...]):
    """All of them, by index. They are looked at after every event: as a tuple, at no cost."""

    __slots__ = ()

    @classmethod
    def of(cls, spec: FitSpec, now_s: float) -> Partitions:
        """That nobody has read, or that the fit goes on with."""
        made = cls(Partition(i, spec.epochs, unowned_s=now_s) for i in range(spec.workers))
        for partition, start in zip(made, spec.starts, strict=bool(spec.starts)):
            partition.begin(start)
        return made

    def as_starts(self) -> tuple[PartitionStart, ...]:
        """For a fit that goes on from a copy of the master's replica, made at this moment."""
        return tuple(partition.as_start() for partition in self)

    @property
    def minibatches(self) -> int:
        """How many minibatches are committed."""
        return sum(partition.minibatches for partition in self)

    @property
    def epochs_whole(self) -> int:
        """How many epochs are committed in every partition that trains, or that nobody has read."""
        return min((partition.position.epoch for partition in self if partition.rows), default=0)

    @property
    def minibatches_resumed(self) -> int:
        """How many of them in the fit that this one goes on with."""
        return sum(partition.minibatches_resumed for partition in self)

    @property
    def minibatches_expected(self) -> int:
        """How many those are that have been read."""
        return sum(partition.epochs * partition.batches for partition in self)
