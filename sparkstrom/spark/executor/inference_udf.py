"""Inference as a function of columns, for SQL expressions, as ``predict_batch_udf`` is.

A pandas UDF gets some thousand rows at a time, so its memory is bounded whatever the table's size.
"""

from __future__ import annotations

import importlib.util
import numbers
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import SetupError, UsageError, first_line
from sparkstrom.base.option_types import shown
from sparkstrom.models.base import Columns, Flat, FlatModel, arrays_of
from sparkstrom.models.outputs import predict_in_blocks, rows_at
from sparkstrom.spark.data.row_blocks import given_dtype
from sparkstrom.spark.executor.inference import (
    Outputs,
    SideBySide,
    opened,
    output_names,
    plain,
    rows_at_once,
)

if TYPE_CHECKING:
    import pandas as pd

Inputs = tuple[str, ...] | int | None
Shapes = Sequence[Sequence[int]] | None


def inference_udf(shipped: Any, inputs: Inputs, shapes: Shapes, output: Any) -> Any:
    """See ``SparkNetwork.udf``."""
    if importlib.util.find_spec("pandas") is None:
        raise SetupError(
            "a function of columns gets pandas' Series, and pandas is not here: pip install pandas "
            "on the driver and the executors"
        )
    import pandas as pd
    from pyspark.sql.pandas.functions import pandas_udf

    check_inputs(inputs, shapes)
    names = None if output is None else output_names(output)
    made: Any = pd.Series if names is None else pd.DataFrame
    schema = "array<float>"
    if names is not None:
        schema = f"struct<{','.join(f'`{name}`:array<float>' for name in names.values())}>"

    def prediction(batches):  # type: ignore[no-untyped-def]  # Spark reads types from annotations
        return predict_series(shipped, inputs, shapes, names, batches)

    takes, gives = Iterator[tuple[pd.Series, ...]], Iterator[made]
    prediction.__annotations__ = {"batches": takes, "return": gives}
    udf: Any = pandas_udf(prediction, schema)  # type: ignore[call-overload]
    return udf


def check_inputs(inputs: Inputs, shapes: Shapes) -> None:
    """Raise UsageError for what no model has."""
    named = isinstance(inputs, tuple) and inputs and all(isinstance(i, str) for i in inputs)
    counted = isinstance(inputs, int) and not isinstance(inputs, bool) and inputs > 0
    if not (inputs is None or named or counted):
        raise UsageError(
            f"inputs={shown(inputs)}: None where all columns are one array, a tuple of names for a "
            "model that takes a dictionary, a number for one that takes a tuple"
        )
    wanted = 1 if inputs is None else len(inputs) if isinstance(inputs, tuple) else inputs
    listed = isinstance(shapes, Sequence) and all(map(_is_shape, shapes))
    if shapes is not None and not (listed and len(shapes) == wanted):
        raise UsageError(
            f"shapes={shown(shapes)}: give one shape, without rows, for each of {wanted}, as whole "
            "numbers, such as [(1, 28, 28)]"
        )


def _is_shape(shape: object) -> bool:
    return isinstance(shape, Sequence) and all(
        isinstance(size, numbers.Integral) and not isinstance(size, bool) for size in shape
    )


def predict_series(
    shipped: Any, inputs: Inputs, shapes: Shapes, names: Any, batches: Any
) -> Iterator[pd.Series[Any] | pd.DataFrame]:
    """Outputs for one batch of Series after the other."""
    model = opened(shipped.value)
    for columns in batches:
        given = columns if isinstance(columns, tuple) else (columns,)
        if len(given[0]) == 0:
            continue
        outputs = outputs_of_features(model, features_of_series(given, inputs, shapes))
        yield plain({0: "only"}, outputs) if names is None else _struct(names, outputs)


def _struct(names: dict[str | int, str], outputs: Outputs) -> pd.DataFrame:
    import pandas as pd

    made = plain(names, outputs)
    frame = made.to_frame() if isinstance(made, pd.Series) else made
    return frame.set_axis(list(names.values()), axis=1)


def outputs_of_features(model: FlatModel, features: Columns) -> Outputs:
    """In parts of whole blocks, the same bits for a row whatever rows are around it."""
    arrays = arrays_of(features)
    step = rows_at_once(array.shape[1:] for array in arrays)
    side = SideBySide(model)
    parts: list[Flat] = []
    for first in range(0, len(arrays[0]), step):
        part = rows_at(features, slice(first, first + step))
        try:
            parts.append(predict_in_blocks(side, part))
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            shapes = [list(array.shape[1:]) for array in arrays]
            raise UsageError(
                f"the model fails on rows of shapes {shapes}: {first_line(error)}; look at inputs= "
                "and shapes= of network.udf"
            ) from error
    return side.apart(parts)


def features_of_series(given: Sequence[Any], inputs: Inputs, shapes: Shapes) -> Columns:
    """One array of all columns side by side, f32 of several, or one for each of the inputs."""
    if inputs is None:
        wide = [_array(i, column) for i, column in enumerate(given)]
        if len(wide) == 1:
            return _shaped(wide[0], shapes, 0)
        flat = [array.reshape(len(array), -1) for array in wide]
        return _shaped(np.concatenate(flat, axis=1, dtype=np.float32), shapes, 0)
    count = inputs if isinstance(inputs, int) else len(inputs)
    if len(given) != count:
        raise UsageError(f"inputs={inputs!r}: the function got {len(given)} columns; give {count}")
    arrays = tuple(_shaped(_array(i, column), shapes, i) for i, column in enumerate(given))
    return arrays if isinstance(inputs, int) else dict(zip(inputs, arrays, strict=True))


def _array(place: int, column: Any) -> NDArray[Any]:
    """[rows] of numbers, or [rows, ...] of arrays, of the dtypes that training gives them."""
    if hasattr(column, "columns"):
        raise UsageError(
            f"column {place} is a struct of {list(column.columns)}: give its fields as columns, "
            "or an array: pyspark.ml.functions.vector_to_array makes one of a vector"
        )
    values: NDArray[Any] = column.to_numpy()
    shape = values.shape
    while values.dtype == object and values.size:  # arrays, or arrays of arrays
        _refuse_missing(place, values, shape[0])
        inner = _stacked(place, values)
        shape += inner.shape[1:]
        if inner.ndim == 1:  # no arrays
            values = inner
            break
        values = inner.reshape(-1) if inner.dtype == object else inner
    if values.size and values.dtype.kind not in "biuf":
        raise UsageError(
            f"column {place} has {type(values.item(0)).__name__} values: give numbers or arrays of "
            "them"
        )
    if values.dtype.kind != "f":
        return values.astype(given_dtype(values.dtype.str), copy=False).reshape(shape)
    values = values.astype(np.float32)
    _refuse_missing(place, values, shape[0])
    return values.reshape(shape)


def _stacked(place: int, values: NDArray[Any]) -> NDArray[Any]:
    try:
        return np.stack([np.asarray(one) for one in values])
    except ValueError as error:
        raise UsageError(
            f"column {place} has arrays of different lengths ({first_line(error)}): make them "
            "equally long"
        ) from None


def _refuse_missing(place: int, values: NDArray[Any], rows: int) -> None:
    """A null among floats has become NaN on the way; training takes neither."""
    import pandas as pd

    missing = pd.isna(values)
    if missing.any():
        row = int(np.flatnonzero(missing)[0]) // (values.size // rows)
        raise UsageError(
            f"column {place} has a null or NaN, in row {row} of its batch: fill or drop it"
        )


def _shaped(array: NDArray[Any], shapes: Shapes, place: int) -> NDArray[Any]:
    if shapes is None:
        return array if array.ndim > 1 else array.reshape(-1, 1)
    try:
        return array.reshape(len(array), *shapes[place])
    except ValueError:
        raise UsageError(
            f"shapes[{place}]={tuple(shapes[place])}: rows have {list(array.shape[1:])}; give a "
            "shape of as many values"
        ) from None
