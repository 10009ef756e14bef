"""Local data: what ``ParallelWrapper.fit`` takes, as blocks of rows.

    (features, labels), (features, labels, weights)   arrays, or tensors of torch on the host
    pyarrow Table, RecordBatch, RecordBatchReader,
    pyarrow Dataset, ParquetFile                      columns, as of a DataFrame
    pandas DataFrame                                  the same
    a path, or a list of paths                        Parquet files, or directories of them
    a Dataset of torch, an iterable                   rows (features, label) or (..., weight)

Everything is read once per fit, in the calling process, some MiB at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError, first_line
from sparkstrom.base.option_types import is_real, is_truth
from sparkstrom.local.arrow_columns import reading_of
from sparkstrom.runtime.records import Leaf, Records, RowFormat, width_of
from sparkstrom.spark.data.arrow import parts_of
from sparkstrom.spark.data.columns import HELD_OUT, Chosen, check_chosen, wanted_by_role
from sparkstrom.spark.data.row_blocks import (
    BLOCK_BYTES,
    Block,
    Row,
    as_array,
    blocks_labelled,
    form_of_row,
    gathered,
    several,
    short,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

WHERE, WHERE_HELD = "the data", "the held-out data"  # in "row 17 of the data"


def blocks_of_data(data: Any, chosen: Chosen, where: str = WHERE) -> Iterator[Block]:
    """All rows, each with its number from 0. Raise UsageError for data that are none of these."""
    source = _arrow_source(data, chosen)
    check_chosen(chosen, source is not None, "this kind of data")
    if source is not None:
        reading, batches = reading_of(*source, chosen)
        return gathered(parts_of(reading, batches, where), where)
    if _is_arrays(data):
        return gathered(_parts_of_arrays(data, where), where)
    return blocks_labelled(where, _host_rows(_rows(data)))


# -- held-out rows ---------------------------------------------------------------------------------


def are_rows(validation: Any) -> bool:
    """Whether ``validation`` holds rows, rather than being a fraction or a column's name."""
    if isinstance(validation, str | bytes) or is_real(validation) or is_truth(validation):
        return False
    readable = ("__iter__", "__getitem__", "__fspath__", "schema", "schema_arrow")
    return any(hasattr(validation, name) for name in readable)


def blocks_with_held_out(data: Any, held: Any, chosen: Chosen) -> Iterator[Block]:
    """Return all rows, those of ``held`` marked as held out.

    Raise UsageError if their arrays do not match those of the data.
    """
    if held is data and hasattr(data, "__next__"):
        raise UsageError(
            "validation: held-out rows and the data are one iterator, which is drawn once: make"
            " two, or give a fraction such as 0.1"
        )
    blocks = blocks_of_data(data, chosen)
    try:
        others = blocks_of_data(held, chosen, WHERE_HELD)
    except UsageError as error:
        raise UsageError(
            f"validation: {error}. Held-out rows are of the same kind as the data, with the same"
            " columns"
        ) from None
    return _both(blocks, others)


def _both(blocks: Iterator[Block], others: Iterator[Block]) -> Iterator[Block]:
    form: RowFormat | None = None
    for block in blocks:
        form = form or block.form
        yield _marked(block, is_held=False)
    for block in others:
        if form is not None:
            _need_like(form, block.form)
        yield _marked(block, is_held=True)


def _marked(block: Block, *, is_held: bool) -> Block:
    """Return the block with one more array, which marks its rows as held out or not."""
    form, flag = block.form, Leaf(HELD_OUT, (), "|u1", "|u1")
    marks = np.full((len(block.records), 1), is_held, np.uint8)
    marked = form._replace(leaves=(*form.leaves, flag), flagged=True)
    return block._replace(form=marked, records=np.concatenate([block.records, marks], axis=1))


def _need_like(mine: RowFormat, theirs: RowFormat) -> None:
    """Raise UsageError if held-out rows have other arrays than the data."""
    kinds = [
        (form.features, form.labels, form.weighted, len(form.leaves)) for form in (mine, theirs)
    ]
    if kinds[0] != kinds[1]:
        said = [", ".join(leaf.name for leaf in form.leaves) for form in (mine, theirs)]
        raise UsageError(
            f"validation: held-out rows have {said[1]}, and the data {said[0]}: give both the same"
            " arrays, in the same order"
        )
    for one, other in zip(mine.leaves, theirs.leaves, strict=True):
        if one[1:4] != other[1:4]:
            raise UsageError(
                f"validation: {other.name} of held-out rows is {_kind(other)}, and in the data"
                f" {_kind(one)}: make both alike, for example with astype"
            )


def _kind(leaf: Leaf) -> str:
    return f"{np.dtype(leaf.stored).name}{list(leaf.shape)}"


# -- tables ----------------------------------------------------------------------------------------


def _arrow_source(data: Any, chosen: Chosen) -> tuple[Any, Any] | None:
    """A schema, and a function of column names that gives record batches; None: no table."""
    if isinstance(data, str | os.PathLike) or _is_paths(data):
        return _parquet(data)
    module = type(data).__module__.partition(".")[0]
    if module not in ("pyarrow", "pandas") or not hasattr(
        data, "columns" if module == "pandas" else "schema"
    ):
        return None
    import pyarrow as pa

    if module == "pandas":
        data = _table_of(data, chosen)
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return data.schema, lambda names: data.select(names).to_batches()
    if hasattr(data, "schema_arrow"):  # pyarrow.parquet.ParquetFile
        return data.schema_arrow, lambda names: _read(data, data.iter_batches(columns=names))
    if isinstance(data, pa.RecordBatchReader):
        return data.schema, lambda names: (batch.select(names) for batch in data)
    return data.schema, lambda names: _read(data, data.to_batches(columns=names))  # a dataset


def _table_of(frame: pd.DataFrame, chosen: Chosen) -> pa.Table:
    """All of its columns by name; those that nobody wants are empty: they may hold anything."""
    import pyarrow as pa

    wanted = [
        name
        for _, one in wanted_by_role(chosen)
        for name in (one if isinstance(one, list) else [one])
    ]
    names = [str(name) for name in frame.columns]
    columns = [
        _arrow_column(frame.iloc[:, i], name) if name in wanted else pa.nulls(len(frame))
        for i, name in enumerate(names)
    ]
    return pa.Table.from_arrays(columns, names)


def _arrow_column(column: pd.Series[Any], name: str) -> Any:
    import pyarrow as pa

    try:
        return pa.array(column, from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UsageError(
            f"column {name!r} of the DataFrame cannot be read: {first_line(error)}; make it numbers"
            ", or arrays of them"
        ) from error


def _read(data: Any, batches: Iterable[Any]) -> Iterator[Any]:
    """Files are opened by their footers; their pages may be damaged all the same."""
    import pyarrow as pa

    try:
        yield from batches
    except (OSError, pa.ArrowException) as error:
        raise UsageError(
            f"data={short(data)} cannot be read on: {first_line(error)}; look at the file, or write"
            " it again"
        ) from error


def _is_paths(data: Any) -> bool:
    return (
        isinstance(data, list)
        and bool(data)
        and all(isinstance(one, str | os.PathLike) for one in data)
    )


def _parquet(paths: Any) -> tuple[Any, Any]:
    import pyarrow as pa
    from pyarrow import dataset

    named = [os.fspath(path) for path in (paths if isinstance(paths, list) else [paths])]
    if missing := [path for path in named if not os.path.exists(path)]:
        raise UsageError(f"data={paths!r}: there is no {missing[0]}; name a Parquet file or folder")
    try:
        found = dataset.dataset([dataset.dataset(path, format="parquet") for path in named])
        return found.schema, lambda names: _read(paths, found.to_batches(columns=names))
    except (OSError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UsageError(f"data={paths!r} cannot be read as Parquet: {error}") from error


# -- arrays ----------------------------------------------------------------------------------------


def _is_arrays(data: Any) -> bool:
    """Is it a tuple of columns, and not an iterable of rows?"""
    if not (isinstance(data, tuple) and len(data) in (2, 3)):
        return False
    first = data[0]
    if isinstance(first, dict):
        first = next(iter(first.values()), None)
    elif isinstance(first, tuple):
        first = first[0] if first else None
    return getattr(first, "ndim", 0) >= 1


def _parts_of_arrays(data: tuple[Any, ...], where: str) -> Iterator[tuple[RowFormat, Records]]:
    features = several(data[0])
    no_labels = np.zeros((len(features[1][0]), 0), np.float32)  # as rows have it
    label = several(no_labels if data[1] is None else data[1])
    n_features, n_labels = width_of(features[0]), width_of(label[0])
    given = [*features[1], *label[1], *data[2:]]
    label_places = range(n_features, n_features + n_labels)
    arrays = []
    for i, value in enumerate(given):
        try:
            arrays.append(_sliceable(_on_host(value), is_label=i in label_places))
        except (TypeError, ValueError) as error:
            raise UsageError(f"array {i} of {where} is {short(value)}: {error}") from None
    counts = [len(array) if array.ndim else -1 for array in arrays]
    if len(set(counts)) != 1:
        raise UsageError(f"the arrays of {where} have {counts} rows: all need the same number")
    if len(data) == 3:
        arrays[-1] = as_array(arrays[-1])
        _check_weights(arrays[-1], where)
    if not counts[0]:
        return

    def rows_at(part: slice) -> list[NDArray[Any]]:
        return [as_array(a[part], is_label=i in label_places) for i, a in enumerate(arrays)]

    first = [array[0] for array in rows_at(slice(1))]
    form = form_of_row(Row(features[0], label[0], len(data) == 3, first))
    count = max(1, BLOCK_BYTES // max(1, form.row_bytes))
    for begin in range(0, counts[0], count):
        yield form, form.pack(rows_at(slice(begin, begin + count)))


def _sliceable(value: Any, *, is_label: bool) -> NDArray[Any]:
    """An array as it is, however large: its slices are made numbers. Else as ``as_array``."""
    if not isinstance(value, np.ndarray):
        return as_array(value, is_label=is_label)
    as_array(np.empty(0, value.dtype))  # refuses what are no numbers
    return value


def _check_weights(weights: NDArray[Any], where: str) -> None:
    wrong = ~((weights >= 0) & (weights < np.inf)) if weights.ndim == 1 else np.ones(1, bool)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise UsageError(f"row {row} of {where} has weight {weights[row]!r}: give 0 or above")


# -- rows ------------------------------------------------------------------------------------------


def _rows(data: Any) -> Iterable[Any]:
    if hasattr(data, "batch_sampler") and hasattr(data, "dataset"):
        raise UsageError(
            f"a {type(data).__name__} was given as data: pass its dataset; workers make"
            " minibatches of batch_size_per_worker rows, and shuffle them by rng_seed"
        )
    if isinstance(data, tuple) and len(data) in (2, 3) and isinstance(data[0], list):
        raise UsageError(
            "data is a tuple of lists: make arrays of them, (numpy.array(features),"
            " numpy.array(labels)); of rows make a list, [(features, label), ...]"
        )
    is_scalar = getattr(data, "shape", None) == ()  # an array of one value has no rows
    if hasattr(data, "__iter__") and not is_scalar:
        rows: Iterable[Any] = data
        return rows
    if (
        not is_scalar and hasattr(data, "__getitem__") and hasattr(data, "__len__")
    ):  # a map-style Dataset
        return (data[i] for i in range(len(data)))
    raise UsageError(
        f"rows cannot be drawn from a {type(data).__module__}.{type(data).__name__}: pass"
        " (features, labels) as arrays, an Arrow table, paths of Parquet files, a Dataset of torch"
        " or an iterable of (features, label)"
    )


def _host_rows(rows: Iterable[Any]) -> Iterator[Any]:
    """With NumPy's arrays in place of torch's tensors."""
    for row in rows:
        if isinstance(row, tuple | list) and len(row) in (2, 3):
            yield (_nested(row[0]), _nested(row[1]), *row[2:])
        else:
            yield row


def _nested(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _on_host(one) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_on_host(one) for one in value)
    return _on_host(value)


def _on_host(value: Any) -> Any:
    """A tensor of torch as an array: the same memory, where it is on the host."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value
