"""Tests of the kinds of data: each gives the same numbered rows, and errors name the wrong part."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import dataset, parquet

from sparkstrom import UsageError
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.data.row_blocks import BLOCK_BYTES
from sparkstrom.local.data import partition_rows, read_data_blocks
from sparkstrom.models.base import Batch

ROWS, WIDTH = 50, 3
CHANCE = np.random.default_rng(1)
X = CHANCE.normal(size=(ROWS, WIDTH)).astype(np.float32)
Y = CHANCE.integers(0, 4, ROWS)
W = CHANCE.random(ROWS).astype(np.float32)


class MapStyleDataset:
    """A map-style dataset like PyTorch's."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        import torch

        return torch.from_numpy(X[index]), torch.tensor(Y[index]), float(W[index])


class StreamedDataset:
    """An iterable dataset like PyTorch's."""

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return iter(list(zip(X, Y, W, strict=True)))


class SparseMatrix:
    """A matrix with two dimensions and without a length, like SciPy's sparse matrices."""

    ndim, shape = 2, (ROWS, WIDTH)

    def __len__(self) -> int:
        raise TypeError("sparse array length is ambiguous")


def table() -> pa.Table:
    pixels = pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), WIDTH)
    return pa.table({"pixels": pixels, "digit": Y, "w": W, "more": Y})


def reader(table: pa.Table) -> pa.RecordBatchReader:
    return pa.RecordBatchReader.from_batches(table.schema, table.to_batches(max_chunksize=7))


TABLE = ColumnSpec("pixels", "digit", "w")


def files(directory: Path) -> list[Path]:
    parquet.write_table(table().slice(0, 20), directory / "a.parquet")
    parquet.write_table(table().slice(20), directory / "b.parquet")
    return [directory / "a.parquet", directory / "b.parquet"]


def whole_file(directory: Path) -> parquet.ParquetFile:
    parquet.write_table(table(), directory / "all.parquet", row_group_size=7)
    return parquet.ParquetFile(directory / "all.parquet")


def both(directory: Path) -> list[Path]:
    """Return a directory that holds one of the files, and the path of the other file."""
    first, second = files(directory)
    (directory / "folder").mkdir()
    return [first.rename(directory / "folder" / "a.parquet").parent, second]


KINDS = {
    "arrays": (lambda _: (X, Y, W), ColumnSpec()),
    "doubles": (lambda _: (X.astype(np.float64), Y.astype(np.int16), W), ColumnSpec()),
    "rows": (lambda _: list(zip(X, Y.tolist(), W.tolist(), strict=True)), ColumnSpec()),
    "generator": (lambda _: (row for row in zip(X, Y, W, strict=True)), ColumnSpec()),
    "dataset": (lambda _: MapStyleDataset(), ColumnSpec()),
    "iterable dataset": (lambda _: StreamedDataset(), ColumnSpec()),
    "table": (lambda _: table(), TABLE),
    "batch": (lambda _: table().combine_chunks().to_batches()[0], TABLE),
    "reader": (lambda _: reader(table()), TABLE),
    "pandas": (lambda _: table().to_pandas(), TABLE),
    "files": (lambda directory: files(directory), TABLE),
    "both": (lambda directory: both(directory), TABLE),
    "parquet file": (lambda directory: whole_file(directory), TABLE),
    "directory": (lambda directory: str(files(directory)[0].parent), TABLE),
    "side by side": (
        lambda _: pa.table({"a": X[:, 0], "b": X[:, 1], "c": X[:, 2], "y": Y, "w": W}),
        ColumnSpec(["a", "b", "c"], "y", "w"),
    ),
}


def rows_of(data: Any, chosen: ColumnSpec = ColumnSpec()) -> tuple[Batch, list[int]]:  # noqa: B008
    """Return all rows of the data as one batch, and their numbers."""
    blocks = list(read_data_blocks(data, chosen))
    batches = [block.form.batch(block.records) for block in blocks]
    parts = [
        np.concatenate([getattr(batch, name) for batch in batches])
        for name in ("features", "labels", "weights")
    ]
    return Batch(*parts), [int(n) for block in blocks for n in block.numbers]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_same_rows(kind: str, tmp_path: Path) -> None:
    """Each kind of data gives the same rows, types and row numbers."""
    if "dataset" in kind:
        pytest.importorskip("torch")
    make, chosen = KINDS[kind]
    batch, numbers = rows_of(make(tmp_path), chosen)
    np.testing.assert_array_equal(batch.features, X)
    np.testing.assert_array_equal(batch.labels, Y)
    np.testing.assert_array_equal(batch.weights, W)
    assert batch.features.dtype == batch.weights.dtype == np.float32
    assert batch.labels.dtype == np.int64
    assert numbers == list(range(ROWS))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_large_arrays_are_read_in_blocks(dtype: Any) -> None:
    """Large memory-mapped arrays are never copied as a whole: peak memory is some blocks."""
    features, labels = np.zeros((1 << 20, 8), dtype), np.zeros(1 << 20, np.int64)
    tracemalloc.start()
    try:
        count = sum(
            len(block.records) for block in read_data_blocks((features, labels), ColumnSpec())
        )
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 1 << 20
    assert peak_bytes < 10 * BLOCK_BYTES < features.nbytes


def test_list_given_with_arrays_is_converted_to_array() -> None:
    """A list given together with arrays is converted to an array."""
    (block,) = read_data_blocks(({"x": X, "n": list(range(ROWS))}, Y.tolist()), ColumnSpec())
    batch = block.form.batch(block.records)
    assert batch.features["n"].dtype == np.float32
    np.testing.assert_array_equal(batch.features["n"], np.arange(ROWS))
    np.testing.assert_array_equal(batch.labels, Y)


def test_unselected_dataframe_columns_are_not_read() -> None:
    """Unselected columns of a DataFrame may be unreadable or have duplicate names."""
    frame = table().to_pandas().assign(junk=[1, *["a"] * (ROWS - 1)])
    frame[7] = frame["w"]
    frame.insert(0, "junk", frame["junk"], allow_duplicates=True)
    batch, _ = rows_of(frame, TABLE)
    np.testing.assert_array_equal(batch.features, X)
    batch, _ = rows_of(frame, ColumnSpec(["w", "7"], "digit", "w"))
    np.testing.assert_array_equal(batch.features, np.stack([W, W], axis=1))
    with pytest.raises(UsageError, match=r"no column 'x' for features, .*the table has .*'7'"):
        rows_of(frame, ColumnSpec("x", "digit"))
    with pytest.raises(UsageError, match="column 'junk' of the DataFrame cannot be read: Could"):
        rows_of(frame, ColumnSpec("junk", "digit"))


def test_big_endian_data_are_read() -> None:
    """FITS files have such arrays, and so have DataFrames that are made of them."""
    pandas = pytest.importorskip("pandas")
    swapped = X.astype(">f4"), Y.astype(">i4"), W.astype(">f4")
    frame = pandas.DataFrame({"x": list(swapped[0]), "digit": swapped[1], "w": swapped[2]})
    for data, chosen in ((swapped, ColumnSpec()), (frame, ColumnSpec("x", "digit", "w"))):
        batch, _ = rows_of(data, chosen)
        assert isinstance(batch.features, np.ndarray)
        assert batch.features.dtype.isnative
        np.testing.assert_array_equal(batch.features, X)
        np.testing.assert_array_equal(batch.labels, Y)
        np.testing.assert_array_equal(batch.weights, W)
    ids, _ = rows_of((Y.astype(">u2"), Y, W))
    assert ids.features.dtype == np.dtype("=u2")  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="column 'digit' of the DataFrame cannot be read: "):
        rows_of(frame.assign(digit=[1j] * ROWS), ColumnSpec("x", "digit"))


def test_spark_column_types_are_read_from_parquet(tmp_path: Path) -> None:
    """Files that Spark wrote may have decimals, ML vectors and images, as on Spark."""
    doubles = [Decimal(f"{x:.2f}") for x in X[:, 0]]
    vectors = [{"type": 1, "size": None, "indices": None, "values": x.tolist()} for x in X]
    image = {"height": 1, "width": 1, "nChannels": 3, "mode": 16, "data": b"abc"}
    vector = pa.struct(
        {
            "type": pa.int8(),
            "size": pa.int32(),
            "indices": pa.list_(pa.int32()),
            "values": pa.list_(pa.float64()),
        }
    )
    columns = {
        "price": pa.array(doubles, pa.decimal128(10, 2)),
        "prices": pa.array([[one] for one in doubles], pa.list_(pa.decimal128(10, 2))),
        "vector": pa.array(vectors, vector),
        "image": pa.array([image] * ROWS),
        "bytes": pa.array([b"abc"] * ROWS, pa.large_binary()),
        "digit": Y,
    }
    parquet.write_table(pa.table(columns), tmp_path / "spark.parquet")
    price = np.array(doubles, np.float32)
    for name, wanted in [
        ("price", price),
        ("prices", price[:, None]),
        ("vector", X),
        ("image", np.full((ROWS, 1, 1, 3), list(b"cba"))),
        ("bytes", np.full((ROWS, 3), list(b"abc"))),
        (["price", "digit"], np.stack([price, Y], axis=1)),
    ]:
        (block,) = read_data_blocks(tmp_path / "spark.parquet", ColumnSpec(name, "digit"))
        np.testing.assert_array_equal(block.form.batch(block.records).features, wanted)
    (block,) = read_data_blocks(tmp_path / "spark.parquet", ColumnSpec("digit", "vector"))
    np.testing.assert_array_equal(block.form.batch(block.records).labels, X)


def test_struct_with_vector_field_names_but_other_types_is_refused() -> None:
    """Only numbers can be the values of a vector of Spark ML."""
    struct = pa.array([{"type": 1, "size": 2, "indices": [0], "values": "x"}] * ROWS)
    with pytest.raises(UsageError, match="features column 'x' is struct"):
        read_data_blocks(pa.table({"x": struct, "digit": Y}), ColumnSpec("x", "digit"))


def test_none_as_weights_means_unweighted_rows() -> None:
    """A fit takes (features, labels, None) as an evaluation does: all rows weigh 1."""
    (block,) = read_data_blocks((X, Y, None), ColumnSpec())
    batch = block.form.batch(block.records)
    assert batch.weights is None
    np.testing.assert_array_equal(batch.features, X)
    np.testing.assert_array_equal(batch.labels, Y)
    (unlabelled,) = read_data_blocks((X, None, None), ColumnSpec())
    assert unlabelled.form.batch(unlabelled.records).labels == ()


def write_damaged_file(directory: Path) -> Path:
    """Return a Parquet file whose footer is intact but whose pages are overwritten."""
    path = files(directory)[1]
    content = path.read_bytes()
    path.write_bytes(content[:4] + bytes(60) + content[64:])
    return path


@pytest.mark.parametrize("opened", [str, parquet.ParquetFile, dataset.dataset])
def test_damaged_parquet_pages_are_reported_with_file(opened: Any, tmp_path: Path) -> None:
    data = opened(write_damaged_file(tmp_path))
    with pytest.raises(UsageError, match=r"data=.* cannot be read to the end: "):
        rows_of(data, TABLE)


def test_features_may_be_named_arrays_without_labels() -> None:
    """Features may be a dictionary of arrays, and labels None."""
    (block,) = read_data_blocks(({"ids": Y, "x": X}, None), ColumnSpec())
    batch = block.form.batch(block.records)
    assert list(batch.features) == ["ids", "x"]
    np.testing.assert_array_equal(batch.features["ids"], Y)
    np.testing.assert_array_equal(batch.features["x"], X)
    assert batch.labels == ()


def test_partitions_hold_each_row_once_and_reproducibly(tmp_path: Path) -> None:
    """Partitions together hold each row once, in equal numbers, and reproducibly."""

    def deal(name: str, workers: int) -> list[list[int]]:
        (tmp_path / name).mkdir()
        files = partition_rows(
            read_data_blocks((X, Y, W), ColumnSpec()), workers, 5, tmp_path / name
        )
        found = []
        for file in files:
            numbers: list[int] = []
            for block in file.blocks():
                batch = block.form.batch(block.records)
                np.testing.assert_array_equal(batch.features, X[block.numbers])
                np.testing.assert_array_equal(batch.labels, Y[block.numbers])
                numbers += block.numbers.tolist()
            found.append(numbers)
        return found

    found = deal("first", 3)
    assert sorted(number for numbers in found for number in numbers) == list(range(ROWS))
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert deal("again", 3) == found
    assert [len(numbers) for numbers in deal("many", ROWS + 2)].count(0) == 2


@pytest.mark.parametrize(
    ("data", "chosen", "why"),
    [
        (
            7,
            ColumnSpec(),
            "rows cannot be read from a builtins.int: pass .features, labels. as arrays",
        ),
        ((X, Y[:9]), ColumnSpec(), r"have \[50, 9\] rows: all need the same number"),
        ((X, 3), ColumnSpec(), "one of the arrays of the data is the number 3: give one per row"),
        ((X, Y, -W), ColumnSpec(), r"row 0 of the data has weight"),
        ((X, np.array(["a"] * ROWS)), ColumnSpec(), "array 1 of the data is"),
        ((SparseMatrix(), Y), ColumnSpec(), "array 0 of the data is .*: not a number"),
        (
            ({"words": SparseMatrix()}, None),
            ColumnSpec(),
            "array 0 of the data is .*: not a number",
        ),
        ((X, SparseMatrix()), ColumnSpec(), "array 1 of the data is .*: not a number"),
        (
            (X, Y),
            ColumnSpec("pixels"),
            "features='pixels': there are no columns in this kind of data",
        ),
        ((X, Y), ColumnSpec(weight="w"), "weight='w': there are no columns in this kind of data"),
        ([(X[0], 1), (X[1],)], ColumnSpec(), "row 1 of the data is"),
        (
            ([[1, 2], [3, 4]], [[5, 6], [7, 8]]),
            ColumnSpec(),
            "data is a tuple of lists: make arrays",
        ),
        ((np.ma.masked_equal(X, X[40, 0]), Y), ColumnSpec(), "array 0 .* masked entries: fill"),
        ((np.full((ROWS, 2), 1e300), Y), ColumnSpec(), r"array 0 of the data: it has 1e\+300"),
        ([(X[0], 1), (np.ma.masked_equal(X[1], X[1, 0]), 1)], ColumnSpec(), "row 1 .* masked"),
        (([[1, 2], [3, 4]], Y[:2], W[:2]), ColumnSpec(), "data is a tuple of lists: make arrays"),
        ("nowhere.parquet", TABLE, "data='nowhere.parquet': there is no nowhere.parquet"),
        ([__file__], TABLE, "cannot be read as Parquet"),
        (table(), ColumnSpec("pixel", "digit"), "there is no column 'pixel' for features"),
        (
            table().to_pandas(),
            ColumnSpec("pixels", np.array(["digit", "more"])),  # type: ignore[arg-type]
            "label=.*: give a column's name, a list",
        ),
        (
            table(),
            ColumnSpec("pixels", "digit", "pixels"),
            "weight column 'pixels' is .*: it must be a",
        ),
        (
            table(),
            ColumnSpec(["pixels", "w"], "digit"),
            "it must be a number to stand beside others",
        ),
        (table(), ColumnSpec("pixels", "digit", validation="w"), "it must be boolean"),
    ],
)
def test_unreadable_data_are_refused_with_name_of_wrong_part(
    data: Any, chosen: ColumnSpec, why: str
) -> None:
    """Data that cannot be read raise ``UsageError`` with the name of the wrong part."""
    with pytest.raises(UsageError, match=why):
        list(read_data_blocks(data, chosen))


def test_dataloader_is_refused_with_advice_to_pass_dataset() -> None:
    """A PyTorch ``DataLoader`` is refused with advice to pass its dataset."""
    utils = pytest.importorskip("torch.utils.data")
    with pytest.raises(UsageError, match="a DataLoader was given as data: pass its dataset"):
        list(read_data_blocks(utils.DataLoader(MapStyleDataset()), ColumnSpec()))


def test_tensor_of_unsupported_dtype_is_refused_with_row_number() -> None:
    torch = pytest.importorskip("torch")
    rows = [(torch.ones(WIDTH), 0), (torch.ones(WIDTH, dtype=torch.bfloat16), 1)]
    with pytest.raises(UsageError, match=r"row 1 of the data is .*BFloat16"):
        list(read_data_blocks(rows, ColumnSpec()))
