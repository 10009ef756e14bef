"""Pack rows into records of equal length in bytes, and unpack records into minibatches.

One array ``u8[rows, row_bytes]`` thus holds rows with any columns, so that code which distributes,
sorts, shuffles, spills or counts rows need not know the columns. A record stores only the nonzero
entries of a long sparse vector; in the minibatch, the vector is dense.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Columns, arrays_of

Records = NDArray[np.uint8]  # [rows, row_bytes]: packed rows
Keys = NDArray[np.uint64]  # [rows, 2]: two hashes of each row
# Arrangement of features or labels. None: one array; int: a tuple's length; tuple: a dict's keys.
ColumnStructure = None | int | tuple[str, ...]

HASH_CHUNK_BYTES = 1 << 20  # bytes hashed at once; they fit into the processor's cache
ENTRY_DTYPE = np.dtype([("place", "<i4"), ("value", "<f4")])  # place: index + 1; 0: unused entry
T = TypeVar("T")
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Leaf(NamedTuple):
    """The layout, within a record, of one array of a minibatch."""

    name: str  # name of the user's column, for messages
    shape: tuple[int, ...]  # shape of one row's value
    stored_dtype: str  # dtype in a record
    batch_dtype: str  # dtype in a minibatch
    entries: int = 0  # number of entries of a sparse vector for which a record has room; 0: dense
    column: str = ""  # kind of DataFrame column: "number", "array" or "vector"; "": other

    @property
    def nbytes(self) -> int:
        """Number of bytes that the array takes in a record."""
        if self.entries:
            return self.entries * ENTRY_DTYPE.itemsize
        return math.prod(self.shape) * np.dtype(self.stored_dtype).itemsize

    def describe(self) -> str:
        """Describe the stored dtype and shape for messages, such as "float32[3, 2]"."""
        return f"{np.dtype(self.stored_dtype).name}{list(self.shape)}"


class RowFormat(NamedTuple):
    """The layout of a record (packed row): features, labels, optional weight and held-out flag."""

    leaves: tuple[Leaf, ...]  # arrays in the order in which a record stores them
    features: ColumnStructure = None  # structure of the features
    labels: ColumnStructure = None  # structure of the labels
    has_weights: bool = False  # whether records have a weight
    has_held_out_flag: bool = False  # whether the last leaf marks held-out rows

    @property
    def row_bytes(self) -> int:
        """Length of a record in bytes."""
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The byte range (first, last + 1) of each leaf in a record."""
        ends = list(itertools.accumulate(leaf.nbytes for leaf in self.leaves))
        return list(zip([0, *ends], ends, strict=False))

    def pack(self, arrays: list[NDArray[Any]]) -> Records:
        """Pack arrays [rows, ...], one per leaf (array of a minibatch), into records.

        Sparse arrays have the form that ``pack_sparse_entries`` returns, with no more entries per
        row than the leaf has room for.
        """
        records = np.zeros((len(arrays[0]), self.row_bytes), np.uint8)
        for leaf, array, (first, end) in zip(self.leaves, arrays, self.spans, strict=True):
            stored = array if leaf.entries else array.astype(leaf.stored_dtype, copy=False)
            if stored.size:
                raw = np.ascontiguousarray(stored).reshape(len(records), -1).view(np.uint8)
                records[:, first : first + min(raw.shape[1], end - first)] = raw
        return records

    def array(self, records: Records, index: int) -> NDArray[Any]:
        """Unpack leaf ``index`` in stored form: [rows, ...], or sparse entries [rows, entries]."""
        (first, end), leaf = self.spans[index], self.leaves[index]
        raw = np.ascontiguousarray(records[:, first:end])
        if leaf.entries:
            return raw.view(ENTRY_DTYPE)
        shape = (len(records), *leaf.shape)
        return (
            raw.view(leaf.stored_dtype).reshape(shape)
            if raw.size
            else np.zeros(shape, leaf.stored_dtype)
        )

    def arrays(self, records: Records) -> list[NDArray[Any]]:
        """Unpack the arrays of all leaves in stored form; see ``array``."""
        return [self.array(records, i) for i in range(len(self.leaves))]

    def batch(self, records: Records) -> Batch:
        """Unpack records into a minibatch, with dense arrays."""
        return self.batch_from_arrays(self.arrays(records))

    def batch_from_arrays(self, stored: list[NDArray[Any]]) -> Batch:
        """Convert leaves in stored form to a minibatch; copy dense arrays only to change dtypes."""
        arrays = [
            entries_to_dense(array, leaf.shape[0])
            if leaf.entries
            else array.astype(leaf.batch_dtype, copy=False)
            for leaf, array in zip(self.leaves, stored, strict=True)
        ]
        n_features, n_labels = count_arrays(self.features), count_arrays(self.labels)
        return Batch(
            arrange_arrays(self.features, arrays[:n_features]),
            arrange_arrays(self.labels, arrays[n_features : n_features + n_labels]),
            arrays[n_features + n_labels] if self.has_weights else None,
        )

    def held_out(self, records: Records) -> NDArray[np.bool_]:
        """Return bool[rows]: True for rows that the user's validation column holds out."""
        if not self.has_held_out_flag:
            return np.zeros(len(records), bool)
        flags: NDArray[np.bool_] = records[:, -1] != 0
        return flags

    def unify(self, other: RowFormat) -> RowFormat:
        """Return a format that can hold the records of both formats.

        Raise UsageError if the formats differ in more than the room for sparse entries and the
        order of dictionaries' keys.
        """
        if self == other:
            return self
        others = order_like(self, other, other.leaves)
        for mine, theirs in itertools.zip_longest(self.leaves, others):
            if mine is None or theirs is None or mine[:4] != theirs[:4]:
                raise UsageError(
                    f"rows do not fit together: {_describe_leaf(theirs)} in one part of the data, "
                    f"{_describe_leaf(mine)} in another"
                )
        leaves = (
            mine._replace(entries=max(mine.entries, theirs.entries))
            for mine, theirs in zip(self.leaves, others, strict=True)
        )
        return self._replace(leaves=tuple(leaves))

    def ordered_like(self, other: RowFormat) -> RowFormat:
        """Return this format with the order of keys of ``other``, a format of the same rows."""
        leaves = order_like(other, self, self.leaves)
        return self._replace(leaves=tuple(leaves), features=other.features, labels=other.labels)

    def repack(self, records: Records, to: RowFormat) -> Records:
        """Convert records of this format to ``to``, a format of the same rows with enough room."""
        if self == to:
            return records
        return to.pack(order_like(to, self, self.arrays(records)))

    def keys(self, records: Records) -> Keys:
        """Return two hashes of each row's content, u64[rows, 2].

        The space for sparse entries that a row does not use has no effect, nor has the order of
        dictionaries' keys.
        """
        salts = order_like(self, KeyOrder.sort(self), range(len(self.leaves)))
        keys = np.zeros((len(records), 2), np.uint64)
        step = max(1, HASH_CHUNK_BYTES // max(1, self.row_bytes))
        for first in range(0, len(records), step):
            part = slice(first, first + step)
            for salt, (begin, end) in zip(salts, self.spans, strict=True):
                if end > begin:
                    keys[part] += _hash_words(records[part, begin:end], salt)
        return splitmix(keys)


def format_from_batch(batch: Batch) -> RowFormat:
    """Return the row format that stores a batch's arrays unchanged."""
    features, labels, weights = batch
    leaves = tuple(
        Leaf(f"array {i}", array.shape[1:], array.dtype.str, array.dtype.str)
        for i, array in enumerate(flatten_batch(batch))
    )
    return RowFormat(leaves, structure_of(features), structure_of(labels), weights is not None)


def flatten_batch(batch: Batch) -> list[NDArray[Any]]:
    """Return a batch's arrays as a list: features, labels, and weights if there are any."""
    weights = [] if batch.weights is None else [batch.weights]
    return [*arrays_of(batch.features), *arrays_of(batch.labels), *weights]


def structure_of(columns: Any) -> ColumnStructure:
    """Return how arrays or column names are arranged: a tuple's length, a dict's keys, or None.

    None means a single array or column.
    """
    if isinstance(columns, dict):
        return tuple(columns)
    return len(columns) if isinstance(columns, tuple) else None


class Structured(Protocol):
    """Rows, or their format, with the structures of features and labels."""

    @property
    def features(self) -> ColumnStructure:
        """Structure of the features."""
        ...

    @property
    def labels(self) -> ColumnStructure:
        """Structure of the labels."""
        ...


class KeyOrder(NamedTuple):
    """The structures of rows whose dictionaries have their keys in another order."""

    features: ColumnStructure
    labels: ColumnStructure

    @classmethod
    def sort(cls, rows: Structured) -> KeyOrder:
        """Return the structures of ``rows`` with sorted keys."""
        both = (rows.features, rows.labels)
        return cls(*(tuple(sorted(s, key=repr)) if isinstance(s, tuple) else s for s in both))


def has_same_parts(one: Structured, other: Structured) -> bool:
    """Return whether features and labels have the same structure; keys may differ in order."""
    return KeyOrder.sort(one) == KeyOrder.sort(other)


def order_like(wanted: Structured, given: Structured, items: Sequence[T]) -> list[T]:
    """Return items, one per array of ``given``, ordered as the dictionaries of ``wanted`` are.

    Structures that are not dictionaries with the same keys leave the order as it is.
    """
    ordered, begin = list(items), 0
    for one, other in ((wanted.features, given.features), (wanted.labels, given.labels)):
        if isinstance(one, tuple) and isinstance(other, tuple) and set(one) == set(other):
            places = [begin + other.index(key) for key in one]
            ordered[begin : begin + len(places)] = [items[place] for place in places]
        begin += count_arrays(other)
    return ordered


def count_arrays(structure: ColumnStructure) -> int:
    """Return the number of arrays in a structure."""
    return 1 if structure is None else structure if isinstance(structure, int) else len(structure)


def arrange_arrays(structure: ColumnStructure, arrays: list[NDArray[Any]]) -> Columns:
    """Arrange a list of arrays by the structure: as one array, a tuple or a dictionary."""
    if structure is None:
        return arrays[0]
    return (
        tuple(arrays) if isinstance(structure, int) else dict(zip(structure, arrays, strict=True))
    )


def pack_sparse_entries(
    rows: NDArray[np.int64], places: NDArray[Any], values: NDArray[Any], count: int
) -> NDArray[Any]:
    """Pack the entries of ``count`` sparse rows into an array of ENTRY_DTYPE [count, entries].

    ``rows``, ``places`` and ``values`` are each entry's row, index and value, sorted by row.
    Entries with value 0 are dropped, so that equal vectors have equal records.
    """
    full = values != 0
    rows, places, values = rows[full], places[full], values[full]
    lengths = np.bincount(rows, minlength=count)
    starts = np.cumsum(lengths) - lengths
    out = np.zeros((count, max(1, int(lengths.max(initial=0)))), ENTRY_DTYPE)
    column = np.arange(len(rows)) - starts[rows]
    out["place"][rows, column], out["value"][rows, column] = places + 1, values
    return out


def entries_to_dense(entries: NDArray[Any], size: int) -> NDArray[np.float32]:
    """Convert sparse entries, ENTRY_DTYPE [rows, entries], to dense vectors f32[rows, size]."""
    out = np.zeros((len(entries), size), np.float32)
    row, column = np.nonzero(entries["place"])
    out[row, entries["place"][row, column] - 1] = entries["value"][row, column]
    return out


def splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of 64-bit integers: SplitMix64's finalizer (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash_words(part: Records, salt: int) -> Keys:
    """Hash each row's bytes of one column to u64[rows, 2]; ``salt`` is the index of the column.

    The hashes are sums over words, in which trailing zeros have no effect.
    """
    words = -(-part.shape[1] // 8)
    padded = np.zeros((len(part), words * 8), np.uint8)
    padded[:, : part.shape[1]] = part
    places = np.arange(1, words + 1, dtype=np.uint64) + np.uint64(salt << 40)
    factors = splitmix(places * _GOLDEN)
    mixed = padded.view("<u8") * (factors | np.uint64(1))
    mixed ^= mixed >> np.uint64(32)
    mixed *= splitmix(factors) | np.uint64(1)  # otherwise the top bits of two words could cancel
    first = mixed.sum(axis=1, dtype=np.uint64)
    return np.stack([first, (mixed * (mixed >> np.uint64(11))).sum(axis=1)], axis=1)


def _describe_leaf(leaf: Leaf | None) -> str:
    """Return the name, dtype and shape of a column for messages; None: there is no such column."""
    if leaf is None:
        return "no such column"
    return f"{leaf.name} is {leaf.describe()}" + (" (sparse)" if leaf.entries else "")
