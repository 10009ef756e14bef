"""Define the Params of the estimator and its model, and wrap values for tuning grids.

A Param's converter checks a value and may convert it. Spark ML saves the grid of a CrossValidator
or TrainValidationSplit as JSON, except for values that are pipeline stages; those get their own
directories. Therefore ``GridValue`` wraps models, training masters, early-stopping rules, listeners
and tuples of columns as stages. Setting a Param of an estimator unwraps them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pyspark.ml import Transformer
from pyspark.ml.param import Param, Params
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasSeed,
    HasValidationIndicatorCol,
    HasWeightCol,
)
from pyspark.ml.util import (
    DefaultParamsReader,
    DefaultParamsWriter,
    MLReadable,
    MLReader,
    MLWritable,
    MLWriter,
)

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import KEY, Metadata, flag, number, shown, text, whole
from sparkstrom.data.column_selection import ColumnNames
from sparkstrom.fit.listeners import check_listeners
from sparkstrom.fit.trained_network import EPOCHS
from sparkstrom.models.base import FlatModel, explain_invalid_model
from sparkstrom.observe.early_stopping import EarlyStopping
from sparkstrom.options.common import BATCH_SIZE
from sparkstrom.options.parameter_averaging import TrainingMaster
from sparkstrom.spark.fit_strategies import strategy_for

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

VALUE_FOLDER = "value"  # next to the metadata; contains an estimator with only this Param set
PARAM_KEY = "param"  # key of the Param's name in the metadata


class GridValue(Transformer, MLWritable, MLReadable["GridValue"]):
    """Wraps a value of a tuning grid that JSON cannot represent. It has the value's attributes.

    ``name`` is the Param under which the value is saved. Column names are always saved under
    "featuresCol", even if they are the value of another Param.
    """

    # The estimator's class, used to save the value. The module ``estimator`` sets it.
    estimator_class: ClassVar[type[Any]]

    def __init__(self, name: str, value: Any) -> None:
        """Wrap ``value``, a value of the Param ``name``."""
        super().__init__()
        self.name, self.value = name, value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "value" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.value, name)

    def __eq__(self, other: object) -> bool:
        """Return whether the wrapped value equals ``other``, wrapped or not."""
        return bool(self.value == unwrap(other))

    def __hash__(self) -> int:
        """Return the hash of the Param's name, because the value may not be hashable."""
        return hash(self.name)

    def __repr__(self) -> str:
        return repr(self.value)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Raise UsageError: a grid value cannot transform data."""
        raise UsageError(f"{self!r} is a value of a grid: it transforms no DataFrame")

    def write(self) -> GridValueWriter:
        """Return the writer with which Spark ML saves this value."""
        return GridValueWriter(self)

    @classmethod
    def read(cls) -> GridValueReader:
        """Return the reader with which Spark ML loads a saved value."""
        return GridValueReader()


def unwrap(value: Any) -> Any:
    """Return the wrapped value of a GridValue; return any other value unchanged."""
    return value.value if isinstance(value, GridValue) else value


class InstanceWriter(MLWriter):
    """Base class of writers of one instance; subclasses implement ``saveImpl``."""

    def __init__(self, instance: Any) -> None:
        """Prepare to write ``instance``."""
        super().__init__()
        self._instance = instance


class GridValueWriter(InstanceWriter):
    """Writes a GridValue as the files of an estimator on which only its Param is set."""

    def saveImpl(self, path: str) -> None:
        """Write the value to ``path``. Raise UsageError for an option that cannot be written."""
        one = self._instance
        one.estimator_class()._set(**{one.name: one.value}).write().save(f"{path}/{VALUE_FOLDER}")
        DefaultParamsWriter.saveMetadata(one, path, self.sc, extraMetadata={PARAM_KEY: one.name})


class GridValueReader(MLReader[GridValue]):
    """Reads what ``GridValueWriter`` wrote."""

    def load(self, path: str) -> GridValue:
        """Return the value in ``path``; for listeners, which are not saved, an empty tuple.

        Raise UsageError if files are missing or damaged.
        """
        held: Any = DefaultParamsReader.loadParamsInstance(f"{path}/{VALUE_FOLDER}", self.sc)
        name = DefaultParamsReader.loadMetadata(path, self.sc).get(PARAM_KEY)
        if not (isinstance(name, str) and held.hasParam(name)):
            raise UsageError(f"{path} names no Param of an estimator: {name!r}; save it again")
        value = held.get_or_none(name)
        return GridValue(name, () if value is None else value)  # listeners are not saved


SEED_OPTION = whole(-(2**63))  # Spark ML's default is a hash, which may be negative
MULTI_COLUMN_PARAMS = ("featuresCol", "labelCol", "predictionCol")  # may name several columns

# A ParamGridBuilder stores the values that these converters return, and Spark ML saves them. So
# values that JSON cannot represent are wrapped as GridValue. ``OutputParams`` unwraps them when a
# Param is set.


def convert_columns(value: Any, param: str = "featuresCol") -> Any:
    """Check the value of a Param that names columns: a name, a list, or a tuple or dictionary.

    Return the value, wrapped if JSON would change it. Raise UsageError for anything else;
    ``param`` is the Param's name for that message.
    """
    value = unwrap(value)
    several = value.values() if isinstance(value, dict) else value
    parts = list(several) if isinstance(value, tuple | dict) else [value]
    for part in parts:
        one = part if isinstance(part, list) else [part]
        if not (one and parts and all(isinstance(name, str) for name in one)):
            raise UsageError(
                f"{param}={shown(value)}: give a column's name, a list of numeric columns that"
                " stand side by side, or a tuple or dictionary of these for several arrays"
            )
    if isinstance(value, str):
        value = str(value)  # NumPy's strings become Python's
    return value if is_json_value(value) else GridValue("featuresCol", value)


def is_json_value(columns: Any) -> bool:
    """Return whether JSON, which has no tuples and only string keys, can represent ``columns``."""
    keys = columns if isinstance(columns, dict) else ()
    return not isinstance(columns, tuple) and all(isinstance(key, str) for key in keys)


def convert_label_columns(value: Any) -> Any:
    """Check and return label columns; None means that the loss takes labels from the features."""
    return None if value is None else convert_columns(value, "labelCol")


def convert_output_columns(value: Any) -> Any:
    """Check and return the names of output columns: one, or one per output of the model.

    A list is refused, because columns of features in a list are one array.
    """
    value = unwrap(value)
    several = value.values() if isinstance(value, dict) else value
    parts = list(several) if isinstance(value, tuple | dict) else [value]
    if not (parts and all(isinstance(name, str) for name in parts)):
        raise UsageError(
            f"predictionCol={shown(value)}: give a column's name; for a model of several outputs a"
            " tuple of names, or a dictionary of them by the model's own"
        )
    return convert_columns(value, "predictionCol")


def convert_listeners(value: Any) -> Any:
    """Check and wrap listeners. Raise UsageError for objects that are not listeners."""
    value = unwrap(value)
    check_listeners(value)
    return GridValue("listeners", value)


def convert_model(value: Any) -> Any:
    """Check and wrap a model. Raise UsageError for anything but a FlatModel."""
    value = unwrap(value)
    if (why := explain_invalid_model(value)) is not None:
        raise UsageError(why)
    return GridValue("model", value)


def convert_master(value: Any) -> Any:
    """Check and wrap a training master. Raise UsageError for anything else."""
    value = unwrap(value)
    strategy_for(value)
    return GridValue("master", value)


def convert_early_stopping(value: Any) -> Any:
    """Check and wrap an EarlyStopping; return None for None. Raise UsageError for anything else."""
    value = unwrap(value)
    if not isinstance(value, EarlyStopping | None):
        raise UsageError(f"earlyStopping={shown(value)}: must be None or EarlyStopping(patience=5)")
    return None if value is None else GridValue("earlyStopping", value)


def _declare_param(name: str, doc: str, checked: Metadata | Callable[[Any], Any]) -> Param[Any]:
    """Return a Param. ``checked`` is a converter, or an option's declaration that checks values."""
    if callable(checked):
        return Param(Params._dummy(), name, doc, checked)
    return Param(Params._dummy(), name, doc, lambda value: checked[KEY].read(name, value))


def _declare_column(name: str, doc: str) -> Param[str]:
    """Return a Param for the name of one column; "" means none."""
    return _declare_param(name, doc, text("must be a column's name", words=("",)))


class OutputParams(HasFeaturesCol, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol):
    """The Params for the columns that a model reads and adds. An empty name adds no column."""

    featuresCol: Param[Any] = _declare_param(
        "featuresCol", "what the model reads: columns as fit takes them", convert_columns
    )
    predictionCol: Param[Any] = _declare_param(
        "predictionCol", "prediction column; of several outputs, several", convert_output_columns
    )

    probabilityCol: Param[str] = _declare_column(
        "probabilityCol", "column of a probability per class"
    )
    rawPredictionCol: Param[str] = _declare_column(
        "rawPredictionCol", "column that ranks rows by class"
    )

    def set(self, param: Param[Any], value: Any) -> None:
        """Set a Param, unwrapping a GridValue. Spark ML's tuning calls this method."""
        super().set(param, value)
        self._paramMap[param] = unwrap(self._paramMap[param])

    def _set(self, **values: Any) -> Self:
        """Set several Params by name; unwrap each GridValue."""
        super()._set(**values)
        for param in map(self.getParam, values):
            if param in self._paramMap:
                self._paramMap[param] = unwrap(self._paramMap[param])
        return self

    def setFeaturesCol(self, value: ColumnNames) -> Self:
        """Set the name of an array, vector or image column, or a list of names of numeric columns.

        For a model with several inputs, give a tuple or dictionary of these.
        """
        return self._set(featuresCol=value)

    def setPredictionCol(self, value: str | tuple[str, ...] | dict[str, str]) -> Self:
        """Set the name of the column for predictions.

        The column contains a class as a double, a value, or an array of several values. For a model
        with several outputs, give a tuple or dictionary of names, one array column for each output.
        """
        return self._set(predictionCol=value)

    def setProbabilityCol(self, value: str) -> Self:
        """Set the name of the column for vectors of class probabilities; only for classifiers."""
        return self._set(probabilityCol=value)

    def setRawPredictionCol(self, value: str) -> Self:
        """Set the name of the column for vectors of class scores; only for classifiers."""
        return self._set(rawPredictionCol=value)


class EstimatorParams(OutputParams, HasLabelCol, HasWeightCol, HasValidationIndicatorCol, HasSeed):
    """The Params of the estimator: the columns to read, the model and the training options."""

    labelCol: Param[Any] = _declare_param(
        "labelCol", "what is learnt: columns as fit takes them", convert_label_columns
    )
    weightCol: Param[str] = _declare_column("weightCol", "column of how much each row counts")
    validationIndicatorCol: Param[str] = _declare_column(
        "validationIndicatorCol", "boolean column: true for rows to hold out"
    )
    seed: Param[int] = _declare_param("seed", "random seed of the order of rows", SEED_OPTION)
    model: Param[Any] = _declare_param(
        "model", "what is trained: a model of sparkstrom.models", convert_model
    )
    epochs: Param[int] = _declare_param("epochs", "epochs to train, at least 1", EPOCHS)
    batchSize: Param[int] = _declare_param(
        "batchSize", "rows of a minibatch on one worker", BATCH_SIZE
    )
    master: Param[Any] = _declare_param(
        "master", "how workers train and share: SharedTrainingMaster", convert_master
    )
    earlyStopping: Param[Any] = _declare_param(
        "earlyStopping", "when held-out rows end it: EarlyStopping", convert_early_stopping
    )
    listeners: Param[Any] = _declare_param(
        "listeners", "listeners of each fit; not saved", convert_listeners
    )
    validationFraction: Param[float] = _declare_param(
        "validationFraction", "share of rows held out", number(least=0, below=1)
    )
    verbose: Param[bool] = _declare_param("verbose", "draw a line of progress", flag())

    def copy(self, extra: dict[Param[Any], Any] | None = None) -> Self:
        """Return a copy with the Params in ``extra`` set.

        The values of this estimator's Params in ``extra`` are converted in place, as a
        ParamGridBuilder would convert them. Spark ML passes the dictionaries of a grid here and
        saves the same dictionaries with a tuned model, and a user may have created them without
        ParamGridBuilder.
        """
        extra = {} if extra is None else extra
        for param in extra:
            if isinstance(param, Param) and self._testOwnParam(param.parent, param.name):
                extra[param] = self.getParam(param.name).typeConverter(extra[param])
        return super().copy(extra)

    def setLabelCol(self, value: ColumnNames | None) -> Self:
        """Set the name of the label column, which contains a class index, a value or an array.

        A tuple or dictionary names several columns. None means that the model's loss takes its
        labels from the features.
        """
        return self._set(labelCol=value)

    def setWeightCol(self, value: str) -> Self:
        """Set the name of the column with the weight of each row."""
        return self._set(weightCol=value)

    def setValidationIndicatorCol(self, value: str) -> Self:
        """Set the name of the boolean column that is true for rows to hold out."""
        return self._set(validationIndicatorCol=value)

    def setSeed(self, value: int) -> Self:
        """Set the random seed for the placement and order of rows. The model has its own seed."""
        return self._set(seed=value)

    def setModel(self, value: FlatModel) -> Self:
        """Set the model. Each fit trains a copy, which starts with the initial parameters."""
        return self._set(model=value)

    def setEpochs(self, value: int) -> Self:
        """Set the number of epochs."""
        return self._set(epochs=value)

    def setBatchSize(self, value: int) -> Self:
        """Set the number of rows in one worker's minibatch."""
        return self._set(batchSize=value)

    def setMaster(self, value: TrainingMaster) -> Self:
        """Set the training master, which contains all other training options."""
        return self._set(master=value)

    def setEarlyStopping(self, value: EarlyStopping | None) -> Self:
        """Set the rule that ends training early; None trains all epochs."""
        return self._set(earlyStopping=value)

    def setListeners(self, value: Sequence[Any]) -> Self:
        """Set the listeners of each fit. Listeners are not saved with the estimator."""
        return self._set(listeners=value)

    def setValidationFraction(self, value: float) -> Self:
        """Set the fraction of rows to hold out; rows are selected by seed and content."""
        return self._set(validationFraction=value)

    def setVerbose(self, value: bool) -> Self:
        """Set whether fits show a progress line."""
        return self._set(verbose=value)

    def get_or_none(self, name: str) -> Any:
        """Return a Param's value, or None if it is unset, empty, False or 0."""
        return (self.getOrDefault(name) or None) if self.isDefined(name) else None
