"""The facts about one fit that all its processes share, such as where each partition starts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sparkstrom.base.identity import Position
from sparkstrom.observe.early_stopping import LOSS


@dataclass(frozen=True, slots=True)
class PartitionStart:
    """Where a fit that resumes from a checkpoint starts in one partition.

    ``rows`` and ``checksum`` describe the partition's rows when the checkpoint was written. A fit
    that finds other rows fails.
    """

    # First minibatch to train. After a round-based fit (parameter averaging) this may be past the
    # last minibatch of an epoch that was not evaluated on its held-out rows yet.
    position: Position
    rows: int = -1  # -1: unknown; any number of rows is accepted
    checksum: int = 0  # of the rows' content
    batches: int = 0  # minibatches per epoch

    @property
    def minibatches(self) -> int:
        """Return the number of minibatches before the start, which are not trained again."""
        return self.position.epoch * self.batches + self.position.batch

    @property
    def with_epoch_closed(self) -> PartitionStart:
        """Return the same start, with a position at an epoch's end moved to the next epoch."""
        epoch, batch = self.position
        whole = self.batches > 0 and batch == self.batches
        return replace(self, position=Position(epoch + 1, 0)) if whole else self


def count_complete_epochs(starts: Iterable[PartitionStart]) -> int:
    """Return the number of epochs before the starts of all partitions with rows."""
    return min((start.position.epoch for start in starts if start.rows), default=0)


@dataclass(frozen=True, slots=True)
class FitSpec:
    """The facts about one fit that the driver program, the master and all workers share.

    The driver program creates the object when it knows the number of partitions.
    """

    workers: int  # number of workers, one for each partition
    epochs: int  # number of epochs to train
    n_params: int  # number of parameters
    version: str  # sparkstrom's version in the driver program
    job: int = 0  # random u63 that identifies the fit in frames, process names and Spark's job
    first_epoch: int = 0  # epochs trained by earlier fits; the order of rows depends on it
    minibatches_before: int = 0  # trained by earlier fits; learning-rate schedules continue there
    fraction: float = 0.0  # fraction of the rows that is held out at random
    metric: str = LOSS  # metric that is computed on held-out rows
    starts: tuple[PartitionStart, ...] = ()  # by partition; (): all start at their first minibatch

    @property
    def epochs_resumed(self) -> int:
        """Number of epochs that all partitions with rows had completed when the fit was resumed."""
        return count_complete_epochs(self.starts)

    def start_of(self, partition: int) -> Position:
        """Return the position of a partition's first minibatch in this fit."""
        return self.starts[partition].position if self.starts else Position(0, 0)

    def with_epochs_closed(self) -> FitSpec:
        """Return the same fit, with starts at the end of an epoch moved to the next epoch.

        In gradient sharing the last minibatch completes an epoch. In a round-based fit, an epoch is
        complete only after the evaluation on its held-out rows; a checkpoint may have been written
        before that.
        """
        return replace(self, starts=tuple(start.with_epoch_closed for start in self.starts))
