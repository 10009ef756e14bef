"""Rows become arrays; what does not fit is refused by the number of its row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.spark.rows import arrays_of_batches, arrays_of_rows, label_array, short


def test_pairs_become_arrays() -> None:
    features, labels = arrays_of_rows([([1, 2], 0), (np.array([[3.0, 4.0]]), 1)])
    assert features.dtype == np.float32
    assert features.tolist() == [[1, 2], [3, 4]]
    assert (labels.dtype, labels.tolist()) == (np.int64, [0, 1])


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
def test_labels_are_classes_or_values(labels: list[Any], dtype: Any, shape: Any) -> None:
    array = label_array(labels)
    assert (array.dtype, array.shape) == (dtype, shape)


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([([1], 0), 7], r"row 1 of this partition is 7: an element must be a pair"),
        ([([1], 0), ([1], 0, 2)], r"row 1 of this partition is \(\[1\], 0, 2\)"),
        ([("cat", 0)], r"row 0 of this partition is \('cat', 0\)"),
        ([([1, 2], 0), ([1], 0)], "row 1 of this partition has 1 features, row 0 has 2"),
        ([([1], "cat")], "labels must be numbers, got 'cat'"),
        ([([1], [1.0]), ([1], [1.0, 2.0])], "labels of this partition have different lengths"),
        ([([1], None)], "labels must be numbers, got None"),
    ],
)
def test_a_row_that_does_not_fit_is_named(rows: list[Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        arrays_of_rows(rows)


def test_no_rows_are_empty_arrays() -> None:
    for features, labels in (arrays_of_rows([]), arrays_of_batches(iter([]))):
        assert (len(features), len(labels)) == (0, 0)


def batch(features: list[Any], labels: list[Any], label_type: Any = None) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(features, pa.list_(pa.float32())), pa.array(labels, label_type)],
        names=["features", "label"],
    )


def test_arrow_batches_become_the_same_arrays() -> None:
    batches = [batch([[1, 2], [3, 4]], [0, 1]), batch([], [], pa.int64()), batch([[5, 6]], [2])]
    features, labels = arrays_of_batches(iter(batches))
    assert features.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert (features.dtype, labels.dtype, labels.tolist()) == (np.float32, np.int64, [0, 1, 2])


def test_a_slice_of_a_batch_is_only_its_own_rows() -> None:
    features, labels = arrays_of_batches(iter([batch([[1], [2], [3]], [4, 5, 6]).slice(1, 1)]))
    assert (features.tolist(), labels.tolist()) == ([[2]], [5])


def test_arrow_labels_may_be_values_or_arrays() -> None:
    values = arrays_of_batches(iter([batch([[1]], [0.5], pa.float64())]))[1]
    assert (values.dtype, values.tolist()) == (np.float32, [0.5])
    lists = arrays_of_batches(iter([batch([[1]], [[0.5, 1.5]], pa.list_(pa.float32()))]))[1]
    assert lists.tolist() == [[0.5, 1.5]]


GOOD = batch([[1, 2], [3, 4]], [0, 1])


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (
            batch([[1, 2], [1]], [0, 1]),
            "row 3 of this partition has 1 values in features, row 0 has 2",
        ),
        (batch([[1, 2], None], [0, 1]), "row 3 of this partition has a null features"),
        (batch([[1, 2], [1, 2]], [0, None]), "row 3 of this partition has a null label"),
        (batch([[1, 2], [1, None]], [0, 1]), "row 3 of this partition has a null among"),
    ],
)
def test_an_arrow_row_that_does_not_fit_is_named(bad: pa.RecordBatch, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        arrays_of_batches(iter([GOOD, bad]))


def test_label_arrays_have_one_width_over_all_batches() -> None:
    lists = pa.list_(pa.float32())
    batches = [batch([[1]], [[1.0]], lists), batch([[1]], [[1.0, 2.0]], lists)]
    with pytest.raises(UsageError, match="row 1 of this partition has 2 values in label"):
        arrays_of_batches(iter(batches))


def test_long_values_are_cut_in_messages() -> None:
    assert len(short("x" * 500)) == 60
