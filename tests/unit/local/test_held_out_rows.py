"""Tests of held-out rows as separate data, of each kind that a ``ParallelWrapper`` accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from sparkstrom import UsageError
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.local.data import holds_rows, read_blocks_with_held_out

CHANCE = np.random.default_rng(1)
X = CHANCE.normal(size=(12, 3)).astype(np.float32)
Y = np.arange(12) % 4
W = np.ones(12, np.float32)
TABLE = ColumnSpec("x", "y", "w")


def table(first: int, end: int) -> pa.Table:
    rows = slice(first, end)
    return pa.table({"x": list(X[rows]), "y": Y[rows], "w": W[rows], f"more{first}": Y[rows]})


def arrays(first: int, end: int) -> tuple[Any, ...]:
    return X[first:end], Y[first:end], W[first:end]


def file(directory: Path, first: int, end: int) -> Path:
    path = directory / f"{first}.parquet"
    parquet.write_table(table(first, end), path)
    return path


KINDS: dict[str, tuple[Any, ColumnSpec]] = {
    "arrays": (lambda _, a, b: arrays(a, b), ColumnSpec()),
    "rows": (lambda _, a, b: list(zip(*arrays(a, b), strict=True)), ColumnSpec()),
    "iterator": (lambda _, a, b: zip(*arrays(a, b), strict=True), ColumnSpec()),
    "table": (lambda _, a, b: table(a, b), TABLE),
    "pandas": (lambda _, a, b: table(a, b).to_pandas(), TABLE),
    "path": (file, TABLE),
}


@pytest.mark.parametrize("kind", KINDS)
def test_separate_held_out_rows_follow_training_rows(kind: str, tmp_path: Path) -> None:
    """Separate held-out rows follow the training rows in the same form, marked as held out."""
    make, chosen = KINDS[kind]
    data, held = make(tmp_path, 0, 9), make(tmp_path, 9, 12)
    assert holds_rows(held)
    blocks = list(read_blocks_with_held_out(data, held, chosen))
    batches = [block.form.batch(block.records) for block in blocks]
    np.testing.assert_array_equal(np.concatenate([one.features for one in batches]), X)
    np.testing.assert_array_equal(np.concatenate([one.labels for one in batches]), Y)
    np.testing.assert_array_equal(np.concatenate([one.weights for one in batches]), W)
    held_out = np.concatenate([block.form.held_out(block.records) for block in blocks])
    assert held_out.tolist() == [False] * 9 + [True] * 3
    assert len({block.form for block in blocks}) == 1
    assert blocks[-1].where == "the held-out data"


@pytest.mark.parametrize("value", [None, 0.1, 0, True, np.True_, np.float32(0.5), "column", b"x"])
def test_fraction_or_column_name_is_not_held_out_data(value: Any) -> None:
    """A fraction, None or a column's name is not held-out data."""
    assert not holds_rows(value)


@pytest.mark.parametrize(
    ("data", "held", "chosen", "why"),
    [
        (
            arrays(0, 9),
            (X, Y),
            ColumnSpec(),
            "have features, label, and the data features, label, wei",
        ),
        (
            arrays(0, 9),
            (X[:, :2], Y, W),
            ColumnSpec(),
            r"is float32\[2\], and in the data float32\[3\]",
        ),
        (
            arrays(0, 9),
            (X.astype(np.uint8), Y, W),
            ColumnSpec(),
            r"features of held-out rows is uint8",
        ),
        (arrays(0, 9), (X, Y[:3], W), ColumnSpec(), "arrays of the held-out data have"),
        (table(0, 9), arrays(9, 12), TABLE, "validation: features='x': there are no columns in"),
        (
            table(0, 9),
            table(9, 12).drop_columns(["y"]),
            TABLE,
            "validation: there is no column 'y' for label.*Held-out rows are of the same kind",
        ),
        (table(0, 9), Path("nowhere"), TABLE, "validation: data=.*there is no nowhere"),
        (
            arrays(0, 9),
            np.array(0.5),
            ColumnSpec(),
            "validation: rows cannot be read from a numpy",
        ),
        (arrays(0, 9), ["ab"], ColumnSpec(), "validation: data=.*there is no ab"),
    ],
)
def test_held_out_rows_unlike_training_data_are_refused(
    data: Any, held: Any, chosen: ColumnSpec, why: str
) -> None:
    """Held-out rows whose columns or types differ from the training data's raise ``UsageError``."""
    with pytest.raises(UsageError, match=why):
        list(read_blocks_with_held_out(data, held, chosen))


def test_same_iterator_for_training_and_held_out_rows_is_refused() -> None:
    """The same iterator as training and held-out data is refused."""
    rows = zip(X, Y, strict=True)
    with pytest.raises(UsageError, match="are one iterator, which is drawn once: make two"):
        read_blocks_with_held_out(rows, rows, ColumnSpec())


def test_held_out_arrays_may_have_their_keys_in_another_order() -> None:
    data, held = ({"a": X, "b": Y}, Y), ({"b": Y[:3], "a": X[:3]}, Y[:3])
    *_, block = read_blocks_with_held_out(data, held, ColumnSpec())
    features = block.form.batch(block.records).features
    np.testing.assert_equal(features, {"a": X[:3], "b": Y[:3]})
