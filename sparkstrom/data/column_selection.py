"""Check the columns that a user names for ``fit``, and plan how executors make arrays of them.

``features_to_arrays`` converts the features that a user passes to ``predict``, and
``arrays_to_batch`` the arrays that a user passes to ``evaluate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import as_float, is_real, shown
from sparkstrom.data.packed_rows import ColumnStructure, arrange_arrays, structure_of
from sparkstrom.data.row_blocks import as_array, shorten_value, split_labels
from sparkstrom.models.base import Batch, Columns, arrays_of, map_columns

# One column; a list of numeric columns, stacked to one array; or a tuple or dictionary of these.
ColumnNames = str | list[str] | tuple[str | list[str], ...] | dict[str, str | list[str]]

NAMES_ADVICE = "give a column's name, a list of numeric columns, or a tuple or dictionary of these"
FEATURES, LABEL, WEIGHT, HELD_OUT = "features", "label", "weight", "validation"  # roles
IMAGE_FIELDS = ("height", "width", "nChannels", "mode", "data")  # Spark's image schema


class ColumnSpec(NamedTuple):
    """The arguments of ``fit`` that select columns."""

    features: ColumnNames = "features"  # columns of the features
    label: ColumnNames | None = "label"  # None: the model's loss uses the features alone
    weight: str | None = None  # name of the column with the rows' weights
    validation: float | str | None = None  # fraction to hold out, or a boolean column's name

    @property
    def labels(self) -> ColumnNames:
        """The columns of the labels; an empty tuple if there are none."""
        return () if self.label is None else self.label

    @property
    def fraction(self) -> float:
        """Fraction of the rows to hold out at random; 0 if ``validation`` is not a number."""
        return as_float(self.validation) if is_real(self.validation) else 0.0


class ArraySource(NamedTuple):
    """The columns from which one array of a minibatch is made."""

    role: str  # FEATURES, LABEL, WEIGHT or HELD_OUT
    names: tuple[str, ...]  # column names as the user gave them, for messages
    columns: tuple[int, ...]  # indices of the columns in the record batches
    is_stacked: bool  # whether a list of numeric columns forms one array [rows, columns]


class ArrowReadPlan(NamedTuple):
    """Instructions for executors: how to convert Arrow record batches to records."""

    schema: bytes  # the Arrow schema, serialized by Arrow
    array_sources: tuple[ArraySource, ...]  # one per array of a record
    features: ColumnStructure  # structure of the features
    labels: ColumnStructure  # structure of the labels
    has_weights: bool  # whether one of the arrays contains weights
    has_held_out_flag: bool  # whether one of the arrays contains held-out flags


def check_column_spec(chosen: ColumnSpec, dataframe: bool, data_kind: str = "an RDD") -> None:
    """Raise UsageError for column arguments (``chosen``) that are invalid or do not suit the data.

    ``dataframe`` is True if the data have columns; otherwise ``data_kind`` names what they are.
    """
    value, weight = chosen.validation, chosen.weight
    _check_all_names(chosen)
    if not isinstance(weight, str | None):
        raise UsageError(f"weight={shown(weight)}: give a column's name, or None for no weights")
    check_validation_value(value)
    for role, names in ((FEATURES, chosen.features), (LABEL, chosen.label)):
        if not dataframe and names != role:
            raise UsageError(
                f"{role}={shown(names)}: there are no columns in {data_kind}; make its elements"
                " (features, label), where either may be a tuple or dictionary of arrays, and a"
                " label None"
            )
    if not dataframe and isinstance(value, str):
        raise UsageError(
            f"validation={shown(value)}: there are no columns in {data_kind}; give a fraction"
        )
    if not dataframe and weight is not None:
        raise UsageError(
            f"weight={shown(weight)}: there are no columns in {data_kind}; make its elements "
            "(features, label, weight)"
        )


def iter_arrays_by_role(chosen: ColumnSpec) -> Iterator[tuple[str, str | list[str]]]:
    """Yield (role, columns) of each array. Raise UsageError for invalid names."""
    _check_all_names(chosen)
    for role, names in (
        (FEATURES, chosen.features),
        (LABEL, chosen.labels),
        (WEIGHT, chosen.weight),
        (HELD_OUT, chosen.validation if isinstance(chosen.validation, str) else None),
    ):
        for one in [] if names is None else split_into_arrays(names):
            yield role, one


def make_read_plan(
    chosen: ColumnSpec, schema: bytes, sources: Sequence[ArraySource]
) -> ArrowReadPlan:
    """Return the plan for reading the chosen columns from batches with this schema."""
    return ArrowReadPlan(
        schema,
        tuple(sources),
        structure_of(chosen.features),
        structure_of(chosen.labels),
        chosen.weight is not None,
        isinstance(chosen.validation, str),
    )


def check_validation_value(value: object) -> None:
    """Raise UsageError unless ``validation`` is a fraction of the rows, a column name or None."""
    if not (is_real(value) or isinstance(value, str | None)):
        raise UsageError(
            f"validation={shown(value)}: give a fraction such as 0.1, the name of a boolean"
            " column, or a DataFrame of held-out rows with the columns that the fit reads"
        )
    if is_real(value) and not 0 <= as_float(value) < 1:
        raise UsageError(f"validation={shown(value)}: a fraction must be at least 0 and below 1")


def _check_all_names(chosen: ColumnSpec) -> None:
    """Raise UsageError for invalid names of features or labels; there may be no labels."""
    _check_names(FEATURES, chosen.features)
    if not isinstance(chosen.labels, tuple) or chosen.labels:
        _check_names(LABEL, chosen.labels)


def _check_names(role: str, names: Any) -> None:
    """Raise UsageError for invalid column names; whether the columns exist is checked elsewhere."""
    if isinstance(names, str | list | tuple | dict):
        check_not_empty(role, names)
    for one in split_into_arrays(names):
        if isinstance(one, str | list):
            check_not_empty(role, one)
        if not all(isinstance(name, str) for name in (one if isinstance(one, list) else [one])):
            raise UsageError(f"{role}={shown(names)}: {NAMES_ADVICE}")


def check_not_empty(role: str, names: ColumnNames) -> None:
    """Raise UsageError, which names the array's ``role``, if ``names`` is empty."""
    if not names:
        raise UsageError(f"{role}={shown(names)}: give a column's name, or several")


def split_into_arrays(names: ColumnNames) -> list[str | list[str]]:
    """Return the columns of each array, in order: a name, or a list of names to be stacked."""
    if isinstance(names, dict):
        return list(names.values())
    return list(names) if isinstance(names, tuple) else [names]


def resolve_array_source(
    role: str, one: Any, used: dict[str, int], check: Callable[[str, bool], None]
) -> ArraySource:
    """Return the source of one array, and register its columns in ``used``.

    Args:
        role: the array's role, for checks and messages.
        one: a column's name, or a list of names for a stacked array.
        used: indices, by name, of all columns that are read; extended with new columns.
        check: called with (name, is_stacked); raises UsageError for an unsuitable column.

    Raises:
        UsageError: ``one`` does not name any column.
    """
    names = [one] if isinstance(one, str) else one
    if not (isinstance(names, list) and names and all(isinstance(n, str) for n in names)):
        raise UsageError(f"{role}={shown(one)}: {NAMES_ADVICE}")
    side_by_side = not isinstance(one, str)
    for name in names:
        check(name, side_by_side)
        used.setdefault(name, len(used))
    return ArraySource(role, tuple(names), tuple(used[name] for name in names), side_by_side)


def features_to_arrays(data: Any) -> Columns:
    """Convert features that a user passes to ``predict`` to arrays of the dtypes used in training.

    The arrays are copies, because a model may change them in place, and the caller may change the
    originals before the prediction is made. Raise UsageError for anything but numbers.
    """
    return map_columns(_to_numbers, data)


def arrays_to_batch(data: tuple[Any, ...]) -> Batch:
    """Convert (features, labels) or (features, labels, weights), as arrays, to one batch of rows.

    The arrays get the dtypes used in training; labels may be None. Raise UsageError unless the
    arrays are numeric and have the same number of rows, and weights are finite and at least 0. If
    weights are None, all rows have weight 1.
    """
    if len(data) not in (2, 3):
        raise UsageError(
            f"data is a tuple of {len(data)}: give arrays (features, labels) or (features, labels,"
            " weights)"
        )
    features = features_to_arrays(data[0])
    arrays = arrays_of(features)
    if not arrays or not all(array.ndim for array in arrays):
        raise UsageError(f"features are {shorten_value(data[0])}: give arrays [rows, ...]")
    structure, columns = split_labels(data[1])
    try:
        labels = [as_array(column, is_label=True) for column in columns]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"labels are {shorten_value(data[1])}: give arrays of numbers [rows, ...] ({error})"
        ) from None
    weights = _to_weights(data[2]) if len(data) == 3 and data[2] is not None else None
    check_same_rows([*arrays, *labels, *([] if weights is None else [weights])])
    whole = [array.astype(np.int64) if array.dtype.kind in "biu" else array for array in labels]
    return Batch(features, arrange_arrays(structure, whole), weights)


def check_same_rows(arrays: Sequence[NDArray[Any]], where: str = "") -> None:
    """Raise UsageError unless all arrays have the same number of rows.

    ``where`` is added to messages, such as " of the data".
    """
    if scalars := [array for array in arrays if not array.ndim]:
        raise UsageError(f"one of the arrays{where} is the number {scalars[0]}: give one per row")
    rows = [len(array) for array in arrays]
    if len(set(rows)) != 1:
        raise UsageError(f"the arrays{where} have {rows} rows: all need the same number")


def _to_weights(values: Any) -> NDArray[np.float32]:
    """Convert weights. Raise UsageError unless they are numbers [rows], finite and at least 0."""
    try:
        weights = as_array(values).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"weights are {shorten_value(values)}: give an array of numbers [rows] ({error})"
        ) from None
    check_weights(weights)
    return weights


def check_weights(weights: NDArray[Any], where: str = "") -> None:
    """Raise UsageError unless the weights are one-dimensional, finite and at least 0.

    ``where`` is added to messages, such as " of the data".
    """
    if weights.ndim != 1:
        raise UsageError(f"weights{where} have shape {list(weights.shape)}: give one for each row")
    wrong = np.flatnonzero(~((weights >= 0) & (weights < np.inf)))
    if len(wrong):
        value = weights[wrong[0]]
        raise UsageError(f"row {wrong[0]}{where} has weight {value}: give 0 or above")


def _to_numbers(values: Any) -> NDArray[Any]:
    """Convert one array of features to a new array. Raise UsageError if it is not numeric."""
    try:
        return as_array(values, own=True)
    except (TypeError, ValueError) as error:  # not numeric, or rows of different lengths
        raise UsageError(
            f"features are {shorten_value(values)}: give an array of numbers [rows, ...], or a "
            f"tuple or dictionary of them ({error})"
        ) from None
