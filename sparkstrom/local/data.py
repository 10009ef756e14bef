"""Read the data of ``ParallelWrapper.fit`` into blocks of rows, and pass them to workers in files.

``read_data_blocks`` accepts:

    (features, labels), (features, labels, weights)   NumPy arrays, or torch tensors
    pyarrow Table, RecordBatch, RecordBatchReader,
    pyarrow Dataset, ParquetFile                      with columns, like a Spark DataFrame
    pandas DataFrame                                  with columns
    a path, or a list of paths                        Parquet files, or directories of them
    a torch Dataset, an iterable                      rows (features, label) or (..., weight)

All data are read once per fit, in the calling process, a few MiB at a time. A table's schema is
checked against the user's column names before any rows are read.

``partition_rows`` distributes rows pseudo-randomly by a seed, with the same function as on Spark
(``row_blocks.distribute_rows``). It writes one file per worker, which the worker maps into memory.
If a worker is replaced, its replacement reads the same file, which is still in the page cache.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import SetupError, UsageError, first_line
from sparkstrom.base.option_types import is_boolean, is_real
from sparkstrom.data.arrow_conversion import is_list_type, read_record_parts
from sparkstrom.data.column_selection import (
    HELD_OUT,
    IMAGE_FIELDS,
    LABEL,
    WEIGHT,
    ArrowReadPlan,
    ColumnSpec,
    check_column_spec,
    check_same_rows,
    check_weights,
    iter_arrays_by_role,
    make_read_plan,
    resolve_array_source,
)
from sparkstrom.data.packed_rows import (
    Leaf,
    Records,
    RowFormat,
    count_arrays,
    has_same_parts,
    order_like,
)
from sparkstrom.data.row_blocks import (
    BLOCK_BYTES,
    Block,
    ParsedRow,
    as_array,
    distribute_rows,
    format_from_row,
    gather_blocks,
    read_labelled_blocks,
    refuse_masked,
    shorten_value,
    split_columns,
    split_labels,
    to_native_order,
    to_numpy,
)
from sparkstrom.transport.aeron.driver_directories import (
    hold_lock_if_free,
    is_same_file,
    open_lock,
    try_lock,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


VECTOR_FIELDS = ("type", "size", "indices", "values")  # of Spark ML's vectors, in Parquet files
DATA_NAME, HELD_OUT_NAME = "the data", "the held-out data"  # for messages: "row 17 of the data"


def read_data_blocks(data: Any, chosen: ColumnSpec, where: str = DATA_NAME) -> Iterator[Block]:
    """Return an iterator over all rows in blocks; rows are numbered from 0.

    Args:
        data: The data, of a kind that this module's docstring lists.
        chosen: Names of the columns to read, if the data have columns.
        where: What to call the data in error messages.

    Raises:
        UsageError: The data are of another kind, or a column is missing or cannot be used.
    """
    source = _open_arrow_source(data, chosen)
    check_column_spec(chosen, source is not None, "this kind of data")
    if source is not None:
        reading, batches = plan_arrow_read(*source, chosen)
        return gather_blocks(read_record_parts(reading, batches, where), where)
    if _is_arrays(data):
        return gather_blocks(_pack_arrays(data, where), where)
    rows = chain.from_iterable([_iter_rows(data)])  # calls ``iter(data)`` when rows are read
    return read_labelled_blocks(where, rows)


def holds_rows(validation: Any) -> bool:
    """Return whether ``validation`` is data, not a fraction or the name of a column."""
    if isinstance(validation, str | bytes) or is_real(validation) or is_boolean(validation):
        return False
    readable = ("__iter__", "__getitem__", "__fspath__", "schema", "schema_arrow")
    return any(hasattr(validation, name) for name in readable)


def read_blocks_with_held_out(data: Any, held: Any, chosen: ColumnSpec) -> Iterator[Block]:
    """Return an iterator over the blocks of ``data``, then of ``held``, marked as held out.

    If ``held`` is None, ``chosen.validation`` selects the held-out rows of ``data``. ``chosen``
    names the columns of both. Raise UsageError if both are the same iterator, or, during the
    iteration, if their arrays have different formats.
    """
    if held is None:
        return read_data_blocks(data, chosen)
    chosen = chosen._replace(validation=None)
    if held is data and hasattr(data, "__next__"):
        raise UsageError(
            "validation: held-out rows and the data are one iterator, which is drawn once: make"
            " two, or give a fraction such as 0.1"
        )
    blocks = read_data_blocks(data, chosen)
    try:
        others = read_data_blocks(held, chosen, HELD_OUT_NAME)
    except UsageError as error:
        raise UsageError(
            f"validation: {error}. Held-out rows are of the same kind as the data, with the same"
            " columns"
        ) from None
    return _chain_blocks(blocks, others)


def _chain_blocks(blocks: Iterator[Block], others: Iterator[Block]) -> Iterator[Block]:
    """Yield training blocks, then held-out blocks, with a column that marks held-out rows."""
    form: RowFormat | None = None
    for block in blocks:
        form = form or block.form
        yield _mark_held_out(block, is_held=False)
    for block in others:
        if form is not None:
            _check_same_format(form, block.form)
        yield _mark_held_out(block, is_held=True)


def _mark_held_out(block: Block, *, is_held: bool) -> Block:
    """Return a copy of a block with one more column: 1 in every row if ``is_held``, else 0."""
    form, flag = block.form, Leaf(HELD_OUT, (), "|u1", "|u1")
    marks = np.full((len(block.records), 1), is_held, np.uint8)
    marked = form._replace(leaves=(*form.leaves, flag), has_held_out_flag=True)
    return block._replace(form=marked, records=np.concatenate([block.records, marks], axis=1))


def _check_same_format(mine: RowFormat, theirs: RowFormat) -> None:
    """Raise UsageError if arrays, shapes or dtypes of the data and of held-out rows differ.

    ``mine``: format of the data; ``theirs``: format of the held-out rows.
    """
    kinds = [(form.has_weights, len(form.leaves)) for form in (mine, theirs)]
    if kinds[0] != kinds[1] or not has_same_parts(mine, theirs):
        said = [", ".join(leaf.name for leaf in form.leaves) for form in (mine, theirs)]
        raise UsageError(
            f"validation: held-out rows have {said[1]}, and the data {said[0]}: give both the same"
            " arrays, in the same order"
        )
    for one, other in zip(mine.leaves, order_like(mine, theirs, theirs.leaves), strict=True):
        if one[1:4] != other[1:4]:
            raise UsageError(
                f"validation: {other.name} of held-out rows is {other.describe()}, and in the"
                f" data {one.describe()}: make both alike, for example with astype"
            )


def _open_arrow_source(data: Any, chosen: ColumnSpec) -> tuple[Any, Any] | None:
    """Return a table's schema, and a function from column names to the table's record batches.

    ``chosen`` names the columns that will be read. Return None if ``data`` is not a table.
    """
    if isinstance(data, str | os.PathLike) or _is_paths(data):
        return _open_parquet(data)
    module = type(data).__module__.partition(".")[0]
    if module not in ("pyarrow", "pandas") or not hasattr(
        data, "columns" if module == "pandas" else "schema"
    ):
        return None
    import pyarrow as pa

    if module == "pandas":
        data = _pandas_to_arrow(data, chosen)
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return data.schema, lambda names: data.select(names).to_batches()
    if hasattr(data, "schema_arrow"):  # pyarrow.parquet.ParquetFile
        return data.schema_arrow, lambda names: _report_damage(
            data, data.iter_batches(columns=names)
        )
    if isinstance(data, pa.RecordBatchReader):
        return data.schema, lambda names: (batch.select(names) for batch in data)
    return data.schema, lambda names: _report_damage(
        data, data.to_batches(columns=names)
    )  # a dataset


def _pandas_to_arrow(frame: pd.DataFrame, chosen: ColumnSpec) -> pa.Table:
    """Return a DataFrame as an Arrow table with columns of the same names.

    Columns that were not chosen become nulls, because they may contain objects that Arrow cannot
    represent.
    """
    import pyarrow as pa

    wanted = [
        name
        for _, one in iter_arrays_by_role(chosen)
        for name in (one if isinstance(one, list) else [one])
    ]
    names = [str(name) for name in frame.columns]
    columns = [
        _to_arrow_column(frame.iloc[:, i], name) if name in wanted else pa.nulls(len(frame))
        for i, name in enumerate(names)
    ]
    return pa.Table.from_arrays(columns, names)


def _to_arrow_column(column: pd.Series[Any], name: str) -> Any:
    """Convert one pandas column to Arrow. Raise UsageError if Arrow cannot represent it."""
    import pyarrow as pa

    try:
        try:
            return pa.array(column, from_pandas=True)
        except pa.ArrowNotImplementedError:  # such as for big-endian values
            return pa.array(_to_native_column(column), from_pandas=True)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        raise UsageError(
            f"column {name!r} of the DataFrame cannot be read: {first_line(error)}; make it numbers"
            ", or arrays of them"
        ) from error


def _to_native_column(column: pd.Series[Any]) -> Any:
    """Return a pandas column with its numbers, or arrays of them, in the machine's byte order."""
    if isinstance(column.dtype, np.dtype) and column.dtype != object:
        return to_native_order(column.to_numpy())
    return column.map(lambda one: to_native_order(one) if isinstance(one, np.ndarray) else one)


def _report_damage(data: Any, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the record batches. Raise UsageError if a file is damaged; the message names ``data``.

    Opening a file reads only its footer, so other damage is found only now.
    """
    import pyarrow as pa

    try:
        yield from batches
    except (OSError, pa.ArrowException) as error:
        raise UsageError(
            f"data={shorten_value(data)} cannot be read to the end: {first_line(error)}; check the"
            " file, or write it again"
        ) from error


def _is_paths(data: Any) -> bool:
    """Return whether ``data`` is a non-empty list of paths."""
    return (
        isinstance(data, list)
        and bool(data)
        and all(isinstance(one, str | os.PathLike) for one in data)
    )


def _open_parquet(paths: Any) -> tuple[Any, Any]:
    """Return the schema and reading function of Parquet files, like ``_open_arrow_source``.

    Raise UsageError if a path does not exist or cannot be read as Parquet.
    """
    import pyarrow as pa
    from pyarrow import dataset

    named = [os.fspath(path) for path in (paths if isinstance(paths, list) else [paths])]
    if missing := [path for path in named if not os.path.exists(path)]:
        raise UsageError(f"data={paths!r}: there is no {missing[0]}; name a Parquet file or folder")
    try:
        found = dataset.dataset([dataset.dataset(path, format="parquet") for path in named])
        return found.schema, lambda names: _report_damage(paths, found.to_batches(columns=names))
    except (OSError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UsageError(f"data={paths!r} cannot be read as Parquet: {error}") from error


def plan_arrow_read(
    schema: pa.Schema, batches: Callable[[list[str]], Iterable[pa.RecordBatch]], chosen: ColumnSpec
) -> tuple[ArrowReadPlan, Iterable[pa.RecordBatch]]:
    """Return how to read the chosen columns of a table, and record batches of these columns.

    ``batches`` returns the table's record batches for a list of column names. Raise UsageError if a
    column is missing, ambiguous or of an unsuitable type; the message names the column.
    """
    used: dict[str, int] = {}  # column name -> index
    sources = [
        resolve_array_source(role, columns, used, partial(_check_column, schema, role))
        for role, columns in iter_arrays_by_role(chosen)
    ]
    return make_read_plan(chosen, b"", sources), batches(list(used))


def _check_column(schema: pa.Schema, role: str, name: str, side_by_side: bool) -> None:
    """Raise UsageError unless the table has exactly one column ``name``, of a suitable type.

    ``role``: what the column is used for, such as label; ``side_by_side``: whether the column is
    one of several that are combined into one array.
    """
    import pyarrow as pa

    if schema.names.count(name) != 1:
        raise UsageError(
            f"there is no column {name!r} for {role}, or more than one; the table has"
            f" {schema.names}"
        )
    kind = schema.field(name).type
    number = _is_number(kind)
    if role == HELD_OUT:
        fits, wanted = pa.types.is_boolean(kind), "boolean: true for rows to hold out"
    elif role == WEIGHT:
        fits, wanted = number, "a number"
    elif side_by_side:
        fits, wanted = number, "a number to stand beside others; name an array column by itself"
    elif role == LABEL:
        fits = number or _is_number_list(kind) or _is_vector(kind)
        wanted = "a number, an array of numbers, or a vector of Spark ML"
    else:
        fits = number or _is_number_list(kind) or _is_bytes(kind)
        fits = fits or _is_vector(kind) or _has_fields(kind, IMAGE_FIELDS)
        wanted = (
            "a number, an array of numbers, a vector of Spark ML, an image or its bytes, or a list"
            " of numeric columns"
        )
    if not fits:
        raise UsageError(f"{role} column {name!r} is {kind}: it must be {wanted}")


def _is_number(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is numeric or boolean."""
    import pyarrow as pa

    tests = pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal, pa.types.is_boolean
    return any(test(kind) for test in tests)


def _is_bytes(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is binary, with offsets of 32 or 64 bits."""
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_vector(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is that of Spark ML's vectors in Parquet files."""
    return _has_fields(kind, VECTOR_FIELDS) and all(
        _is_number_list(kind.field(name).type) for name in ("indices", "values")
    )


def _has_fields(kind: pa.DataType, names: tuple[str, ...]) -> bool:
    """Return whether an Arrow type is a struct that has all these fields."""
    import pyarrow as pa

    return bool(pa.types.is_struct(kind)) and {*names} <= {field.name for field in kind}


def _is_number_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a list of numbers, at any depth of nesting."""
    is_list = is_list_type(kind)
    while is_list_type(kind):
        kind = kind.value_type
    return is_list and _is_number(kind)


def _is_arrays(data: Any) -> bool:
    """Return whether ``data`` is (features, labels) or (features, labels, weights) as arrays."""
    if not (isinstance(data, tuple) and len(data) in (2, 3)):
        return False
    first = data[0]
    if isinstance(first, dict):
        first = next(iter(first.values()), None)
    elif isinstance(first, tuple):
        first = first[0] if first else None
    return getattr(first, "ndim", 0) >= 1


def _pack_arrays(data: tuple[Any, ...], where: str) -> Iterator[tuple[RowFormat, Records]]:
    """Yield the rows of arrays, packed as records, in pieces of about BLOCK_BYTES.

    If the weights are None, all rows weigh 1. Raise UsageError if arrays differ in length, are not
    numeric or have numbers beyond float32, or if weights are invalid.
    """
    if len(data) == 3 and data[2] is None:
        data = data[:2]
    features = split_columns(data[0])
    label = split_labels(data[1])
    n_features, n_labels = count_arrays(features[0]), count_arrays(label[0])
    given = [*features[1], *label[1], *data[2:]]
    label_places = range(n_features, n_features + n_labels)
    arrays = []
    for i, value in enumerate(given):
        try:
            arrays.append(_to_sliceable(value, is_label=i in label_places))
        except (TypeError, ValueError) as error:
            raise UsageError(f"array {i} of {where} is {shorten_value(value)}: {error}") from None
    check_same_rows(arrays, f" of {where}")

    def convert(i: int, part: slice = slice(None)) -> NDArray[Any]:
        try:
            return as_array(arrays[i][part], is_label=i in label_places)
        except ValueError as error:
            raise UsageError(f"array {i} of {where}: {error}") from None

    if len(data) == 3:
        arrays[-1] = convert(len(arrays) - 1)
        check_weights(arrays[-1], f" of {where}")
    if not len(arrays[0]):
        return

    def rows_at(part: slice) -> list[NDArray[Any]]:
        return [convert(i, part) for i in range(len(arrays))]

    first = [array[0] for array in rows_at(slice(1))]
    form = format_from_row(ParsedRow(features[0], label[0], len(data) == 3, first))
    count = max(1, BLOCK_BYTES // max(1, form.row_bytes))
    for begin in range(0, len(arrays[0]), count):
        yield form, form.pack(rows_at(slice(begin, begin + count)))


def _to_sliceable(value: Any, *, is_label: bool) -> NDArray[Any]:
    """Return a tensor or a NumPy array as a NumPy array; convert others with ``as_array``.

    A NumPy array is converted later, slice by slice, to save memory. Raise TypeError or ValueError
    if the dtype is not numeric, or if entries are masked.
    """
    value = to_numpy(value)
    if not isinstance(value, np.ndarray):
        return as_array(value, is_label=is_label)
    refuse_masked(value)
    as_array(np.empty(0, value.dtype))  # raises for a dtype that is not numeric
    return value


def _iter_rows(data: Any) -> Iterable[Any]:
    """Return an iterable over the rows of a torch Dataset or any iterable.

    Raise UsageError if rows cannot be read from ``data``.
    """
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
    if getattr(data, "shape", None) != ():  # an array of one value has no rows
        if hasattr(data, "__iter__"):
            rows: Iterable[Any] = data
            return rows
        if hasattr(data, "__getitem__") and hasattr(data, "__len__"):  # a map-style Dataset
            return (data[i] for i in range(len(data)))
    raise UsageError(
        f"rows cannot be read from a {type(data).__module__}.{type(data).__name__}: pass"
        " (features, labels) as arrays, an Arrow table, paths of Parquet files, a Dataset of torch"
        " or an iterable of (features, label)"
    )


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file. Raise SetupError if it cannot be written, as on a full disk."""
    with _convert_write_errors(path, len(content)):
        path.write_bytes(content)


def allocate_file(path: Path, n_bytes: int) -> None:
    """Create a file of ``n_bytes`` zeros with its disk space reserved.

    Without reserved space, a process that maps the file into memory is killed (SIGBUS) when it
    writes to a page for which the disk has no room. Raise SetupError if there is no such space.
    """
    with _convert_write_errors(path, n_bytes), path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, n_bytes)


@contextmanager
def _convert_write_errors(path: Path, n_bytes: int) -> Iterator[None]:
    """Convert an OSError in the ``with`` block to a SetupError with path, size and a remedy.

    A FileNotFoundError is not converted.
    """
    try:
        yield
    except FileNotFoundError:  # its directory was deleted; the disk is not full
        raise
    except OSError as error:
        raise SetupError(
            f"{path} does not take {n_bytes:,} bytes: {error.strerror}; set TMPDIR to a directory"
            " on a disk that has room"
        ) from error


PREFIX = "sparkstrom-local-"  # prefix of the names of scratch directories
LOCK = "lock"  # name of the lock file in a scratch directory


class ScratchDirectory:
    """The scratch directory of one ParallelWrapper, inside the temporary directory.

    The directory exists from construction until ``remove``. This process locks a file in it. If
    the process dies, the kernel releases the lock, and another process may delete the directory.
    """

    def __init__(self) -> None:
        self.path = Path()
        while not self._try_create():
            pass  # rare: another wrapper took it for abandoned and deleted it before it was locked

    def _try_create(self) -> bool:
        """Create and lock a directory; return whether it still exists.

        Before it is locked, another ParallelWrapper may take it for abandoned and delete it.
        """
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._descriptor = open_lock(self.path / LOCK)
        try:
            is_locked = try_lock(self._descriptor)
            is_ours = is_locked and is_same_file(self.path / LOCK, self._descriptor)
        except OSError:  # no locks on this file system, so no wrapper deletes this one
            is_ours = True
        if not is_ours:
            os.close(self._descriptor)
        return is_ours

    def remove(self) -> None:
        """Delete the directory with its contents and release the lock. Call it once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def remove_abandoned_directories() -> None:
    """Delete the scratch directories that killed programs of this user left behind.

    Directories without a lock file are not deleted, because another program may own them.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # deleted meanwhile, or without a lock file
            if path.lstat().st_uid == os.getuid():
                _remove_if_abandoned(path)


def _remove_if_abandoned(path: Path) -> None:
    """Delete a scratch directory if no process holds its lock."""
    with hold_lock_if_free(path / LOCK) as is_abandoned:
        if is_abandoned:
            shutil.rmtree(path, ignore_errors=True)


ROW_NUMBER_DTYPE = np.dtype("<i8")
NO_DATA = (
    "the data have no rows to train on: they are empty, or an iterator (a generator, a reader) that"
    " an earlier fit has drawn to its end, as each fit does; make a new one for each"
)


class RowSpan(NamedTuple):
    """The location of some rows in a file: the rows' records, followed by their row numbers."""

    form: RowFormat  # layout of a record
    offset: int  # offset of the first record in the file, in bytes
    rows: int  # number of rows
    where: str  # what to call the data in messages


class RowFile(NamedTuple):
    """A reference to the file with one worker's rows. It is sent to the worker, not the rows."""

    path: str
    spans: tuple[RowSpan, ...]  # where each block is, in the order of writing

    def blocks(self) -> Iterator[Block]:
        """Yield the worker's rows in blocks, in the order of writing, mapped from the file."""
        if not self.spans:
            return
        content = np.memmap(self.path, np.uint8, "r")
        for form, offset, rows, where in self.spans:
            end = offset + rows * form.row_bytes
            records = content[offset:end].reshape(rows, form.row_bytes)
            numbers = np.frombuffer(content, ROW_NUMBER_DTYPE, rows, end)
            yield Block(form, np.asarray(records), numbers, where)


def partition_rows(
    blocks: Iterable[Block], workers: int, seed: int, directory: Path
) -> tuple[RowFile, ...]:
    """Distribute rows at random over the workers; return each worker's file in ``directory``.

    The same data, seed and number of workers always give the same distribution. Raise UsageError if
    there are no rows or rows have different formats, and SetupError if the disk is full.
    """
    spans: list[list[RowSpan]] = [[] for _ in range(workers)]
    paths = [directory / f"rows-{worker}" for worker in range(workers)]
    with ExitStack() as closing:
        files = [closing.enter_context(path.open("wb", buffering=0)) for path in paths]
        for worker, one in distribute_rows(lambda _, given: iter(given), workers, seed, 0, blocks):  # type: ignore[arg-type]
            if one.refusal is not None:
                raise one.refusal
            if one.block is not None and len(one.block.records):
                spans[worker].append(_append_block(files[worker], one.block, directory))
    if not any(spans):
        raise UsageError(NO_DATA)
    return tuple(RowFile(str(path), tuple(own)) for path, own in zip(paths, spans, strict=True))


def _append_block(file: IO[bytes], block: Block, directory: Path) -> RowSpan:
    """Append a block to a worker's file and return the block's location.

    Raise SetupError if the disk is full.
    """
    offset = file.tell()
    try:
        np.ascontiguousarray(block.records).tofile(file)
        block.numbers.astype(ROW_NUMBER_DTYPE).tofile(file)
    except OSError as error:
        raise SetupError(
            f"{directory} does not take the rows after {offset:,} bytes of one worker's: {error}; "
            "set TMPDIR to a directory on a disk that has room for all of them"
        ) from None
    return RowSpan(block.form, offset, len(block.records), block.where)
