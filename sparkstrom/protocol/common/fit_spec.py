"""``FitSpec``: the facts of one fit that the driver, the master and all workers share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparkstrom.base.identity import Position
from sparkstrom.observe.early_stopping import LOSS


@dataclass(frozen=True, slots=True)
class PartitionStart:
    """Where a fit that resumes from a checkpoint starts in one partition.

    ``rows`` and ``checksum`` describe the partition's rows when the checkpoint was written. A fit
    that finds other rows fails.
    """

    # First minibatch to train. After a fit in rounds it may lie behind the last minibatch of an
    # epoch whose held-out rows were not measured yet.
    position: Position
    rows: int = -1  # -1: unknown; any number of rows is accepted
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
    """The facts of one fit. The driver creates it after counting its data; it never changes."""

    workers: int  # number of workers, one for each partition
    epochs: int  # number of epochs to train
    n_params: int  # number of parameters
    version: str  # sparkstrom's version on the driver
    job: int = 0  # random u63 that identifies the fit in frames, process names and Spark's job
    first_epoch: int = 0  # epochs trained by earlier fits; the order of rows depends on it
    minibatches_before: int = 0  # trained by earlier fits; learning-rate schedules continue there
    fraction: float = 0.0  # fraction of the rows that is held out at random
    metric: str = LOSS  # metric that is computed on held-out rows
    starts: tuple[PartitionStart, ...] = ()  # by partition; (): all start at their first minibatch

    def start_of(self, partition: int) -> Position:
        """Return the position of a partition's first minibatch in this fit."""
        return self.starts[partition].position if self.starts else Position(0, 0)

    def with_epochs_closed(self) -> FitSpec:
        """Return the same fit for gradient sharing, where the last minibatch completes an epoch.

        In rounds, an epoch is complete only when its held-out rows are measured; a checkpoint may
        have been written before.
        """
        return replace(self, starts=tuple(start.with_epoch_closed for start in self.starts))
