"""Spark ML: an estimator for pipelines and cross-validation, and the model that it gives.

Each fit makes a network of its own from a copy of the model, so fits may run at the same time in
threads; give each few enough workers that all of them find a slot (``workers_per_node``).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark import keyword_only
from pyspark.ml import Estimator, Model
from pyspark.ml.util import MLReadable, MLWritable

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Flat, FlatModel
from sparkstrom.models.outputs import VALUES, classes_of, kind_of, probabilities_of, raw_of
from sparkstrom.observe.stopping import EarlyStopping
from sparkstrom.spark.data.columns import Names, is_one_number
from sparkstrom.spark.driver.applications import application_of
from sparkstrom.spark.driver.averaging_master import TrainingMaster
from sparkstrom.spark.driver.network import SparkNetwork
from sparkstrom.spark.driver.option_json import changed
from sparkstrom.spark.driver.summary import TrainingSummary
from sparkstrom.spark.driver.training_master import SharedTrainingMaster
from sparkstrom.spark.executor.inference import (
    Outputs,
    TrainedModel,
    column_of,
    features_of,
    with_outputs,
)
from sparkstrom.spark.ml.estimator_files import (
    EstimatorReader,
    EstimatorWriter,
    ModelReader,
    ModelWriter,
)
from sparkstrom.spark.ml.estimator_params import EstimatorParams, OutputParams
from sparkstrom.spark.ml.grid_values import GridValue

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

CLASSES = "struct<prediction:double,raw:array<double>,probability:array<double>>"
LABELS = "struct<prediction:array<double>,raw:array<double>,probability:array<double>>"


class SparkstromEstimator(
    Estimator["SparkstromModel"], EstimatorParams, MLWritable, MLReadable["SparkstromEstimator"]
):
    """Trains a model of ``sparkstrom.models`` on a DataFrame.

    Keywords are the Params; ``model`` is the one that has no default. What is not a Param of its
    own is an option of ``master``. Raises what ``SparkNetwork.fit`` raises.
    """

    _input_kwargs: dict[str, Any]

    @keyword_only
    def __init__(
        self,
        *,
        model: FlatModel | None = None,
        featuresCol: Names = "features",
        labelCol: Names | None = "label",
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
        super().__init__()
        self._setDefault(epochs=10, validationFraction=0.0, verbose=False, seed=None)
        given = self._input_kwargs.items()
        self._set(**{k: v for k, v in given if v is not None or k == "labelCol"})

    @keyword_only
    def setParams(self, **values: Any) -> SparkstromEstimator:
        """Set several Params by keyword. Raise UsageError for a name that is none."""
        for name in values:
            if not self.hasParam(name):
                known = ", ".join(param.name for param in self.params)
                raise UsageError(
                    f"setParams({name}=...): there is no such Param; there are {known}"
                )
        return self._set(**self._input_kwargs)

    def _fit(self, dataset: DataFrame) -> SparkstromModel:
        if self.of("model") is None:
            raise UsageError("model is not set: SparkstromEstimator(model=DenseNetwork(...))")
        # Other fits may run at the same time, and the model that was passed stays as it is; a
        # pickle would leave initial parameters behind that are values.
        model = copy.deepcopy(self.of("model"))
        network = SparkNetwork(
            dataset.sparkSession,
            model,
            self._master(),
            progress=self.getOrDefault("verbose"),
            keep=False,
        )
        if network.checkpoint_directory is not None:
            raise UsageError(
                f"checkpoint_directory={network.checkpoint_directory!r}: an estimator's fits are"
                " many and alike, as in cross-validation, and one would be taken for another;"
                " leave it out, or train with SparkNetwork"
            )
        try:
            summary = network.fit(
                dataset,
                epochs=self.getOrDefault("epochs"),
                features=self.getOrDefault("featuresCol"),
                label=self.getOrDefault("labelCol"),
                weight=self.of("weightCol"),
                validation=self.of("validationIndicatorCol") or self.of("validationFraction"),
                early_stopping=self.of("earlyStopping"),
                listeners=self.of("listeners") or (),
            )
        finally:
            network.close()
        trained = TrainedModel.of(network.model, network.parameters)
        several = not is_one_number(dataset, self.getOrDefault("labelCol"))
        made = SparkstromModel(trained, summary, len(summary.history), several=several)
        made._resetUid(self.uid)  # as Spark's own models do
        return self._copyValues(made)

    def _master(self) -> TrainingMaster:
        """The master with what was set as a Param of its own."""
        changes = {"batch_size_per_worker": self.of("batchSize")}
        if self.isSet("seed"):
            changes["rng_seed"] = self.getOrDefault("seed")
        master: TrainingMaster = self.of("master") or SharedTrainingMaster()
        return changed(master, **{k: v for k, v in changes.items() if v is not None})

    def write(self) -> EstimatorWriter:
        """A writer: ``write().overwrite().save(path)``."""
        return EstimatorWriter(self)

    @classmethod
    def read(cls) -> EstimatorReader:
        """A reader: ``read().load(path)``, or ``load(path)``."""
        return EstimatorReader(cls)


GridValue.estimator_class = SparkstromEstimator


class SparkstromModel(Model, OutputParams, MLWritable, MLReadable["SparkstromModel"]):
    """What an estimator has trained; adds columns to a DataFrame, row by row on the executors.

    Of classes: ``predictionCol`` (the class as a double), ``probabilityCol`` and
    ``rawPredictionCol`` (vectors). Of values: ``predictionCol`` alone.
    """

    def __init__(
        self,
        trained: TrainedModel,
        summary: TrainingSummary | None = None,
        epochs_trained: int = 0,
        *,
        several: bool = False,
    ) -> None:
        super().__init__()
        self.trained, self.summary, self.epochs_trained = trained, summary, epochs_trained
        self.several = several  # values in a row's prediction
        self._shipped: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, {self.epochs_trained} epochs trained)"

    @property
    def model(self) -> FlatModel:
        """The model with its parameters, in this process."""
        return self.trained.open()

    @property
    def parameters(self) -> Flat:
        """A copy of the parameters, f32[n_params]."""
        return self.trained.parameters.copy()

    def predict(self, features: Any) -> Any:
        """Outputs f32[rows, outputs] for features [rows, ...], computed in this process.

        A tuple or dictionary of arrays goes to a model with several inputs.
        """
        return self.model.predict(features_of(features))

    def _transform(self, dataset: DataFrame) -> DataFrame:
        features = self.getOrDefault("featuresCol")
        name = self.getOrDefault("predictionCol")
        if isinstance(name, tuple | dict):
            return with_outputs(dataset, self._ship(dataset), features, name, "double")
        if kind_of(self.trained.model) != VALUES:
            return self._classes(dataset, features)
        if not name:
            return dataset
        schema = "array<double>" if self.several else "double"
        make = partial(values, several=self.several)
        return dataset.withColumn(
            name, column_of(dataset, self._ship(dataset), make, schema, features)
        )

    def _classes(self, dataset: DataFrame, features: Names) -> DataFrame:
        from pyspark.ml.functions import array_to_vector
        from pyspark.sql import functions as sql

        model = self.trained.model
        by_label = self.several and bool(getattr(model, "per_label", False))
        make = partial(labelled if by_label else classified, kind_of(model))
        held = f"{self.uid}_outputs"
        schema = LABELS if by_label else CLASSES
        made = column_of(dataset, self._ship(dataset), make, schema, features)
        out = dataset.withColumn(held, made)
        for param, field in (("rawPredictionCol", "raw"), ("probabilityCol", "probability")):
            if name := self.getOrDefault(param):
                out = out.withColumn(name, array_to_vector(sql.col(f"{held}.{field}")))
        if name := self.getOrDefault("predictionCol"):
            out = out.withColumn(name, sql.col(f"{held}.prediction"))
        return out.drop(held)

    def _ship(self, dataset: DataFrame) -> Any:
        """The broadcast of this model; one for all its uses in an application."""
        application = application_of(dataset.sparkSession)
        if self._shipped is None or self._shipped[0] != application.name:
            self._shipped = (application.name, application.ship(self.trained))
        return self._shipped[1]

    def write(self) -> ModelWriter:
        """A writer: ``write().overwrite().save(path)``."""
        return ModelWriter(self)

    @classmethod
    def read(cls) -> ModelReader:
        """A reader: ``read().load(path)``, or ``load(path)``."""
        return ModelReader(cls)


def classified(kind: str, outputs: Outputs) -> pd.DataFrame:
    """Outputs as the fields of ``CLASSES``."""
    import pandas as pd

    scores = only(outputs)
    return pd.DataFrame(
        {
            "prediction": classes_of(scores, kind).astype(np.float64),
            "raw": list(raw_of(scores, kind)),
            "probability": list(probabilities_of(scores, kind)),
        }
    )


def labelled(kind: str, outputs: Outputs) -> pd.DataFrame:
    """Outputs as the fields of ``LABELS``: of each label its own, true or false."""
    import pandas as pd

    scores = only(outputs)
    wide, shape = scores.reshape(-1, 1), (len(scores), -1)
    return pd.DataFrame(
        {
            "prediction": list(classes_of(wide, kind).astype(np.float64).reshape(shape)),
            "raw": list(scores.astype(np.float64).reshape(shape)),
            "probability": list(probabilities_of(wide, kind)[:, 1].reshape(shape)),
        }
    )


def values(outputs: Outputs, *, several: bool) -> pd.Series[Any]:
    """Outputs as a column of numbers, or of lists of them."""
    import pandas as pd

    wide = only(outputs).astype(np.float64)
    if not several and wide.shape[1] != 1:
        raise UsageError(
            f"the model puts out {wide.shape[1]} values for a row, it was trained on one number "
            "as the label: give the network one output, or labelCol an array"
        )
    return pd.Series(list(wide) if several else wide[:, 0])


def only(outputs: Outputs) -> Flat:
    """The one output. Raise UsageError where there are several."""
    if len(outputs) != 1:
        raise UsageError(
            f"the model has {len(outputs)} outputs: name a column for each, such as "
            "predictionCol=('a', 'b'), or a dictionary of columns by the model's own names"
        )
    return next(iter(outputs.values()))
