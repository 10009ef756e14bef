"""Rows: what a partition holds, as arrays, with errors that name the row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

FEATURES, LABEL = "features", "label"  # column names inside a job, whatever the user's are

Arrays = tuple[NDArray[np.float32], NDArray[Any]]


def arrays_of_rows(rows: Iterable[Any]) -> Arrays:
    """(features, label) pairs to arrays: f32[rows, width] and labels [rows] or [rows, outputs].

    Raise UsageError naming the first row that is no pair, or of another width than row 0.
    """
    features: list[NDArray[np.float32]] = []
    labels: list[Any] = []
    for i, row in enumerate(rows):
        try:
            feature, label = row
            feature = np.asarray(feature, np.float32).reshape(-1)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"row {i} of this partition is {short(row)}: an element must be a pair "
                f"(features, label) of numbers ({error})"
            ) from None
        if features and feature.shape != features[0].shape:
            raise UsageError(
                f"row {i} of this partition has {feature.size} features, row 0 has "
                f"{features[0].size}: all rows need the same width"
            )
        features.append(feature)
        labels.append(label)
    if not features:
        return np.zeros((0, 0), np.float32), np.zeros(0, np.int64)
    return np.stack(features), label_array(labels)


def label_array(labels: list[Any]) -> NDArray[Any]:
    """Labels as i64 classes where they are whole numbers, otherwise as f32."""
    try:
        array = np.asarray(labels)
    except ValueError:
        raise UsageError("labels of this partition have different lengths") from None
    if array.dtype == object or array.dtype.kind not in "biuf":
        raise UsageError(f"labels must be numbers, got {short(labels[0])}")
    return array.astype(np.int64 if array.dtype.kind in "biu" else np.float32)


def arrays_of_batches(batches: Iterator[pa.RecordBatch]) -> Arrays:
    """Arrow batches with columns ``features`` (list of float) and ``label`` to arrays.

    Raise UsageError naming the first row with a null or of another width.
    """
    features: list[NDArray[np.float32]] = []
    labels: list[NDArray[Any]] = []
    rows = 0
    for batch in batches:
        if batch.num_rows:
            width = features[0].shape[1] if features else None
            features.append(_matrix(batch.column(FEATURES), rows, width, FEATURES))
            width = labels[0].shape[-1] if labels else None
            labels.append(_label_column(batch.column(LABEL), rows, width))
            rows += batch.num_rows
    if not features:
        return np.zeros((0, 0), np.float32), np.zeros(0, np.int64)
    return np.concatenate(features), np.concatenate(labels)


def _matrix(column: pa.Array, first: int, width: int | None, name: str) -> NDArray[np.float32]:
    """Lists to f32[rows, width]; ``first`` is the number of their first row, for messages."""
    import pyarrow.compute as pc

    _refuse_nulls(column, first, name)
    lengths = pc.list_value_length(column).to_numpy()
    width = int(lengths[0]) if width is None else width
    if (lengths != width).any():
        bad = int(np.argmax(lengths != width))
        raise UsageError(
            f"row {first + bad} of this partition has {lengths[bad]} values in {name}, row 0 has "
            f"{width}: all rows need the same width"
        )
    values = column.flatten()
    if values.null_count:
        bad = int(np.argmax(values.is_null().to_numpy(zero_copy_only=False))) // max(1, width)
        raise UsageError(
            f"row {first + bad} of this partition has a null among its {name}: fill or drop it"
        )
    matrix: NDArray[np.float32] = values.to_numpy(zero_copy_only=False).astype(np.float32)
    return matrix.reshape(len(column), width)


def _label_column(column: pa.Array, first: int, width: int | None) -> NDArray[Any]:
    import pyarrow as pa

    _refuse_nulls(column, first, LABEL)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        return _matrix(column, first, width, LABEL)
    values = column.to_numpy(zero_copy_only=False)
    labels: NDArray[Any] = values.astype(np.int64 if values.dtype.kind in "biu" else np.float32)
    return labels


def _refuse_nulls(column: pa.Array, first: int, name: str) -> None:
    if column.null_count:
        bad = first + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise UsageError(f"row {bad} of this partition has a null {name}: fill or drop it")


def short(value: object) -> str:
    """A value in an error message."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
