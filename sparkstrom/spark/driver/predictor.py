"""Predictor: what can be done with a model's parameters, on executors or in this process."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from sparkstrom.models.base import Batch, Flat, FlatModel
from sparkstrom.spark.data import partitioning as spreading
from sparkstrom.spark.data.columns import Chosen, Names
from sparkstrom.spark.driver.application import Application, need_session
from sparkstrom.spark.driver.evaluation import (
    Evaluation,
    Wanted,
    evaluate_batch,
    merged,
)
from sparkstrom.spark.executor.inference import (
    TrainedModel,
    features_of,
    predict_pairs,
    predict_rows,
    with_outputs,
)
from sparkstrom.spark.executor.inference_udf import Inputs, Shapes, inference_udf
from sparkstrom.spark.executor.scoring import check_scored, scored, with_scores


class Predictor:
    """Predicts and evaluates with what ``current`` says at each call.

    ``current`` gives a model, bound to a copy of its parameters, and another copy of them.
    """

    def __init__(
        self, application: Application, current: Callable[[], tuple[FlatModel, Flat]]
    ) -> None:
        self._application, self._current = application, current
        self._name = secrets.token_hex()  # of the model, which stays the same
        self._broadcast: Any = None  # of what was used last on executors

    def predict(
        self, data: Any, features: Names, output: str | tuple[str, ...] | dict[str, str]
    ) -> Any:
        """Outputs; see ``SparkNetwork.predict``."""
        if spreading.is_dataframe(data):
            return with_outputs(data, self._shipped(), features, output)
        if hasattr(data, "mapPartitionsWithIndex"):
            return data.mapPartitionsWithIndex(partial(predict_rows, self._shipped()))
        model, _ = self._current()
        return model.predict(features_of(data))

    def predict_with_keys(self, pairs: Any) -> Any:
        """Of an RDD of (key, features) one of (key, outputs); each partition is computed once."""
        return pairs.mapPartitionsWithIndex(partial(predict_pairs, self._shipped()))

    def udf(self, inputs: Inputs, shapes: Shapes, output: Any) -> Any:
        """A function of columns; see ``SparkNetwork.udf``."""
        return inference_udf(self._shipped(), inputs, shapes, output)

    def score(self, data: Any, chosen: Chosen, output: str, *, penalized: bool) -> Any:
        """Each row's loss; see ``SparkNetwork.score_examples``."""
        check_scored(self._current()[0], penalized)
        if spreading.is_dataframe(data):
            return with_scores(data, self._shipped(), chosen, output, penalized)
        return scored(self._shipped(), spreading.source_of(data, chosen), penalized)

    def evaluate(self, data: Any, wanted: Wanted, chosen: Chosen) -> Evaluation:
        """Figures, of a tuple of arrays or of what ``fit`` takes; see ``SparkNetwork.evaluate``."""
        if isinstance(data, tuple):
            batch, (model, _) = Batch(*data), self._current()
            model.check(batch.features, batch.labels)
            return merged([evaluate_batch(model, wanted, batch)])
        need_session(self._application)
        self._application.check_data(data)
        return self._application.evaluate(self._shipped(), wanted, data, chosen)

    def _shipped(self) -> Any:
        """The model with its parameters, as a broadcast; one as long as they stay the same."""
        need_session(self._application)
        trained = TrainedModel.of(*self._current(), self._name)
        if self._broadcast is None or self._broadcast.value.digest != trained.digest:
            self._broadcast = self._application.ship(trained)
        return self._broadcast
