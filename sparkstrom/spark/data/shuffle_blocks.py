"""Shuffle blocks: rows on their way through a shuffle; the far end knows when they are whole.

Spark ends a Python worker's input in the same way when it is read to the end and when it breaks
off (lost shuffle files): the task's failure shows only when the Python side is done. A task that
trains for hours on half a partition would be the worst end of all. So every source partition
sends each worker at least one shuffle block, and the last one says how many there were.

Dealing holds one block of rows at a time, of some MiB. What is wrong with the data travels as a
block, too: a worker can tell the master why, where a task that fails would only be tried again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import SetupError, SparkstromError, UsageError
from sparkstrom.base.import_archives import keep_unchanged_archives
from sparkstrom.spark.data.row_blocks import Block

Blocks = Callable[[int, Iterable[object]], Iterator[Block]]  # partition and what it holds


class ShuffleBlock(NamedTuple):
    """Some rows of a source partition for one worker."""

    source: int
    number: int  # from 0
    total: int  # how many this source sent this worker, in the last one; 0 before it
    block: Block | None = None
    refusal: SparkstromError | None = None  # why there are no more


def deal(
    blocks: Blocks, workers: int, seed: int, source: int, rows: Iterable[object]
) -> Iterator[tuple[int, ShuffleBlock]]:
    """A source partition as (worker, shuffle block): each block shuffled, then dealt in turn.

    Shares differ by at most one row per source, and are the same when Spark computes it again.
    """
    keep_unchanged_archives()
    chance = np.random.default_rng((seed, source))
    turn, sent, refusal = int(chance.integers(workers)), 0, None
    try:
        for block in blocks(source, rows):
            order = chance.permutation(len(block.records))
            for worker in range(workers):
                share = order[(worker - turn) % workers :: workers]
                yield worker, ShuffleBlock(source, sent, 0, _part(block, share))
            turn, sent = (turn + len(order)) % workers, sent + 1
    except (UsageError, SetupError) as error:
        refusal = error
    for worker in range(workers):
        yield worker, ShuffleBlock(source, sent, sent + 1, None, refusal)


def _part(block: Block, share: NDArray[np.int64]) -> Block:
    return block._replace(records=block.records[share], numbers=block.numbers[share])


def blocks_from_shuffle(
    sources: int, partition: int, shuffled: Iterable[ShuffleBlock]
) -> Iterator[Block]:
    """A worker's rows, as they come. Raise EOFError where a block is missing in the end."""
    seen: dict[int, set[int]] = {source: set() for source in range(sources)}
    counts: dict[int, int] = {}
    for dealt in shuffled:
        if dealt.refusal is not None:
            raise dealt.refusal
        if dealt.number in seen[dealt.source]:
            continue
        seen[dealt.source].add(dealt.number)
        if dealt.total:
            counts[dealt.source] = dealt.total
        if dealt.block is not None and len(dealt.block.records):
            yield dealt.block
    missing = [s for s in range(sources) if len(seen[s]) != counts.get(s)]
    if missing:
        raise EOFError(
            f"shuffle blocks did not arrive from {len(missing)} of {sources} source partitions "
            f"(first: source partition {missing[0]}): Spark has lost shuffle files and makes them "
            "again"
        )
