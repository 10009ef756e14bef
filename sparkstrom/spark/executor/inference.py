"""Inference: a trained model on the executors, unpacked once per Python worker.

Training never sends weights through Spark; inference does, as one broadcast. A Python worker keeps
the few models that it used last, by the digest of their parameters, so that the tasks of a job, and
the jobs of a notebook, share one.

Columns come by a ``pandas_udf``, not ``mapInArrow``: only the columns that the model reads go to
Python and only its outputs come back, where ``mapInArrow`` would carry the whole table both ways
(twice the time, with 30 columns beside the features). What arrives is made Arrow again and read
as in training, so that every kind of column means the same, and a bad row has the same name.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import pickle
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import SetupError, UsageError, first_line
from sparkstrom.models.base import Buffered, Columns, Flat, FlatModel, arrays_of
from sparkstrom.models.outputs import BLOCK_ROWS, predict_in_blocks, stacked
from sparkstrom.models.registry import says_all
from sparkstrom.spark.data.arrow import parts_of
from sparkstrom.spark.data.columns import Chosen, Names, Reading, wanted_columns
from sparkstrom.spark.data.row_blocks import (
    BLOCK_BYTES,
    Block,
    as_array,
    blocks_of_features,
    gathered,
    of_rows,
    short,
)
from sparkstrom.spark.driver.pickling import packed

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame

Outputs = dict[str | int, Flat]  # f32[rows, width] by the model's names, or by place from 0
Make = Callable[[Outputs], Any]  # -> Series or DataFrame

MODELS_MAX = 4  # that one Python worker keeps


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model on its way: what it is, and what it has learnt."""

    model: FlatModel  # without its storage
    parameters: Flat
    buffers: bytes  # of a model that has some
    digest: str  # of all three; of a model by its name

    @classmethod
    def of(cls, model: FlatModel, parameters: Flat, name: str = "") -> TrainedModel:
        """A model with these parameters, and the buffers that it has now.

        ``name`` tells its code from that of another one of the same description; without it a
        model whose code is not described is like no other.
        """
        buffers = model.buffers_bytes() if isinstance(model, Buffered) else b""
        description = model.describe()
        words = json.dumps(description, sort_keys=True, default=repr).encode()
        name = name or ("" if says_all(description) else secrets.token_hex())
        digest = hashlib.sha256(b"%d %s" % (len(words), words))
        digest.update(name.encode())
        digest.update(parameters.tobytes())
        digest.update(buffers)
        return cls(model, parameters, buffers, digest.hexdigest())

    def __reduce__(self) -> tuple[Any, ...]:
        """By value: a broadcast's own pickle does not send what a user's script defines."""
        return _unpacked, (packed(self.model), self.parameters, self.buffers, self.digest)

    def open(self) -> FlatModel:
        """The model, bound to a copy of its parameters."""
        self.model.bind(self.parameters.copy())
        if isinstance(self.model, Buffered) and self.buffers:
            self.model.load_buffers_bytes(self.buffers)
        return self.model


def _unpacked(model: bytes, parameters: Flat, buffers: bytes, digest: str) -> TrainedModel:
    return TrainedModel(pickle.loads(model), parameters, buffers, digest)


_opened: OrderedDict[str, FlatModel] = OrderedDict()  # of this Python worker


def opened(trained: TrainedModel) -> FlatModel:
    """The model, from those that this process has at hand, if it is among them."""
    if trained.digest not in _opened:
        _opened[trained.digest] = trained.open()
        while len(_opened) > MODELS_MAX:
            _opened.popitem(last=False)
    _opened.move_to_end(trained.digest)
    return _opened[trained.digest]


# -- rows to outputs -------------------------------------------------------------------------------


def features_of(data: Any) -> Columns:
    """What a user passes to ``predict`` in one process, with the dtypes that training gives it.

    As memory of its own: a module may change it in place, and who asks may while the answer is
    waited for.
    """
    if isinstance(data, dict):
        return {name: _numbers(array) for name, array in data.items()}
    if isinstance(data, tuple):
        return tuple(_numbers(array) for array in data)
    return _numbers(data)


def _numbers(values: Any) -> NDArray[Any]:
    try:
        return as_array(values, own=True)
    except (TypeError, ValueError) as error:  # other kinds, and rows of several lengths
        raise UsageError(
            f"features are {short(values)}: give an array of numbers [rows, ...], or a tuple or "
            f"dictionary of them ({error})"
        ) from None


class SideBySide:
    """A model with all of its outputs as one array; ``widths``: of each, once it has predicted."""

    def __init__(self, model: FlatModel) -> None:
        self._model = model
        self.widths: dict[str | int, int] = {}

    def predict(self, features: Columns) -> Flat:
        outputs = self._model.predict(features)
        names = list(outputs) if isinstance(outputs, dict) else range(len(arrays_of(outputs)))
        wide = [np.asarray(a, np.float32).reshape(len(a), -1) for a in arrays_of(outputs)]
        self.widths = {name: a.shape[1] for name, a in zip(names, wide, strict=True)}
        return wide[0] if len(wide) == 1 else np.concatenate(wide, axis=1)

    def apart(self, parts: list[Flat]) -> Outputs:
        """What it predicted, one behind the other, by output."""
        cuts = np.cumsum(list(self.widths.values()))[:-1]
        return dict(zip(self.widths, np.split(stacked(parts), cuts, axis=1), strict=True))


def outputs_of(model: FlatModel, block: Block) -> Outputs:
    """The model's outputs. Raise UsageError naming a row whose NaN came out as NaN.

    Long sparse vectors are made dense for some rows at a time.
    """
    step = rows_at_once(leaf.shape for leaf in block.form.leaves)
    side, parts = SideBySide(model), []
    for first in range(0, len(block.records), step):
        features = block.form.batch(block.records[first : first + step]).features
        try:
            with np.errstate(all="ignore"):  # what comes of NaN is looked at below
                parts.append(predict_in_blocks(side, features))
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise UsageError(
                f"the model fails on rows of {block.where} with features {_shapes(block)}:"
                f" {first_line(error)}"
            ) from error
        _refuse_nan(block, first, features, parts[-1])
    return side.apart(parts)


def rows_at_once(shapes: Iterable[tuple[int, ...]]) -> int:
    """Whole blocks, of not too many bytes."""
    row_bytes = sum(4 * max(1, math.prod(shape)) for shape in shapes)
    return BLOCK_ROWS * max(1, BLOCK_BYTES // (BLOCK_ROWS * row_bytes))


def _refuse_nan(block: Block, first: int, features: Columns, outputs: Flat) -> None:
    """The likeliest class of NaN would be class 0; a model may know what to do with one, too."""
    if np.isfinite(outputs).all():
        return
    lost = ~np.isfinite(outputs).all(axis=1)
    for leaf, array in zip(block.form.leaves, arrays_of(features), strict=False):
        bad = ~np.isfinite(array) & lost.reshape(-1, *[1] * (array.ndim - 1))
        if bad.any():
            at = tuple(np.argwhere(bad)[0])
            place = f" at {list(map(int, at[1:]))}" if len(at) > 1 else ""
            raise UsageError(
                f"row {block.numbers[first + at[0]]} of {block.where}: column {leaf.name!r} is "
                f"{'null or ' if np.isnan(array[at]) else ''}{array[at]}{place}: fill or drop it"
            )


def _shapes(block: Block) -> str:
    return ", ".join(f"{leaf.name!r}: {list(leaf.shape)}" for leaf in block.form.leaves)


def predict_rows(shipped: Any, index: int, rows: Iterable[Any]) -> Iterator[Any]:
    """For each row of a partition f32[outputs]; of several outputs a tuple or dictionary."""
    model = opened(shipped.value)
    for block in of_rows(blocks_of_features(index, rows), BLOCK_ROWS):
        outputs = outputs_of(model, block)
        several = zip(*outputs.values(), strict=True)
        if list(outputs) == [0]:
            yield from outputs[0]
        elif 0 in outputs:
            yield from several
        else:
            yield from (dict(zip(outputs, row, strict=True)) for row in several)


def predict_pairs(shipped: Any, index: int, pairs: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """(key, outputs) of each (key, features) of a partition, which is gone through once.

    Only the keys of rows that are under way are held. Raise UsageError naming what is no pair.
    """
    keys: deque[Any] = deque()

    def features() -> Iterator[Any]:
        for number, pair in enumerate(pairs):
            if not (isinstance(pair, tuple | list) and len(pair) == 2):
                raise UsageError(
                    f"row {number} of partition {index} is {short(pair)}: an element must be a pair"
                    " (key, features)"
                )
            keys.append(pair[0])
            yield pair[1]

    for outputs in predict_rows(shipped, index, features()):
        yield keys.popleft(), outputs


# -- columns ---------------------------------------------------------------------------------------


def predict_columns(
    shipped: Any, make: Make, reading: Reading, where: str, batches: Iterable[Any]
) -> Iterator[Any]:
    """What ``make`` makes of the outputs of one partition's pandas columns.

    It comes in other batches than the columns came in.
    """
    model = opened(shipped.value)
    parts = parts_of(reading, arrow_batches(reading, batches), where)
    for block in of_rows(gathered(parts, where), BLOCK_ROWS):
        yield make(outputs_of(model, block))


def arrow_batches(reading: Reading, batches: Iterable[Any]) -> Iterator[pa.RecordBatch]:
    """Pandas batches as the Arrow ones that Spark made them of."""
    import pyarrow as pa

    schema = pa.ipc.read_schema(pa.py_buffer(reading.schema))
    for columns in batches:
        given = columns if isinstance(columns, tuple) else (columns,)
        arrays = [arrow_of(one, field.type) for one, field in zip(given, schema, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def arrow_of(column: Any, kind: pa.DataType) -> pa.Array:
    """A Series, or a DataFrame of a struct's fields, as the Arrow array that Spark made it of.

    A null among floats has become NaN on the way, and stays one.
    """
    import pyarrow as pa

    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        arrays = [arrow_of(column[field.name], field.type) for field in fields]
        missing = arrays[0].is_null()  # a null struct has nulls in all its fields
        return pa.StructArray.from_arrays(arrays, fields=fields, mask=missing)
    if pa.types.is_list(kind):
        return _lists(np.asarray(column, object), kind)
    return pa.array(column, kind, from_pandas=not pa.types.is_floating(kind))


def _lists(rows: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Rows are arrays of numbers, arrays of arrays, or None."""
    import pyarrow as pa

    missing = np.array([row is None for row in rows], bool)
    full = [row for row in rows if row is not None]
    offsets = np.zeros(len(rows) + 1, np.int32)
    offsets[1:][~missing] = [len(row) for row in full]
    np.cumsum(offsets, out=offsets)
    flat = np.concatenate(full) if full else np.zeros(0)
    nulls = np.append(missing, False) if missing.any() else None
    values = arrow_of(flat, kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets, mask=nulls), values, type=kind)


def output_names(output: Any) -> dict[str | int, str]:
    """The column for each of the model's outputs. Raise UsageError for what is none."""
    names = output if isinstance(output, dict) else {0: output}
    if isinstance(output, tuple):
        names = dict(enumerate(output))
    if not (names and all(isinstance(name, str) and name for name in names.values())):
        raise UsageError(
            f"output={output!r}: give a column's name; for a model of several outputs a tuple of "
            "names, or a dictionary of them by the model's own"
        )
    return names


def plain(names: dict[str | int, str], outputs: Outputs) -> pd.Series[Any] | pd.DataFrame:
    """Outputs as a column of lists; several as the fields of a struct, o0, o1 ..."""
    import pandas as pd

    if set(outputs) != set(names):
        raise UsageError(
            f"the model puts out {_said(outputs)}, the columns for it are {names}: name one "
            "column for each output: a tuple for a tuple, a dictionary for a dictionary"
        )
    columns = [list(outputs[name]) for name in names]
    if len(columns) == 1:
        return pd.Series(columns[0])
    return pd.DataFrame({f"o{i}": one for i, one in enumerate(columns)})


def _said(outputs: Outputs) -> str:
    if list(outputs) == [0]:
        return "one array"
    return f"a tuple of {len(outputs)}" if 0 in outputs else f"a dictionary of {list(outputs)}"


def with_outputs(
    frame: DataFrame, shipped: Any, features: Names, output: Any, element: str = "float"
) -> DataFrame:
    """The frame with a column array<element> for each of the model's outputs.

    Raise UsageError naming a column that features cannot be made of.
    """
    from pyspark.sql import functions as sql

    names = output_names(output)
    kinds = [f"array<{element}>"] * len(names)
    schema = kinds[0]
    if len(names) > 1:
        schema = f"struct<{','.join(f'o{i}:{kind}' for i, kind in enumerate(kinds))}>"
    made = column_of(frame, shipped, partial(plain, names), schema, features)
    if len(names) == 1:
        return frame.withColumn(next(iter(names.values())), made)
    held = f"sparkstrom_{shipped.value.digest}"
    out = frame.withColumn(held, made)
    for i, name in enumerate(names.values()):
        out = out.withColumn(name, sql.col(f"{held}.o{i}"))
    return out.drop(held)


def column_of(frame: DataFrame, shipped: Any, make: Make, schema: str, features: Names) -> Column:
    """``make`` of the outputs for these features of the frame, as a column of type ``schema``.

    Only the features travel to Python; the other columns of the table stay where they are. Raise
    UsageError naming the column that features cannot be made of, SetupError without pandas.
    """
    if importlib.util.find_spec("pandas") is None:
        raise SetupError(
            "Spark hands columns to Python with pandas, which is not here: pip install pandas on "
            "the driver and the executors, or predict an RDD of features"
        )
    columns, reading = wanted_columns(frame, Chosen(features, ()), dense=True)
    run = partial(predict_columns, shipped, make, reading)
    return udf_of(columns, run, schema)


def udf_of(columns: list[Column], run: Callable[[str, Iterable[Any]], Any], schema: str) -> Column:
    """``run(where, batches)`` of these columns' pandas batches, as a column of type ``schema``."""
    import pandas as pd
    from pyspark.sql.pandas.functions import pandas_udf

    def of_task(batches):  # type: ignore[no-untyped-def]  # Spark reads the types from its annotations
        from pyspark import TaskContext

        task = TaskContext.get()
        return run(f"partition {task.partitionId() if task else 0}", batches)

    made: Any = pd.DataFrame if schema.startswith("struct") else pd.Series
    taken: Any = Iterator[pd.Series] if len(columns) == 1 else Iterator[tuple[pd.Series, ...]]
    of_task.__annotations__ = {"batches": taken, "return": Iterator[made]}
    column: Column = pandas_udf(of_task, schema)(*columns)  # type: ignore[call-overload]
    return column
