"""Tests of rows in Spark's shuffle: all rows arrive, or an error makes Spark repeat the task."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.data import row_blocks
from sparkstrom.data.row_blocks import (
    ShuffleBlock,
    distribute_rows,
    read_row_blocks,
    read_shuffle_blocks,
)


def make_worker_blocks(worker: int, sources: int, rows: int, bad: Any = ()) -> list[ShuffleBlock]:
    """Return the blocks that one of two workers gets from sources of ``rows`` rows each."""
    sent = [
        dealt
        for source in range(sources)
        for who, dealt in distribute_rows(
            read_row_blocks, 2, 0, source, [*(([source, i], i) for i in range(rows)), *bad]
        )
        if who == worker
    ]
    return pickle.loads(pickle.dumps(sent))


def read_rows(sources: int, shuffled: list[ShuffleBlock]) -> list[tuple[str, int]]:
    """Return (source, number) for all rows of these blocks, sorted."""
    found = read_shuffle_blocks(sources, 0, shuffled)
    return sorted((block.where, int(number)) for block in found for number in block.numbers)


def test_partition_is_complete_for_any_block_order() -> None:
    """Blocks in any order give the same rows, and both workers together get every row."""
    sent = make_worker_blocks(0, sources=3, rows=10)
    assert len(read_rows(3, sent)) == 15
    assert read_rows(3, sent) == read_rows(3, sent[::-1])
    assert sorted([*read_rows(3, sent), *read_rows(3, make_worker_blocks(1, 3, 10))]) == [
        (f"partition {source}", i) for source in range(3) for i in range(10)
    ]


def test_duplicate_block_counts_once() -> None:
    sent = make_worker_blocks(0, sources=2, rows=10)
    assert read_rows(2, sent * 2) == read_rows(2, sent)


def test_empty_source_sends_empty_block() -> None:
    """A source without rows sends an empty block, so that it does not count as missing."""
    sent = make_worker_blocks(1, sources=2, rows=0)
    assert len(sent) == 2
    assert read_rows(2, sent) == []


@pytest.mark.parametrize("lost", range(8))
def test_missing_block_raises_error_naming_source(lost: int) -> None:
    """A missing block raises EOFError with the number of its source."""
    sent = make_worker_blocks(0, sources=4, rows=5)
    source = sent.pop(lost).source
    with pytest.raises(EOFError, match=f"source partition {source}"):
        read_rows(4, sent)


def test_missing_block_of_multi_block_source_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source's last block has their number, so a missing one is always noticed."""
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 3 * 16)
    sent = make_worker_blocks(0, sources=1, rows=20)
    assert [dealt.total for dealt in sent] == [0] * (len(sent) - 1) + [len(sent)]
    assert len(sent) > 5
    assert len(read_rows(1, sent)) == 10
    for lost in range(len(sent)):
        with pytest.raises(EOFError, match="1 of 1 source"):
            read_rows(1, sent[:lost] + sent[lost + 1 :])


def test_partition_without_blocks_raises_eof_error() -> None:
    """A partition without any block raises EOFError."""
    with pytest.raises(EOFError):
        read_rows(2, [])


@pytest.mark.parametrize("worker", range(2))
def test_mismatched_row_raises_same_error_in_every_worker(worker: int) -> None:
    """A row that does not fit raises the same UsageError in every worker."""
    sent = make_worker_blocks(worker, 1, 3, bad=[([1.0], 2)])
    with pytest.raises(UsageError, match="row 3 of partition 0 has features"):
        read_rows(1, sent)


def test_distributed_rows_keep_their_row_numbers() -> None:
    """Each worker's rows have the numbers that they had in their source, and none is lost."""
    found: list[int] = []
    for worker in range(2):
        for dealt in make_worker_blocks(worker, sources=1, rows=10):
            if dealt.block is not None:
                features = dealt.block.form.batch(dealt.block.records).features
                assert isinstance(features, np.ndarray)
                np.testing.assert_array_equal(features[:, 1], dealt.block.numbers)
                found += dealt.block.numbers.tolist()
    assert sorted(found) == [*range(10)]
