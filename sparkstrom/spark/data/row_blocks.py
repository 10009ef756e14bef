"""Row blocks: rows on their way from Spark to a worker, some MiB at a time, each with its number.

Whatever the rows come from, they become records here. What does not fit is refused by the column
and by the row's number in its own partition.
"""

from __future__ import annotations

import functools
import itertools
import numbers
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.models.base import FlatModel
from sparkstrom.models.row_checks import LABELS, BadValue
from sparkstrom.runtime.records import Leaf, Nest, Records, RowFormat, nest_of, width_of

BLOCK_BYTES = 2 << 20  # rows in one block: there are about six copies of it while it is made
ROWS_AT_ONCE = 4096


class Block(NamedTuple):
    """Some rows of one partition."""

    form: RowFormat
    records: Records
    numbers: NDArray[np.int64]  # of the rows, from 0, in ``where``
    where: str  # such as "partition 3", for messages


def check_block(model: FlatModel, block: Block) -> None:
    """Raise UsageError naming the first row that does not fit the model."""
    batch = block.form.batch(block.records)
    try:
        model.check(batch.features, batch.labels)
    except BadValue as error:
        raise UsageError(_told(block, error)) from None
    except UsageError as error:
        raise _named(model, block, error) from None


def _told(block: Block, bad: BadValue) -> str:
    """Where the value is, in the user's words."""
    form = block.form
    before, nest = 0, form.features
    if bad.role == LABELS:
        before, nest = width_of(form.features), form.labels
    index = nest.index(bad.array) if isinstance(nest, tuple) else int(bad.array or 0)
    leaf, at = form.leaves[before + index], bad.at
    column, names = leaf.name, leaf.name.split(", ")
    if len(names) > 1 and leaf.shape == (len(names),):  # columns side by side
        column, at = names[int(bad.place)], ""
    role = " (label)" if bad.role == LABELS else ""
    advice = ""
    if not at and column.partition("[")[0] not in ("features", "label"):  # no RDD's own names
        value = bad.said if bad.said.lstrip("-").isdigit() else f"double('{bad.said}')"
        advice = found_by(block.where, f"{quoted(column)} = {value}")
    return (
        f"row {block.numbers[bad.row]} of {block.where}: column {column!r}{role}{at} is {bad.said}:"
        f" {bad.why}{advice}"
    )


def found_by(where: str, condition: str) -> str:
    """How to find such rows of a DataFrame; local data have no partitions, and number them well.

    A DataFrame's row numbers are those of the columns that a fit reads: after a repartition Spark
    puts rows elsewhere where it reads other columns.
    """
    return f'; frame.where("{condition}") shows such rows' if where.startswith("partition") else ""


def quoted(column: str) -> str:
    """A column's name in an SQL expression."""
    return column if column.isidentifier() else "`" + column.replace("`", "``") + "`"


def _named(model: FlatModel, block: Block, error: UsageError) -> UsageError:
    """Halve the rows until the one is found that is wrong by itself."""
    first, end = 0, len(block.records)
    while end - first > 1:
        middle = (first + end) // 2
        found = _refusal(model, block, first, middle)
        first, end = (first, middle) if found else (middle, end)
    found = _refusal(model, block, first, end)
    if found is None:
        return UsageError(f"{error} (in {block.where})")
    columns = ", ".join(repr(leaf.name) for leaf in block.form.leaves)
    return UsageError(
        f"row {block.numbers[first]} of {block.where}: {str(found).replace(' of row 0', '')} "
        f"(columns {columns})"
    )


def _refusal(model: FlatModel, block: Block, first: int, end: int) -> UsageError | None:
    batch = block.form.batch(block.records[first:end])
    try:
        model.check(batch.features, batch.labels)
    except UsageError as error:
        return error
    return None


def gathered(parts: Iterable[tuple[RowFormat, Records]], where: str) -> Iterator[Block]:
    """Parts, in order, as blocks of about ``BLOCK_BYTES``; one block at least where rows are."""
    held: list[Records] = []
    form, begin = RowFormat(()), 0
    for part_form, records in parts:
        if held and part_form != form:
            joined = form.joined(part_form)
            held = [form.widened(some, joined) for some in held]
            records, part_form = part_form.widened(records, joined), joined
        form = part_form
        held.append(records)
        if sum(some.nbytes for some in held) >= BLOCK_BYTES:
            yield _block(form, held, begin, where)
            begin, held = begin + sum(map(len, held)), []
    if held:
        yield _block(form, held, begin, where)


def _block(form: RowFormat, held: list[Records], begin: int, where: str) -> Block:
    records = held[0] if len(held) == 1 else np.concatenate(held)
    return Block(form, records, np.arange(begin, begin + len(records)), where)


def of_rows(blocks: Iterable[Block], rows: int) -> Iterator[Block]:
    """Consecutive blocks joined until they have so many rows: images are few to a block."""
    held: list[Block] = []
    for block in blocks:
        held.append(block)
        if sum(len(one.records) for one in held) >= rows:
            yield _joined(held)
            held = []
    if held:
        yield _joined(held)


def _joined(blocks: list[Block]) -> Block:
    form = functools.reduce(RowFormat.joined, (block.form for block in blocks))
    records = [block.form.widened(block.records, form) for block in blocks]
    numbers = np.concatenate([block.numbers for block in blocks])
    return Block(form, np.concatenate(records), numbers, blocks[0].where)


# -- rows of an RDD --------------------------------------------------------------------------------


def blocks_of_rows(partition: int, rows: Iterable[Any]) -> Iterator[Block]:
    """(features, label) or (features, label, weight) as blocks.

    Features: a number or array, a tuple of several, or a dictionary; labels likewise, except that
    a tuple or list of numbers is one array. Raises UsageError naming the row.
    """
    return blocks_labelled(f"partition {partition}", rows)


def blocks_labelled(where: str, rows: Iterable[Any]) -> Iterator[Block]:
    """The same of rows that are called ``where`` in messages."""
    return gathered(_parts(iter(rows), where, _labelled), where)


def blocks_of_features(partition: int, rows: Iterable[Any]) -> Iterator[Block]:
    """Features without labels, of the same kinds, as blocks. Raises UsageError naming the row."""
    where = f"partition {partition}"
    return gathered(_parts(iter(rows), where, _unlabelled), where)


class Row(NamedTuple):
    """One row's arrays, and how its features and labels are arranged."""

    features: Nest
    labels: Nest
    weighted: bool
    arrays: list[NDArray[Any]]


def _parts(
    rows: Iterator[Any], where: str, opened: Callable[[Any, int, str], Row]
) -> Iterator[tuple[RowFormat, Records]]:
    form: RowFormat | None = None
    begin, count = 0, 1
    while chunk := list(itertools.islice(rows, count)):
        columns = [opened(row, begin + i, where) for i, row in enumerate(chunk)]
        form = form or form_of_row(columns[0])
        yield form, form.pack(_stacked(form, columns, chunk, begin, where))
        begin += len(chunk)
        count = max(1, min(ROWS_AT_ONCE, BLOCK_BYTES // max(1, form.row_bytes)))


def _unlabelled(row: Any, number: int, where: str) -> Row:
    nest, values = several(row)
    try:
        return Row(nest, 0, False, [as_array(value) for value in values])
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"row {number} of {where} is {short(row)}: features must be numbers, an array, or a "
            f"tuple or dictionary of these ({error})"
        ) from None


def _labelled(row: Any, number: int, where: str) -> Row:
    if not (isinstance(row, tuple | list) and len(row) in (2, 3)):
        raise UsageError(
            f"row {number} of {where} is {short(row)}: an element must be a pair (features, "
            "label), or a triple with a weight"
        )
    features, label = several(row[0]), several(() if row[1] is None else row[1])
    values = [*features[1], *label[1], *row[2:]]
    n_features = len(features[1])
    try:
        arrays = [
            as_array(value, is_label=n_features <= i < n_features + len(label[1]))
            for i, value in enumerate(values)
        ]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"row {number} of {where} is {short(row)}: an element must be a pair (features, "
            f"label) of numbers ({error})"
        ) from None
    if len(row) == 3 and not (arrays[-1].shape == () and 0 <= arrays[-1] < np.inf):
        raise UsageError(f"row {number} of {where} has weight {short(row[2])}: give 0 or above")
    return Row(features[0], label[0], len(row) == 3, arrays)


def several(value: Any) -> tuple[Nest, list[Any]]:
    """A dictionary, or a tuple of arrays, is several columns; numbers side by side are one."""
    if isinstance(value, dict):
        return nest_of(value), list(value.values())
    many = isinstance(value, tuple) and not all(isinstance(v, numbers.Real) for v in value)
    return (len(value), list(value)) if many else (None, [value])


def as_array(value: Any, *, is_label: bool = False, own: bool = False) -> NDArray[Any]:
    """Lists and floats as f32; arrays of whole numbers, and whole labels, as they are.

    The same memory where it need not be changed, unless it is to be the array's ``own``.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ValueError("not a number")
    whole = array.dtype.kind in "biu" and (is_label or isinstance(value, np.ndarray | np.generic))
    made = array if whole else array.astype(np.float32, copy=False)
    return made.copy() if own and made is array else made


def form_of_row(row: Row) -> RowFormat:
    """The form of rows like this one."""
    features, labels, weighted, arrays = row
    names = [*names_of("features", features), *names_of("label", labels), "weight"]
    n_features = width_of(features)
    leaves = []
    for i, array in enumerate(arrays):
        is_label = n_features <= i < n_features + width_of(labels)
        weight = weighted and i == len(arrays) - 1
        stored = "<f4" if weight else "<i8" if is_label and array.dtype.kind in "biu" else None
        stored = stored or array.dtype.str
        leaves.append(Leaf(names[i], array.shape, stored, given_dtype(stored)))
    return RowFormat(tuple(leaves), features, labels, weighted)


def names_of(role: str, nest: Nest) -> list[str]:
    """What the arrays of features or labels are called in messages."""
    if nest is None:
        return [role]
    return [f"{role}[{name!r}]" for name in (range(nest) if isinstance(nest, int) else nest)]


def given_dtype(stored: str) -> str:
    """What a minibatch has of a stored kind: signed whole numbers as int64, others as they are."""
    return "<i8" if np.dtype(stored).kind == "i" else stored


def _stacked(
    form: RowFormat,
    columns: list[Row],
    chunk: list[Any],
    begin: int,
    where: str,
) -> list[NDArray[Any]]:
    """The rows' arrays, one per leaf. Raise UsageError naming the first row of another kind."""
    for i, (features, labels, _, arrays) in enumerate(columns):
        if (features, labels, len(arrays)) != (form.features, form.labels, len(form.leaves)):
            raise UsageError(
                f"row {begin + i} of {where} is {short(chunk[i])}: it has other parts than row 0"
            )
        for leaf, array in zip(form.leaves, arrays, strict=True):
            kind = np.dtype(leaf.stored).kind
            if array.shape != leaf.shape or (kind in "biu" and array.dtype.kind == "f"):
                raise UsageError(
                    f"row {begin + i} of {where} has {leaf.name} {kind_of(array)}, row 0 has "
                    f"{np.dtype(leaf.stored).name}{list(leaf.shape)}: all rows need the same"
                )
    return [np.stack([row.arrays[i] for row in columns]) for i in range(len(form.leaves))]


def kind_of(array: NDArray[Any]) -> str:
    """An array's dtype and shape, for messages."""
    return f"{array.dtype.name}{list(array.shape)}"


def count_rows(rows: Iterable[Any]) -> Iterator[int]:
    """How many rows a partition has."""
    yield sum(1 for _ in rows)


def short(value: object) -> str:
    """A value in an error message."""
    text = shown(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
