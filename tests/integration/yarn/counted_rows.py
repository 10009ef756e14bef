"""A model whose parameters count how often each row was trained.

Every step adds one STEP to the parameter of each row of the minibatch. STEP is the threshold, so
that all of it is sent (with publish_every=1), and a power of two, so that sums are exact: an
update that is lost or applied twice changes the parameters, whatever a summary reports.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pyspark import RDD, SparkContext

from sparkstrom import FixedThreshold
from sparkstrom.models.base import Batch, Columns, Flat, State

STEP = 2.0**-6
THRESHOLD = FixedThreshold(STEP)


class CountingModel:
    """A model with one parameter per row; a row's feature is its number."""

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._params = self.initial()

    @property
    def n_params(self) -> int:
        return self._rows

    def initial(self) -> Flat:
        return np.zeros(self._rows, np.float32)

    def bind(self, params: Flat) -> None:
        self._params = params

    def step(self, batch: Batch) -> float:
        self._params[batch.features[:, 0].astype(int)] += STEP
        return 0.0

    def predict(self, features: Columns) -> Any:
        return np.zeros((len(features), 1), np.float32)

    def check(self, features: Columns, labels: Columns) -> None:
        pass

    def updater_state(self) -> State:
        return {}

    def load_updater_state(self, state: State) -> None:
        pass

    def layer_of(self, index: int) -> str:
        return f"row {index}"

    def describe(self) -> dict[str, Any]:
        return {"counting": self._rows}


def numbered_rows(context: SparkContext, rows: int) -> RDD[tuple[np.ndarray, float]]:
    """Return rows for a CountingModel."""
    return context.parallelize([(np.array([i], np.float32), 0.0) for i in range(rows)])


def trainings(parameters: Flat) -> list[float]:
    """Return the distinct numbers of trainings per row: [epochs] if each counts once per epoch."""
    return sorted({float(value) for value in parameters / STEP})
