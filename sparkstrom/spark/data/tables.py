"""Tables: records as Arrow columns and back, so that exported files are plain Parquet.

A number is a number, an array a list of its values row by row, an image its bytes, and a sparse
vector the bytes of its entries, as many as the row needs. Shapes stand in the metadata.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.runtime.records import ENTRY, Leaf, Records, RowFormat

if TYPE_CHECKING:
    import pyarrow as pa

KEY = b"sparkstrom.form"  # in the metadata of a schema


def schema_of(form: RowFormat) -> pa.Schema:
    """The columns of a form, and the form itself."""
    import pyarrow as pa

    fields = [(f"{i}: {leaf.name}", _type_of(leaf)) for i, leaf in enumerate(form.leaves)]
    return pa.schema(fields, metadata={KEY: json.dumps(form).encode()})


def form_in(schema: pa.Schema) -> RowFormat:
    """The form that ``schema_of`` put into a schema."""
    leaves, features, labels, weighted, flagged = json.loads(schema.metadata[KEY])
    return RowFormat(
        tuple(Leaf(name, tuple(shape), *rest) for name, shape, *rest in leaves),
        tuple(features) if isinstance(features, list) else features,
        tuple(labels) if isinstance(labels, list) else labels,
        weighted,
        flagged,
    )


def to_arrow(form: RowFormat, records: Records) -> pa.RecordBatch:
    """Records as columns."""
    import pyarrow as pa

    pairs = zip(form.leaves, form.arrays(records), strict=True)
    columns = [_column(leaf, array) for leaf, array in pairs]
    return pa.RecordBatch.from_arrays(columns, schema=schema_of(form))


def from_arrow(base: RowFormat, batch: pa.RecordBatch) -> tuple[RowFormat, Records]:
    """Columns as records, and their form: ``base`` with the room that these rows need."""
    leaves, arrays = [], []
    for leaf, column in zip(base.leaves, batch.columns, strict=True):
        array = _entries(column) if leaf.entries else _array(leaf, column)
        leaves.append(leaf._replace(entries=array.shape[1]) if leaf.entries else leaf)
        arrays.append(array)
    form = base._replace(leaves=tuple(leaves))
    return form, form.pack(arrays)


def _type_of(leaf: Leaf) -> pa.DataType:
    import pyarrow as pa

    if leaf.entries:
        return pa.large_binary()
    kind, size = np.dtype(leaf.stored), math.prod(leaf.shape)
    if not leaf.shape:
        return pa.from_numpy_dtype(kind)
    if kind == np.uint8 or not size:
        return pa.binary(size)
    return pa.list_(pa.from_numpy_dtype(kind), size)


def _column(leaf: Leaf, array: NDArray[Any]) -> pa.Array:
    import pyarrow as pa

    kind = _type_of(leaf)
    if leaf.entries:
        full = array["place"] != 0
        offsets = np.concatenate([[0], np.cumsum(full.sum(axis=1) * ENTRY.itemsize)])
        buffers = [None, pa.py_buffer(offsets.astype("<i8")), pa.py_buffer(array[full].tobytes())]
        return pa.Array.from_buffers(kind, len(array), buffers)
    if not leaf.shape:
        return pa.array(array, kind)
    if pa.types.is_fixed_size_binary(kind):
        return pa.Array.from_buffers(kind, len(array), [None, pa.py_buffer(array.tobytes())])
    return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), kind.list_size)


def _array(leaf: Leaf, column: pa.Array) -> NDArray[Any]:
    import pyarrow as pa

    shape = (len(column), *leaf.shape)
    if pa.types.is_fixed_size_binary(column.type):
        raw = b"".join(column.to_pylist())
        return (
            np.frombuffer(raw, leaf.stored).reshape(shape) if raw else np.zeros(shape, leaf.stored)
        )
    flat = column.flatten() if leaf.shape else column
    values: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    return values.reshape(shape)


def _entries(column: pa.Array) -> NDArray[Any]:
    rows = [np.frombuffer(value, ENTRY) for value in column.to_pylist()]
    out = np.zeros((len(rows), max(1, *map(len, rows))), ENTRY)
    for row, entries in zip(out, rows, strict=True):
        row[: len(entries)] = entries
    return out
