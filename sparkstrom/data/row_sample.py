"""Draw a uniform random sample from blocks of rows, without keeping all rows in memory.

Each row gets a random key. The sample consists of a given number of rows, those with the smallest
keys, or of all rows if there are fewer. If the user names held-out rows, the sample also has a
tenth as many of these, because they may be a small part of the data. Partitions can thus be sampled
separately, and ``merge_samples`` merges their samples into a sample of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.data.row_blocks import Block, BlockReader

HELD_OUT_SHARE = 10  # at least one held-out row for so many rows of the sample, if there are any


class SampledBlock(NamedTuple):
    """Rows of one block that a sample may contain."""

    block: Block  # the rows
    keys: NDArray[np.float64]  # random, one per row; the sample has the rows with the smallest keys


class RowSample(NamedTuple):
    """A random sample of rows."""

    blocks: list[Block]  # the rows of the sample, in blocks
    rows: int  # number of rows in the sample, without additional held-out rows
    total: int  # number of rows in the data

    def head(self, rows: int) -> RowSample:
        """Return a sample of as many first blocks as are needed for ``rows`` rows, or of all.

        Rows that the user's validation column holds out are in the sample, but are not counted.
        """
        blocks, count = [], 0
        for block in self.blocks:
            if count >= rows:
                break
            blocks.append(block)
            count += len(block.records) - int(block.form.held_out(block.records).sum())
        return RowSample(blocks, sum(len(block.records) for block in blocks), self.total)


class RowSampler:
    """Draws a sample from the blocks that are added.

    Args:
        rows: Size of the sample, without additional held-out rows; all rows if there are fewer.
        seed: Seed of the choice.
        source: Number of the part of the data, such as a partition; parts choose independently.
    """

    def __init__(self, rows: int, seed: int, source: int = 0) -> None:
        self._rows, self._rng = rows, np.random.default_rng((seed, source))
        self._kept: list[SampledBlock] = []
        self.total = 0  # number of rows in the data so far

    def add(self, block: Block) -> None:
        """Add a block of the data, whose rows may be drawn."""
        self.merge([SampledBlock(block, self._rng.random(len(block.records)))], len(block.records))

    def merge(self, sampled: Iterable[SampledBlock], total: int) -> None:
        """Add ``sampled``, the sample of a part of the data that has ``total`` rows."""
        self._kept += sampled
        self.total += total
        if self._count_kept() > 2 * self._rows:
            self._shrink()

    def take(self) -> list[SampledBlock]:
        """Return the sampled rows in the order of the data."""
        self._shrink()
        return self._kept

    def finish(self) -> RowSample:
        """Return the sample. Raise UsageError if the data have no rows."""
        blocks = [each.block for each in self.take() if len(each.block.records)]
        if not blocks:
            raise UsageError("the data have no rows to rehearse with: give data that are not empty")
        return RowSample(blocks, min(self._rows, self.total), self.total)

    def _count_kept(self) -> int:
        """Return the number of rows that are currently kept."""
        return sum(len(each.keys) for each in self._kept)

    def _shrink(self) -> None:
        """Drop the rows that are not in the sample of what has been added so far."""
        if self._count_kept() <= self._rows:
            return
        held = [each.block.form.held_out(each.block.records) for each in self._kept]
        keys = np.concatenate([each.keys for each in self._kept])
        limit = _find_limit(keys, self._rows)
        held_limit = _find_limit(keys[np.concatenate(held)], self._rows // HELD_OUT_SHARE)
        chosen = [
            (each.keys <= limit) | (flags & (each.keys <= held_limit))
            for each, flags in zip(self._kept, held, strict=True)
        ]
        self._kept = [
            SampledBlock(each.block.select(rows), each.keys[rows])
            for each, rows in zip(self._kept, chosen, strict=True)
        ]


def _find_limit(keys: NDArray[np.float64], count: int) -> float:
    """Return the greatest of the ``count`` smallest keys; 0 for a count of 0, inf for few keys."""
    if len(keys) <= count:
        return np.inf
    return float(np.partition(keys, count - 1)[count - 1]) if count else 0.0


def sample_blocks(blocks: Iterable[Block], rows: int, seed: int) -> RowSample:
    """Return a uniform sample of ``rows`` rows from ``blocks``, or all rows if there are fewer.

    Raise UsageError if there are no rows.
    """
    sampler = RowSampler(rows, seed)
    for block in blocks:
        sampler.add(block)
    return sampler.finish()


def merge_samples(
    parts: Iterable[tuple[list[SampledBlock], int]], rows: int, seed: int
) -> RowSample:
    """Return a sample of all the data from what ``sample_partition`` yielded for each part.

    Raise UsageError if there are no rows.
    """
    sampler = RowSampler(rows, seed)
    for sampled, total in parts:
        sampler.merge(sampled, total)
    return sampler.finish()


def sample_partition(
    blocks: BlockReader, rows: int, seed: int, source: int, elements: Iterable[object]
) -> Iterator[tuple[list[SampledBlock], int]]:
    """Yield the sample of one source partition, and the number of its rows; runs on an executor.

    Args:
        blocks: converts the partition's elements to blocks.
        rows: size of the sample.
        seed: seed of the choice.
        source: number of the partition.
        elements: its elements.
    """
    sampler = RowSampler(rows, seed, source)
    for block in blocks(source, elements):
        sampler.add(block)
    yield sampler.take(), sampler.total
