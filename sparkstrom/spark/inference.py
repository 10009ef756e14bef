"""Inference: a trained model on the executors, unpacked once per Python worker.

Training never sends weights through Spark; inference does, as one broadcast. A Python worker keeps
the few models that it used last, by the digest of their parameters, so that the tasks of a job, and
the jobs of a notebook, share one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.models.base import Buffered, Flat, FlatModel
from sparkstrom.models.outputs import predict_in_blocks
from sparkstrom.spark.blocks import short
from sparkstrom.spark.columns import is_vector
from sparkstrom.spark.shipping import packed

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import Column, DataFrame

Make = Callable[[Flat], Any]  # outputs f32[rows, outputs] -> Series or DataFrame

MODELS_MAX = 4  # that one Python worker keeps
ROWS_AT_ONCE = 4096  # of an RDD: enough for full blocks


@dataclass(frozen=True, slots=True)
class Trained:
    """A model on its way: what it is, and what it has learnt."""

    model: FlatModel  # without its storage
    parameters: Flat
    buffers: bytes  # of a model that has some
    digest: str  # of all three

    @classmethod
    def of(cls, model: FlatModel, parameters: Flat) -> Trained:
        """A model with these parameters, and the buffers that it has now."""
        buffers = model.buffers_bytes() if isinstance(model, Buffered) else b""
        words = json.dumps(model.describe(), sort_keys=True, default=repr).encode()
        digest = hashlib.sha256(b"%d %s" % (len(words), words))
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


def _unpacked(model: bytes, parameters: Flat, buffers: bytes, digest: str) -> Trained:
    return Trained(pickle.loads(model), parameters, buffers, digest)


_opened: OrderedDict[str, FlatModel] = OrderedDict()  # of this Python worker


def opened(trained: Trained) -> FlatModel:
    """The model, from those that this process has at hand, if it is among them."""
    if trained.digest not in _opened:
        _opened[trained.digest] = trained.open()
        while len(_opened) > MODELS_MAX:
            _opened.popitem(last=False)
    _opened.move_to_end(trained.digest)
    return _opened[trained.digest]


def predict_rows(shipped: Any, rows: Iterable[Any]) -> Iterator[Flat]:
    """Outputs f32[outputs] for each row of a partition of an RDD of features."""
    model, held = opened(shipped.value), []
    for row in rows:
        held.append(np.asarray(row, np.float32))
        if len(held) == ROWS_AT_ONCE:
            yield from predict_in_blocks(model, np.stack(held))
            held.clear()
    if held:
        yield from predict_in_blocks(model, np.stack(held))


def predict_series(shipped: Any, make: Make, columns: Iterator[pd.Series[Any]]) -> Iterator[Any]:
    """What ``make`` makes of the outputs, for each Arrow batch of a features column."""
    model = opened(shipped.value)
    for column in columns:
        yield make(predict_in_blocks(model, features_of(column)))


def features_of(column: pd.Series[Any]) -> Flat:
    """A column of lists as f32[rows, width]. Raise ValueError naming a row that does not fit."""
    values = column.to_numpy()
    if not len(values):
        return np.zeros((0, 0), np.float32)
    widths = [-1 if value is None else len(value) for value in values]
    for row, width in enumerate(widths):
        if width < 0 or width != widths[0]:
            raise ValueError(
                f"row {row} of this batch has features {short(values[row])}, row 0 has "
                f"{widths[0]} values: fill or drop it; all rows need the same width"
            )
    return np.stack(values).astype(np.float32, copy=False)


def plain(outputs: Flat) -> pd.Series[Any]:
    """Outputs as a column of lists."""
    import pandas as pd

    return pd.Series(list(outputs))


def column_of(shipped: Any, make: Make, schema: str, features: Column) -> Column:
    """``make`` of the outputs for a column array<float>, as a column of type ``schema``.

    Only the features travel to Python; the other columns of the table stay where they are.
    """
    import pandas as pd
    from pyspark.sql.pandas.functions import pandas_udf

    def run(columns):  # type: ignore[no-untyped-def]  # Spark reads the types from its annotations
        return predict_series(shipped, make, columns)

    made: Any = pd.DataFrame if schema.startswith("struct") else pd.Series
    run.__annotations__ = {"columns": Iterator[pd.Series], "return": Iterator[made]}
    column: Column = pandas_udf(run, schema)(features)  # type: ignore[call-overload]
    return column


def feature_column(frame: DataFrame, features: str | list[str]) -> Column:
    """An array, a vector, a number, or several numbers side by side, as array<float>.

    Raise UsageError naming the column that is none of these, SetupError without pandas.
    """
    from pyspark.sql import functions as sql
    from pyspark.sql.types import ArrayType, NumericType

    if importlib.util.find_spec("pandas") is None:
        raise SetupError(
            "Spark hands columns to Python with pandas, which is not here: pip install pandas on "
            "the driver and the executors, or predict an RDD of features"
        )
    names = [features] if isinstance(features, str) else list(features)
    for name in names:
        if name not in frame.columns:
            raise UsageError(f"there is no column {name!r}; the DataFrame has {frame.columns}")
    kinds = [frame.schema[name].dataType for name in names]
    columns = [sql.col("`" + name.replace("`", "``") + "`") for name in names]
    if isinstance(features, str) and is_vector(kinds[0]):
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(columns[0], "float32")
    element = kinds[0].elementType if isinstance(kinds[0], ArrayType) else None
    if isinstance(features, str) and isinstance(element, NumericType):
        return columns[0].cast("array<float>")
    for name, kind in zip(names, kinds, strict=True):
        if not isinstance(kind, NumericType):
            raise UsageError(
                f"features column {name!r} is {kind.simpleString()}: predicting takes an array of "
                "numbers, an ml vector, a number, or a list of numeric columns; for anything else "
                "predict arrays, or an RDD"
            )
    return sql.array(*(column.cast("float") for column in columns))
