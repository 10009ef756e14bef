"""Buffers of models on JAX: arrays that are not parameters, such as BatchNorm's statistics.

They travel as their bytes one behind the other. The average of several workers is the mean of each
element, by weight where there are some, in float64 and in the order given, so that the same reports
make the same bytes; whole numbers take the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparkstrom.base.errors import UsageError

Arrays = list[Any]


def packed(arrays: Arrays) -> bytes:
    """One behind the other, little endian."""
    return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def unpacked(like: Arrays, data: bytes) -> Arrays:
    """Arrays of these kinds and shapes. Raise UsageError where the sizes do not agree."""
    wanted = sum(array.nbytes for array in like)
    if len(data) != wanted:
        raise UsageError(
            f"{len(data)} bytes of buffers, this model has {wanted} (of {len(like)} buffers): they"
            " are not of an equal model"
        )
    made, at = [], 0
    for array in like:
        part = np.frombuffer(data, array.dtype, array.size, at)
        made.append(part.reshape(array.shape))
        at += array.nbytes
    return made


def averaged(like: Arrays, reports: list[bytes], weights: Sequence[float] | None = None) -> bytes:
    """Means in float64, in the given order; whole numbers take the largest."""
    columns = [unpacked(like, report) for report in reports]
    counts = [1.0] * len(reports) if weights is None else weights
    return packed([_average([column[i] for column in columns], counts) for i in range(len(like))])


def _average(values: Arrays, weights: Sequence[float]) -> Any:
    first = values[0]
    if first.dtype.kind in "biu":
        return np.maximum.reduce(values)
    total = np.zeros(first.shape, np.float64)
    for value, weight in zip(values, weights, strict=True):
        total += value.astype(np.float64) * weight
    return (total / sum(weights)).astype(first.dtype)
