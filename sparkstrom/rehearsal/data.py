"""The sampled rows of a rehearsal (simulated fits) as minibatches for any number of workers.

The rows are distributed to workers as in a fit that shuffles them. The curves of loss and accuracy
are measured on held-out rows, or on training rows if the fit holds out none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sparkstrom.base.errors import UsageError
from sparkstrom.data.row_blocks import Block, check_block, distribute_rows
from sparkstrom.data.row_sample import RowSample
from sparkstrom.data.row_store import Batches
from sparkstrom.models.base import Batch
from sparkstrom.models.output_interpretation import select_rows
from sparkstrom.protocol.master.phases import NO_ROWS
from sparkstrom.rehearsal.fit import FitRecipe, make_environment
from sparkstrom.worker.task_environment import load_batches

EVALUATION_ROWS_MAX = 4_000  # few, so that evaluations take less time than the training


@dataclass(frozen=True, slots=True)
class SampledData:
    """A sample of rows, distributed to workers as in a fit."""

    recipe: FitRecipe  # the fit that trains on the rows
    sample: RowSample  # the rows, in blocks

    def partitions(self, workers: int) -> list[Batches]:
        """Return each worker's minibatches.

        Raise UsageError for a row that the model rejects, or more workers than rows.
        """
        if workers > self.sample.rows:
            raise UsageError(
                f"workers={workers}: the sample has {self.sample.rows} rows, and each worker needs"
                " one; rehearse fewer workers or more rows"
            )
        dealt: list[list[Block]] = [[] for _ in range(workers)]
        seed = self.recipe.master.rng_seed
        for worker, share in distribute_rows(_select_blocks, workers, seed, 0, self.sample.blocks):
            if share.block is not None and len(share.block.records):
                dealt[worker].append(share.block)
        job = self.recipe.job(workers)
        return [
            load_batches(job, make_environment(partition), iter(blocks))
            for partition, blocks in enumerate(dealt)
        ]

    def check(self) -> None:
        """Raise UsageError if the model rejects a row (it names the first) or all are held out."""
        for block in self.sample.blocks:
            check_block(self.recipe.model, block)
        if not self.partitions(1)[0].rows:
            raise UsageError(NO_ROWS.format(1))

    def evaluation_batches(self) -> tuple[list[Batch], bool]:
        """Return minibatches on which to evaluate parameters, and whether their rows are held out.

        They have up to EVALUATION_ROWS_MAX held-out rows, or training rows if none are held out.
        """
        whole = self.partitions(1)[0]
        held = whole.held_out
        source: Iterator[Batch] = iter(held)
        if not held.rows:
            source = (whole.get(0, index) for index in range(whole.batches_per_epoch))
        batches, rows = [], 0
        for batch in source:
            batches.append(select_batch(batch, EVALUATION_ROWS_MAX - rows))
            rows += batches[-1].rows
            if rows >= EVALUATION_ROWS_MAX:
                break
        return batches, held.rows > 0


def select_batch(batch: Batch, rows: int) -> Batch:
    """Return a minibatch of the first ``rows`` rows, or ``batch`` itself if it has no more."""
    if batch.rows <= rows:
        return batch
    first = slice(rows)
    weights = None if batch.weights is None else batch.weights[first]
    return Batch(select_rows(batch.features, first), select_rows(batch.labels, first), weights)


def _select_blocks(source: int, blocks: Iterable[object]) -> Iterator[Block]:
    """Return an iterator over the Blocks in ``blocks``; objects of other types are skipped.

    ``distribute_rows`` requires a function of this form that converts the rows of partition
    ``source`` to blocks. The rows of a sample are already in blocks.
    """
    return (block for block in blocks if isinstance(block, Block))
