"""Convert Arrow record batches, including images and sparse vectors, to packed rows and back.

Packed rows, called records, are byte strings of equal length (``data.packed_rows``). The columns of
a Spark DataFrame or an Arrow table become arrays of a minibatch:

number           [rows]           integers as int64, floats as float32, booleans unchanged
list of columns  [rows, columns]  float32
array            [rows, ...]      possibly nested; all rows must have the same shape
ml vector        [rows, size]     float32; if longer than ``DENSE_MAX``, packed as a sparse vector
image, bytes     [rows, ...]      see below

Images become arrays [rows, height, width, channels] in grey, RGB or RGBA. Spark's image schema has
OpenCV's order of channels, blue first, which is reversed. Pillow, an optional dependency, decodes
PNG and JPEG. Other bytes become uint8[rows, length].
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.data.column_selection import (
    FEATURES,
    HELD_OUT,
    LABEL,
    WEIGHT,
    ArraySource,
    ArrowReadPlan,
)
from sparkstrom.data.packed_rows import (
    ENTRY_DTYPE,
    Leaf,
    Records,
    RowFormat,
    entries_to_dense,
    pack_sparse_entries,
)
from sparkstrom.data.row_blocks import BLOCK_BYTES, Block, batch_dtype, gather_blocks, search_advice

if TYPE_CHECKING:
    import pyarrow as pa


RejectRow = Callable[[int, str], None]  # (row, reason); raises UsageError
ExpectedShape = tuple[int, ...] | None  # shape of one row's value; None: not known yet

ENCODED_IMAGE_MAGIC = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")  # PNG, JPEG
PNG_DEPTH_AT = 24  # position of the bits per channel in a PNG: in IHDR, its first chunk
OPENCV_DEPTHS = {0: "u1", 5: "<f4"}  # low bits of the mode in Spark's image schema: CV_8U, CV_32F


def decode_image_bytes(
    values: list[bytes], reject: RejectRow, expected: ExpectedShape
) -> NDArray[np.uint8]:
    """Return PNGs and JPEGs, or raw bytes, as one array; call ``reject`` for an unsuitable row.

    The array is [rows, height, width, channels], or [rows, length] for raw bytes.
    """
    encoded = [value.startswith(ENCODED_IMAGE_MAGIC) for value in values]
    arrays = []
    for row, value in enumerate(values):
        if encoded[row] != encoded[0]:
            reject(row, "is a PNG or JPEG, and earlier ones are not, or the other way round")
        arrays.append(
            _decode_image(row, value, reject) if encoded[0] else np.frombuffer(value, "u1")
        )
    return _stack_images(arrays, reject, expected)


def decode_image_structs(
    values: list[dict[str, Any]], reject: RejectRow, expected: ExpectedShape
) -> NDArray[Any]:
    """Return equally sized images in Spark's image schema as an array of uint8 or float32.

    The array is [rows, height, width, channels], with the channels BGR reordered to RGB. Call
    ``reject`` for the first row that is damaged, of a different OpenCV type than 8 bits or float32,
    or of a different shape than ``expected`` (None: than the first row).
    """
    arrays = [_read_image_struct(row, value, reject) for row, value in enumerate(values)]
    return _stack_images(arrays, reject, expected)


def _decode_image(row: int, value: bytes, reject: RejectRow) -> NDArray[np.uint8]:
    """Decode one PNG or JPEG to uint8[height, width, channels]; call ``reject`` if impossible.

    Raise SetupError if Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError:
        raise SetupError(
            "PNG and JPEG columns need Pillow, which is not installed: pip install pillow on the "
            "executors, or read the files with spark.read.format('image')"
        ) from None
    try:
        with Image.open(io.BytesIO(value)) as image:
            if image.mode[0] in "IF" or _has_16_bits(value):
                mode = image.mode if image.mode[0] in "IF" else f"{image.mode} with 16 bits"
                reject(row, f"is an image of mode {mode}: only 8 bits per channel are read")
            kept = image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGB")
            array = np.asarray(kept)
    except (OSError, SyntaxError) as error:  # Pillow's errors for damaged files
        reject(row, f"is an image that cannot be opened: {error}")
        raise
    return array.reshape(array.shape[0], array.shape[1], -1)


def _has_16_bits(value: bytes) -> bool:
    """Return whether an encoded image is a PNG with 16 bits per channel.

    Pillow drops the lower 8 bits of those with colours, and its mode does not show it.
    """
    return value.startswith(ENCODED_IMAGE_MAGIC[0]) and value[PNG_DEPTH_AT] == 16


def _read_image_struct(row: int, image: dict[str, Any], reject: RejectRow) -> NDArray[Any]:
    """Convert one image in Spark's schema to [height, width, channels], or call ``reject``."""
    shape = (image["height"], image["width"], image["nChannels"])
    depth = OPENCV_DEPTHS.get(image["mode"] & 7) if image["mode"] is not None else None
    if depth is None or None in shape:
        reject(row, f"is an image of OpenCV mode {image['mode']}: only 8 bits and floats are read")
    array = np.frombuffer(image["data"] or b"", depth)
    if array.size != np.prod(shape):
        reject(row, f"has {array.size} values for an image of {list(shape)}")
    array = array.reshape(shape)
    if shape[2] < 3:
        return array
    return array[:, :, [2, 1, 0, *range(3, shape[2])]]


def _stack_images(
    arrays: list[NDArray[Any]], reject: RejectRow, expected: ExpectedShape
) -> NDArray[Any]:
    """Stack images to one array; ``reject`` the first one with a different shape or dtype."""
    shape = arrays[0].shape if expected is None else expected
    for row, array in enumerate(arrays):
        if array.shape != shape or array.dtype != arrays[0].dtype:
            reject(
                row,
                f"is {array.dtype.name}{list(array.shape)}, earlier ones are "
                f"{arrays[0].dtype.name}{list(shape)}: scale images to one size",
            )
    return np.stack(arrays)


FORMAT_KEY = b"sparkstrom.form"  # key of the row format in a schema's metadata


def schema_from_format(form: RowFormat) -> pa.Schema:
    """Return the Arrow schema of a row format, with the format itself in the schema's metadata."""
    import pyarrow as pa

    fields = [(f"{i}: {leaf.name}", _arrow_type(leaf)) for i, leaf in enumerate(form.leaves)]
    return pa.schema(fields, metadata={FORMAT_KEY: json.dumps(form).encode()})


def read_stored_format(schema: pa.Schema) -> RowFormat:
    """Read the row format that ``schema_from_format`` stored in a schema's metadata."""
    leaves, features, labels, weighted, flagged = json.loads(schema.metadata[FORMAT_KEY])
    return RowFormat(
        tuple(Leaf(name, tuple(shape), *rest) for name, shape, *rest in leaves),
        tuple(features) if isinstance(features, list) else features,
        tuple(labels) if isinstance(labels, list) else labels,
        weighted,
        flagged,
    )


def records_to_arrow(form: RowFormat, records: Records) -> pa.RecordBatch:
    """Convert records to Arrow columns for an exported Parquet file.

    A number is stored as a number, an array as a list of its values in row-major order, an image as
    its bytes, and a sparse vector as the bytes of its entries.
    """
    import pyarrow as pa

    pairs = zip(form.leaves, form.arrays(records), strict=True)
    columns = [_to_column(leaf, array) for leaf, array in pairs]
    return pa.RecordBatch.from_arrays(columns, schema=schema_from_format(form))


def records_from_arrow(base: RowFormat, batch: pa.RecordBatch) -> tuple[RowFormat, Records]:
    """Convert columns made by ``records_to_arrow`` back to records; return (row format, records).

    The row format is ``base``, with room for as many sparse entries as these rows need.
    """
    leaves, arrays = [], []
    for leaf, column in zip(base.leaves, batch.columns, strict=True):
        array = _to_entries(column) if leaf.entries else _to_array(leaf, column)
        leaves.append(leaf._replace(entries=array.shape[1]) if leaf.entries else leaf)
        arrays.append(array)
    form = base._replace(leaves=tuple(leaves))
    return form, form.pack(arrays)


def _arrow_type(leaf: Leaf) -> pa.DataType:
    """Return the Arrow type of the exported column with the values of ``leaf``."""
    import pyarrow as pa

    if leaf.entries:
        return pa.large_binary()
    kind, size = np.dtype(leaf.stored_dtype), math.prod(leaf.shape)
    if not leaf.shape:
        return pa.from_numpy_dtype(kind)
    if kind == np.uint8 or not size:
        return pa.binary(size)
    return pa.list_(pa.from_numpy_dtype(kind), size)


def _to_column(leaf: Leaf, array: NDArray[Any]) -> pa.Array:
    """Convert an array unpacked from records, with the layout ``leaf``, to an Arrow column."""
    import pyarrow as pa

    kind = _arrow_type(leaf)
    if leaf.entries:
        full = array["place"] != 0
        offsets = np.concatenate([[0], np.cumsum(full.sum(axis=1) * ENTRY_DTYPE.itemsize)])
        buffers = [None, pa.py_buffer(offsets.astype("<i8")), pa.py_buffer(array[full].tobytes())]
        return pa.Array.from_buffers(kind, len(array), buffers)
    if not leaf.shape:
        return pa.array(array, kind)
    if pa.types.is_fixed_size_binary(kind):
        return pa.Array.from_buffers(kind, len(array), [None, pa.py_buffer(array.tobytes())])
    return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), kind.list_size)


def _to_array(leaf: Leaf, column: pa.Array) -> NDArray[Any]:
    """Convert an Arrow column to an array that can be packed into records as ``leaf``."""
    import pyarrow as pa

    shape = (len(column), *leaf.shape)
    if pa.types.is_fixed_size_binary(column.type):
        raw = b"".join(column.to_pylist())
        stored = np.frombuffer(raw, leaf.stored_dtype) if raw else np.zeros(0, leaf.stored_dtype)
        return stored.reshape(shape)
    flat = column.flatten() if leaf.shape else column
    values: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
    return values.reshape(shape)


def _to_entries(column: pa.Array) -> NDArray[Any]:
    """Convert an Arrow column with the bytes of sparse entries to an array [rows, entries]."""
    rows = [np.frombuffer(value, ENTRY_DTYPE) for value in column.to_pylist()]
    out = np.zeros((len(rows), max([1, *map(len, rows)])), ENTRY_DTYPE)
    for row, entries in zip(out, rows, strict=True):
        row[: len(entries)] = entries
    return out


DENSE_MAX = 1024  # longer vectors are stored as sparse entries of 8 bytes, not as dense floats


def read_arrow_blocks(
    plan: ArrowReadPlan, partition: int, messages: Iterable[bytes]
) -> Iterator[Block]:
    """Convert a partition's serialized Arrow batches to blocks of records, by ``plan``.

    Raise UsageError that names the column and row if a value cannot be used.
    """
    return read_batch_blocks(plan, partition, _decode_batches(plan, messages))


def read_batch_blocks(
    plan: ArrowReadPlan, partition: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[Block]:
    """Convert a partition's Arrow batches, such as those of ``mapInArrow``, to record blocks."""
    where = f"partition {partition}"
    return gather_blocks(read_record_parts(plan, batches, where), where)


def count_arrow_rows(plan: ArrowReadPlan, messages: Iterable[bytes]) -> Iterator[int]:
    """Yield the number of rows in a partition's serialized Arrow batches, as the only item."""
    yield sum(batch.num_rows for batch in _decode_batches(plan, messages))


def _decode_batches(plan: ArrowReadPlan, messages: Iterable[bytes]) -> Iterator[pa.RecordBatch]:
    """Deserialize Arrow record batches."""
    import pyarrow as pa

    schema = pa.ipc.read_schema(pa.py_buffer(plan.schema))
    for message in messages:
        yield pa.ipc.read_record_batch(pa.py_buffer(message), schema)


def read_record_parts(
    plan: ArrowReadPlan, batches: Iterable[pa.RecordBatch], where: str
) -> Iterator[tuple[RowFormat, Records]]:
    """Convert Arrow batches to records, and yield (row format, records) of about BLOCK_BYTES each.

    Records are rows packed as bytes of equal length. ``where`` names their origin in errors.
    """
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
            form, records = _read_part(plan, part, begin + at, where, form)
            yield form, records
            at += part.num_rows
        begin += batch.num_rows


def _read_part(
    plan: ArrowReadPlan,
    batch: pa.RecordBatch,
    first_row: int,
    where: str,
    previous: RowFormat | None,
) -> tuple[RowFormat, Records]:
    """Convert part of an Arrow batch to records; return (row format, records).

    ``first_row`` is the number of its first row; ``where`` names the rows' origin in errors. Raise
    UsageError for a row that cannot be used or has a different shape than earlier rows, whose
    format is ``previous``.
    """
    leaves, arrays = [], []
    for i, source in enumerate(plan.array_sources):
        expected = previous.leaves[i].shape if previous else None
        array, size = _ArrayReader(source, first_row, where, expected).array(batch)
        shape, stored = array.shape[1:], array.dtype.str
        entries, kind = 0, _column_kind(batch.schema.field(source.columns[0]).type)
        if size is not None:
            shape, stored, entries = (size,), "<f4", array.shape[1]
        name = ", ".join(source.names)
        leaves.append(Leaf(name, shape, stored, batch_dtype(stored), entries, kind))
        arrays.append(array)
    form = RowFormat(
        tuple(leaves), plan.features, plan.labels, plan.has_weights, plan.has_held_out_flag
    )
    return form, form.pack(arrays)


class _ArrayReader:
    """Reads one array of the records from an Arrow batch, and checks every row.

    ``first_row`` is the number of the batch's first row and ``where`` names the rows' origin, both
    for errors. ``expected`` is the shape of a row's value in earlier rows; None: there are none.
    """

    def __init__(
        self, source: ArraySource, first_row: int, where: str, expected: tuple[int, ...] | None
    ) -> None:
        self._source, self._first_row = source, first_row
        self._where, self._expected = where, expected

    def array(self, batch: pa.RecordBatch) -> tuple[NDArray[Any], int | None]:
        """Return (array [rows, ...], None), or (sparse entries [rows, entries], vector size).

        Raise UsageError naming the first row that cannot be used.
        """
        columns = [batch.column(i) for i in self._source.columns]
        for name, column in zip(self._source.names, columns, strict=True):
            self._reject_nulls(column, name)
        if self._source.is_stacked:
            arrays = [
                self._to_float32(_to_numpy(column), name).astype(np.float32, copy=False)
                for name, column in zip(self._source.names, columns, strict=True)
            ]
            return np.stack(arrays, axis=1), None
        array, size = self._read_column(columns[0])
        shape = (size,) if size is not None else array.shape[1:]
        if self._expected is not None and shape != self._expected and len(array):
            self._reject(0, f"is {list(shape)}, in earlier rows it is {list(self._expected)}")
        if self._source.role == WEIGHT:
            bad = ~((array >= 0) & np.isfinite(array))
            if bad.any():
                row = int(np.argmax(bad))
                advice = self._search_advice(f"float({{}}) = float('{array[row]}')")
                self._reject(
                    row, f"is {array[row]}, which is not a weight: give 0 or above{advice}"
                )
            array = array.astype(np.float32)
        elif self._source.role == HELD_OUT:
            array = array.astype(np.uint8)
        elif self._source.role == LABEL and array.dtype.kind == "b":
            array = array.astype(np.int8)
        return array, size

    def _read_column(self, column: pa.Array) -> tuple[NDArray[Any], int | None]:
        """Convert one column according to its Arrow type; the result is like that of ``array``."""
        import pyarrow as pa

        kind = column.type
        if is_list_type(kind):
            return self._read_nested(column), None
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return decode_image_bytes(column.to_pylist(), self._reject, self._expected), None
        if pa.types.is_struct(kind):
            if kind.get_field_index("indices") >= 0:
                return self._read_vectors(column)
            return decode_image_structs(column.to_pylist(), self._reject, self._expected), None
        return self._to_float32(_to_numpy(column)), None

    def _read_nested(self, column: pa.Array) -> NDArray[Any]:
        """Convert a column of number lists, nested to any depth, to one array."""
        import pyarrow.compute as pc

        shape: list[int] = []
        rows, per_row = len(column), 1
        while is_list_type(column.type):
            lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
            depth = len(shape)
            width = int(lengths[0]) if len(lengths) else 0
            if self._expected is not None and depth < len(self._expected):
                width = self._expected[depth]
            bad = np.flatnonzero(lengths != width)
            if len(bad):
                self._reject(
                    int(bad[0]) // per_row,
                    f"has {lengths[bad[0]]} values where earlier ones have {width}: all rows need "
                    "the same shape; pad or cut them, with a mask as another column"
                    + self._search_advice(f"size({{}}) != {width}", depth),
                )
            shape.append(width)
            per_row *= width
            column = column.flatten()
            if column.null_count:
                nulls = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
                advice = self._search_advice("{} is null", len(shape))
                row = int(nulls[0]) // max(1, per_row)
                self._reject(row, f"has a null: fill or drop it{advice}")
        array = self._to_float32(_to_numpy(column), row_of=lambda at: at // max(1, per_row))
        return array.reshape(rows, *shape)

    def _read_vectors(self, column: pa.Array) -> tuple[NDArray[Any], int | None]:
        """Convert pyspark.ml vectors: structs of type (1 is dense), size, indices and values.

        Return (array [rows, size], None), or (packed sparse entries, size) for vectors longer than
        DENSE_MAX. Reject a row whose vector has a different size than earlier ones.
        """
        import pyarrow.compute as pc

        is_dense = column.field("type").to_numpy(zero_copy_only=False) == 1
        lengths = pc.list_value_length(column.field("values")).to_numpy(zero_copy_only=False)
        sizes = pc.fill_null(column.field("size"), 0).to_numpy(zero_copy_only=False)
        sizes = np.where(is_dense, lengths, sizes)
        size = int(sizes[0]) if self._expected is None else self._expected[0]
        bad = np.flatnonzero(sizes != size)
        if len(bad):
            self._reject(int(bad[0]), f"is a vector of {sizes[bad[0]]}, earlier ones are of {size}")
        values = column.field("values").flatten().to_numpy(zero_copy_only=False)
        ends = np.cumsum(lengths)
        values = self._to_float32(values, row_of=lambda at: int(np.searchsorted(ends, at, "right")))
        if size <= DENSE_MAX and is_dense.all():
            return values.reshape(len(column), size), None
        rows = np.repeat(np.arange(len(column)), lengths)
        starts = ends - lengths
        places = np.arange(len(rows)) - starts[rows]
        indices = column.field("indices").flatten().to_numpy(zero_copy_only=False)
        places[~is_dense[rows]] = indices
        entries = pack_sparse_entries(rows, places, values, len(column))
        return (entries_to_dense(entries, size), None) if size <= DENSE_MAX else (entries, size)

    def _to_float32(
        self,
        array: NDArray[Any],
        name: str | None = None,
        row_of: Callable[[int], int] = int,
    ) -> NDArray[Any]:
        """Convert flat float arrays to float32; return other arrays unchanged.

        Raise UsageError for a finite number that would become infinite. ``name`` is the column's
        name if the source has several; ``row_of`` returns the row of an element, given by its
        index.
        """
        if array.dtype.kind != "f":
            return array
        try:
            with np.errstate(over="raise"):
                return array.astype(np.float32)
        except FloatingPointError:
            too_large = np.isfinite(array) & (np.abs(array) > np.finfo(np.float32).max)
            at = int(np.argmax(too_large))
            why = f"has {array[at]}, which float32 cannot hold: scale or clip it"
            self._reject(row_of(at), why, name)

    def _reject_nulls(self, column: pa.Array, name: str) -> None:
        """Raise UsageError, which names the first null, if a column has nulls."""
        if column.null_count:
            bad = int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
            advice = search_advice(self._where, name, "{} is null")
            self._reject(bad, f"is null: fill or drop it{advice}", name)

    def _search_advice(self, condition: str, depth: int = 0) -> str:
        """Return advice on finding rows that meet a condition, see ``row_blocks.search_advice``."""
        return search_advice(self._where, self._source.names[0], condition, depth)

    def _reject(self, row: int, why: str, name: str | None = None) -> NoReturn:
        """Raise UsageError that says ``why`` a row, given by its index in the batch, is unsuitable.

        ``name`` is the column's name; None: name all columns of the array.
        """
        column = name or ", ".join(self._source.names)
        kind = "" if self._source.role == FEATURES else f" ({self._source.role})"
        raise UsageError(
            f"row {self._first_row + row} of {self._where}: column {column!r}{kind} {why}"
        )


def _column_kind(kind: pa.DataType) -> str:
    """Return "number", "array" or "vector" for an Arrow type; "" for images and other bytes."""
    import pyarrow as pa

    if is_list_type(kind):
        return "array"
    if pa.types.is_struct(kind):
        return "vector" if kind.get_field_index("indices") >= 0 else ""
    return "" if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else "number"


def is_list_type(kind: pa.DataType) -> bool:
    """Return whether a type is one of Arrow's three list types."""
    import pyarrow as pa

    is_kind = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(each(kind) for each in is_kind)


def _to_numpy(column: pa.Array) -> NDArray[Any]:
    """Convert an Arrow column to a NumPy array, of float64 for decimals; copy only if necessary."""
    import pyarrow as pa

    if pa.types.is_decimal(column.type):
        column = column.cast(pa.float64())
    array: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return array
