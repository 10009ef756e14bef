"""Convert rows to blocks of records, check the blocks, and distribute them in a Spark shuffle.

Records are rows packed as bytes of equal length (``packed_rows``); a block is about ``BLOCK_BYTES``
of them. Error messages name the column and the row's number in its partition.
"""

from __future__ import annotations

import functools
import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import SetupError, SparkstromError, UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.data.packed_rows import (
    ColumnStructure,
    Leaf,
    Records,
    RowFormat,
    count_arrays,
    has_same_parts,
    order_like,
    structure_of,
)
from sparkstrom.models.base import FlatModel
from sparkstrom.models.output_interpretation import BLOCK_ROWS
from sparkstrom.models.row_checks import LABELS, BadValue

BLOCK_BYTES = 2 << 20  # size of a block's records; making a block takes six times as much memory
ROWS_PER_CHUNK_MAX = 4096
SQL_LITERALS = ("null", "true", "false")  # Spark takes all other words for columns
GOLDEN_STEP = 2654435769  # 2**32 / golden ratio: its multiples modulo 2**32 are evenly spaced


class Block(NamedTuple):
    """Some rows of one partition, as records, with their row numbers for error messages."""

    form: RowFormat  # layout of the records
    records: Records  # u8[rows, row_bytes]
    numbers: NDArray[np.int64]  # number of each row within ``where``, from 0
    where: str  # origin of the rows for messages, such as "partition 3"

    def select(self, rows: NDArray[Any] | slice) -> Block:
        """Return a block of some rows, given by their indices, as bool[rows] or as a slice."""
        return self._replace(records=self.records[rows], numbers=self.numbers[rows])

    def split(self, multiple: int = BLOCK_ROWS) -> Iterator[Block]:
        """Yield parts of the block whose minibatches, with dense vectors, fit into memory.

        Each part but the last has a multiple of ``multiple`` rows.
        """
        step_rows = choose_step_rows((leaf.shape for leaf in self.form.leaves), multiple)
        for first in range(0, len(self.records), step_rows):
            yield self.select(slice(first, first + step_rows))


def choose_step_rows(shapes: Iterable[tuple[int, ...]], multiple: int = BLOCK_ROWS) -> int:
    """Return how many rows to process at once, so that their arrays fit into ``BLOCK_BYTES``.

    The number is a multiple of ``multiple``, and at least that. ``shapes`` are those of a row's
    arrays.
    """
    row_bytes = sum(4 * max(1, math.prod(shape)) for shape in shapes)
    return multiple * max(1, BLOCK_BYTES // (multiple * row_bytes))


def check_block(model: FlatModel, block: Block) -> None:
    """Have the model check a block's rows; raise UsageError naming the first rejected row."""
    for part in block.split(multiple=1):
        batch = part.form.batch(part.records)
        try:
            model.check(batch.features, batch.labels)
        except BadValue as error:
            raise UsageError(describe_bad_value(part, error)) from None
        except UsageError as error:
            raise _locate_bad_row(model, part, error) from None


def describe_bad_value(block: Block, bad: BadValue) -> str:
    """Return an error message that names the row, column and value, and how to find such rows."""
    form = block.form
    before, structure = 0, form.features
    if bad.role == LABELS:
        before, structure = count_arrays(form.features), form.labels
    index = structure.index(bad.array) if isinstance(structure, tuple) else int(bad.array or 0)
    leaf, at = form.leaves[before + index], bad.location_text
    column, names = leaf.name, leaf.name.split(", ")
    is_stacked = leaf.column in ("number", "") and len(names) > 1
    if is_stacked and leaf.shape == (len(names),):
        column, at = names[int(bad.position)], ""
    role = " (label)" if bad.role == LABELS else ""
    advice = ""
    if leaf.column == "vector":
        advice = _vector_search_advice(block.where, column, bad.text)
    elif leaf.column:
        depth = len(leaf.shape) if leaf.column == "array" else 0
        # Compared as floats: the user's doubles were rounded to float32, and differ from it.
        is_integer = bad.text.lstrip("-").isdigit()
        condition = f"{{}} = {bad.text}" if is_integer else f"float({{}}) = float('{bad.text}')"
        advice = search_advice(block.where, column, condition, depth)
    return (
        f"row {block.numbers[bad.row]} of {block.where}: column {column!r}{role}{at} is {bad.text}:"
        f" {bad.reason}{advice}"
    )


def search_advice(where: str, column: str, condition: str, depth: int = 0) -> str:
    """Return advice on finding the rows of a DataFrame that meet an SQL condition.

    In ``condition``, {} is replaced by the column, or by a value nested ``depth`` arrays deep. For
    a DataFrame (``where`` is a partition), the row number is not enough, because after a
    repartition Spark orders rows differently if other columns are read. For local data the number
    is enough, so the advice is "".
    """
    variables = ["v"] if depth == 1 else [f"v{i + 1}" for i in range(depth)]
    arrays = [quote_column(column), *variables]
    found = condition.format(arrays[-1])
    for i in reversed(range(depth)):
        found = f"exists({arrays[i]}, {arrays[i + 1]} -> {found})"
    return f'; frame.where("{found}") shows such rows' if where.startswith("partition") else ""


def _vector_search_advice(where: str, column: str, value: str) -> str:
    """Return advice like ``search_advice`` for a vector column, which SQL cannot search directly.

    ``value`` is the element that a vector of the row contains.
    """
    if not where.startswith("partition"):
        return ""
    return (
        f'; frame.where(exists(vector_to_array("{quote_column(column)}", "float32"), lambda v: v =='
        f' lit("{value}").cast("float"))) shows such rows, with exists and lit of'
        " pyspark.sql.functions, vector_to_array of pyspark.ml.functions"
    )


def quote_column(column: str) -> str:
    """Return a column's name for an SQL expression, quoted in backticks if necessary."""
    is_plain = column.isascii() and column.isidentifier()
    is_plain &= column.lower() not in SQL_LITERALS
    return column if is_plain else "`" + column.replace("`", "``") + "`"


def _locate_bad_row(model: FlatModel, block: Block, error: UsageError) -> UsageError:
    """Find by bisection a row that the model rejects; return an error that names the row."""
    first, end = 0, len(block.records)
    while end - first > 1:
        middle = (first + end) // 2
        found = _find_error(model, block, first, middle)
        first, end = (first, middle) if found else (middle, end)
    found = _find_error(model, block, first, end)
    if found is None:
        return UsageError(f"{error} (in {block.where})")
    columns = ", ".join(repr(leaf.name) for leaf in block.form.leaves)
    return UsageError(
        f"row {block.numbers[first]} of {block.where}: {str(found).replace(' of row 0', '')} "
        f"(columns {columns})"
    )


def _find_error(model: FlatModel, block: Block, first: int, end: int) -> UsageError | None:
    """Return the error that the model raises for rows ``first`` to ``end`` - 1, or None."""
    batch = block.form.batch(block.records[first:end])
    try:
        model.check(batch.features, batch.labels)
    except UsageError as error:
        return error
    return None


def gather_blocks(parts: Iterable[tuple[RowFormat, Records]], where: str) -> Iterator[Block]:
    """Join consecutive records into blocks of about ``BLOCK_BYTES``; ``where`` as in ``Block``."""
    held: list[Records] = []
    form, begin = RowFormat(()), 0
    for part_form, records in parts:
        if held and part_form != form:
            joined = form.unify(part_form)
            rows = sum(map(len, held))
            if (rows + len(records)) * joined.row_bytes > BLOCK_BYTES:  # with one long sparse row
                yield _make_block(form, held, begin, where)
                begin, held = begin + rows, []
            else:
                held = [form.repack(some, joined) for some in held]
                records, part_form = part_form.repack(records, joined), joined
        form = part_form
        held.append(records)
        if sum(some.nbytes for some in held) >= BLOCK_BYTES:
            yield _make_block(form, held, begin, where)
            begin, held = begin + sum(map(len, held)), []
    if held:
        yield _make_block(form, held, begin, where)


def _make_block(form: RowFormat, held: list[Records], begin: int, where: str) -> Block:
    """Return one block of all records in ``held``, with row numbers from ``begin``."""
    records = held[0] if len(held) == 1 else np.concatenate(held)
    return Block(form, records, np.arange(begin, begin + len(records)), where)


def join_small_blocks(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """Join blocks of few rows to blocks of ``rows`` rows or more; the last may have fewer."""
    held: list[Block] = []
    for block in blocks:
        held.append(block)
        if sum(len(one.records) for one in held) >= rows:
            yield _join_blocks(held)
            held = []
    if held:
        yield _join_blocks(held)


def _join_blocks(blocks: list[Block]) -> Block:
    """Return one block with the rows of several blocks."""
    form = functools.reduce(RowFormat.unify, (block.form for block in blocks))
    records = [block.form.repack(block.records, form) for block in blocks]
    numbers = np.concatenate([block.numbers for block in blocks])
    return Block(form, np.concatenate(records), numbers, blocks[0].where)


def read_row_blocks(partition: int, rows: Iterable[Any]) -> Iterator[Block]:
    """Convert a partition's rows (features, label) or (features, label, weight) to blocks.

    Features and labels are a number, an array, or a tuple or dictionary of several arrays; a tuple
    or list of numbers is one array. Raise UsageError naming the first invalid row.
    """
    return read_labelled_blocks(f"partition {partition}", rows)


def read_labelled_blocks(where: str, rows: Iterable[Any]) -> Iterator[Block]:
    """Convert rows (features, label) or (features, label, weight) of any origin to blocks.

    ``where`` names the origin in error messages; otherwise like ``read_row_blocks``.
    """
    return gather_blocks(_pack_rows(iter(rows), where, _parse_labelled_row), where)


def read_feature_blocks(partition: int, rows: Iterable[Any]) -> Iterator[Block]:
    """Convert a partition's rows, which are features without labels, to blocks.

    Raise UsageError naming the first invalid row.
    """
    where = f"partition {partition}"
    return gather_blocks(_pack_rows(iter(rows), where, _parse_features), where)


class ParsedRow(NamedTuple):
    """One row as arrays, and the structure of its features and labels."""

    features: ColumnStructure  # structure of the features
    labels: ColumnStructure  # structure of the labels
    has_weights: bool  # whether the row has a weight
    arrays: list[NDArray[Any]]  # one per leaf of the row format


def _pack_rows(
    rows: Iterator[Any], where: str, parse: Callable[[Any, int, str], ParsedRow]
) -> Iterator[tuple[RowFormat, Records]]:
    """Pack rows into records, some at a time; yield each part as (row format, records).

    ``parse(row, number, where)`` returns a row as arrays, or raises UsageError. The first row
    determines the row format.
    """
    form: RowFormat | None = None
    begin, count = 0, 1
    while chunk := list(itertools.islice(rows, count)):
        columns = [parse(row, begin + i, where) for i, row in enumerate(chunk)]
        form = form or format_from_row(columns[0])
        yield form, form.pack(_stack_rows(form, columns, chunk, begin, where))
        begin += len(chunk)
        count = max(1, min(ROWS_PER_CHUNK_MAX, BLOCK_BYTES // max(1, form.row_bytes)))


def _parse_features(row: Any, number: int, where: str) -> ParsedRow:
    """Convert a row of features without a label to arrays. Raise UsageError if it is invalid."""
    structure, values = split_columns(row)
    try:
        return ParsedRow(structure, 0, False, [as_array(value) for value in values])
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"row {number} of {where} is {shorten_value(row)}: features must be numbers, an array, "
            f"or a tuple or dictionary of these ({error})"
        ) from None


def _parse_labelled_row(row: Any, number: int, where: str) -> ParsedRow:
    """Convert a row (features, label[, weight]) to arrays. Raise UsageError if it is invalid.

    A weight of None is no weight.
    """
    if not (isinstance(row, tuple | list) and len(row) in (2, 3)):
        raise UsageError(
            f"row {number} of {where} is {shorten_value(row)}: an element must be a pair "
            "(features, label), or a triple with a weight"
        )
    # Names of the fields of a Row or namedtuple.
    names: Any = getattr(row, "__fields__", None) or getattr(row, "_fields", ())
    if "label" in names[::2] or "features" in names[1:]:
        raise UsageError(
            f"row {number} of {where} has the fields {list(names)}: an element must be a pair"
            " (features, label), or a triple with a weight, in this order; pass the DataFrame, not"
            " its rdd, with features=... and label=..., or select the columns in this order"
        )
    features, label = split_columns(row[0]), split_labels(row[1])
    weights = [weight for weight in row[2:] if weight is not None]
    values = [*features[1], *label[1], *weights]
    n_features = len(features[1])
    try:
        arrays = [
            as_array(value, is_label=n_features <= i < n_features + len(label[1]))
            for i, value in enumerate(values)
        ]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"row {number} of {where} is {shorten_value(row)}: an element must be a pair "
            f"(features, label) of numbers ({error})"
        ) from None
    if weights and not (arrays[-1].shape == () and 0 <= arrays[-1] < np.inf):
        raise UsageError(
            f"row {number} of {where} has weight {shorten_value(row[2])}: give 0 or above"
        )
    return ParsedRow(features[0], label[0], bool(weights), arrays)


def split_columns(value: Any) -> tuple[ColumnStructure, list[Any]]:
    """Return (structure, columns) of a row's features or labels.

    A dictionary or a tuple of arrays is several columns; a tuple of numbers is one column.
    """
    if isinstance(value, dict):
        return structure_of(value), list(value.values())
    many = isinstance(value, tuple) and not all(isinstance(v, numbers.Real) for v in value)
    return (len(value), list(value)) if many else (None, [value])


def split_labels(value: Any) -> tuple[ColumnStructure, list[Any]]:
    """Return (structure, columns) of a row's labels; None and () are not labels."""
    if value is None or (isinstance(value, tuple) and not value):
        return 0, []
    return split_columns(value)


def as_array(value: Any, *, is_label: bool = False, own: bool = False) -> NDArray[Any]:
    """Convert a value to an array: float32, except for integer arrays and integer labels.

    The result has the machine's byte order, also if ``value`` is a big-endian array. It may share
    memory with ``value``, unless ``own`` is True. Raise ValueError if the value is not numeric, has
    masked entries, or has a number beyond float32, and TypeError if NumPy has no such array.
    """
    refuse_masked(value)
    value = to_numpy(value)
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ValueError("not a number")
    whole = array.dtype.kind in "biu" and (is_label or isinstance(value, np.ndarray | np.generic))
    made = to_native_order(array) if whole else to_float32(array)
    return made.copy() if own and made is array else made


def to_numpy(value: Any) -> Any:
    """Return a tensor of PyTorch or TensorFlow, or a JAX array, as a NumPy array of its dtype.

    Host memory of PyTorch and JAX is not copied. Return any other value unchanged. Raise TypeError
    if NumPy has no such array.
    """
    kind = type(value)
    if hasattr(kind, "block_until_ready"):  # JAX
        return np.asarray(value)
    if not hasattr(kind, "numpy"):
        return value
    try:
        return (value.detach().cpu() if hasattr(kind, "detach") else value).numpy()
    except RuntimeError as error:  # such as a tensor without data
        raise TypeError(str(error)) from None


def to_native_order(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array in the machine's byte order; copy it only if it has another one."""
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def to_float32(array: NDArray[Any]) -> NDArray[np.float32]:
    """Convert an array to float32. Raise ValueError for a number that would become infinite."""
    if array.dtype.kind != "f" or array.dtype.itemsize <= np.dtype(np.float32).itemsize:
        return array.astype(np.float32, copy=False)
    try:
        with np.errstate(over="raise"):
            return array.astype(np.float32, copy=False)
    except FloatingPointError:
        too_large = np.isfinite(array) & (np.abs(array) > np.finfo(np.float32).max)
        raise ValueError(
            f"it has {array[too_large].flat[0]}, which float32 cannot hold: scale or clip it"
        ) from None


def refuse_masked(value: Any) -> None:
    """Raise ValueError for a ``numpy.ma`` array with masked entries, whose mask would be lost."""
    if np.ma.is_masked(value):
        raise ValueError("it has masked entries: fill them, with .filled(0), or drop their rows")


def format_from_row(row: ParsedRow) -> RowFormat:
    """Return the row format for rows with the same structure, shapes and dtypes as this one."""
    features, labels, weighted, arrays = row
    names = [*array_names("features", features), *array_names("label", labels), "weight"]
    n_features = count_arrays(features)
    leaves = []
    for i, array in enumerate(arrays):
        is_label = n_features <= i < n_features + count_arrays(labels)
        weight = weighted and i == len(arrays) - 1
        stored = "<f4" if weight else "<i8" if is_label and array.dtype.kind in "biu" else None
        stored = stored or array.dtype.str
        leaves.append(Leaf(names[i], array.shape, stored, batch_dtype(stored)))
    return RowFormat(tuple(leaves), features, labels, weighted)


def array_names(role: str, structure: ColumnStructure) -> list[str]:
    """Return names, for messages, of the arrays of features or labels."""
    if structure is None:
        return [role]
    return [
        f"{role}[{name!r}]"
        for name in (range(structure) if isinstance(structure, int) else structure)
    ]


def batch_dtype(stored: str) -> str:
    """Return the dtype in a minibatch: int64 for signed integers, else the stored dtype."""
    return "<i8" if np.dtype(stored).kind == "i" else stored


def _stack_rows(
    form: RowFormat, columns: list[ParsedRow], chunk: list[Any], begin: int, where: str
) -> list[NDArray[Any]]:
    """Stack the rows to arrays [rows, ...], one per leaf; raise UsageError if a row differs."""
    stacked = []
    for i, row in enumerate(columns):
        arrays = row.arrays
        if row.has_weights != form.has_weights:
            having = ("a weight", "none") if row.has_weights else ("no weight", "one")
            raise UsageError(
                f"row {begin + i} of {where} has {having[0]}, row 0 has {having[1]}: give all rows"
                " a weight, such as 1, or none of them"
            )
        if (row.features, row.labels) != (form.features, form.labels):
            arrays = order_like(form, row, arrays) if has_same_parts(form, row) else []
        if len(arrays) != len(form.leaves):
            raise UsageError(
                f"row {begin + i} of {where} is {shorten_value(chunk[i])}: it has different parts"
                " than row 0"
            )
        stacked.append(arrays)
        for leaf, array in zip(form.leaves, arrays, strict=True):
            kind = np.dtype(leaf.stored_dtype).kind
            if array.shape != leaf.shape or (kind in "biu" and array.dtype.kind == "f"):
                raise UsageError(
                    f"row {begin + i} of {where} has {leaf.name} {describe_array(array)}, row 0 "
                    f"has {leaf.describe()}: all rows need the same"
                )
            if (value := _find_unfit_value(leaf, array)) is not None:
                raise UsageError(
                    f"row {begin + i} of {where} has {leaf.name} {describe_array(array)} with"
                    f" {value}, which does not fit into {np.dtype(leaf.stored_dtype).name}, as"
                    " which row 0 is stored: give all rows one type, such as np.int64"
                )
    return [np.stack(parts) for parts in zip(*stacked, strict=True)]


def _find_unfit_value(leaf: Leaf, array: NDArray[Any]) -> Any:
    """Return the first value that would change if it were stored as the leaf's integer type.

    Return None if there is none. Values that are stored as float32 may be rounded.
    """
    stored = np.dtype(leaf.stored_dtype)
    if stored.kind == "f" or np.can_cast(array.dtype, stored):
        return None
    unfit = array[array.astype(stored) != array]
    return unfit.flat[0] if unfit.size else None


def describe_array(array: NDArray[Any]) -> str:
    """Describe an array's dtype and shape for messages, such as "float32[3, 2]"."""
    return f"{array.dtype.name}{list(array.shape)}"


def count_rows(rows: Iterable[Any]) -> Iterator[int]:
    """Yield the number of rows in a partition, as the only item."""
    yield sum(1 for _ in rows)


def shorten_value(value: object) -> str:
    """Format a value for messages, in at most 60 characters."""
    text = shown(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


BlockReader = Callable[[int, Iterable[object]], Iterator[Block]]  # (partition, its rows) -> blocks


class ShuffleBlock(NamedTuple):
    """Some rows that a source partition sends to one worker, or the error that ended the source.

    The input of a Python worker ends in the same way whether all rows have arrived or Spark has
    lost shuffle files. So that no task silently trains on a truncated partition, every source sends
    each worker at least one block, and the last block states the number of blocks. Errors in the
    data are sent as a block because a worker reports them to the master; if a task failed, Spark
    would only retry it.
    """

    source: int  # index of the source partition
    number: int  # number of this block, from 0
    total: int  # in the last block: number of blocks from this source to this worker; else 0
    block: Block | None = None  # the rows; None in the last block
    refusal: SparkstromError | None = None  # error that ended the source's rows; None: no error


def distribute_rows(
    blocks: BlockReader, workers: int, seed: int, source: int, rows: Iterable[object]
) -> Iterator[tuple[int, ShuffleBlock]]:
    """Distribute a source partition's rows randomly to workers; yield (worker, shuffle block).

    Workers' numbers of rows from one source differ by at most one. Those from many small sources of
    equal size differ little more; if some sources are empty, they differ about as at random. The
    distribution is the same if Spark recomputes it. The last block for each worker has no rows; see
    ``ShuffleBlock``.

    Args:
        blocks: converts the source's rows to blocks.
        workers: number of workers.
        seed: seed of the distribution.
        source: index of the source partition.
        rows: the source's rows.
    """
    chance = np.random.default_rng((seed, source))
    # Not random: for consecutive sources of a few rows, random starts would give some workers twice
    # as many rows as others.
    start = (seed + source) * GOLDEN_STEP % 2**32
    turn, sent, refusal = start * workers >> 32, 0, None
    try:
        for block in blocks(source, rows):
            order = chance.permutation(len(block.records))
            for worker in range(workers):
                share = order[(worker - turn) % workers :: workers]
                yield worker, ShuffleBlock(source, sent, 0, block.select(share))
            turn, sent = (turn + len(order)) % workers, sent + 1
    except (UsageError, SetupError) as error:
        refusal = error
    for worker in range(workers):
        yield worker, ShuffleBlock(source, sent, sent + 1, None, refusal)


def read_shuffle_blocks(
    sources: int, partition: int, shuffled: Iterable[ShuffleBlock]
) -> Iterator[Block]:
    """Yield each block of rows that source partitions sent to a worker, once.

    Args:
        sources: Number of source partitions.
        partition: Not used; Spark passes the worker's partition.
        shuffled: All shuffle blocks of the worker. Spark may repeat some.

    Raises:
        EOFError: A block is missing at the end. If a source sent an error, that error is raised.
    """
    seen: dict[int, set[int]] = {source: set() for source in range(sources)}
    counts: dict[int, int] = {}
    for dealt in shuffled:
        if dealt.refusal is not None:
            raise dealt.refusal
        if dealt.number in seen[dealt.source]:
            continue
        seen[dealt.source].add(dealt.number)
        if dealt.total:
            counts[dealt.source] = dealt.total
        if dealt.block is not None and len(dealt.block.records):
            yield dealt.block
    missing = [s for s in range(sources) if len(seen[s]) != counts.get(s)]
    if missing:
        raise EOFError(
            f"shuffle blocks did not arrive from {len(missing)} of {sources} source partitions "
            f"(first: source partition {missing[0]}): Spark has lost shuffle files and recomputes "
            "them"
        )
