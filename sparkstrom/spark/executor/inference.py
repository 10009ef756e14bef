"""Predict, score and evaluate on executors with a trained model.

The model is sent as one broadcast variable, the ``handle`` (or ``model``) of the functions here: an
object whose ``value`` is a ``TrainedModel``. Each Python worker unpickles it once and caches the
most recently used models by their digest, so that all tasks and jobs share one copy. In functions
that run as tasks, ``items`` are the elements of the partition with the number ``index``.

DataFrames are read with a ``pandas_udf``, not ``mapInArrow``: only the columns that the model reads
are sent to Python, and only its outputs come back. ``mapInArrow`` would carry the whole table both
ways, which takes twice the time with 30 other columns. The pandas columns are converted back to
Arrow and read as in training, so that all kinds of columns are interpreted in the same way and
errors name the same row.
"""

from __future__ import annotations

import decimal
import hashlib
import importlib.util
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import SetupError, UsageError, first_line
from sparkstrom.base.option_types import is_whole, shown
from sparkstrom.data.arrow_conversion import read_record_parts
from sparkstrom.data.column_selection import ArrowReadPlan, ColumnNames, ColumnSpec
from sparkstrom.data.row_blocks import (
    Block,
    BlockReader,
    batch_dtype,
    check_block,
    choose_step_rows,
    describe_bad_value,
    gather_blocks,
    join_small_blocks,
    read_feature_blocks,
    shorten_value,
    to_float32,
)
from sparkstrom.fit.evaluation import (
    Evaluation,
    EvaluationAccumulator,
    MetricSpec,
    evaluate_batch,
    merge_evaluations,
    merge_evaluations_or_raise,
)
from sparkstrom.models.base import (
    Batch,
    Columns,
    Flat,
    FlatModel,
    HasPenalty,
    Measured,
    RequiresLoss,
    Shape,
    arrays_of,
    count_rows,
    get_buffers,
    load_buffers,
)
from sparkstrom.models.output_interpretation import (
    BLOCK_ROWS,
    concatenate_outputs,
    list_outputs,
    predict_flattened,
    select_rows,
)
from sparkstrom.models.row_checks import BadValue
from sparkstrom.spark.data.column_selection import has_exact_names, resolve_columns
from sparkstrom.spark.data.partitioning import RowSource
from sparkstrom.spark.executor.entry_points import (
    forget_spark_archive_importers,
    hash_by_value,
    pickle_by_value,
)
from sparkstrom.spark.jobs import translate_job_errors
from sparkstrom.worker.task_environment import (
    free_models,
    freeze_garbage_collector,
    refer_weakly,
    unpickle_without_collecting,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame


Outputs = dict[str | int, Flat]  # f32[rows, ...] by the output's name, or its index if unnamed
OutputConverter = Callable[[Outputs], Any]  # returns a pandas Series or DataFrame

FLOAT32_INTEGER_MAX = 1 << 24  # float32 represents every integer up to this one
CACHED_MODELS_MAX = 4  # number of models that a Python worker caches


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model and its parameters, as they are sent to executors."""

    model: FlatModel  # the model, without memory for its parameters
    parameters: Flat  # f32[n_params]
    buffers: bytes  # other state, such as batch statistics; b"" if the model has none
    digest: str  # hash of the model's pickle, its parameters and its buffers

    @classmethod
    def from_model(
        cls, model: FlatModel, parameters: Flat, buffers: bytes | None = None
    ) -> TrainedModel:
        """Return a model with these parameters and buffers (None: the model's current buffers).

        The digest includes the model's pickle, so that models that differ only in code, attributes
        or frozen weights have different digests.
        """
        if buffers is None:
            buffers = get_buffers(model)
        digest = hashlib.sha256(hash_by_value(model))
        digest.update(parameters.tobytes())
        digest.update(buffers)
        return cls(model, parameters, buffers, digest.hexdigest())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model by value, because executors do not have the user's script."""
        return _unpickle_model, (
            pickle_by_value(self.model),
            self.parameters,
            self.buffers,
            self.digest,
        )

    def open(self) -> FlatModel:
        """Return the model, bound to a copy of its parameters."""
        self.model.bind(self.parameters.copy())
        load_buffers(self.model, self.buffers)
        return self.model


def _unpickle_model(model: bytes, parameters: Flat, buffers: bytes, digest: str) -> TrainedModel:
    """Return the TrainedModel whose pickle ``TrainedModel.__reduce__`` made."""
    return TrainedModel(unpickle_without_collecting(model), parameters, buffers, digest)


_open_models: OrderedDict[str, FlatModel] = OrderedDict()  # cache, least recently used first

# Weak references to models that left the cache; a broadcast variable may still contain them.
_removed_models: deque[Callable[[], FlatModel | None]] = deque(maxlen=CACHED_MODELS_MAX)


def get_open_model(trained: TrainedModel) -> FlatModel:
    """Return the model, bound to its parameters, from this process's cache or newly opened."""
    forget_spark_archive_importers()
    freeze_garbage_collector()
    if trained.digest not in _open_models:
        free_models(_removed_models)
        _open_models[trained.digest] = trained.open()
        while len(_open_models) > CACHED_MODELS_MAX:
            _removed_models.append(refer_weakly(_open_models.popitem(last=False)[1]))
    _open_models.move_to_end(trained.digest)
    return _open_models[trained.digest]


class OutputConcatenator:
    """Wraps a model and concatenates its outputs into one array, f32[rows, sum of widths].

    After a prediction, ``shapes`` contains the shape of each output of a row, by the output's name,
    or by its index if outputs have no names.
    """

    def __init__(self, model: FlatModel) -> None:
        self._model = model
        self.shapes: dict[str | int, Shape] = {}

    def predict(self, features: Columns) -> Flat:
        """Return the concatenated outputs and remember their shapes.

        Raise UsageError for integers that float32 would change, and for outputs that are not
        arrays with an entry for each row.
        """
        outputs = list_outputs(self._model.predict(features), count_rows(features))
        arrays = {name: _to_exact_float32(output) for name, output in outputs}
        self.shapes = {name: array.shape[1:] for name, array in arrays.items()}
        flat = [array.reshape(len(array), -1) for array in arrays.values()]
        return flat[0] if len(flat) == 1 else np.concatenate(flat, axis=1)

    def split(self, parts: list[Flat]) -> Outputs:
        """Join ``parts``, the predictions of consecutive rows; split them into the outputs."""
        boundaries = np.cumsum([math.prod(shape) for shape in self.shapes.values()])[:-1]
        split = np.split(concatenate_outputs(parts), boundaries, axis=1)
        return {
            name: array.reshape(len(array), *shape)
            for (name, shape), array in zip(self.shapes.items(), split, strict=True)
        }


def _to_exact_float32(output: Any) -> Flat:
    """Convert an output to float32. Raise UsageError for integers beyond 2^24, positive or not."""
    array = np.asarray(output)
    if array.dtype.kind in "iu" and array.size:
        extreme = max(int(array.max()), int(array.min()), key=abs)
        if abs(extreme) > FLOAT32_INTEGER_MAX:
            raise UsageError(
                f"the model outputs the integer {extreme}, and predictions on executors are"
                f" float32, which is exact up to {FLOAT32_INTEGER_MAX}: output it in two parts, or"
                " as its index"
            )
    return array.astype(np.float32, copy=False)


def flatten_rows(outputs: Outputs) -> Outputs:
    """Return each output as f32[rows, width]."""
    return {name: array.reshape(len(array), -1) for name, array in outputs.items()}


def predict_block(model: FlatModel, block: Block) -> Outputs:
    """Return the model's outputs for a block of rows.

    Raise UsageError if the model fails or refuses a value, or if a NaN or null in a row makes an
    output non-finite; the message then names the row.
    """
    concatenator, parts = OutputConcatenator(model), []
    for part in block.split():
        features = part.form.batch(part.records).features
        try:
            with np.errstate(all="ignore"):  # _check_outputs reports NaN
                parts.append(predict_flattened(concatenator, features))
        except BadValue as error:
            raise UsageError(describe_bad_value(part, error)) from None
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise UsageError(
                f"the model fails on rows of {block.where} with features {_format_shapes(block)}:"
                f" {first_line(error)}"
            ) from error
        _check_outputs(part, features, parts[-1])
    return concatenator.split(parts)


def _check_outputs(block: Block, features: Columns, outputs: Flat) -> None:
    """Raise UsageError if a missing or infinite feature made an output non-finite.

    Otherwise NaN would look like class 0. A model that handles NaN itself has finite outputs.
    """
    if np.isfinite(outputs).all():
        return
    is_lost = ~np.isfinite(outputs).all(axis=1)
    for leaf, array in zip(block.form.leaves, arrays_of(features), strict=False):
        bad = ~np.isfinite(array) & is_lost.reshape(-1, *[1] * (array.ndim - 1))
        if bad.any():
            index = tuple(np.argwhere(bad)[0])
            position = f" at {list(map(int, index[1:]))}" if len(index) > 1 else ""
            raise UsageError(
                f"row {block.numbers[index[0]]} of {block.where}: column {leaf.name!r} is "
                f"{'null or ' if np.isnan(array[index]) else ''}{array[index]}{position}: fill or"
                " drop it"
            )


def _format_shapes(block: Block) -> str:
    """Return the shapes of a block's features as text."""
    return ", ".join(f"{leaf.name!r}: {list(leaf.shape)}" for leaf in block.form.leaves)


def predict_rows(handle: Any, index: int, rows: Iterable[Any]) -> Iterator[Any]:
    """Yield each row's output, f32[outputs], or a tuple or dictionary of its several outputs.

    Runs on an executor. ``rows`` contains the features of each row of partition ``index``.
    """
    model = get_open_model(handle.value)
    for block in join_small_blocks(read_feature_blocks(index, rows), BLOCK_ROWS):
        outputs = flatten_rows(predict_block(model, block))
        several = zip(*outputs.values(), strict=True)
        if list(outputs) == [0]:
            yield from outputs[0]
        elif 0 in outputs:
            yield from several
        else:
            yield from (dict(zip(outputs, row, strict=True)) for row in several)


def predict_pairs(handle: Any, index: int, pairs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield (key, outputs) for each (key, features) of a partition, which is read only once.

    Only the keys of rows in progress are kept in memory. Raise UsageError for an element that is
    not a pair.
    """
    keys: deque[Any] = deque()

    def features() -> Iterator[Any]:
        """Yield the features of the pairs and queue their keys."""
        for number, pair in enumerate(pairs):
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise UsageError(
                    f"row {number} of partition {index} is {shorten_value(pair)}: an element must"
                    " be a pair (key, features)"
                )
            keys.append(pair[0])
            yield pair[1]

    for outputs in predict_rows(handle, index, features()):
        yield keys.popleft(), outputs


def predict_columns(
    handle: Any, convert: OutputConverter, plan: ArrowReadPlan, source: str, batches: Iterable[Any]
) -> Iterator[Any]:
    """Predict one partition of a DataFrame; yield the outputs, one converted batch at a time.

    Args:
        handle: Broadcast variable of the ``TrainedModel``.
        convert: Converts the outputs of a batch to pandas.
        plan: How to read rows from the feature columns.
        source: Description of the partition for messages.
        batches: The feature columns, as pandas Series; output batches may have other sizes.
    """
    model = get_open_model(handle.value)
    parts = read_record_parts(plan, to_arrow_batches(plan, batches), source)
    for block in join_small_blocks(gather_blocks(parts, source), BLOCK_ROWS):
        yield convert(predict_block(model, block))


def to_arrow_batches(plan: ArrowReadPlan, batches: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    """Convert pandas batches back to the Arrow batches from which Spark created them."""
    import pyarrow as pa

    schema = pa.ipc.read_schema(pa.py_buffer(plan.schema))
    for columns in batches:
        series = columns if isinstance(columns, tuple) else (columns,)
        arrays = [
            to_arrow_array(one, field.type) for one, field in zip(series, schema, strict=True)
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def to_arrow_array(column: Any, kind: pa.DataType) -> pa.Array:
    """Convert a Series, or a DataFrame of a struct's fields, back to Spark's Arrow array.

    ``kind`` is the array's type. Pandas represents nulls among floats as NaN; these stay NaN.
    """
    import pyarrow as pa

    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        arrays = [to_arrow_array(column[field.name], field.type) for field in fields]
        missing = arrays[0].is_null()  # a null struct has nulls in all its fields
        return pa.StructArray.from_arrays(arrays, fields=fields, mask=missing)
    if pa.types.is_list(kind):
        return _to_list_array(np.asarray(column, object), kind)
    return pa.array(column, kind, from_pandas=not pa.types.is_floating(kind))


def _to_list_array(rows: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Convert rows (arrays, nested arrays or None) to an Arrow array of the list type ``kind``."""
    import pyarrow as pa

    missing = np.array([row is None for row in rows], bool)
    full = [row for row in rows if row is not None]
    offsets = np.zeros(len(rows) + 1, np.int32)
    offsets[1:][~missing] = [len(row) for row in full]
    np.cumsum(offsets, out=offsets)
    flat = np.concatenate(full) if full else np.zeros(0)
    nulls = np.append(missing, False) if missing.any() else None
    values = to_arrow_array(flat, kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets, mask=nulls), values, type=kind)


def resolve_output_columns(output: Any) -> dict[str | int, str]:
    """Return the column's name for each output of the model, by the output's name or index.

    Raise UsageError unless ``output`` is a column's name, or a tuple or dictionary of distinct
    names.
    """
    names = output if isinstance(output, dict) else {0: output}
    if isinstance(output, tuple):
        names = dict(enumerate(output))
    if not (names and all(isinstance(name, str) and name for name in names.values())):
        raise UsageError(
            f"output={output!r}: give a column's name; for a model of several outputs a tuple of "
            "names, or a dictionary of them by the model's own"
        )
    require_distinct_columns(names.values(), exact=True)
    return names


def require_distinct_columns(names: Iterable[str], *, exact: bool) -> None:
    """Raise UsageError if two new columns have the same name: the second would replace the first.

    ``exact`` is True if names are case-sensitive.
    """
    known: dict[str, str] = {}
    for name in names:
        key = name if exact else name.lower()
        if key in known:
            case = "" if name == known[key] else ", which Spark considers equal"
            raise UsageError(
                f"columns {known[key]!r} and {name!r} for outputs{case}: give each its own name"
            )
        known[key] = name


def require_new_columns(frame: DataFrame, names: Iterable[str]) -> None:
    """Raise UsageError unless new columns have distinct names that ``frame`` does not have yet."""
    new, exact = list(names), has_exact_names(frame)
    require_distinct_columns(new, exact=exact)
    known = {name if exact else name.lower(): name for name in frame.columns}
    for name in new:
        if (old := known.get(name if exact else name.lower())) is not None:
            raise UsageError(
                f"column {name!r} for outputs would replace the DataFrame's column {old!r}: give it"
                f" another name, or leave the old one out, with frame.drop({old!r})"
            )


def to_pandas(names: dict[str | int, str], outputs: Outputs) -> pd.Series[Any] | pd.DataFrame:
    """Convert one output to a Series of arrays, or several to a DataFrame of fields o0, o1, ...

    ``names`` contains a column's name for each output, by the output's name or index. Raise
    UsageError if the model has other outputs.
    """
    import pandas as pd

    if set(outputs) != set(names):
        raise UsageError(
            f"the model returns {_describe_outputs(outputs)}, the columns for it are {names}: name"
            " one column for each output: a tuple for a tuple, a dictionary for a dictionary"
        )
    flat = flatten_rows(outputs)
    columns = [list(flat[name]) for name in names]
    if len(columns) == 1:
        return pd.Series(columns[0])
    return pd.DataFrame({f"o{i}": one for i, one in enumerate(columns)})


def _describe_outputs(outputs: Outputs) -> str:
    """Return the type and number of outputs as text for a message."""
    if list(outputs) == [0]:
        return "one array"
    return f"a tuple of {len(outputs)}" if 0 in outputs else f"a dictionary of {list(outputs)}"


def add_output_columns(
    frame: DataFrame, model: Any, features: ColumnNames, output: Any, element: str = "float"
) -> DataFrame:
    """Return the DataFrame with an additional column array<element> for each model output.

    ``output`` names the new columns, as for ``resolve_output_columns``. Raise UsageError if a
    column exists already or cannot be used as features; the message names the column.
    """
    from pyspark.sql import functions as sql

    names = resolve_output_columns(output)
    require_new_columns(frame, names.values())
    types = [f"array<{element}>"] * len(names)
    schema = types[0]
    if len(names) > 1:
        schema = f"struct<{','.join(f'o{i}:{kind}' for i, kind in enumerate(types))}>"
    column = create_output_column(frame, model, partial(to_pandas, names), schema, features)
    if len(names) == 1:
        return frame.withColumn(next(iter(names.values())), column)
    struct = f"sparkstrom_{model.value.digest}"
    result = frame.withColumn(struct, column)
    for i, name in enumerate(names.values()):
        result = result.withColumn(name, sql.col(f"{struct}.o{i}"))
    return result.drop(struct)


def create_output_column(
    frame: DataFrame, model: Any, convert: OutputConverter, schema: str, features: ColumnNames
) -> Column:
    """Return a column of type ``schema`` with the model's outputs, converted by ``convert``.

    Only the feature columns are sent to Python. Raise UsageError if a column cannot be used as
    features, and SetupError if pandas is not installed.
    """
    if importlib.util.find_spec("pandas") is None:
        raise SetupError(
            "Spark passes columns to Python with pandas, which is not installed: pip install pandas"
            " on the driver and the executors, or predict an RDD of features"
        )
    columns, reading = resolve_columns(frame, ColumnSpec(features, ()), dense=True)
    run = partial(predict_columns, model, convert, reading)
    return apply_pandas_udf(columns, run, schema)


def apply_pandas_udf(
    columns: list[Column], run: Callable[[str, Iterable[Any]], Any], schema: str
) -> Column:
    """Return a column of type ``schema`` that ``run(source, batches)`` computes from ``columns``.

    Each batch is a pandas Series, or a tuple of Series for several columns. ``source`` describes
    the partition for messages.
    """
    import pandas as pd
    from pyspark.sql.pandas.functions import pandas_udf

    def of_task(batches):  # type: ignore[no-untyped-def]  # Spark reads the types from its annotations
        """Apply ``run`` to the batches of this task's partition."""
        from pyspark import TaskContext

        task = TaskContext.get()
        return run(f"partition {task.partitionId() if task else 0}", batches)

    result_type: Any = pd.DataFrame if schema.startswith("struct") else pd.Series
    argument_type: Any = (
        Iterator[pd.Series] if len(columns) == 1 else Iterator[tuple[pd.Series, ...]]
    )
    of_task.__annotations__ = {"batches": argument_type, "return": Iterator[result_type]}
    column: Column = pandas_udf(of_task, schema)(*columns)  # type: ignore[call-overload]
    return column


UdfInputs = tuple[str, ...] | int | None  # names or number of a model's inputs; None: one array
UdfShapes = Sequence[Sequence[int]] | None  # shape of each input without rows; None: as given


def create_inference_udf(model: Any, inputs: UdfInputs, shapes: UdfShapes, output: Any) -> Any:
    """Return a pandas UDF that predicts with ``model``, a handle (see the module's docstring).

    ``SparkNetwork.udf`` documents the other arguments. Raise SetupError if pandas is not installed,
    and UsageError for invalid inputs, shapes or output names.
    """
    if importlib.util.find_spec("pandas") is None:
        raise SetupError(
            "a function of columns needs pandas, which is not installed: pip install pandas on the "
            "driver and the executors"
        )
    import pandas as pd
    from pyspark.sql.pandas.functions import pandas_udf

    check_inputs(inputs, shapes)
    names = None if output is None else resolve_output_columns(output)
    result_type: Any = pd.Series if names is None else pd.DataFrame
    schema = "array<float>"
    if names is not None:
        quoted = [name.replace("`", "``") for name in names.values()]
        schema = f"struct<{','.join(f'`{name}`:array<float>' for name in quoted)}>"

    def prediction(batches):  # type: ignore[no-untyped-def]  # Spark reads types from annotations
        """Yield the model's outputs for each batch of pandas Series."""
        return predict_series(model, inputs, shapes, names, batches)

    argument_type, return_type = Iterator[tuple[pd.Series, ...]], Iterator[result_type]
    prediction.__annotations__ = {"batches": argument_type, "return": return_type}
    udf: Any = pandas_udf(prediction, schema)  # type: ignore[call-overload]
    return udf


def check_inputs(inputs: UdfInputs, shapes: UdfShapes) -> None:
    """Raise UsageError for invalid arguments ``inputs`` and ``shapes`` of a UDF."""
    named = isinstance(inputs, tuple) and inputs and all(isinstance(i, str) for i in inputs)
    counted = is_whole(inputs) and inputs > 0
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
    """Return whether an object is a sequence of integers."""
    return isinstance(shape, Sequence) and all(map(is_whole, shape))


def predict_series(
    handle: Any, inputs: UdfInputs, shapes: UdfShapes, names: Any, batches: Any
) -> Iterator[pd.Series[Any] | pd.DataFrame]:
    """Yield the model's outputs for each batch of pandas Series, the input columns of a UDF.

    ``names`` are the names of the outputs' fields, as from ``resolve_output_columns``. If it is
    None, the model must have one output, which becomes a Series. Empty batches are skipped.
    """
    model = get_open_model(handle.value)
    for columns in batches:
        series = columns if isinstance(columns, tuple) else (columns,)
        if len(series[0]) == 0:
            continue
        outputs = predict_features(model, series_to_features(series, inputs, shapes))
        yield to_pandas({0: "only"}, outputs) if names is None else _to_struct(names, outputs)


def _to_struct(names: dict[str | int, str], outputs: Outputs) -> pd.DataFrame:
    """Convert outputs to a DataFrame whose columns have the given names, by output."""
    import pandas as pd

    made = to_pandas(names, outputs)
    frame = made.to_frame() if isinstance(made, pd.Series) else made
    return frame.set_axis(list(names.values()), axis=1)


def predict_features(model: FlatModel, features: Columns) -> Outputs:
    """Return the model's outputs, predicted in steps of whole blocks.

    A row's output is bit-identical whatever other rows are predicted with it. Raise UsageError if
    the model fails.
    """
    arrays = arrays_of(features)
    step_rows = choose_step_rows(array.shape[1:] for array in arrays)
    concatenator = OutputConcatenator(model)
    parts: list[Flat] = []
    for first in range(0, len(arrays[0]), step_rows):
        part = select_rows(features, slice(first, first + step_rows))
        try:
            parts.append(predict_flattened(concatenator, part))
        except BadValue as error:
            raise error.moved(first) from None
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            shapes = [list(array.shape[1:]) for array in arrays]
            raise UsageError(
                f"the model fails on rows of shapes {shapes}: {first_line(error)}; check inputs= "
                "and shapes= of network.udf"
            ) from error
    return concatenator.split(parts)


def series_to_features(series: Sequence[Any], inputs: UdfInputs, shapes: UdfShapes) -> Columns:
    """Return the model's features: all columns combined into one array, or one array per input.

    Combined columns are [rows, ...], also if it is a single one, of numbers; several are converted
    to float32. An input of its own is [rows] if its column contains numbers, as in training. Raise
    UsageError if ``inputs`` or ``shapes`` do not suit the columns.
    """
    if inputs is None:
        arrays = [_to_array(i, column) for i, column in enumerate(series)]
        arrays = [array if array.ndim > 1 else array.reshape(-1, 1) for array in arrays]
        if len(arrays) == 1:
            return _reshape(arrays[0], shapes, 0)
        flat = [array.reshape(len(array), -1) for array in arrays]
        return _reshape(np.concatenate(flat, axis=1, dtype=np.float32), shapes, 0)
    count = len(inputs) if isinstance(inputs, tuple) else inputs
    if len(series) != count:
        raise UsageError(f"inputs={inputs!r}: the function got {len(series)} columns; give {count}")
    input_arrays = tuple(
        _reshape(_to_array(i, column), shapes, i) for i, column in enumerate(series)
    )
    if not isinstance(inputs, tuple):
        return input_arrays
    return dict(zip(inputs, input_arrays, strict=True))


def _to_array(position: int, column: Any) -> NDArray[Any]:
    """Convert a Series to an array [rows] or [rows, ...], with the dtypes that training uses.

    Raise UsageError for a struct, a null, NaN, values that are not numbers, or a number beyond
    float32. ``position`` is the column's index, for messages.
    """
    if hasattr(column, "columns"):
        raise UsageError(
            f"column {position} is a struct of {list(column.columns)}: give its fields as columns, "
            "or an array: pyspark.ml.functions.vector_to_array makes one of a vector"
        )
    values: NDArray[Any] = column.to_numpy()
    shape = values.shape
    while values.dtype == object and values.size:  # arrays, or arrays of arrays
        _check_missing(position, values, shape[0])
        inner = _stack_rows(position, values)
        shape += inner.shape[1:]
        if inner.ndim == 1:  # no arrays
            is_decimal = isinstance(inner[0], decimal.Decimal)
            values = inner.astype(np.float64) if is_decimal else inner
            break
        values = inner.reshape(-1) if inner.dtype == object else inner
    if values.size and values.dtype.kind not in "biuf":
        is_time = values.dtype.kind in "mM"  # whose items NumPy may return as integers
        kind = values.dtype.name if is_time else type(values.item(0)).__name__
        raise UsageError(f"column {position} has {kind} values: give numbers or arrays of them")
    if values.dtype.kind != "f":
        return values.astype(batch_dtype(values.dtype.str), copy=False).reshape(shape)
    try:
        values = to_float32(values)
    except ValueError as error:
        raise UsageError(f"column {position}: {error}") from None
    _check_missing(position, values, shape[0])
    return values.reshape(shape)


def _stack_rows(position: int, values: NDArray[Any]) -> NDArray[Any]:
    """Return ``values``, arrays of equal length, as rows of one array.

    Raise UsageError if lengths differ; ``position`` is the column's index, for the message.
    """
    try:
        return np.stack([np.asarray(one) for one in values])
    except ValueError as error:
        raise UsageError(
            f"column {position} has arrays of different lengths ({first_line(error)}): make them "
            "equally long"
        ) from None


def _check_missing(position: int, values: NDArray[Any], rows: int) -> None:
    """Raise UsageError if a value is None or NaN. NaN also represents a null among floats.

    ``rows`` is the number of rows to which ``values``, perhaps flattened, belong.
    """
    import pandas as pd

    missing = pd.isna(values)
    if missing.any():
        row = int(np.flatnonzero(missing)[0]) // (values.size // rows)
        raise UsageError(
            f"column {position} has a null or NaN, in row {row} of its batch: fill or drop it"
        )


def _reshape(array: NDArray[Any], shapes: UdfShapes, position: int) -> NDArray[Any]:
    """Reshape each row to ``shapes[position]``; without shapes, return the array unchanged."""
    if shapes is None:
        return array
    try:
        return array.reshape(len(array), *shapes[position])
    except ValueError:
        raise UsageError(
            f"shapes[{position}]={tuple(shapes[position])}: rows have {list(array.shape[1:])}; give"
            " a shape of as many values"
        ) from None


def check_can_score(model: FlatModel, penalized: bool) -> None:
    """Raise UsageError if the model has no loss, or, if ``penalized``, reports no penalty."""
    if isinstance(model, RequiresLoss):
        model.need_loss()
    if not isinstance(model, Measured):
        raise UsageError(
            f"score_examples: a {type(model).__name__} lacks loss(batch) -> (sum, weight), or"
            " outputs; give it both (sparkstrom.models.base.Measured)"
        )
    if penalized and not isinstance(model, HasPenalty):
        raise UsageError(
            f"include_regularization=True: a {type(model).__name__} does not report its penalty,"
            " which is in its optimizer (weight_decay) or its own loss; leave it out"
        )


def score_block(model: Any, block: Block, penalized: bool) -> NDArray[np.float64]:
    """Return each row's unweighted loss, f64[rows], plus the model's penalty if ``penalized``.

    The loss is NaN if the row's label has no weight, for instance because the loss ignores it.
    """
    check_block(model, block)
    scores = np.empty(len(block.records))
    for i in range(len(scores)):
        batch = block.form.batch(block.records[i : i + 1])
        total, weight = model.loss(Batch(batch.features, batch.labels))
        scores[i] = total / weight if weight else np.nan
    return scores + model.penalty() if penalized else scores


def score_rows(
    handle: Any, blocks: BlockReader, penalized: bool, index: int, items: Iterable[Any]
) -> Iterator[float]:
    """Yield the score (see ``score_block``) of each row of a partition. Runs on an executor."""
    model = get_open_model(handle.value)
    for block in join_small_blocks(blocks(index, items), BLOCK_ROWS):
        yield from map(float, score_block(model, block, penalized))


def score_rdd(model: Any, source: RowSource, penalized: bool) -> Any:
    """Return an RDD with the score (see ``score_block``) of each row of the source, in order."""
    run = partial(score_rows, model, source.blocks, penalized)
    return source.rdd.mapPartitionsWithIndex(run)


def add_score_column(
    frame: DataFrame, model: Any, spec: ColumnSpec, output: str, penalized: bool
) -> DataFrame:
    """Return the DataFrame with an additional column ``output`` for the scores of ``score_block``.

    Raise UsageError if ``output`` exists already, or a column does not suit its role; the message
    names the column.
    """
    require_new_columns(frame, [output])
    columns, plan = resolve_columns(frame, spec, dense=True)
    run = partial(_score_columns, model, plan, penalized)
    return frame.withColumn(output, apply_pandas_udf(columns, run, "double"))


def _score_columns(
    handle: Any, plan: ArrowReadPlan, penalized: bool, source: str, batches: Iterable[Any]
) -> Iterator[Any]:
    """Yield the scores (see ``score_block``) of a partition's rows, a Series per block of rows."""
    import pandas as pd

    model = get_open_model(handle.value)
    parts = read_record_parts(plan, to_arrow_batches(plan, batches), source)
    for block in join_small_blocks(gather_blocks(parts, source), BLOCK_ROWS):
        yield pd.Series(score_block(model, block, penalized))


MERGED_PARTITIONS_MAX = 32  # number of partitions whose metrics one task, or the driver, merges


def evaluate_partition(
    model: Any, metrics: MetricSpec, blocks: BlockReader, index: int, items: Iterable[Any]
) -> Iterator[Evaluation | UsageError | SetupError]:
    """Yield the metrics of one partition if it has rows. Runs on an executor.

    An error in the rows is yielded, not raised, because Spark would only retry a failed task.
    """
    opened, accumulator = get_open_model(model.value), EvaluationAccumulator()
    try:
        for block in join_small_blocks(blocks(index, items), BLOCK_ROWS):
            check_block(opened, block)
            for part in block.split():
                accumulator.add(evaluate_batch(opened, metrics, part.form.batch(part.records)))
    except (UsageError, SetupError) as error:
        yield error
        return
    if accumulator.all:
        yield merge_evaluations(accumulator.all)


def evaluate_source(model: Any, metrics: MetricSpec, source: RowSource) -> Evaluation:
    """Return the metrics over all rows. Raise UsageError if a row does not suit the model."""
    run = partial(evaluate_partition, model, metrics, source.blocks)
    answers = source.rdd.mapPartitionsWithIndex(run)
    with translate_job_errors("evaluating"):
        while (count := answers.getNumPartitions()) > MERGED_PARTITIONS_MAX:
            answers = answers.coalesce(-(-count // MERGED_PARTITIONS_MAX), shuffle=True)
            answers = answers.mapPartitions(merge_partition_metrics)
        results = answers.collect()
    return merge_evaluations_or_raise(results)


def merge_partition_metrics(
    answers: Iterable[Any],
) -> Iterator[Evaluation | UsageError | SetupError]:
    """Yield the merged metrics of several partitions, or the first error among them.

    Runs on an executor. ``answers`` are what ``evaluate_partition`` yielded.
    """
    accumulator = EvaluationAccumulator()
    for part in answers:
        if not isinstance(part, Evaluation):
            yield part
            return
        accumulator.add(part)
    if accumulator.all:
        yield merge_evaluations(accumulator.all)
