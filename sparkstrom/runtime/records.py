"""Records: rows of any columns as bytes of one width, so that one array holds them all.

What deals rows out, sorts, shuffles, spills and counts them sees ``u8[rows, row_bytes]``; only a
minibatch is taken apart into arrays again. A long sparse vector has room for so many entries in a
record, not for all of its zeros: it is made dense in the minibatch.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Columns, arrays_of

Records = NDArray[np.uint8]  # [rows, row_bytes]
Keys = NDArray[np.uint64]  # [rows, 2]
Nest = None | int | tuple[str, ...]  # one array, so many in their places, or by these names

HASHED_BYTES = 1 << 20  # hash so many bytes at once: they stay in the processor's cache
ENTRY = np.dtype([("place", "<i4"), ("value", "<f4")])  # place counts from 1: 0 is room left
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Leaf(NamedTuple):
    """One array of a minibatch, as a part of a record."""

    name: str  # the user's column, for messages
    shape: tuple[int, ...]  # of one row
    stored: str  # dtype in a record
    given: str  # dtype in a minibatch
    entries: int = 0  # room for so many of a sparse vector; 0: dense

    @property
    def nbytes(self) -> int:
        if self.entries:
            return self.entries * ENTRY.itemsize
        return math.prod(self.shape) * np.dtype(self.stored).itemsize


class RowFormat(NamedTuple):
    """How a record is laid out: features, labels, then weight and held-out flag where there are."""

    leaves: tuple[Leaf, ...]
    features: Nest = None
    labels: Nest = None
    weighted: bool = False
    flagged: bool = False  # the last leaf says which rows are held out

    @property
    def row_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Where each leaf lies in a record."""
        ends = list(itertools.accumulate(leaf.nbytes for leaf in self.leaves))
        return list(zip([0, *ends], ends, strict=False))

    def pack(self, arrays: list[NDArray[Any]]) -> Records:
        """Arrays [rows, ...], one per leaf, as records; sparse ones as ``entries_of`` gives them.

        An array of entries may have less room than the leaf.
        """
        records = np.zeros((len(arrays[0]), self.row_bytes), np.uint8)
        for leaf, array, (first, end) in zip(self.leaves, arrays, self.spans, strict=True):
            stored = array if leaf.entries else array.astype(leaf.stored, copy=False)
            if stored.size:
                raw = np.ascontiguousarray(stored).reshape(len(records), -1).view(np.uint8)
                records[:, first : first + min(raw.shape[1], end - first)] = raw
        return records

    def array(self, records: Records, index: int) -> NDArray[Any]:
        """Leaf ``index`` as it is stored: [rows, ...], or entries [rows, room]."""
        (first, end), leaf = self.spans[index], self.leaves[index]
        raw = np.ascontiguousarray(records[:, first:end])
        if leaf.entries:
            return raw.view(ENTRY)
        shape = (len(records), *leaf.shape)
        return raw.view(leaf.stored).reshape(shape) if raw.size else np.zeros(shape, leaf.stored)

    def arrays(self, records: Records) -> list[NDArray[Any]]:
        """All leaves as they are stored."""
        return [self.array(records, i) for i in range(len(self.leaves))]

    def batch(self, records: Records) -> Batch:
        """Records as a minibatch."""
        return self.batch_of(self.arrays(records))

    def batch_of(self, stored: list[NDArray[Any]]) -> Batch:
        """Leaves as they are stored as a minibatch: views, where the dtype is the same."""
        arrays = [
            dense(array, leaf.shape[0]) if leaf.entries else array.astype(leaf.given, copy=False)
            for leaf, array in zip(self.leaves, stored, strict=True)
        ]
        n_features, n_labels = width_of(self.features), width_of(self.labels)
        return Batch(
            nested(self.features, arrays[:n_features]),
            nested(self.labels, arrays[n_features : n_features + n_labels]),
            arrays[n_features + n_labels] if self.weighted else None,
        )

    def held_out(self, records: Records) -> NDArray[np.bool_]:
        """Which rows the user's own column holds out."""
        if not self.flagged:
            return np.zeros(len(records), bool)
        flags: NDArray[np.bool_] = records[:, -1] != 0
        return flags

    def joined(self, other: RowFormat) -> RowFormat:
        """The form that has room for records of both. Raise UsageError where there is none."""
        if self == other:
            return self
        for mine, theirs in itertools.zip_longest(self.leaves, other.leaves):
            if mine is None or theirs is None or mine[:4] != theirs[:4]:
                raise UsageError(
                    f"rows do not fit together: {_said(theirs)} in one part of the data, "
                    f"{_said(mine)} in another"
                )
        leaves = (
            mine._replace(entries=max(mine.entries, theirs.entries))
            for mine, theirs in zip(self.leaves, other.leaves, strict=True)
        )
        return self._replace(leaves=tuple(leaves))

    def widened(self, records: Records, to: RowFormat) -> Records:
        """Records of this form in another one with more room for entries."""
        if self == to:
            return records
        return to.pack(self.arrays(records))

    def keys(self, records: Records) -> Keys:
        """Two numbers for each row from its content alone: same row, same key, with any room."""
        keys = np.zeros((len(records), 2), np.uint64)
        step = max(1, HASHED_BYTES // max(1, self.row_bytes))
        for first in range(0, len(records), step):
            part = slice(first, first + step)
            for salt, (begin, end) in enumerate(self.spans):
                if end > begin:
                    keys[part] += _hashed(records[part, begin:end], salt)
        return splitmix(keys)


def form_of(batch: Batch) -> RowFormat:
    """The form that keeps a batch's arrays as they are."""
    features, labels, weights = batch
    arrays = [*arrays_of(features), *arrays_of(labels)] + ([] if weights is None else [weights])
    leaves = [
        Leaf(f"array {i}", a.shape[1:], a.dtype.str, a.dtype.str) for i, a in enumerate(arrays)
    ]
    return RowFormat(tuple(leaves), nest_of(features), nest_of(labels), weights is not None)


def arrays_in(batch: Batch) -> list[NDArray[Any]]:
    """A batch's arrays in the order of its form's leaves."""
    weights = [] if batch.weights is None else [batch.weights]
    return [*arrays_of(batch.features), *arrays_of(batch.labels), *weights]


def nest_of(columns: Any) -> Nest:
    """How arrays, or names of columns, are arranged: a tuple by place, a dict by name."""
    if isinstance(columns, dict):
        return tuple(columns)
    return len(columns) if isinstance(columns, tuple) else None


def width_of(nest: Nest) -> int:
    """How many arrays."""
    return 1 if nest is None else nest if isinstance(nest, int) else len(nest)


def nested(nest: Nest, arrays: list[NDArray[Any]]) -> Columns:
    """Arrays as one, a tuple or a dictionary."""
    if nest is None:
        return arrays[0]
    return tuple(arrays) if isinstance(nest, int) else dict(zip(nest, arrays, strict=True))


def entries_of(
    rows: NDArray[np.int64], places: NDArray[Any], values: NDArray[Any], count: int
) -> NDArray[Any]:
    """Entries [count, room] of ``count`` sparse rows, from each entry's row, place and value.

    Entries stand row by row; what is 0 takes no room, so that equal vectors have equal records.
    """
    full = values != 0
    rows, places, values = rows[full], places[full], values[full]
    lengths = np.bincount(rows, minlength=count)
    starts = np.cumsum(lengths) - lengths
    out = np.zeros((count, max(1, int(lengths.max(initial=0)))), ENTRY)
    column = np.arange(len(rows)) - starts[rows]
    out["place"][rows, column], out["value"][rows, column] = places + 1, values
    return out


def dense(entries: NDArray[Any], size: int) -> NDArray[np.float32]:
    """Entries [rows, room] as f32[rows, size]."""
    out = np.zeros((len(entries), size), np.float32)
    row, column = np.nonzero(entries["place"])
    out[row, entries["place"][row, column] - 1] = entries["value"][row, column]
    return out


def splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the answer depends on every bit of ``x`` (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hashed(part: Records, salt: int) -> Keys:
    """Sums over words of 8 bytes; zeros at the end change nothing."""
    words = -(-part.shape[1] // 8)
    padded = np.zeros((len(part), words * 8), np.uint8)
    padded[:, : part.shape[1]] = part
    places = np.arange(1, words + 1, dtype=np.uint64) + np.uint64(salt << 40)
    factors = splitmix(places * _GOLDEN)
    mixed = padded.view("<u8") * (factors | np.uint64(1))
    mixed ^= mixed >> np.uint64(32)
    mixed *= splitmix(factors) | np.uint64(1)  # else the top bits of two words would cancel out
    first = mixed.sum(axis=1, dtype=np.uint64)
    return np.stack([first, (mixed * (mixed >> np.uint64(11))).sum(axis=1)], axis=1)


def _said(leaf: Leaf | None) -> str:
    if leaf is None:
        return "no such column"
    kind = f"{np.dtype(leaf.stored).name}{list(leaf.shape)}"
    return f"{leaf.name} is {kind}" + (" (sparse)" if leaf.entries else "")
