"""Tests of Predictor: it uses the present parameters, and sends the same model only once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.fit.evaluation import select_metrics
from sparkstrom.models import DenseNetwork
from sparkstrom.spark.application import Predictor

FEATURES = np.eye(4, 3, dtype=np.float32)
LABELS = np.array([0, 1, 0, 1])


@dataclass
class FakeBroadcast:
    value: Any


class Context:
    """A fake application that records what is sent to executors."""

    is_stopped = False

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def broadcast_value(self, value: Any) -> FakeBroadcast:
        self.sent.append(value)
        return FakeBroadcast(value)


class Rows:
    """A fake RDD that returns the function which would run on its partitions."""

    def mapPartitionsWithIndex(self, run: Any) -> Any:
        return run


class Bench:
    """A predictor with a fake application, and the network's present parameters."""

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


def test_arrays_are_predicted_in_calling_process(bench: Bench) -> None:
    """Arrays are predicted in this process, with the parameters at the time of the call."""
    before = bench.predictor.predict(FEATURES, "features", "prediction")
    assert before.shape == (4, 2)
    bench.parameters = bench.parameters * 2
    assert not np.array_equal(bench.predictor.predict(FEATURES, "features", "prediction"), before)
    assert bench.context.sent == []


def test_arrays_are_evaluated_in_calling_process(bench: Bench) -> None:
    """Arrays are evaluated in this process, with the parameters at the time of the call."""
    wanted = select_metrics(bench.model, "loss", 1)
    before = bench.predictor.evaluate((FEATURES, LABELS), wanted, ColumnSpec())
    bench.parameters = bench.parameters * 2
    assert bench.predictor.evaluate((FEATURES, LABELS), wanted, ColumnSpec()).loss != before.loss
    assert bench.context.sent == []


def test_lists_and_other_dtypes_give_same_metrics_as_arrays(bench: Bench) -> None:
    """Lists, other dtypes and weights of 1 or None give the same metrics as plain arrays."""
    wanted = select_metrics(bench.model, ["loss", "classification"], 1)
    expected: Any = bench.predictor.evaluate((FEATURES, LABELS), wanted, ColumnSpec())
    for data in (
        (FEATURES.tolist(), LABELS.tolist()),
        (FEATURES.astype(np.float64), LABELS.astype(np.uint8), [1, 1, 1, 1]),
        (FEATURES, LABELS, None),
    ):
        found: Any = bench.predictor.evaluate(data, wanted, ColumnSpec())
        assert found.loss == expected.loss
        assert found.classification.accuracy == expected.classification.accuracy


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ((FEATURES[:0], LABELS[:0]), "there are no rows to evaluate"),
        ((FEATURES,), "data is a tuple of 1: give arrays"),
        ((FEATURES, LABELS, LABELS, LABELS), "data is a tuple of 4: give arrays"),
        ((FEATURES, LABELS[:3]), r"the arrays have \[4, 3\] rows"),
        ((FEATURES, 1), "one of the arrays is the number 1: give one per row"),
        ((FEATURES, ["a"] * 4), "labels are .*: give arrays of numbers"),
        ((FEATURES, LABELS, ["a"] * 4), "weights are .*: give an array of numbers"),
        ((FEATURES, LABELS, 1.0), r"weights have shape \[\]: give one for each row"),
        (((), None), r"features are \(\): give arrays"),
        ((1.0, None), r"features are 1\.0: give arrays"),
        (("abc", LABELS), "features are 'abc': give an array of numbers"),
        ((FEATURES, LABELS, [1.0, -1.0, 1.0, 1.0]), r"row 1 has weight -1\.0: give 0 or above"),
        ((FEATURES, LABELS, [1.0, np.nan, 1.0, 1.0]), "row 1 has weight nan: give 0 or above"),
        ((FEATURES, LABELS, [1.0]), r"the arrays have \[4, 4, 1\] rows"),
        ((FEATURES, LABELS, np.ones((4, 1))), r"weights have shape \[4, 1\]"),
    ],
)
def test_evaluate_rejects_invalid_arrays(bench: Bench, data: Any, why: str) -> None:
    wanted = select_metrics(bench.model, "loss", 1)
    with pytest.raises(UsageError, match=why):
        bench.predictor.evaluate(data, wanted, ColumnSpec())


def test_model_is_sent_again_only_after_parameters_change(bench: Bench) -> None:
    """A model is sent to executors again only after its parameters have changed."""
    rows = Rows()
    for _ in range(2):
        bench.predictor.predict(rows, "features", "prediction")
    assert len(bench.context.sent) == 1
    bench.parameters = bench.parameters * 2
    bench.predictor.predict(rows, "features", "prediction")
    first, second = bench.context.sent
    assert np.array_equal(second.parameters, first.parameters * 2)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (ColumnSpec(weight="w"), "weight='w': there are no columns in a tuple of arrays; make"),
        (ColumnSpec("pixels"), "features='pixels': there are no columns in a tuple of arrays"),
        (ColumnSpec(label=["y"]), r"label=\['y'\]: there are no columns in a tuple of arrays"),
    ],
)
def test_evaluate_rejects_column_names_for_arrays(
    bench: Bench, columns: ColumnSpec, why: str
) -> None:
    """Before, ``weight`` was ignored, and the loss was that of rows which all weigh 1."""
    wanted = select_metrics(bench.model, "loss", 1)
    with pytest.raises(UsageError, match=why):
        bench.predictor.evaluate((FEATURES, LABELS), wanted, columns)


@pytest.mark.parametrize("data", [FEATURES, Rows()])
def test_predict_rejects_column_names_without_dataframe(bench: Bench, data: Any) -> None:
    """Before, all columns of a pandas DataFrame were predicted, in its own order."""
    with pytest.raises(UsageError, match=r"features=\['b', 'a'\]: only a Spark DataFrame has"):
        bench.predictor.predict(data, ["b", "a"], "prediction")
    with pytest.raises(UsageError, match=r"features=.*: only a Spark DataFrame has named columns"):
        bench.predictor.predict(data, np.array(["b", "a"]), "prediction")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="output='p': only a Spark DataFrame has named columns"):
        bench.predictor.predict(data, "features", "p")
