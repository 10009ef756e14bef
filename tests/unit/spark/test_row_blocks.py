"""Tests of reading an RDD's rows: dtypes, shapes, and errors that name a row by its number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row

from sparkstrom.base.errors import UsageError
from sparkstrom.data import row_blocks
from sparkstrom.data.column_selection import arrays_to_batch
from sparkstrom.data.packed_rows import ENTRY_DTYPE, Leaf, RowFormat
from sparkstrom.data.row_blocks import (
    Block,
    check_block,
    join_small_blocks,
    read_feature_blocks,
    read_row_blocks,
    shorten_value,
)
from sparkstrom.data.row_store import RowStore
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Batch


def read(rows: list[Any]) -> Batch:
    """Return the only batch that these rows of partition 3 make."""
    (block,) = read_row_blocks(3, rows)
    return block.form.batch(block.records)


def test_feature_label_pairs_become_arrays() -> None:
    features, labels, weights = read([([1, 2], 0), (np.array([3.0, 4.0]), 1)])
    assert features.dtype == np.float32
    assert features.tolist() == [[1, 2], [3, 4]]
    assert (labels.dtype, labels.tolist(), weights) == (np.int64, [0, 1], None)


@pytest.mark.parametrize("rows", [[([1], None)] * 2, [([1], None, 0.5)] * 2])
def test_rows_without_labels_give_empty_labels(rows: list[Any]) -> None:
    features, labels, weights = read(rows)
    assert (features.tolist(), labels) == ([[1], [1]], ())
    assert weights is None or weights.tolist() == [0.5, 0.5]
    assert arrays_to_batch((features, None, weights)).labels == ()


def test_a_weight_of_none_is_no_weight() -> None:
    assert read([([1], 0, None), ([2], 1, None)]).weights is None
    assert read([([1], 0, None), ([2], 1)]).weights is None


@pytest.mark.parametrize(
    ("labels", "dtype", "shape"),
    [
        ([1, 0], np.int64, (2,)),
        ([True, False], np.int64, (2,)),
        ([0.5, 1.0], np.float32, (2,)),
        ([[0.0, 1.0], [1.0, 0.0]], np.float32, (2, 2)),
        ([np.int8(1), np.int8(2)], np.int64, (2,)),
    ],
)
def test_integer_labels_become_int64_and_others_float32(
    labels: list[Any], dtype: Any, shape: Any
) -> None:
    """Integer and boolean labels become int64, all other labels float32."""
    array = read([([1.0], label) for label in labels]).labels
    assert (array.dtype, array.shape) == (dtype, shape)


def test_array_features_keep_shape_and_integer_dtype() -> None:
    """Arrays keep their shape and integer dtype; Python numbers become float32."""
    image = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    features = read([(image, 0), (image + 1, 1)]).features
    assert (features.dtype, features.shape) == (np.uint8, (2, 1, 2, 3))
    assert read([(np.array([7, 8]), 0)]).features.dtype == np.int64
    assert read([(3.5, 0), (2, 1)]).features.tolist() == [3.5, 2.0]


def test_rows_may_have_several_inputs_outputs_and_weight() -> None:
    rows = [({"a": [1.0], "b": np.array([i])}, ([0.5], np.array([i, i])), 0.25) for i in range(3)]
    features, labels, weights = read(rows)
    assert list(features) == ["a", "b"]
    assert features["b"].tolist() == [[0], [1], [2]]
    assert [a.shape for a in labels] == [(3, 1), (3, 2)]
    assert weights.tolist() == [0.25] * 3


def test_the_order_of_keys_is_that_of_the_first_row() -> None:
    """Rows from several functions may have the same keys in another order."""
    (block,) = read_row_blocks(0, [({"a": 1, "b": [2, 3]}, 0), ({"b": [5, 6], "a": 4}, 1)])
    features = block.form.batch(block.records).features
    assert isinstance(features, dict)
    assert {name: array.tolist() for name, array in features.items()} == {
        "a": [1, 4],
        "b": [[2, 3], [5, 6]],
    }


def test_partitions_may_have_their_keys_in_another_order() -> None:
    """Each partition takes the order of its first row; the stored rows do not depend on it."""
    rows: list[Any] = [({"b": [i, 7 * i], "a": i}, {"y": i, "x": 2.0 * i}) for i in range(9)]
    turned = [tuple(dict(reversed(part.items())) for part in row) for row in rows]
    ordered = []
    for partitions in [(rows[:5], turned[5:]), (turned[5:], rows[:5]), (rows,)]:
        store = RowStore()
        for partition in partitions:
            for block in read_row_blocks(0, partition):
                store.add(block.form, block.records)
        stored = store.finish()
        batch = stored.form.batch(stored.read([(0, 9)]))
        ordered.append({**dict(batch.features), **dict(batch.labels)})
    np.testing.assert_array_equal(ordered[0]["b"], np.outer(ordered[0]["y"], [1, 7]))
    for other in ordered[1:]:
        np.testing.assert_equal({name: other[name] for name in ordered[0]}, ordered[0])


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([([1], 0), 7], r"row 1 of partition 3 is 7: an element must be a pair"),
        (
            [([1], 0), ([1], 0, 2)],
            "row 1 of partition 3 has a weight, row 0 has none: give all rows a weight, such as 1",
        ),
        ([([1], 0, 1), ([1], 0, None)], "row 1 of partition 3 has no weight, row 0 has one"),
        ([("cat", 0)], r"row 0 of partition 3 is \('cat', 0\)"),
        ([([1, 2], 0), ([1], 0)], r"row 1 of partition 3 has features float32\[1\], row 0 has"),
        ([([1], "cat")], r"row 0 of partition 3 is \(\[1\], 'cat'\)"),
        ([([1], [1.0]), ([1], [1.0, 2.0])], r"row 1 of partition 3 has label float32\[2\]"),
        ([([1], 1), ([1], 0.5)], r"row 1 of partition 3 has label float32\[\], row 0 has int64"),
        ([([1], 0), ([1], None)], r"row 1 of partition 3 is .*: it has different parts than row 0"),
        ([([1], 0, -1.0)], "row 0 of partition 3 has weight -1.0: give 0 or above"),
        ([({"a": 1}, 0), ({"b": 1}, 0)], "row 1 of partition 3 .* has different parts than row 0"),
        ([([[1], [1, 2]], 0)], "row 0 of partition 3"),
    ],
)
def test_mismatched_row_is_named_by_row_and_partition(rows: list[Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read(rows)


@pytest.mark.parametrize(
    ("first", "later", "value"),
    [
        (
            np.array([1, 2], np.uint8),
            np.array([3, 300]),
            "int64[2] with 300, which does not fit into uint8",
        ),
        (
            np.array([1, 2], np.uint16),
            np.array([-1, 3], np.int8),
            "int8[2] with -1, which does not fit into uint16",
        ),
        (
            np.array([True, False]),
            np.array([7, 0]),
            "int64[2] with 7, which does not fit into bool",
        ),
    ],
)
def test_rejects_integer_beyond_dtype_of_row_0(first: Any, later: Any, value: str) -> None:
    """An integer that row 0's dtype cannot represent is refused, with the value and a remedy."""
    for rows in (
        read_row_blocks(3, [(first, 0), (later, 1)]),
        read_feature_blocks(3, [first, later]),
    ):
        with pytest.raises(UsageError, match="row 1 of partition 3 has features") as refused:
            list(rows)
        assert value in str(refused.value)
        assert "give all rows one type, such as np.int64" in str(refused.value)


@pytest.mark.parametrize("row", [(1e300, 0), ([0.0, -1e300], 0), (0.0, 1e300), (0.0, 0, 1e300)])
def test_rejects_number_beyond_float32(row: Any) -> None:
    """Such a number became infinity before; predictions from it could be finite."""
    with pytest.raises(UsageError, match=r"row 0 of partition 3 .*it has -?1e\+300, which float32"):
        list(read_row_blocks(3, [row]))
    with np.errstate(over="ignore"):
        assert row_blocks.as_array(np.array([np.inf, 1.0])).dtype == np.float32


@pytest.mark.parametrize("names", ["label features", "x y label", "label x", "x features"])
def test_rejects_named_row_fields_in_wrong_order(names: str) -> None:
    """Rows of ``frame.rdd`` have names; before, a label in front was trained on as a feature."""
    fields = names.split()
    with pytest.raises(UsageError, match=r"row 0 of partition 0 has the fields \['.*in this order"):
        list(read_row_blocks(0, [Row(*fields)(*range(len(fields)))]))
    assert list(read_row_blocks(0, [Row("features", "label")(0.5, 1)]))
    assert list(read_row_blocks(0, [Row("height", "weight")(0.5, 1), Row(0.5, 1)]))


def test_rejects_label_beyond_int64() -> None:
    with pytest.raises(UsageError, match=r"row 0 of partition 3 has label uint64.* 92233"):
        read([([1.0], np.uint64(2**63 + 1))])


def test_accepts_integers_that_fit_dtype_of_row_0() -> None:
    """Integers of other dtypes are accepted if row 0's dtype can represent them."""
    rows = [np.array([1, 2], np.uint8), np.array([255, 0]), np.array([True, False])]
    assert read([(row, np.uint64(3)) for row in rows]).features.tolist() == [
        [1, 2],
        [255, 0],
        [1, 0],
    ]
    assert read([(row / 2, 0) for row in rows[:1]] + [(rows[1], 1)]).features.dtype == np.float32


def test_row_numbers_continue_over_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are numbered from 0 over all blocks of a partition, also in errors."""
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 100)
    rows: list[Any] = [([float(i)], i) for i in range(50)]
    made = list(read_row_blocks(0, rows))
    assert len(made) > 3
    assert [int(n) for block in made for n in block.numbers] == list(range(50))
    with pytest.raises(UsageError, match="row 50 of partition 0"):
        list(read_row_blocks(0, [*rows, ([1.0, 2.0], 0)]))


class RefusingModel(DenseNetwork):
    """A model that refuses features above 1 without naming the row."""

    def check(self, features: Any, labels: Any) -> None:
        if features.max() > 1:
            raise UsageError(f"{features.max():g} is too many")


@pytest.mark.parametrize("bad", [0, 17, 99])
def test_check_block_names_first_row_refused_by_model(bad: int) -> None:
    """check_block names the first row that the model refuses."""
    features = np.zeros((100, 2), np.float32)
    features[bad:, 1] = 7
    (block,) = read_row_blocks(3, list(zip(features, [0] * 100, strict=True)))
    moved = Block(block.form, block.records, block.numbers + 1000, block.where)
    with pytest.raises(UsageError, match=rf"^row {bad + 1000} of partition 3: 7 is too many "):
        check_block(RefusingModel([2, 2]), moved)


def test_empty_input_gives_no_blocks() -> None:
    assert list(read_row_blocks(0, [])) == []
    assert list(join_small_blocks([], 3)) == []


@given(counts=st.lists(st.integers(1, 6), max_size=12), rows=st.integers(1, 9))
def test_small_blocks_are_joined_to_minimum_rows(counts: list[int], rows: int) -> None:
    """Blocks are joined to ``rows`` rows or more, also sparse ones with different capacities."""
    made, number = [], 0
    for count in counts:
        leaf = Leaf("x", (2000,), "<f4", "<f4", entries=count)
        entries = np.zeros((count, count), ENTRY_DTYPE)
        entries["place"], entries["value"] = np.arange(count) + 1, number
        form = RowFormat((leaf,), labels=0)
        numbers = np.arange(number, number + count)
        made.append(Block(form, form.pack([entries]), numbers, "here"))
        number += count
    joined = list(join_small_blocks(iter(made), rows))
    assert [int(n) for block in joined for n in block.numbers] == list(range(number))
    assert all(len(block.records) >= rows for block in joined[:-1])
    whole = [vector for block in joined for vector in dense_rows(block)]
    np.testing.assert_array_equal(whole, [vector for block in made for vector in dense_rows(block)])


def dense_rows(block: Block) -> Any:
    return block.form.batch(block.records).features


def test_features_without_labels_read_like_labelled_rows() -> None:
    """Features without labels have the same values, dtypes and errors as those with labels."""
    rows: list[Any] = [{"ids": np.array([i, 1]), "x": [float(i)]} for i in range(5)]
    (alone,) = read_feature_blocks(0, rows)
    (labelled,) = read_row_blocks(0, [(row, 0) for row in rows])
    features = alone.form.batch(alone.records).features
    wanted = labelled.form.batch(labelled.records).features
    assert isinstance(features, dict)
    assert isinstance(wanted, dict)
    for name, array in wanted.items():
        np.testing.assert_array_equal(features[name], array)
        assert features[name].dtype == array.dtype
    with pytest.raises(UsageError, match=r"row 1 of partition 0 .* has different parts than row 0"):
        list(read_feature_blocks(0, [rows[0], [1.0]]))


def test_long_values_are_cut_in_messages() -> None:
    assert len(shorten_value("x" * 500)) == 60


def test_sparse_block_is_checked_in_small_dense_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of sparse rows may be thousands of times larger as a minibatch."""
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 40_000)
    form = RowFormat((Leaf("x", (1000,), "<f4", "<f4", 1, "vector"), Leaf("y", (), "<i8", "<i8")))
    entries = np.ones((700, 1), ENTRY_DTYPE)
    labels = np.zeros(700, np.int64)
    labels[-1] = 9
    block = Block(form, form.pack([entries, labels]), np.arange(700), "partition 0")
    seen: list[int] = []

    class Watched(DenseNetwork):
        def check(self, features: Any, labels: Any) -> None:
            seen.append(features.nbytes)
            super().check(features, labels)

    with pytest.raises(UsageError, match=r"row 699 of partition 0: column 'y' \(label\) is 9"):
        check_block(Watched([1000, 2]), block)
    assert max(seen) <= 40_000
    assert [len(part.records) for part in block.split()] == [256, 256, 188]
