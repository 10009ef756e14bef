"""The predictor uses what is current at each call, and sends it to executors once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.fit.evaluation import select_metrics
from sparkstrom.models import DenseNetwork
from sparkstrom.spark.application import Predictor

FEATURES = np.eye(4, 3, dtype=np.float32)
LABELS = np.array([0, 1, 0, 1])


@dataclass
class Shipped:
    value: Any


class Context:
    """Counts what is sent to executors."""

    is_stopped = False

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def broadcast_value(self, value: Any) -> Shipped:
        self.sent.append(value)
        return Shipped(value)


class Rows:
    """Stands for an RDD; gives back what would run on its partitions."""

    def mapPartitionsWithIndex(self, run: Any) -> Any:
        return run


class Bench:
    def __init__(self) -> None:
        self.context, self.model = Context(), DenseNetwork([3, 2])
        self.parameters = self.model.initial()
        self.predictor = Predictor(self.context, self.current)

    def current(self) -> Any:
        self.model.bind(self.parameters.copy())
        return self.model, self.parameters.copy()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_arrays_are_predicted_here(bench: Bench) -> None:
    before = bench.predictor.predict(FEATURES, "features", "prediction")
    assert before.shape == (4, 2)
    bench.parameters = bench.parameters * 2
    assert not np.array_equal(bench.predictor.predict(FEATURES, "features", "prediction"), before)
    assert bench.context.sent == []


def test_arrays_are_measured_here(bench: Bench) -> None:
    wanted = select_metrics(bench.model, "loss", 1)
    before = bench.predictor.evaluate((FEATURES, LABELS), wanted, ColumnSpec())
    bench.parameters = bench.parameters * 2
    assert bench.predictor.evaluate((FEATURES, LABELS), wanted, ColumnSpec()).loss != before.loss
    assert bench.context.sent == []


def test_executors_get_the_same_parameters_once(bench: Bench) -> None:
    rows = Rows()
    for _ in range(2):
        bench.predictor.predict(rows, "features", "prediction")
    assert len(bench.context.sent) == 1
    bench.parameters = bench.parameters * 2
    bench.predictor.predict(rows, "features", "prediction")
    first, second = bench.context.sent
    assert np.array_equal(second.parameters, first.parameters * 2)
