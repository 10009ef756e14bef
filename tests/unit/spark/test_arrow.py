"""Tests of reading Arrow record batches; errors name the column and row of a bad value."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from sparkstrom.base.errors import UsageError
from sparkstrom.data import arrow_conversion as arrow
from sparkstrom.data import row_blocks
from sparkstrom.data.arrow_conversion import count_arrow_rows, read_arrow_blocks, read_record_parts
from sparkstrom.data.column_selection import (
    FEATURES,
    HELD_OUT,
    LABEL,
    WEIGHT,
    ArraySource,
    ArrowReadPlan,
)
from sparkstrom.data.packed_rows import Leaf, RowFormat
from sparkstrom.models.base import Batch

F32, VECTOR = pa.float32(), pa.struct(
    [
        ("type", pa.int8()),
        ("size", pa.int32()),
        ("indices", pa.list_(pa.int32())),
        ("values", pa.list_(pa.float64())),
    ]
)  # fmt: skip
IMAGE = pa.struct(
    [("height", pa.int32()), ("width", pa.int32()), ("nChannels", pa.int32()),
     ("mode", pa.int32()), ("data", pa.binary())]
)  # fmt: skip


def make_read_plan(schema: pa.Schema, **options: Any) -> ArrowReadPlan:
    """Return a plan: "y" is the label, "w" a weight, "v" held out; other columns are features."""
    roles = {"y": LABEL, "w": WEIGHT, "v": HELD_OUT}
    takes = [
        ArraySource(roles.get(name, FEATURES), (name,), (i,), False)
        for i, name in enumerate(schema.names)
    ]
    names = tuple(name for name in schema.names if name not in roles)
    fixed: dict[str, Any] = {
        "features": None if len(names) == 1 else names,
        "labels": None,
        "has_weights": "w" in schema.names,
        "has_held_out_flag": "v" in schema.names,
    }
    return ArrowReadPlan(schema.serialize().to_pybytes(), tuple(takes), **fixed | options)


def messages(*batches: pa.RecordBatch) -> Iterator[bytes]:
    """Yield the record batches in Arrow's stream format."""
    return (batch.serialize().to_pybytes() for batch in batches)


def table(types: dict[str, pa.DataType], *parts: dict[str, list[Any]]) -> list[pa.RecordBatch]:
    """Return record batches of these parts, with row numbers as labels unless "y" is given."""
    schema = pa.schema([*types.items(), *([] if "y" in types else [("y", pa.int32())])])
    return [
        pa.RecordBatch.from_pydict(
            {"y": list(range(len(next(iter(part.values()))))), **part}, schema=schema
        )
        for part in parts
    ]


def read(types: dict[str, pa.DataType], *parts: dict[str, list[Any]]) -> Batch:
    """Read record batches of these parts as partition 3; return all rows as one minibatch."""
    batches = table(types, *parts)
    made = list(read_arrow_blocks(make_read_plan(batches[0].schema), 3, messages(*batches)))
    form = made[-1].form
    return form.batch(np.concatenate([b.form.repack(b.records, form) for b in made]))


@pytest.mark.parametrize(
    ("kind", "values", "dtype"),
    [
        (pa.int8(), [1, 2, -3], "int64"),
        (pa.int64(), [1, 2**40, -3], "int64"),
        (pa.float64(), [0.5, 1.5, 2.5], "float32"),
        (pa.bool_(), [True, False, True], "bool"),
        (pa.list_(pa.int16()), [[1, 2], [3, 4], [5, 6]], "int64"),
        (pa.list_(pa.list_(F32)), [[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]], "float32"),
        (pa.list_(pa.bool_()), [[True, False], [False, True], [True, True]], "bool"),
        (pa.binary(), [b"\x01\x02", b"\x03\x04", b"\x05\x06"], "uint8"),
    ],
)
def test_column_keeps_shape_and_dtype(kind: Any, values: list[Any], dtype: str) -> None:
    features = read({"x": kind}, {"x": values[:1]}, {"x": values[1:]}).features
    wanted = np.array([list(v) if isinstance(v, bytes) else v for v in values])
    assert isinstance(features, np.ndarray)
    assert features.dtype == dtype
    np.testing.assert_array_equal(features, wanted)


def test_reads_named_inputs_labels_weights_and_held_out_flags() -> None:
    types = {"ids": pa.list_(pa.int32()), "mask": pa.list_(pa.bool_()), "y": pa.float64(),
             "w": pa.float64(), "v": pa.bool_()}  # fmt: skip
    part = {"ids": [[7, 8], [9, 0]], "mask": [[True, True], [True, False]], "y": [0.5, 1.5],
            "w": [1.0, 0.0], "v": [False, True]}  # fmt: skip
    batches = table(types, part)
    (block,) = read_arrow_blocks(make_read_plan(batches[0].schema), 0, messages(*batches))
    batch = block.form.batch(block.records)
    assert isinstance(batch.features, dict)
    assert list(batch.features) == ["ids", "mask"]
    assert batch.features["ids"].tolist() == [[7, 8], [9, 0]]
    assert (batch.labels.dtype, batch.weights.tolist()) == (np.float32, [1.0, 0.0])
    assert block.form.held_out(block.records).tolist() == [False, True]


def vectors(*rows: Any) -> list[dict[str, Any]]:
    """Return Spark vectors: a list is a dense one, (size, indices, values) a sparse one."""
    return [
        {"type": 1, "size": None, "indices": None, "values": row}
        if isinstance(row, list)
        else {"type": 0, "size": row[0], "indices": row[1], "values": row[2]}
        for row in rows
    ]


@pytest.mark.parametrize("dense_max", [1024, 2])
def test_dense_and_sparse_vectors_become_dense_features(
    dense_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both kinds of vectors, and vectors longer than DENSE_MAX, become dense in a minibatch."""
    monkeypatch.setattr(arrow, "DENSE_MAX", dense_max)
    parts = [{"x": vectors([1.0, 0.0, 3.0], (3, [1], [5.0]))}, {"x": vectors((3, [], []))},
             {"x": vectors((3, [0, 1, 2], [1.0, 2.0, 0.0]))}]  # fmt: skip
    features = read({"x": VECTOR}, *parts).features
    assert features.tolist() == [[1, 0, 3], [0, 5, 0], [0, 0, 0], [1, 2, 0]]
    assert features.dtype == np.float32


def test_long_vector_is_stored_by_its_nonzero_entries() -> None:
    """A long vector takes 8 bytes for its only entry, whether it came sparse or dense."""
    size = 1 << 18
    as_dense = np.zeros(size)
    as_dense[7] = 2.0
    forms = [
        next(read_arrow_blocks(make_read_plan(b[0].schema), 0, messages(*b)))
        for row in ((size, [7], [2.0]), (size, [7, 9], [2.0, 0.0]), as_dense.tolist())
        if (b := table({"x": VECTOR}, {"x": vectors(row)}))
    ]
    assert {block.records.nbytes for block in forms} == {8 + 4}
    assert len({block.records.tobytes() for block in forms}) == 1


def test_png_and_spark_images_become_equal_rgb_arrays() -> None:
    """PNG files and Spark's BGR image structs become equal RGB arrays; floats stay floats."""
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    opencv = {"height": 2, "width": 3, "nChannels": 3, "mode": 16,
              "data": pixels[:, :, ::-1].tobytes()}  # fmt: skip
    png = read({"x": pa.binary()}, {"x": [encoded.getvalue()] * 2}).features
    struct = read({"x": IMAGE}, {"x": [opencv] * 2}).features
    for features in (png, struct):
        assert (features.dtype, features.shape) == (np.uint8, (2, 2, 3, 3))
        np.testing.assert_array_equal(features[1], pixels)
    grey = {"height": 1, "width": 2, "nChannels": 1, "mode": 5,
            "data": np.array([0.5, 1.5], "<f4").tobytes()}  # fmt: skip
    assert read({"x": IMAGE}, {"x": [grey]}).features.tolist() == [[[[0.5], [1.5]]]]


def png(*shape: int, mode: str | None = None) -> bytes:
    """Return a PNG file of a black image."""
    out = io.BytesIO()
    image = Image.fromarray(np.zeros(shape, np.uint8))
    (image.convert(mode) if mode else image).save(out, "PNG")
    return out.getvalue()


def chunk(name: bytes, content: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    checked = name + content
    return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))


# An RGB image of one pixel, with 16 bits per channel.
DEEP_PNG = (
    png(1, 1)[:8]
    + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))
    + chunk(b"IDAT", zlib.compress(bytes(7)))
    + chunk(b"IEND", b"")
)
LIST = pa.list_(F32)
GOOD = [1.0, 2.0]


@pytest.mark.parametrize(
    ("kind", "values", "why"),
    [
        (LIST, [GOOD, [1.0]], "column 'x' has 1 values where earlier ones have 2.*pad or cut"),
        (LIST, [GOOD, None], "column 'x' is null: fill or drop it"),
        (LIST, [GOOD, [1.0, None]], "column 'x' has a null: fill or drop it"),
        (pa.list_(LIST), [[GOOD, GOOD], [GOOD, [1.0]]], "column 'x' has 1 values where earlier"),
        (pa.list_(LIST), [[GOOD, GOOD], [GOOD]], "column 'x' has 1 values where earlier"),
        (pa.list_(LIST), [[GOOD, GOOD], [GOOD, None]], "column 'x' has a null"),
        (pa.int32(), [1, None], r"is null: .* frame\.where\(.x is null.\) shows such rows"),
        (LIST, [GOOD, [1.0]], r"has 1 values.* frame\.where\(.size\(x\) != 2.\) shows such rows"),
        (LIST, [GOOD, [1.0, None]], r"where\(.exists\(x, v -> v is null\).\) shows such rows"),
        (
            pa.list_(LIST),
            [[GOOD, GOOD], [GOOD, [1.0, None]]],
            r"where\(.exists\(x, v1 -> exists\(v1, v2 -> v2 is null\)\).\) shows such rows",
        ),
        (pa.list_(LIST), [[GOOD], [[1.0]]], r"where\(.exists\(x, v -> size\(v\) != 2\).\) shows"),
        (pa.float64(), [1.0, -1e300], r"column 'x' has -1e\+300, which float32 cannot hold: scale"),
        (pa.list_(pa.float64()), [GOOD, [1e39, 0.0]], r"column 'x' has 1e\+39, which float32"),
        (VECTOR, vectors(GOOD, [1.0, 1e300]), r"column 'x' has 1e\+300, which float32 cannot"),
        (VECTOR, vectors(GOOD, [1.0]), "column 'x' is a vector of 1, earlier ones are of 2"),
        (VECTOR, vectors(GOOD, (3, [1], [1.0])), "column 'x' is a vector of 3"),
        (pa.binary(), [b"ab", b"abc"], r"is uint8\[3\], earlier ones are uint8\[2\]: scale"),
        (pa.binary(), [b"ab", png(2, 2)], r"(is a PNG or JPEG, and earlier|is uint8\[2, 2, 1\])"),
        (pa.binary(), [png(2, 2), png(2, 3)], r"is uint8\[2, 3, 1\], earlier ones are"),
        (pa.binary(), [png(2, 2), png(2, 2)[:30]], "cannot be opened"),
        (pa.binary(), [png(2, 2), png(2, 2, mode="I;16")], "is an image of mode I"),
        (pa.binary(), [png(1, 1, 3), DEEP_PNG], "is an image of mode RGB with 16 bits: only 8"),
    ],
)
@pytest.mark.parametrize("together", [True, False])
def test_error_of_invalid_row_names_row_and_partition(
    kind: Any, values: list[Any], why: str, together: bool
) -> None:
    """The error names the row, also if rows with which it is compared came in an earlier batch."""
    parts = [{"x": values}] if together else [{"x": values[:1]}, {"x": values[1:]}]
    first = {"x": values[:1] * 4}
    with pytest.raises(UsageError, match=rf"^row 5 of partition 3: .*{why}"):
        read({"x": kind}, first, *parts)


def test_float32_overflow_error_names_column_and_value() -> None:
    """The error has the number; before, it had an infinity, which is not in the data."""
    schema = pa.schema([("a", pa.int64()), ("b", pa.float64())])
    plan = ArrowReadPlan(
        schema.serialize().to_pybytes(),
        (ArraySource(FEATURES, ("a", "b"), (0, 1), True),),
        None,
        0,
        False,
        False,
    )
    batch = pa.RecordBatch.from_pydict({"a": [1, 2], "b": [np.inf, 1e300]}, schema=schema)
    with pytest.raises(UsageError, match=r"row 1 of partition 3: column 'b' has 1e\+300, which"):
        list(read_record_parts(plan, [batch], "partition 3"))


def test_reads_empty_batch_of_sparse_vectors() -> None:
    form = RowFormat((Leaf("x", (2000,), "<f4", "<f4", 3, "vector"),))
    schema = arrow.schema_from_format(form)
    _, records = arrow.records_from_arrow(form, pa.RecordBatch.from_pylist([], schema=schema))
    assert len(records) == 0


def test_row_format_records_column_kinds() -> None:
    """The row format records each column's kind, on which the query for bad values depends."""
    kinds = {"x": LIST, "vec": VECTOR, "b": pa.binary(), "n": F32}
    row = {"x": [GOOD], "vec": vectors(GOOD), "b": [b"ab"], "n": [1.0]}
    batch = table(kinds, row)[0]
    form, _ = next(read_record_parts(make_read_plan(batch.schema), [batch], "partition 0"))
    assert {leaf.name: leaf.column for leaf in form.leaves} == {
        "x": "array", "vec": "vector", "b": "", "n": "number", "y": "number"
    }  # fmt: skip


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), None])
def test_rejects_negative_nonfinite_or_null_weight(weight: float | None) -> None:
    said = "null" if weight is None else f"{weight}, which is not a weight"
    with pytest.raises(UsageError, match=rf"row 1 of partition 3: column 'w' \(weight\) is {said}"):
        read({"x": F32, "y": F32, "w": F32}, {"x": [1, 2], "y": [1, 2], "w": [1.0, weight]})


def test_block_size_does_not_depend_on_record_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks have about BLOCK_BYTES, however many rows the record batches have."""
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 1200)
    monkeypatch.setattr(arrow, "BLOCK_BYTES", 1200)
    batches = table({"x": F32}, *({"x": list(range(n))} for n in (700, 3, 0, 100, 5)))
    made = list(read_arrow_blocks(make_read_plan(batches[0].schema), 0, messages(*batches)))
    assert [int(n) for block in made for n in block.numbers] == list(range(808))
    sizes = [block.records.nbytes for block in made]
    assert max(sizes) <= 2 * 1200
    assert min(sizes[:-1]) >= 1200  # only the last may be smaller
    assert list(count_arrow_rows(make_read_plan(batches[0].schema), messages(*batches))) == [808]


def test_a_long_sparse_vector_does_not_widen_a_whole_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records are as long as the block's longest sparse row, so such a row has a block with few."""
    monkeypatch.setattr(row_blocks, "BLOCK_BYTES", 1200)
    entries = [1, 2, 100, 1, 2]
    forms = [RowFormat((Leaf("x", (2000,), "<f4", "<f4", count),)) for count in entries]
    parts = [(form, np.zeros((20, form.row_bytes), np.uint8)) for form in forms]
    made = list(row_blocks.gather_blocks(iter(parts), "partition 0"))
    assert [int(n) for block in made for n in block.numbers] == list(range(100))
    assert [block.form.leaves[0].entries for block in made] == [2, 100, 2]


def test_empty_stream_yields_no_blocks() -> None:
    assert list(read_arrow_blocks(make_read_plan(pa.schema([("x", F32), ("y", F32)])), 0, [])) == []
