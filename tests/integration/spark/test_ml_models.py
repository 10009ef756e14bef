"""Tests of all kinds of models in the estimator: tuned, and in saved pipelines."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark import cloudpickle
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import MaxAbsScaler
from pyspark.ml.linalg import Vectors
from pyspark.ml.tuning import (
    CrossValidator,
    CrossValidatorModel,
    ParamGridBuilder,
    TrainValidationSplit,
    TrainValidationSplitModel,
)

from sparkstrom import AdaptiveThreshold, SharedTrainingMaster, SparkNetwork
from sparkstrom.base.errors import UsageError
from sparkstrom.listeners import TrainingListener
from sparkstrom.ml import SparkstromEstimator, SparkstromModel
from sparkstrom.spark.executor.inference import TrainedModel
from sparkstrom.spark.ml.params import unwrap

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported

RATE, WIDTH = 0.1, 8
TWO = SharedTrainingMaster(workers_per_node=1, threshold=AdaptiveThreshold(1e-2))


def torch_model() -> Any:
    torch = pytest.importorskip("torch", reason="not installed: pip install 'sparkstrom[torch]'")
    from sparkstrom.models.torch import TorchModel

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        """A user's own class, as in a notebook, with a buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = torch.nn.Linear(64, WIDTH), torch.nn.BatchNorm1d(WIDTH)
            self.last = torch.nn.Linear(WIDTH, 10)

        def forward(self, x: Any) -> Any:
            return self.last(torch.relu(self.norm(self.first(x))))

    torch.manual_seed(3)
    optimizer = partial(torch.optim.SGD, lr=RATE)
    return TorchModel(Net(), torch.nn.CrossEntropyLoss(), optimizer)


def jax_model() -> Any:
    for wanted in ("jax", "optax"):
        pytest.importorskip(wanted, reason="not installed: pip install 'sparkstrom[jax]'")
    import jax
    import optax

    from sparkstrom.models.jax import JaxModel

    def init(key: Any) -> Any:
        one, two = jax.random.split(key)
        first = jax.random.normal(one, (64, WIDTH)) / 8
        return {"first": first, "last": jax.random.normal(two, (WIDTH, 10)) / 3}

    def apply(params: Any, x: Any) -> Any:
        return jax.nn.relu(x @ params["first"]) @ params["last"]

    loss = optax.softmax_cross_entropy_with_integer_labels
    return JaxModel(init, apply, loss, optax.sgd(RATE), seed=2)


def keras_model() -> Any:
    for wanted in ("jax", "keras"):
        pytest.importorskip(wanted, reason="not installed: pip install 'sparkstrom[keras]'")
    import keras

    from sparkstrom.models.keras import KerasModel

    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(WIDTH, "relu"), keras.layers.Dense(10, "softmax")]
    net = keras.Sequential([keras.Input((64,)), *layers])
    return KerasModel(net, "sparse_categorical_crossentropy", keras.optimizers.SGD(RATE))


slow = partial(pytest.param, marks=pytest.mark.slow)  # dense ones are in test_ml_pipeline
KINDS = pytest.mark.parametrize("make", [torch_model, slow(jax_model), slow(keras_model)])


@pytest.fixture(scope="module", autouse=True)
def by_value() -> Iterator[None]:
    """Pickle this module's classes by value, because executors cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def frame(spark: Any, digits: Any) -> Any:
    rows = [
        (i, Vectors.dense(features), int(label))
        for i, (features, label) in enumerate(
            zip(digits.features[:160], digits.labels, strict=False)
        )
    ]
    return spark.createDataFrame(rows, ["id", "pixels", "digit"]).repartition(2).cache()


@pytest.fixture
def initial_parameters(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """A list to which each fit appends its initial parameters."""
    began: list[np.ndarray] = []
    fit = SparkNetwork.fit

    def noting(self: SparkNetwork, *given: Any, **named: Any) -> Any:
        began.append(self.parameters)
        return fit(self, *given, **named)

    monkeypatch.setattr(SparkNetwork, "fit", noting)
    return began


def make_estimator(model: Any, **params: Any) -> SparkstromEstimator:
    given = {"featuresCol": "pixels", "epochs": 1, "batchSize": 16, **params}
    return SparkstromEstimator(model=model, labelCol="digit", master=TWO, seed=1, **given)


def collect_predictions(stage: Any, frame: Any) -> list[Any]:
    return sorted(stage.transform(frame).select("id", "prediction", "probability").collect())


@KINDS
@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool:ResourceWarning")
def test_pipeline_is_tuned_saved_and_loaded(
    frame: Any, make: Callable[[], Any], initial_parameters: list[np.ndarray], tmp_path: Path
) -> None:
    """Fits do not change the estimator's model: each begins with the same parameters."""
    model = make()
    before, buffers = model.initial(), getattr(model, "buffers_bytes", bytes)()
    scaler = MaxAbsScaler(inputCol="pixels", outputCol="scaled")
    estimator = make_estimator(model, featuresCol="scaled")
    pipeline = Pipeline(stages=[scaler, estimator])
    validator = TrainValidationSplit(
        estimator=pipeline, parallelism=2, seed=1, collectSubModels=True,
        estimatorParamMaps=ParamGridBuilder().addGrid(estimator.epochs, [1, 2]).build(),
        evaluator=MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy"),
    )  # fmt: skip
    found = validator.fit(frame)
    gc.collect()  # Spark leaves its thread pool to the garbage collector
    assert len(found.validationMetrics) == len(found.subModels) == 2
    for tuned in (found.bestModel, *found.subModels):
        _, trained = tuned.stages
        assert trained.summary.replicas_equal
        assert (trained.parameters != before).any()
        assert trained.model is not model
    assert len(collect_predictions(found, frame)) == 160
    np.testing.assert_array_equal(model.initial(), before)
    assert getattr(model, "buffers_bytes", bytes)() == buffers
    pipeline.write().overwrite().save(str(tmp_path / "untrained"))
    trained = Pipeline.load(str(tmp_path / "untrained")).fit(frame)
    assert [start.tobytes() for start in initial_parameters] == [before.tobytes()] * 4
    trained.write().overwrite().save(str(tmp_path / "trained"))
    loaded = PipelineModel.load(str(tmp_path / "trained"))
    rows = collect_predictions(trained, frame)
    assert len(rows) == 160
    assert collect_predictions(loaded, frame) == rows
    again = tmp_path / "again"
    loaded.write().overwrite().save(str(again))  # code that was loaded is saved again
    assert collect_predictions(PipelineModel.load(str(again)), frame) == rows


class SilentListener(TrainingListener):
    """A listener that ignores all events."""


@pytest.mark.parametrize(
    ("validator", "tuned"),
    [(CrossValidator, CrossValidatorModel), (TrainValidationSplit, TrainValidationSplitModel)],
)
@pytest.mark.parametrize("by_hand", [False, True])
def test_tuned_model_is_saved_with_its_parameter_grid(
    frame: Any, tmp_path: Path, validator: Any, tuned: Any, by_hand: bool
) -> None:
    """Spark saves and loads a tuned model with a grid of values that JSON lacks, without a fit."""
    model = torch_model()
    estimator = make_estimator(model)
    best = SparkstromModel(TrainedModel.from_model(model, model.initial()), None, 1)
    estimator._copyValues(best)
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1]).addGrid(estimator.model, [model])
    grid.addGrid(estimator.master, [TWO]).addGrid(estimator.featuresCol, [("pixels",)])
    grid.addGrid(estimator.listeners, [[SilentListener()]])
    maps = grid.build()
    if by_hand:
        maps = [{param: unwrap(value) for param, value in maps[0].items()}]
        estimator.copy(maps[0])  # as each fit does
    made = validator(
        estimator=estimator,
        estimatorParamMaps=maps,
        evaluator=MulticlassClassificationEvaluator(labelCol="digit"),
    )
    path = str(tmp_path / "tuned")
    made._copyValues(tuned(best, [0.5])).save(path)
    again = tuned.load(path)
    assert collect_predictions(again.bestModel, frame) == collect_predictions(best, frame)
    (values,) = again.getEstimatorParamMaps()
    by_name = {param.name: value for param, value in values.items()}
    assert by_name["epochs"] == 1
    assert repr(by_name["model"]) == repr(model)
    assert by_name["listeners"].value == ()
    of_next_fit = estimator.copy(values)
    np.testing.assert_array_equal(of_next_fit.getOrDefault("model").initial(), model.initial())
    assert of_next_fit.getOrDefault("master").given == TWO.given
    assert of_next_fit.getOrDefault("featuresCol") == ("pixels",)


def test_saved_model_loads_without_its_class(frame: Any, tmp_path: Path) -> None:
    """A saved model's code loads in a program without its class; damaged code is refused."""
    path = str(tmp_path / "model")
    make_estimator(torch_model()).fit(frame).save(path)
    code = tmp_path / "model" / "model" / "model.npz.pickle"
    opened = subprocess.run(
        [sys.executable, "-c", OPEN, str(code)], capture_output=True, text=True, cwd=tmp_path
    )
    assert opened.stdout.split() == ["Net", str(torch_model().n_params)], opened.stderr
    code.write_bytes(b"garbled")
    (code.parent / f".{code.name}.crc").unlink(missing_ok=True)
    with pytest.raises(UsageError, match=r"model.npz.pickle holds the code of a model"):
        SparkstromModel.load(path)
    given = SparkstromModel.read().model(torch_model()).load(path)  # does not run saved code
    assert len(collect_predictions(given, frame)) == 160


OPEN = """
import pickle, sys
model = pickle.load(open(sys.argv[1], "rb"))
print(type(model.module).__name__, model.n_params)
"""
