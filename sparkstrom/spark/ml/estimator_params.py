"""The Params of the estimator and its model: Spark ML's shared ones, and ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

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

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import KEY, Metadata, flag, number
from sparkstrom.models.base import FlatModel, no_model
from sparkstrom.observe.stopping import EarlyStopping
from sparkstrom.spark.data.columns import Names
from sparkstrom.spark.driver.averaging_master import TrainingMaster
from sparkstrom.spark.driver.call_checks import EPOCHS
from sparkstrom.spark.driver.common_options import BATCH_SIZE
from sparkstrom.spark.driver.listener_thread import check_listeners
from sparkstrom.spark.ml.grid_values import GridValue, unwrapped


def _reader(name: str, declared: Metadata) -> Callable[[Any], Any]:
    """Return what checks a Param's value, as the option of that meaning is checked elsewhere."""
    return lambda value: declared[KEY].read(name, value)


NAMES = ("featuresCol", "labelCol", "predictionCol")  # may name several columns

# A ParamGridBuilder keeps what these converters return, and Spark ML saves it: values that JSON
# cannot hold are wrapped as GridValue. ``OutputParams`` unwraps them when a Param is set.


def names(value: Any) -> Any:
    """A column's name, a list of them, a tuple or dictionary of these; or UsageError."""
    value = unwrapped(value)
    several = value.values() if isinstance(value, dict) else value
    parts = list(several) if isinstance(value, tuple | dict) else [value]
    for part in parts:
        one = part if isinstance(part, list) else [part]
        if not (one and parts and all(isinstance(name, str) for name in one)):
            raise UsageError(
                f"{value!r}: give a column's name, a list of numeric columns that stand side by "
                "side, or a tuple or dictionary of these for several arrays"
            )
    return GridValue("featuresCol", value) if isinstance(value, tuple) else value


def labels(value: Any) -> Any:
    """As ``names``; None: the model's loss takes its labels from the features."""
    return None if value is None else names(value)


def some_listeners(value: Any) -> Any:
    """Objects that hear something, or UsageError."""
    value = unwrapped(value)
    check_listeners(value)
    return GridValue("listeners", value)


def a_model(value: Any) -> Any:
    """A FlatModel, or UsageError."""
    value = unwrapped(value)
    if (why := no_model(value)) is not None:
        raise UsageError(why)
    return GridValue("model", value)


def a_master(value: Any) -> Any:
    """A training master, or UsageError."""
    value = unwrapped(value)
    if not isinstance(value, TrainingMaster):
        raise UsageError(
            f"master={value!r}: must be a SharedTrainingMaster or a"
            " ParameterAveragingTrainingMaster"
        )
    return GridValue("master", value)


def a_rule(value: Any) -> Any:
    """An EarlyStopping or None, or UsageError."""
    value = unwrapped(value)
    if not isinstance(value, EarlyStopping | None):
        raise UsageError(f"earlyStopping={value!r}: must be None or EarlyStopping(patience=5)")
    return None if value is None else GridValue("earlyStopping", value)


class OutputParams(HasFeaturesCol, HasPredictionCol, HasProbabilityCol, HasRawPredictionCol):
    """Columns that the model reads and adds; an empty name adds none."""

    featuresCol: Param[Any] = Param(
        Params._dummy(), "featuresCol", "what the model reads: columns as fit takes them", names
    )
    predictionCol: Param[Any] = Param(
        Params._dummy(), "predictionCol", "prediction column; of several outputs, several", names
    )

    def set(self, param: Param[Any], value: Any) -> None:
        """Set a Param."""
        super().set(param, value)
        self._paramMap[param] = unwrapped(self._paramMap[param])

    def _set(self, **values: Any) -> Self:
        super()._set(**values)
        for param in map(self.getParam, values):
            if param in self._paramMap:
                self._paramMap[param] = unwrapped(self._paramMap[param])
        return self

    def setFeaturesCol(self, value: Names) -> Self:
        """Array, vector or image; a list of numbers; a tuple or dictionary of several."""
        return self._set(featuresCol=value)

    def setPredictionCol(self, value: str | tuple[str, ...] | dict[str, str]) -> Self:
        """The class as a double, or the value; several values as an array.

        A tuple or dictionary names an array column for each output of a model of several.
        """
        return self._set(predictionCol=value)

    def setProbabilityCol(self, value: str) -> Self:
        """A vector of a probability per class; not for values."""
        return self._set(probabilityCol=value)

    def setRawPredictionCol(self, value: str) -> Self:
        """A vector that ranks rows by each class; not for values."""
        return self._set(rawPredictionCol=value)


class EstimatorParams(OutputParams, HasLabelCol, HasWeightCol, HasValidationIndicatorCol, HasSeed):
    """What the estimator is told."""

    labelCol: Param[Any] = Param(
        Params._dummy(), "labelCol", "what is learnt: columns as fit takes them", labels
    )
    model: Param[Any] = Param(
        Params._dummy(), "model", "what is trained: a model of sparkstrom.models", a_model
    )
    epochs: Param[int] = Param(
        Params._dummy(), "epochs", "epochs to train, at least 1", _reader("epochs", EPOCHS)
    )
    batchSize: Param[int] = Param(
        Params._dummy(),
        "batchSize",
        "rows of a minibatch on one worker",
        _reader("batchSize", BATCH_SIZE),
    )
    master: Param[Any] = Param(
        Params._dummy(), "master", "how workers train and share: SharedTrainingMaster", a_master
    )
    earlyStopping: Param[Any] = Param(
        Params._dummy(), "earlyStopping", "when held-out rows end it: EarlyStopping", a_rule
    )
    listeners: Param[Any] = Param(
        Params._dummy(), "listeners", "who hears each fit; not saved", some_listeners
    )
    validationFraction: Param[float] = Param(
        Params._dummy(),
        "validationFraction",
        "share of rows held out",
        _reader("validationFraction", number(least=0, below=1)),
    )
    verbose: Param[bool] = Param(
        Params._dummy(), "verbose", "draw a line of progress", _reader("verbose", flag())
    )

    def setLabelCol(self, value: Names | None) -> Self:
        """A class index, a value, or an array; a tuple or dictionary of several.

        None is for a model whose loss takes its labels from the features.
        """
        return self._set(labelCol=value)

    def setWeightCol(self, value: str) -> Self:
        """How much each row counts."""
        return self._set(weightCol=value)

    def setValidationIndicatorCol(self, value: str) -> Self:
        """A boolean column: true for rows to hold out."""
        return self._set(validationIndicatorCol=value)

    def setSeed(self, value: int) -> Self:
        """Of the placement and order of rows; initial parameters have the model's own."""
        return self._set(seed=value)

    def setModel(self, value: FlatModel) -> Self:
        """What is trained; each fit starts with fresh parameters."""
        return self._set(model=value)

    def setEpochs(self, value: int) -> Self:
        """How many epochs."""
        return self._set(epochs=value)

    def setBatchSize(self, value: int) -> Self:
        """Rows of a minibatch on one worker."""
        return self._set(batchSize=value)

    def setMaster(self, value: TrainingMaster) -> Self:
        """Every other option of training."""
        return self._set(master=value)

    def setEarlyStopping(self, value: EarlyStopping | None) -> Self:
        """When held-out rows end it; None: after all epochs."""
        return self._set(earlyStopping=value)

    def setListeners(self, value: Sequence[Any]) -> Self:
        """Who hears each fit, of this program: a saved estimator has none."""
        return self._set(listeners=value)

    def setValidationFraction(self, value: float) -> Self:
        """Share of rows held out, by seed and content."""
        return self._set(validationFraction=value)

    def setVerbose(self, value: bool) -> Self:
        """Draw a line of progress."""
        return self._set(verbose=value)

    def of(self, name: str) -> Any:
        """A Param's value, or None where it has none or an empty one."""
        return (self.getOrDefault(name) or None) if self.isDefined(name) else None
