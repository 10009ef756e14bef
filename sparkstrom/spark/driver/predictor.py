"""Predictor: what can be done with a network's parameters once they are trained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sparkstrom.models.base import Batch, Flat, FlatModel
from sparkstrom.spark.data import partitioning as spreading
from sparkstrom.spark.data.columns import Chosen, Names
from sparkstrom.spark.driver.evaluation import (
    Evaluation,
    evaluate_batch,
    evaluate_source,
    merged,
    wanted_for,
)
from sparkstrom.spark.executor.inference import (
    TrainedModel,
    features_of,
    predict_rows,
    with_outputs,
)


class Predictor:
    """Prediction and evaluation, on executors or in this process; mixed into ``SparkNetwork``."""

    _model: FlatModel
    _parameters: Flat
    _context: Any  # SparkContext
    _broadcast: Any = None  # of the parameters that were used last on executors

    @property
    def model(self) -> FlatModel:
        """The model, bound to a copy of the shared parameters."""
        raise NotImplementedError

    def predict(
        self,
        data: Any,
        *,
        features: Names = "features",
        output: str | tuple[str, ...] | dict[str, str] = "prediction",
    ) -> Any:
        """Outputs under the shared parameters.

        Of features [rows, ...] f32[rows, outputs], computed in this process; a tuple or dict of
        arrays goes to a model with several inputs. Of an RDD of features an RDD of f32[outputs];
        of a DataFrame, with ``features`` as ``fit`` takes them, the same with one more column
        ``output``, array<float>: on the executors, when Spark runs it, under the parameters of
        now. A model of several outputs, a tuple or dictionary, gives one for each row of an RDD,
        and needs one of names in ``output``, for the columns of a DataFrame.
        """
        if spreading.is_dataframe(data):
            return with_outputs(data, self._shipped(), features, output)
        if hasattr(data, "mapPartitionsWithIndex"):
            return data.mapPartitionsWithIndex(partial(predict_rows, self._shipped()))
        return self.model.predict(features_of(data))

    def evaluate(
        self,
        data: Any,
        metrics: str | Sequence[str] | None = None,
        *,
        features: Names = "features",
        label: Names = "label",
        weight: str | None = None,
        positive: int = 1,
    ) -> Evaluation:
        """How well the shared parameters do on ``data``, as ``fit`` takes it, or on two arrays.

        ``metrics``: among classification, regression, roc (of class ``positive``) and loss; None:
        what fits the model. ``weight`` counts in the loss. Counted on the executors and merged
        exactly: see docs/evaluation.md.
        """
        wanted = wanted_for(self._model, metrics, positive)
        if isinstance(data, tuple):
            batch, model = Batch(*data), self.model
            model.check(batch.features, batch.labels)
            return merged([evaluate_batch(model, wanted, batch)])
        source = spreading.source_of(data, Chosen(features, label, weight))
        return evaluate_source(self._shipped(), wanted, source)

    def score(
        self,
        data: Any,
        *,
        features: Names = "features",
        label: Names = "label",
        weight: str | None = None,
    ) -> float:
        """The model's own loss on ``data``, mean over rows: smaller is better (DL4J's score)."""
        chosen: dict[str, Any] = {"features": features, "label": label, "weight": weight}
        return self.evaluate(data, "loss", **chosen).loss

    def _shipped(self) -> Any:
        """The model with its parameters, as a broadcast; one as long as they stay the same."""
        trained = TrainedModel.of(self.model, self._parameters.copy())
        if self._broadcast is None or self._broadcast.value.digest != trained.digest:
            self._broadcast = self._context.broadcast(trained)
        return self._broadcast
