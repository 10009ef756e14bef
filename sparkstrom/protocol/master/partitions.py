"""Partitions: who owns each, and how much of it is trained.

A minibatch counts as trained when a position at or after it is committed. A position that came
with an update counts with the update's commit; one that came with a report counts once the
update it names is committed, and is dropped when its node's id closes before that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkstrom.base.identity import Position


@dataclass(slots=True)
class Partition:
    """One partition of the data, through all its owners."""

    index: int
    epochs: int
    rows: int = -1  # unknown until the first attempt has read it
    checksum: int = 0
    batches: int = 0  # minibatches per epoch
    position: Position = field(default_factory=lambda: Position(0, 0))
    attempt: int = -1  # Spark's taskAttemptId of the newest owner
    owner: int | None = None  # the live node that trains it
    last_owner: int | None = None
    unowned_s: float = 0.0  # since when nobody owns it

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

    def advance(self, position: Position) -> int:
        """How many minibatches that adds: positions only grow, what is reported late adds none."""
        before = self.minibatches
        self.position = max(self.position, position)
        return self.minibatches - before

    def seen_before(self, rows: int, checksum: int, batches: int) -> bool:
        """Take the first attempt's data as the truth; is this the same data?"""
        if self.rows < 0:
            self.rows, self.checksum, self.batches = rows, checksum, batches
        return (rows, checksum, batches) == (self.rows, self.checksum, self.batches)


class Partitions(tuple[Partition, ...]):
    """All of them, by index. They are looked at after every event: as a tuple, at no cost."""

    __slots__ = ()

    @classmethod
    def of(cls, count: int, epochs: int, now_s: float) -> Partitions:
        """So many that nobody has read."""
        return cls(Partition(index, epochs, unowned_s=now_s) for index in range(count))

    @property
    def minibatches(self) -> int:
        """How many minibatches are committed."""
        return sum(partition.minibatches for partition in self)

    @property
    def minibatches_expected(self) -> int:
        """How many those are that have been read."""
        return sum(partition.epochs * partition.batches for partition in self)
