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


def of_worker(worker: int, sources: int, rows: int, bad: Any = ()) -> list[ShuffleBlock]:
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


def rows_of(sources: int, shuffled: list[ShuffleBlock]) -> list[tuple[str, int]]:
    """Return (source, number) for all rows of these blocks, sorted."""
    found = read_shuffle_blocks(sources, 0, shuffled)
    return sorted((block.where, int(number)) for block in found for number in block.numbers)


def test_all_blocks_make_the_partition_whatever_their_order() -> None:
    """Blocks in any order give the same rows, and both workers together get every row."""
    sent = of_worker(0, sources=3, rows=10)
    assert len(rows_of(3, sent)) == 15
    assert rows_of(3, sent) == rows_of(3, sent[::-1])
    assert sorted([*rows_of(3, sent), *rows_of(3, of_worker(1, 3, 10))]) == [
        (f"partition {source}", i) for source in range(3) for i in range(10)
    ]


def test_a_block_that_came_twice_counts_once() -> None:
    sent = of_worker(0, sources=2, rows=10)
    assert rows_of(2, sent * 2) == rows_of(2, sent)


def test_an_empty_source_sends_a_block_too() -> None:
    """A source without rows sends an empty block, so that it does not count as missing."""
    sent = of_worker(1, sources=2, rows=0)
    assert len(sent) == 2
    assert rows_of(2, sent) == []


@pytest.mark.parametrize("lost", range(8))
def test_a_block_that_did_not_arrive_is_no_end_of_input(lost: int) -> None:
    """A missing block raises EOFError with the number of its source."""
    sent = of_worker(0, sources=4, rows=5)
    source = sent.pop(lost).source
    with pytest.raises(EOFError, match=f"source partition {source}"):
        rows_of(4, sent)


def test_a_source_in_many_blocks_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source's last block has their number, so a missing one is always noticed."""
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 3 * 16)
    sent = of_worker(0, sources=1, rows=20)
    assert [dealt.total for dealt in sent] == [0] * (len(sent) - 1) + [len(sent)]
    assert len(sent) > 5
    assert len(rows_of(1, sent)) == 10
    for lost in range(len(sent)):
        with pytest.raises(EOFError, match="1 of 1 source"):
            rows_of(1, sent[:lost] + sent[lost + 1 :])


def test_nothing_at_all_is_not_an_empty_partition() -> None:
    """A partition without any block raises EOFError."""
    with pytest.raises(EOFError):
        rows_of(2, [])


@pytest.mark.parametrize("worker", range(2))
def test_a_row_that_does_not_fit_is_told_to_every_worker(worker: int) -> None:
    """A row that does not fit raises the same UsageError in every worker."""
    sent = of_worker(worker, 1, 3, bad=[([1.0], 2)])
    with pytest.raises(UsageError, match="row 3 of partition 0 has features"):
        rows_of(1, sent)


def test_shares_of_a_block_keep_the_numbers_of_their_rows() -> None:
    blocks = [dealt.block for dealt in of_worker(0, 1, rows=10) if dealt.block is not None]
    assert sum(len(block.numbers) for block in blocks) == 5
    for block in blocks:
        features = block.form.batch(block.records).features
        assert isinstance(features, np.ndarray)
        np.testing.assert_array_equal(features[:, 1], block.numbers)
