"""Grid values: what a ParamGridBuilder holds of Params whose values are no JSON.

Spark ML writes the grid of a CrossValidator, a TrainValidationSplit or their models as JSON, except
values that are stages: these it saves and loads in directories of their own. So a model, a master
or a rule in a grid is wrapped as such a stage; an estimator that is given one takes the value.
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

FOLDER = "value"  # beside the metadata: an estimator with this one Param
PARAM = "param"


class GridValue(Transformer, MLWritable, MLReadable["GridValue"]):
    """A value of the estimator's Param ``name``; its attributes are those of ``value``.

    ``holder``: the estimator, whose files can hold it.
    """

    holder: ClassVar[type[Any]]  # set where it is defined

    def __init__(self, name: str, value: Any) -> None:
        super().__init__()
        self.name, self.value = name, value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "value" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.value, name)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == opened(other))

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return repr(self.value)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        raise UsageError(f"{self!r} is a value of a grid: it transforms no DataFrame")

    def write(self) -> GridValueWriter:
        """A writer, for Spark ML's files of a grid."""
        return GridValueWriter(self)

    @classmethod
    def read(cls) -> GridValueReader:
        """A reader of what ``write`` wrote."""
        return GridValueReader()


def opened(value: Any) -> Any:
    """The value itself, where it comes from a grid."""
    return value.value if isinstance(value, GridValue) else value


class GridValueWriter(MLWriter):
    """Writes a value as an estimator's files hold it."""

    def __init__(self, instance: GridValue) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        """Write it. Raise UsageError for an option that cannot be written."""
        one = self._instance
        one.holder()._set(**{one.name: one.value}).write().save(f"{path}/{FOLDER}")
        DefaultParamsWriter.saveMetadata(one, path, self.sc, extraMetadata={PARAM: one.name})


class GridValueReader(MLReader[GridValue]):
    """Reads what ``GridValueWriter`` wrote."""

    def load(self, path: str) -> GridValue:
        """The value. Raise UsageError where its files are missing or damaged."""
        held: Any = DefaultParamsReader.loadParamsInstance(f"{path}/{FOLDER}", self.sc)
        name = DefaultParamsReader.loadMetadata(path, self.sc).get(PARAM)
        if not (isinstance(name, str) and held.hasParam(name)):
            raise UsageError(f"{path} names no Param of an estimator: {name!r}; save it again")
        value = held.of(name)
        return GridValue(name, () if value is None else value)  # listeners are in no file
