"""Arrow: record batches, as a JVM writes them, to records; no pandas on the way.

number       [rows]           whole numbers as int64, others as float32, booleans as they are
a list of    [rows, columns]  float32
array        [rows, ...]      nested ones, too; every row of one shape
ml vector    [rows, size]     float32; above ``DENSE_MAX`` it is kept sparse until a minibatch
image, bytes [rows, ...]      see ``images``
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.runtime.records import Leaf, Records, RowFormat, dense, entries_of
from sparkstrom.spark.data.columns import FEATURES, HELD_OUT, LABEL, WEIGHT, Reading, Take
from sparkstrom.spark.data.images import images_of_bytes, images_of_structs
from sparkstrom.spark.data.row_blocks import (
    BLOCK_BYTES,
    Block,
    found_by,
    gathered,
    given_dtype,
    quoted,
)

if TYPE_CHECKING:
    import pyarrow as pa

DENSE_MAX = 1024  # a longer vector is kept as its entries: 8 bytes each instead of 4 per place


def blocks_of_arrow(reading: Reading, partition: int, messages: Iterable[bytes]) -> Iterator[Block]:
    """Arrow messages of one partition as blocks. Raises UsageError naming column and row."""
    return blocks_of_batches(reading, partition, _batches(reading, messages))


def blocks_of_batches(
    reading: Reading, partition: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[Block]:
    """The same, of batches as ``mapInArrow`` hands them over."""
    where = f"partition {partition}"
    return gathered(parts_of(reading, batches, where), where)


def count_arrow(reading: Reading, messages: Iterable[bytes]) -> Iterator[int]:
    """How many rows a partition has."""
    yield sum(batch.num_rows for batch in _batches(reading, messages))


def _batches(reading: Reading, messages: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    schema = pa.ipc.read_schema(pa.py_buffer(reading.schema))
    for message in messages:
        yield pa.ipc.read_record_batch(pa.py_buffer(message), schema)


def parts_of(
    reading: Reading, batches: Iterable[pa.RecordBatch], where: str
) -> Iterator[tuple[RowFormat, Records]]:
    """Slices of batches, small enough also when they are images or vectors of zeros."""
    form: RowFormat | None = None
    begin = 0
    for batch in batches:
        at = 0
        while at < batch.num_rows:
            count = 1
            if form is not None:
                row_bytes = max(1, form.row_bytes, batch.nbytes // batch.num_rows)
                count = max(1, BLOCK_BYTES // row_bytes)
            part = batch.slice(at, count)
            form, records = _read(reading, part, begin + at, where, form)
            yield form, records
            at += part.num_rows
        begin += batch.num_rows


def _read(
    reading: Reading, batch: pa.RecordBatch, first: int, where: str, before: RowFormat | None
) -> tuple[RowFormat, Records]:
    leaves, arrays = [], []
    for i, take in enumerate(reading.takes):
        expected = before.leaves[i].shape if before else None
        array, size = _Reader(take, first, where, expected).array(batch)
        shape, stored = array.shape[1:], array.dtype.str
        entries = 0
        if size is not None:
            shape, stored, entries = (size,), "<f4", array.shape[1]
        leaves.append(Leaf(_name(take), shape, stored, given_dtype(stored), entries))
        arrays.append(array)
    form = RowFormat(
        tuple(leaves), reading.features, reading.labels, reading.weighted, reading.flagged
    )
    return form, form.pack(arrays)


def _name(take: Take) -> str:
    return ", ".join(take.names)


class _Reader:
    """One array of a minibatch out of one Arrow batch."""

    def __init__(
        self, take: Take, first: int, where: str, expected: tuple[int, ...] | None
    ) -> None:
        self._take, self._first, self._where, self._expected = take, first, where, expected

    def array(self, batch: pa.RecordBatch) -> tuple[NDArray[Any], int | None]:
        """Array [rows, ...] and None, or a sparse vector's entries [rows, room] and its size."""
        columns = [batch.column(i) for i in self._take.columns]
        for name, column in zip(self._take.names, columns, strict=True):
            self._refuse_nulls(column, name)
        if self._take.side_by_side:
            return np.stack([_numpy(c).astype(np.float32) for c in columns], axis=1), None
        array, size = self._one(columns[0])
        shape = (size,) if size is not None else array.shape[1:]
        if self._expected is not None and shape != self._expected and len(array):
            self._refuse(0, f"is {list(shape)}, in earlier rows it is {list(self._expected)}")
        if self._take.role == WEIGHT:
            bad = ~((array >= 0) & np.isfinite(array))
            if bad.any():
                row = int(np.argmax(bad))
                self._refuse(row, f"is {array[row]}, which is no weight: give 0 or above")
            array = array.astype(np.float32)
        elif self._take.role == HELD_OUT:
            array = array.astype(np.uint8)
        elif self._take.role == LABEL and array.dtype.kind == "b":
            array = array.astype(np.int8)
        return array, size

    def _one(self, column: pa.Array) -> tuple[NDArray[Any], int | None]:
        import pyarrow as pa

        kind = column.type
        if is_listed(kind):
            return self._nested(column), None
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return images_of_bytes(column.to_pylist(), self._refuse, self._expected), None
        if pa.types.is_struct(kind):
            if kind.get_field_index("indices") >= 0:
                return self._vectors(column)
            return images_of_structs(column.to_pylist(), self._refuse, self._expected), None
        return _narrowed(_numpy(column)), None

    # -- arrays ----------------------------------------------------------------------------------

    def _nested(self, column: pa.Array) -> NDArray[Any]:
        """Lists of lists ... of numbers as one array."""
        import pyarrow.compute as pc

        shape: list[int] = []
        rows, per_row = len(column), 1
        while is_listed(column.type):
            lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
            depth = len(shape)
            width = int(lengths[0]) if len(lengths) else 0
            if self._expected is not None and depth < len(self._expected):
                width = self._expected[depth]
            bad = np.flatnonzero(lengths != width)
            if len(bad):
                self._refuse(
                    int(bad[0]) // per_row,
                    f"has {lengths[bad[0]]} values where earlier ones have {width}: all rows need "
                    "the same shape; pad or cut them, with a mask as another column",
                )
            shape.append(width)
            per_row *= width
            column = column.flatten()
            if column.null_count:
                nulls = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
                self._refuse(int(nulls[0]) // max(1, per_row), "has a null: fill or drop it")
        return _narrowed(_numpy(column)).reshape(rows, *shape)

    # -- vectors ---------------------------------------------------------------------------------

    def _vectors(self, column: pa.Array) -> tuple[NDArray[Any], int | None]:
        """pyspark's vectors: struct of type (1: dense), size, indices and values."""
        import pyarrow.compute as pc

        is_dense = column.field("type").to_numpy(zero_copy_only=False) == 1
        lengths = pc.list_value_length(column.field("values")).to_numpy(zero_copy_only=False)
        sizes = pc.fill_null(column.field("size"), 0).to_numpy(zero_copy_only=False)
        sizes = np.where(is_dense, lengths, sizes)
        size = int(sizes[0]) if self._expected is None else self._expected[0]
        bad = np.flatnonzero(sizes != size)
        if len(bad):
            self._refuse(int(bad[0]), f"is a vector of {sizes[bad[0]]}, earlier ones are of {size}")
        values = column.field("values").flatten().to_numpy(zero_copy_only=False)
        values = values.astype(np.float32)
        if size <= DENSE_MAX and is_dense.all():
            return values.reshape(len(column), size), None
        rows = np.repeat(np.arange(len(column)), lengths)
        starts = np.cumsum(lengths) - lengths
        places = np.arange(len(rows)) - starts[rows]
        indices = column.field("indices").flatten().to_numpy(zero_copy_only=False)
        places[~is_dense[rows]] = indices
        entries = entries_of(rows, places, values, len(column))
        return (dense(entries, size), None) if size <= DENSE_MAX else (entries, size)

    # -- refusals --------------------------------------------------------------------------------

    def _refuse_nulls(self, column: pa.Array, name: str) -> None:
        if column.null_count:
            bad = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            advice = found_by(self._where, f"{quoted(name)} is null")
            self._refuse(bad, f"is null: fill or drop it{advice}", name)

    def _refuse(self, row: int, why: str, name: str | None = None) -> None:
        column = name or _name(self._take)
        kind = "" if self._take.role == FEATURES else f" ({self._take.role})"
        raise UsageError(f"row {self._first + row} of {self._where}: column {column!r}{kind} {why}")


def is_listed(kind: pa.DataType) -> bool:
    """Lists of Arrow's three kinds; Spark writes two of them."""
    import pyarrow as pa

    is_kind = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(each(kind) for each in is_kind)


def _numpy(column: pa.Array) -> NDArray[Any]:
    array: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return array


def _narrowed(array: NDArray[Any]) -> NDArray[Any]:
    """Doubles as float32."""
    return array.astype(np.float32) if array.dtype.kind == "f" else array
