"""Define an Estimator for Spark ML's pipelines and cross-validation, and the Model it returns.

Each fit trains a copy of the model, so several fits may run at the same time in threads. Limit the
number of workers per fit (``workers_per_node``) so that all workers find a task slot.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark import keyword_only
from pyspark.ml import Estimator, Model
from pyspark.ml.util import MLReadable, MLWritable

from sparkstrom.base.errors import UsageError
from sparkstrom.data.column_selection import ColumnNames, features_to_arrays
from sparkstrom.fit.summary import TrainingSummary
from sparkstrom.models.base import Batch, Flat, FlatModel
from sparkstrom.models.output_interpretation import (
    VALUES,
    argmax_classes,
    compute_probabilities,
    compute_raw_scores,
    get_output_kind,
)
from sparkstrom.observe.early_stopping import EarlyStopping
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.parameter_averaging import TrainingMaster
from sparkstrom.options.resolution import replace_options
from sparkstrom.spark.data.column_selection import is_scalar_label
from sparkstrom.spark.executor.inference import (
    OutputConcatenator,
    OutputConverter,
    Outputs,
    TrainedModel,
    add_output_columns,
    create_output_column,
    require_new_columns,
    resolve_output_columns,
    to_pandas,
)
from sparkstrom.spark.ml.params import EstimatorParams, GridValue, OutputParams
from sparkstrom.spark.ml.persistence import (
    EstimatorReader,
    EstimatorWriter,
    ModelReader,
    ModelWriter,
)
from sparkstrom.spark.network import SparkNetwork, make_application

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

CLASS_SCHEMA = "struct<prediction:double,raw:array<double>,probability:array<double>>"
LABEL_SCHEMA = "struct<prediction:array<double>,raw:array<double>,probability:array<double>>"


class SparkstromEstimator(
    Estimator["SparkstromModel"], EstimatorParams, MLWritable, MLReadable["SparkstromEstimator"]
):
    """Trains a model of ``sparkstrom.models`` on a DataFrame.

    The constructor's keywords are the Params; ``model`` is required for a fit. All other training
    options belong to ``master``. ``fit`` raises the same errors as ``SparkNetwork.fit``.
    """

    _input_kwargs: dict[str, Any]

    @keyword_only
    def __init__(  # noqa: PLR0913 -- Spark ML's parameters, by keyword
        self,
        *,
        model: FlatModel | None = None,
        featuresCol: ColumnNames = "features",
        labelCol: ColumnNames | None = "label",
        predictionCol: str | tuple[str, ...] | dict[str, str] = "prediction",
        probabilityCol: str = "probability",
        rawPredictionCol: str = "rawPrediction",
        weightCol: str | None = None,
        validationIndicatorCol: str | None = None,
        validationFraction: float = 0.0,
        earlyStopping: EarlyStopping | None = None,
        epochs: int = 10,
        batchSize: int | None = None,
        seed: int | None = None,
        master: TrainingMaster | None = None,
        listeners: Sequence[Any] | None = None,
        verbose: bool = False,
    ) -> None:
        """Set the Params. For their meaning, see the setters, such as ``setEpochs``."""
        super().__init__()
        self._setDefault(epochs=10, validationFraction=0.0, verbose=False, seed=None)
        given = self._input_kwargs.items()
        self._set(**{k: v for k, v in given if v is not None or k == "labelCol"})

    @keyword_only
    def setParams(self, **values: Any) -> SparkstromEstimator:
        """Set several Params by keyword. Raise UsageError if a keyword is not a Param's name."""
        for name in values:
            if not self.hasParam(name):
                known = ", ".join(param.name for param in self.params)
                raise UsageError(
                    f"setParams({name}=...): there is no such Param; there are {known}"
                )
        return self._set(**self._input_kwargs)

    def _fit(self, dataset: DataFrame) -> SparkstromModel:
        """Train on the DataFrame and return the trained model; Spark ML's ``fit`` calls this."""
        if self.get_or_none("model") is None:
            raise UsageError("model is not set: SparkstromEstimator(model=DenseNetwork(...))")
        validation = self._validation()
        # A copy, because other fits may run at the same time and the user's model must not change.
        # A pickle would lose initial parameters that were set as values.
        model = copy.deepcopy(self.get_or_none("model"))
        require_new_outputs(dataset, self, model)
        label = self.getOrDefault("labelCol")
        network = _EstimatorNetwork(
            dataset.sparkSession,
            model,
            self._master(),
            partial(self._choose_converter, model, dataset),
            progress=self.getOrDefault("verbose"),
        )
        if network.checkpoint_directory is not None:
            raise UsageError(
                f"checkpoint_directory={network.checkpoint_directory!r}: an estimator may run"
                " several equal fits, as in cross-validation, which would resume one another;"
                " leave it out, or train with SparkNetwork"
            )
        try:
            summary = network.fit(
                dataset,
                epochs=self.getOrDefault("epochs"),
                features=self.getOrDefault("featuresCol"),
                label=label,
                weight=self.get_or_none("weightCol"),
                validation=validation,
                early_stopping=self.get_or_none("earlyStopping"),
                listeners=self.get_or_none("listeners") or (),
            )
        finally:
            network.close()
        trained = TrainedModel.from_model(network.model, network.parameters)
        has_several = not is_scalar_label(dataset, label)
        model_stage = SparkstromModel(trained, summary, len(summary.history), several=has_several)
        model_stage._resetUid(self.uid)  # as Spark's own models do
        return self._copyValues(model_stage)

    def _choose_converter(self, model: FlatModel, dataset: DataFrame) -> OutputConverter | None:
        """Return the function that converts the model's outputs to columns of ``dataset``.

        Return None if no column will be added.
        """
        prediction, *others = map(self.getOrDefault, OUTPUT_PARAMS)
        if not prediction and (get_output_kind(model) == VALUES or not any(others)):
            return None
        several = not is_scalar_label(dataset, self.getOrDefault("labelCol"))
        return make_converter(model, prediction, several=several)

    def _validation(self) -> str | float | None:
        """Return which rows to hold out: a boolean column's name, a fraction, or None for no rows.

        Raise UsageError if both Params are set.
        """
        column, share = map(self.get_or_none, ("validationIndicatorCol", "validationFraction"))
        if column and share:
            raise UsageError(
                f"validationIndicatorCol={column!r} and validationFraction={share} both set the"
                " rows to hold out: set only one of them; validationFraction=0 and"
                " validationIndicatorCol='' hold out none"
            )
        validation: str | float | None = column or share
        return validation

    def _master(self) -> TrainingMaster:
        """Return the training master, with batch size and seed from the Params that are set."""
        changes = {"batch_size_per_worker": self.get_or_none("batchSize")}
        seed = self.getOrDefault("seed") if self.isSet("seed") else None
        if seed is not None:
            changes["rng_seed"] = seed % 2**63  # Spark ML's may be negative
        master: TrainingMaster = self.get_or_none("master") or SharedTrainingMaster()
        return replace_options(master, **{k: v for k, v in changes.items() if v is not None})

    def write(self) -> EstimatorWriter:
        """Return a writer, for ``write().overwrite().save(path)``."""
        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> EstimatorReader:
        """Return a reader, for ``read().load(path)``."""
        return EstimatorReader(cls)


GridValue.estimator_class = SparkstromEstimator


class _EstimatorNetwork(SparkNetwork):
    """A SparkNetwork that checks before training whether the model's outputs can become columns.

    Args:
        spark: The session.
        model: The model to train.
        master: The training options.
        choose_converter: Returns the function that converts outputs to columns, or None if no
            column will be added. Called after the label's columns were checked.
        progress: Whether to show progress.
    """

    def __init__(
        self,
        spark: Any,
        model: FlatModel,
        master: TrainingMaster,
        choose_converter: Callable[[], OutputConverter | None],
        *,
        progress: bool,
    ) -> None:
        super().__init__(spark, model, master, progress=progress, keep=False)
        self._choose_converter = choose_converter

    def _examine_outputs(self, model: FlatModel, batch: Batch) -> None:
        """Raise UsageError if the model's outputs for ``batch`` cannot be converted to columns."""
        if (convert := self._choose_converter()) is not None:
            outputs = OutputConcatenator(model)
            convert(outputs.split([outputs.predict(batch.features)]))


class SparkstromModel(Model, OutputParams, MLWritable, MLReadable["SparkstromModel"]):
    """A trained model, which adds output columns to a DataFrame on the executors.

    A model that predicts classes adds ``predictionCol`` (the class as a double, or an array of 0
    and 1 for several labels), ``probabilityCol`` and ``rawPredictionCol`` (vectors). A model that
    predicts values, or has several outputs, adds only ``predictionCol`` (one column per output).
    """

    def __init__(
        self,
        trained: TrainedModel,
        summary: TrainingSummary | None = None,
        epochs_trained: int = 0,
        *,
        several: bool = False,
    ) -> None:
        """Store a trained model and the summary of its fit, which a loaded model does not have.

        ``several`` is True if predictions are arrays, because a label is not a single number.
        """
        super().__init__()
        self.trained, self.summary, self.epochs_trained = trained, summary, epochs_trained
        self.several = several
        self._shipped: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, {self.epochs_trained} epochs trained)"

    @property
    def model(self) -> FlatModel:
        """The model, bound to a copy of its parameters, in this process."""
        return self.trained.open()

    @property
    def parameters(self) -> Flat:
        """A copy of the parameters, f32[n_params]."""
        return self.trained.parameters.copy()

    def predict(self, features: Any) -> Any:
        """Return outputs f32[rows, outputs] for features [rows, ...], computed in this process.

        For a model with several inputs, ``features`` is a tuple or dictionary of arrays.
        """
        return self.model.predict(features_to_arrays(features))

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Return the DataFrame with the output columns; Spark ML's ``transform`` calls this."""
        features = self.getOrDefault("featuresCol")
        name = self.getOrDefault("predictionCol")
        if isinstance(name, tuple | dict):
            return add_output_columns(
                dataset, self._broadcast_model(dataset), features, name, "double"
            )
        require_new_outputs(dataset, self, self.trained.model)
        convert = make_converter(self.trained.model, name, several=self.several)
        if get_output_kind(self.trained.model) != VALUES:
            return self._add_class_columns(dataset, features, convert)
        if not name:
            return dataset
        schema = "array<double>" if self.several else "double"
        return dataset.withColumn(
            name,
            create_output_column(
                dataset, self._broadcast_model(dataset), convert, schema, features
            ),
        )

    def _add_class_columns(
        self, dataset: DataFrame, features: ColumnNames, convert: OutputConverter
    ) -> DataFrame:
        """Return the DataFrame with columns for class, probabilities and raw predictions."""
        from pyspark.ml.functions import array_to_vector
        from pyspark.sql import functions as sql

        temporary = f"{self.uid}_outputs"
        has_labels = predicts_labels(self.trained.model, several=self.several)
        schema = LABEL_SCHEMA if has_labels else CLASS_SCHEMA
        outputs = create_output_column(
            dataset, self._broadcast_model(dataset), convert, schema, features
        )
        result = dataset.withColumn(temporary, outputs)
        for param, field in (("rawPredictionCol", "raw"), ("probabilityCol", "probability")):
            if name := self.getOrDefault(param):
                result = result.withColumn(name, array_to_vector(sql.col(f"{temporary}.{field}")))
        if name := self.getOrDefault("predictionCol"):
            result = result.withColumn(name, sql.col(f"{temporary}.prediction"))
        return result.drop(temporary)

    def _broadcast_model(self, dataset: DataFrame) -> Any:
        """Return a handle from which executors get this model.

        The model is broadcast once per application, and again if its attributes have changed.
        """
        application = make_application(dataset.sparkSession)
        old = self.trained
        trained = TrainedModel.from_model(old.model, old.parameters, old.buffers)
        key = application.name, trained.digest
        if self._shipped is None or self._shipped[0] != key:
            self._shipped = key, application.broadcast_value(trained)
        return self._shipped[1]

    def write(self) -> ModelWriter:
        """Return a writer, for ``write().overwrite().save(path)``."""
        return ModelWriter(self)

    @classmethod
    def read(cls) -> ModelReader:
        """Return a reader, for ``read().load(path)``."""
        return ModelReader(cls)


OUTPUT_PARAMS = "predictionCol", "probabilityCol", "rawPredictionCol"


def require_new_outputs(dataset: DataFrame, stage: OutputParams, model: FlatModel) -> None:
    """Raise UsageError if a column that ``stage`` will add exists already, or is named twice."""
    prediction, *others = map(stage.getOrDefault, OUTPUT_PARAMS)
    names = [prediction, *others]
    if isinstance(prediction, tuple | dict):
        names = list(resolve_output_columns(prediction).values())
    elif get_output_kind(model) == VALUES:
        names = [prediction]
    require_new_columns(dataset, filter(None, names))


def predicts_labels(model: FlatModel, *, several: bool) -> bool:
    """Return whether a classifier predicts yes or no for each of several labels of a row.

    ``several`` is True unless a row's label is a single number.
    """
    return several and bool(getattr(model, "per_label", False))


def make_converter(model: FlatModel, prediction: Any, *, several: bool) -> OutputConverter:
    """Return the function that converts the model's outputs to the columns that it adds.

    ``prediction`` is the value of the Param ``predictionCol``. ``several`` is True unless a row's
    label is a single number.
    """
    kind = get_output_kind(model)
    if isinstance(prediction, tuple | dict):
        return partial(to_pandas, resolve_output_columns(prediction))
    if kind == VALUES:
        return partial(to_value_series, several=several)
    return partial(
        to_label_frame if predicts_labels(model, several=several) else to_class_frame, kind
    )


def to_class_frame(kind: str, outputs: Outputs) -> pd.DataFrame:
    """Convert the outputs of a classifier to the fields of ``CLASS_SCHEMA``.

    ``kind`` is PROBABILITIES or LOGITS. Raise UsageError if the model has several outputs, or
    predicts a class for each of several positions of a row.
    """
    import pandas as pd

    scores = require_single_output(outputs)
    if sum(length > 1 for length in scores.shape[1:]) > 1:
        raise UsageError(
            f"the model returns {list(scores.shape[1:])} for a row, and the estimator's columns"
            " contain one class for a row: name a column of all the numbers by"
            " predictionCol=('name',), or train with SparkNetwork and call its predict"
        )
    scores = scores.reshape(len(scores), -1)
    return pd.DataFrame(
        {
            "prediction": argmax_classes(scores, kind),
            "raw": list(compute_raw_scores(scores, kind)),
            "probability": list(compute_probabilities(scores, kind)),
        }
    )


def to_label_frame(kind: str, outputs: Outputs) -> pd.DataFrame:
    """Convert the only output of a multi-label model to the fields of ``LABEL_SCHEMA``.

    ``kind`` is PROBABILITIES or LOGITS. The prediction is 0 or 1 for each label.
    """
    import pandas as pd

    scores = require_single_output(outputs)
    wide, shape = scores.reshape(-1, 1), (len(scores), -1)
    return pd.DataFrame(
        {
            "prediction": list(argmax_classes(wide, kind).reshape(shape)),
            "raw": list(scores.astype(np.float64).reshape(shape)),
            "probability": list(compute_probabilities(wide, kind)[:, 1].reshape(shape)),
        }
    )


def to_value_series(outputs: Outputs, *, several: bool) -> pd.Series[Any]:
    """Convert the model's only output to a Series of numbers, or of arrays if ``several`` is True.

    Raise UsageError if the model has several outputs, or several values but ``several`` is False.
    """
    import pandas as pd

    wide = require_single_output(outputs).astype(np.float64)
    wide = wide.reshape(len(wide), -1)
    if not several and wide.shape[1] != 1:
        raise UsageError(
            f"the model returns {wide.shape[1]} values for a row, it was trained on one number "
            "as the label: give the network one output, or labelCol an array, or name a column of"
            " arrays by predictionCol=('name',)"
        )
    return pd.Series(list(wide) if several else wide[:, 0])


def require_single_output(outputs: Outputs) -> Flat:
    """Return the model's only output. Raise UsageError if it has several."""
    if len(outputs) != 1:
        raise UsageError(
            f"the model has {len(outputs)} outputs: name a column for each, such as "
            "predictionCol=('a', 'b'), or a dictionary of columns by the model's own names"
        )
    return next(iter(outputs.values()))
