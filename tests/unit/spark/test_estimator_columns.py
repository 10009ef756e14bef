"""Tests of the estimator's columns: scalar labels, held-out rows, and columns for outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import ArrayType, DoubleType, IntegerType, StructType

from sparkstrom.base.errors import UsageError
from sparkstrom.models import DenseNetwork
from sparkstrom.spark.data.column_selection import is_scalar_label
from sparkstrom.spark.executor.inference import OutputConcatenator, TrainedModel
from sparkstrom.spark.ml import estimator
from sparkstrom.spark.ml.estimator import SparkstromEstimator, SparkstromModel, make_converter

FRAME: Any = SimpleNamespace(
    schema=StructType()
    .add("label", DoubleType())
    .add("other", IntegerType())
    .add("steps", ArrayType(IntegerType()))
    .add("shares", VectorUDT()),
    columns=["label", "other", "steps", "shares"],
    sparkSession=SimpleNamespace(conf=SimpleNamespace(get=lambda *_: "false")),
)


@pytest.mark.parametrize(
    ("label", "scalar"),
    [
        *[(label, True) for label in ("label", ["label"], ("other",), (["label"],))],
        *[({"y": "label"}, True), ({"y": ["other"]}, True)],
        *[(label, False) for label in (None, "steps", "shares", ("steps",), {"y": "shares"})],
        *[(label, False) for label in (["label", "other"], ("label", "other"))],
    ],
)
def test_single_number_label_is_scalar_in_any_notation(label: Any, scalar: bool) -> None:
    """A single number is a scalar label, also if its column is in a list, for labels [rows, 1]."""
    assert is_scalar_label(FRAME, label) is scalar


def test_rows_are_held_out_by_a_column_or_a_fraction_not_both() -> None:
    """An indicator column and a fraction exclude each other; before, the fraction had no effect."""
    estimator = SparkstromEstimator(validationIndicatorCol="held")
    assert estimator._validation() == "held"
    with pytest.raises(UsageError, match=r"validationFraction=0\.5 both set the rows to hold out"):
        estimator.setValidationFraction(0.5)._validation()
    assert estimator.setValidationIndicatorCol("")._validation() == 0.5
    assert estimator.setValidationFraction(0)._validation() is None


@pytest.mark.parametrize("names", [["p"], ["p", "q"], (["p"], "q"), {"a": ["p"]}, (), 3])
def test_rejects_lists_as_output_column_names(names: Any) -> None:
    """Before, a list of names ended the fit in an AttributeError."""
    with pytest.raises(UsageError, match=r"predictionCol=.*: give a column's name; for a model of"):
        SparkstromEstimator().setPredictionCol(names)


def convert_outputs(shape: tuple[int, ...], prediction: Any = "prediction", **model: Any) -> Any:
    """Return the columns that an executor makes for two rows whose outputs have this shape."""
    numbers = np.arange(2 * np.prod(shape), dtype=np.float32).reshape(2, *shape)
    made: Any = SimpleNamespace(predict=lambda _: numbers, **model)
    outputs = OutputConcatenator(made)
    return make_converter(made, prediction, several=True)(outputs.split([outputs.predict(numbers)]))


def test_rejects_class_prediction_per_position() -> None:
    """A class per position is refused, but a column may have all numbers of a row's output."""
    with pytest.raises(UsageError, match=r"returns \[3, 4\] for a row.*predictionCol=\('name',\)"):
        convert_outputs((3, 4))
    assert convert_outputs((3, 4), ("name",))[1].tolist() == list(range(12, 24))
    assert convert_outputs((3, 1, 1)).prediction.tolist() == [2.0, 2.0]
    assert convert_outputs((3,)).prediction.tolist() == [2.0, 2.0]
    assert [len(row) for row in convert_outputs((3, 4), per_label=True).prediction] == [12, 12]


class TemperatureModel(DenseNetwork):
    """A model with an attribute on which its outputs depend."""

    temperature = 1.0

    def __getstate__(self) -> dict[str, Any]:
        return {"temperature": self.temperature}


def test_a_model_is_sent_again_if_an_attribute_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    application = SimpleNamespace(name="app", broadcast_value=sent.append)
    monkeypatch.setattr(estimator, "make_application", lambda _: application)
    model = TemperatureModel([3, 2])
    stage = object.__new__(SparkstromModel)  # without a Spark session
    stage.trained, stage._shipped = TrainedModel.from_model(model, model.initial()), None
    for temperature in (1.0, 1.0, 5.0):
        model.temperature = temperature
        stage._broadcast_model(SimpleNamespace(sparkSession=None))
    assert len(sent) == 2


@pytest.mark.parametrize(
    ("columns", "refused"),
    [
        ({"predictionCol": "p", "probabilityCol": "P"}, r"columns 'p' and 'P' for outputs, which"),
        ({"predictionCol": ("p", "q", "p")}, "columns 'p' and 'p' for outputs: give each its own"),
        ({"predictionCol": "", "probabilityCol": "Label"}, "would replace the .* column 'label'"),
        ({"predictionCol": "", "probabilityCol": ""}, None),
    ],
)
def test_rejects_duplicate_or_existing_output_columns_before_training(
    columns: dict[str, Any], refused: str | None
) -> None:
    model = DenseNetwork([3, 2])
    stage = SparkstromEstimator(model=model, **columns)
    if refused is None:
        assert stage._choose_converter(model, FRAME) is not None
        return
    with pytest.raises(UsageError, match=refused):
        stage._fit(FRAME)


def test_two_outputs_with_one_column_are_refused_in_transform() -> None:
    model = DenseNetwork([3, 2])
    stage = SparkstromModel(TrainedModel.from_model(model, model.initial()))
    stage.set(stage.predictionCol, "p")
    stage.set(stage.probabilityCol, "P")
    with pytest.raises(UsageError, match="columns 'p' and 'P' for outputs"):
        stage._transform(FRAME)


def test_an_output_that_would_replace_a_column_is_refused_in_transform() -> None:
    model = DenseNetwork([3, 1], loss="squared_error")
    stage = SparkstromModel(TrainedModel.from_model(model, model.initial()))
    stage.set(stage.predictionCol, "other")
    with pytest.raises(UsageError, match=r"'other' for outputs would replace .* column 'other'"):
        stage._transform(FRAME)
