"""Wrap grid values that JSON cannot hold, so that Spark ML can save a tuned estimator.

Spark ML writes the grid of a CrossValidator, a TrainValidationSplit or their models as JSON, except
values that are stages, which it saves in directories of their own. So models, masters, early
stopping, listeners and tuples of columns are wrapped as stages in a grid, and unwrapped when an
estimator's Param is set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml import Transformer
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from sparkstrom.base.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FOLDER = "value"  # next to the metadata: an estimator on which only this Param is set
PARAM = "param"


class GridValue(Transformer, MLWritable, MLReadable["GridValue"]):
    """A wrapped grid value, with the attributes of ``value``.

    ``name`` is the Param under which it is saved: featuresCol for the columns of every Param.
    """

    # The estimator's class, whose files can hold the value. Its module imports this one.
    estimator_class: ClassVar[type[Any]]

    def __init__(self, name: str, value: Any) -> None:
        super().__init__()
        self.name, self.value = name, value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "value" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.value, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == unwrapped(other))

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return repr(self.value)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        raise UsageError(f"{self!r} is a value of a grid: it transforms no DataFrame")

    def write(self) -> GridValueWriter:
        """Return a writer of Spark ML's files."""
        return GridValueWriter(self)

    @classmethod
    def read(cls) -> GridValueReader:
        """Return a reader of the files that ``write`` makes."""
        return GridValueReader()


def unwrapped(value: Any) -> Any:
    """Return the wrapped value of a GridValue, and any other value as it is."""
    return value.value if isinstance(value, GridValue) else value


class GridValueWriter(MLWriter):
    """Writes a value as an estimator's files hold it."""

    def __init__(self, instance: GridValue) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Write the value to ``path``. Raise UsageError for an option that cannot be written."""
        one = self._instance
        one.estimator_class()._set(**{one.name: one.value}).write().save(f"{path}/{FOLDER}")
        DefaultParamsWriter.saveMetadata(one, path, self.sc, extraMetadata={PARAM: one.name})


class GridValueReader(MLReader[GridValue]):
    """Reads what ``GridValueWriter`` wrote."""

    def load(self, path: str) -> GridValue:
        """Return the value in ``path``. Raise UsageError if files are missing or damaged."""
        held: Any = DefaultParamsReader.loadParamsInstance(f"{path}/{FOLDER}", self.sc)
        name = DefaultParamsReader.loadMetadata(path, self.sc).get(PARAM)
        if not (isinstance(name, str) and held.hasParam(name)):
            raise UsageError(f"{path} names no Param of an estimator: {name!r}; save it again")
        value = held.of(name)
        return GridValue(name, () if value is None else value)  # listeners are in no file
