"""What is to be trained, and how far: the same words for the driver, its master and all workers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparkstrom.base.identity import Position
from sparkstrom.observe.stopping import LOSS


@dataclass(frozen=True, slots=True)
class PartitionStart:
    """How far a partition was trained before, and what its rows were then."""

    position: Position  # of rounds' it may be behind an epoch's last minibatch: not measured yet
    rows: int = -1  # unknown: whatever the first attempt reads
    checksum: int = 0
    batches: int = 0  # minibatches per epoch

    @property
    def minibatches(self) -> int:
        """So many are not trained again."""
        return self.position.epoch * self.batches + self.position.batch

    @property
    def past_whole_epoch(self) -> PartitionStart:
        """The same where an epoch is over with its last minibatch."""
        epoch, batch = self.position
        whole = self.batches > 0 and batch == self.batches
        return replace(self, position=Position(epoch + 1, 0)) if whole else self


@dataclass(frozen=True, slots=True)
class FitSpec:
    """One ``fit``. The driver builds it once, when it knows its data; nobody changes it."""

    workers: int  # one for each partition of the rows
    epochs: int
    n_params: int
    version: str  # of sparkstrom, on the driver
    job: int = 0  # u63, random: names the fit's frames, processes and Spark job
    first_epoch: int = 0  # epochs of earlier fits: shuffling goes on from there
    minibatches_before: int = 0  # in earlier fits whose updaters' states go on: schedules do, too
    fraction: float = 0.0  # of the rows is held out, by chance
    metric: str = LOSS  # of held-out rows
    starts: tuple[PartitionStart, ...] = ()  # by partition; (): all begin at their first minibatch

    def start_of(self, partition: int) -> Position:
        """Where this fit began with it."""
        return self.starts[partition].position if self.starts else Position(0, 0)

    def by_minibatches(self) -> FitSpec:
        """For gradient sharing, where an epoch is over with its last minibatch.

        Rounds measure it afterwards, and may have been saved in between.
        """
        return replace(self, starts=tuple(start.past_whole_epoch for start in self.starts))
