"""Tests of distributing rows over workers: balanced, repeatable, random, and every row once."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import ArrayType, BinaryType, FloatType, StructField, StructType

from sparkstrom.base.errors import UsageError
from sparkstrom.data import row_blocks
from sparkstrom.data.column_selection import ColumnSpec, check_column_spec
from sparkstrom.data.row_blocks import count_rows, distribute_rows, read_row_blocks
from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster
from sparkstrom.spark.classic_application import ClassicApplication
from sparkstrom.spark.data import partitioning
from sparkstrom.spark.data.partitioning import (
    PartitionedData,
    RowSource,
    check_data,
    choose_message_rows,
    partition_source,
)

Parts = st.lists(st.integers(0, 40), max_size=8)  # number of rows of each input partition


def shares(parts: list[int], workers: int, seed: int) -> list[tuple[int, tuple[int, int]]]:
    """Return (worker, (input partition, row)) for all rows of all input partitions."""
    return [
        (worker, (index, int(number)))
        for index, count in enumerate(parts)
        for worker, dealt in distribute_rows(
            read_row_blocks, workers, seed, index, [([index, i], i) for i in range(count)]
        )
        if dealt.block is not None
        for number in dealt.block.numbers
    ]


@given(parts=Parts, workers=st.integers(1, 7), seed=st.integers(0, 2**40))
def test_each_row_goes_to_one_worker_in_balanced_shares(
    parts: list[int], workers: int, seed: int
) -> None:
    """Each row goes to one worker; shares differ by at most one row per input partition."""
    dealt = shares(parts, workers, seed)
    assert sorted(row for _, row in dealt) == [
        (index, i) for index, count in enumerate(parts) for i in range(count)
    ]
    counts = Counter(worker for worker, _ in dealt)
    assert set(counts) <= set(range(workers))
    each = [counts[worker] for worker in range(workers)]
    assert max(each) - min(each) <= len(parts)


@pytest.mark.parametrize("every", [1, 2, 5])
@pytest.mark.parametrize("workers", [2, 4, 7])
def test_partitions_of_one_row_are_dealt_evenly(workers: int, every: int) -> None:
    """Workers get about as many rows of many small partitions, also if most of these are empty."""
    parts = [int(index % every == 0) for index in range(30 * workers * every)]
    counts = Counter(worker for worker, _ in shares(parts, workers, 0))
    assert [abs(counts[worker] - 30) <= 3 for worker in range(workers)] == [True] * workers


@given(parts=Parts, workers=st.integers(1, 7), seed=st.integers(0, 100))
def test_recomputed_partition_is_distributed_identically(
    parts: list[int], workers: int, seed: int
) -> None:
    assert shares(parts, workers, seed) == shares(parts, workers, seed)


def test_seed_changes_distribution_of_rows() -> None:
    assert shares([40], 4, 1) != shares([40], 4, 2)


def test_rows_sorted_by_label_are_mixed_over_workers() -> None:
    """Each worker gets rows from both halves of a partition, as of a table sorted by label."""
    dealt = shares([100], 4, 0)
    for worker in range(4):
        rows = [i for who, (_, i) in dealt if who == worker]
        assert min(rows) < 50 <= max(rows)


def test_rows_are_distributed_one_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are distributed one block at a time, to save memory, and shares stay even."""
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 10 * 16)
    dealt = shares([103], 4, 0)
    assert sorted(row for _, (_, row) in dealt) == list(range(103))
    counts = Counter(worker for worker, _ in dealt)
    assert max(counts.values()) - min(counts.values()) <= 1
    for worker in range(4):
        blocks_of_worker = {row // 10 for who, (_, row) in dealt if who == worker}
        assert len(blocks_of_worker) >= 9  # every block has rows for every worker


def test_rejects_list_as_data() -> None:
    with pytest.raises(UsageError, match=r"data is a builtins\.list: pass an RDD"):
        check_data([1, 2])


@pytest.mark.parametrize(
    ("chosen", "dataframe", "why"),
    [
        (ColumnSpec("x"), False, "features='x': there are no columns in an RDD"),
        (ColumnSpec(label="y"), False, "label='y': there are no columns in an RDD"),
    ],
)
def test_rejects_column_names_for_rdd(chosen: ColumnSpec, dataframe: bool, why: str) -> None:
    """Names of columns are refused for an RDD, which has no columns."""
    check_column_spec(ColumnSpec(), dataframe)
    with pytest.raises(UsageError, match=why):
        check_column_spec(chosen, dataframe)


class Partitions:
    """A fake RDD with these numbers of rows in its partitions."""

    def __init__(self, *rows: int) -> None:
        self.rows = rows

    def getNumPartitions(self) -> int:
        return len(self.rows)

    def mapPartitions(self, count: Any) -> Any:
        return SimpleNamespace(collect=lambda: list(self.rows))


@pytest.mark.parametrize("rows", [(), (0, 0)])
def test_rejects_empty_data_that_is_not_moved(rows: tuple[int, ...]) -> None:
    """Data without any row are refused if rows stay in their partitions; one row suffices."""
    data: Any = Partitions(*rows)
    source = RowSource(data, read_row_blocks, count_rows)
    with pytest.raises(UsageError, match=f"all {len(rows)} partitions are empty"):
        partition_source(source, 2, 0, move=False)
    kept: Any = Partitions(0, 3)
    assert partition_source(source._replace(rdd=kept), 2, 0, move=False).rows == (0, 3)


def test_repartition_counts_partitions_of_selected_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spark may give a DataFrame more partitions than one of only the columns that are read."""
    read: Any = Partitions(3, 4)
    source = RowSource(read, read_row_blocks, count_rows)
    monkeypatch.setattr(partitioning, "create_source", lambda data, columns: source)
    moved = []

    def partition(source: RowSource, workers: int, seed: int, *, move: bool) -> PartitionedData:
        moved.append(move)
        return PartitionedData(source.rdd, source.blocks, workers)

    monkeypatch.setattr(partitioning, "partition_source", partition)
    master = ParameterAveragingTrainingMaster(repartition="num_partitions_workers_differs")
    frame = SimpleNamespace(rdd=Partitions(1, 2, 3, 4))
    for workers in (2, 4):
        ClassicApplication(None).partition_data(frame, ColumnSpec(), workers, master)
    assert moved == [False, True]


VECTOR, NUMBERS = VectorUDT(), ArrayType(FloatType())
IMAGES = ArrayType(ArrayType(NUMBERS))


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ([("x", FloatType(), {})] * 5, 10_000),
        ([("x", FloatType(), {})] * 5_000, 104),
        ([("x", NUMBERS, {}), ("y", FloatType(), {})], 127),
        ([("x", IMAGES, {})], 32),
        ([("x", BinaryType(), {})] * 2, 32),
        ([("x", VECTOR, {"ml_attr": {"num_attrs": 50}})], 10_000),
        ([("x", VECTOR, {"ml_attr": {"num_attrs": 4_096}})], 128),
        ([("x", VECTOR, {"ml_attr": {"num_attrs": 1 << 18}})], 128),
        ([("x", VECTOR, {})], 128),
    ],
)
def test_arrow_messages_have_fewer_rows_if_rows_are_long(fields: list[Any], rows: int) -> None:
    """Before, arrays came 1,000 rows at a time: 600 MB of images given as arrays of numbers."""
    schema = StructType([StructField(name, kind, True, info) for name, kind, info in fields])
    frame: Any = SimpleNamespace(schema=schema)
    assert choose_message_rows(frame) == rows
