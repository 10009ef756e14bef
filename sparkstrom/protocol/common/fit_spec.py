"""The specification of a fit, equal for the driver, the master and all workers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparkstrom.base.identity import Position
from sparkstrom.observe.early_stopping import LOSS


@dataclass(frozen=True, slots=True)
class PartitionStart:
    """A partition's position before this fit, and the number and checksum of its rows then."""

    position: Position  # of rounds' it may be behind an epoch's last minibatch: not measured yet
    rows: int = -1  # unknown: whatever the first attempt reads
    checksum: int = 0
    batches: int = 0  # minibatches per epoch

    @property
    def minibatches(self) -> int:
        """Return the number of minibatches that are not trained again."""
        return self.position.epoch * self.batches + self.position.batch

    @property
    def with_epoch_closed(self) -> PartitionStart:
        """Return the same start, with a completed last epoch counted as over."""
        epoch, batch = self.position
        whole = self.batches > 0 and batch == self.batches
        return replace(self, position=Position(epoch + 1, 0)) if whole else self


@dataclass(frozen=True, slots=True)
class FitSpec:
    """The facts of one fit. The driver builds it once, once it has counted its data; nothing
    changes it.
    """

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
        """Return the position at which this fit begins with a partition."""
        return self.starts[partition].position if self.starts else Position(0, 0)

    def with_epochs_closed(self) -> FitSpec:
        """Return the same fit for gradient sharing, where an epoch is over with its last minibatch.

        Fits in rounds measure the epoch afterwards, and a checkpoint may have been written in
        between.
        """
        return replace(self, starts=tuple(start.with_epoch_closed for start in self.starts))
