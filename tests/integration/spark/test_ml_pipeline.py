"""Tests of the estimator in pipelines: saved, loaded, cross-validated in threads, regression."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys

import numpy as np
import pytest
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import StandardScaler
from pyspark.ml.linalg import Vectors
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

from sparkstrom import AdaptiveThreshold, EarlyStopping, SharedTrainingMaster
from sparkstrom.base.errors import UsageError
from sparkstrom.ml import SparkstromEstimator, SparkstromModel
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.models.output_interpretation import predict_flattened

MODEL = DenseNetwork([64, 24, 10], updater=Sgd(0.1), seed=1)
TWO = SharedTrainingMaster(workers_per_node=1, threshold=AdaptiveThreshold(1e-2))  # few steps


@pytest.fixture(scope="module")
def frame(spark, digits):
    rows = [
        (i, Vectors.dense(f), float(y))
        for i, (f, y) in enumerate(zip(digits.features[:500], digits.labels, strict=False))
    ]
    return spark.createDataFrame(rows, ["id", "pixels", "digit"]).repartition(3).cache()


def accuracy(frame, **columns):
    evaluator = MulticlassClassificationEvaluator(metricName="accuracy", **columns)
    return evaluator.evaluate(frame)


def test_a_pipeline_is_trained_saved_and_loaded(spark, frame, tmp_path):
    """A saved pipeline predicts the same once loaded; NumPy alone can read its model."""
    scaler = StandardScaler(inputCol="pixels", outputCol="scaled", withMean=True, withStd=True)
    estimator = SparkstromEstimator(
        model=MODEL, featuresCol="scaled", labelCol="digit", epochs=6, master=TWO
    )
    assert estimator.setBatchSize(16).extractParamMap()[estimator.batchSize] == 16
    Pipeline(stages=[scaler, estimator]).write().overwrite().save(str(tmp_path / "untrained"))
    pipeline = Pipeline.load(str(tmp_path / "untrained"))
    trained = pipeline.fit(frame)
    assert trained.stages[1].summary.replicas_equal
    assert trained.stages[1].summary.rows == 500
    assert trained.stages[1].uid == estimator.uid
    found = trained.transform(frame)
    assert found.columns == [*frame.columns, "scaled", "rawPrediction", "probability", "prediction"]
    assert accuracy(found, labelCol="digit") > 0.85
    for _ in range(2):  # the second time, it overwrites the first
        trained.write().overwrite().save(str(tmp_path / "trained"))
    loaded = PipelineModel.load(str(tmp_path / "trained"))
    columns = ["id", "prediction", "probability"]
    assert sorted(loaded.transform(frame).select(columns).collect()) == sorted(
        found.select(columns).collect()
    )
    row = found.first()
    assert row.probability.toArray().sum() == pytest.approx(1, abs=1e-6)
    assert row.probability.toArray().argmax() == row.prediction
    files = tmp_path / "trained/stages" / f"1_{estimator.uid}" / "model"
    outputs = subprocess.run(
        [sys.executable, "-c", ALONE, str(files / "model.npz")],
        input=" ".join(map(str, row.scaled.toArray())),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    np.testing.assert_allclose(
        np.array(outputs.stdout.split(), float), row.probability.toArray(), atol=1e-6
    )


ALONE = """
import json, sys
sys.modules["sparkstrom"] = sys.modules["pyspark"] = None  # neither is there
import numpy as np
path = sys.argv[1]
model = json.load(open(path + ".json"))["model"]
flat = np.load(path)["parameters"]
x, at = np.array([sys.stdin.read().split()], np.float32), 0
widths = model["widths"]
for n_in, n_out in zip(widths, widths[1:]):
    weights = flat[at : at + n_in * n_out].reshape(n_in, n_out)
    at += n_in * n_out
    x = x @ weights + flat[at : at + n_out]
    at += n_out
    if at < len(flat):
        x = np.maximum(x, 0)
x = np.exp(x - x.max())
print(*(x / x.sum())[0])
"""


@pytest.mark.filterwarnings("ignore:unclosed running multiprocessing pool:ResourceWarning")
def test_parallel_cross_validation_finds_better_model(frame):
    """A CrossValidator with two threads finds the better model."""
    estimator = SparkstromEstimator(
        model=MODEL, featuresCol="pixels", labelCol="digit", master=TWO, seed=3, batchSize=8
    )
    worse, better = (DenseNetwork([64, 24, 10], updater=Sgd(rate), seed=1) for rate in (1e-6, 0.1))
    grid = ParamGridBuilder().addGrid(estimator.model, [worse, better]).build()
    evaluator = MulticlassClassificationEvaluator(labelCol="digit", metricName="accuracy")
    validator = CrossValidator(
        estimator=estimator.setEpochs(8), estimatorParamMaps=grid, evaluator=evaluator,
        numFolds=2, parallelism=2, seed=1,
    )  # fmt: skip
    found = validator.fit(frame)
    gc.collect()  # Spark leaves its thread pool to the garbage collector
    assert found.avgMetrics[1] > found.avgMetrics[0] + 0.2
    assert found.bestModel.summary.replicas_equal
    assert accuracy(found.transform(frame), labelCol="digit") > 0.5


def test_weighted_regression_with_early_stopping_is_saved(spark, tmp_path):
    """A regression with weights, held-out rows and early stopping is saved and loaded."""
    random = np.random.default_rng(2)
    features = random.normal(size=(400, 3))
    wrong = random.random(400) < 0.3
    labels = features @ [1.0, -2.0, 0.5] + 100 * wrong
    rows = [
        (f.tolist(), float(y), 0.0 if bad else 1.0, i % 5 == 0)
        for i, (f, y, bad) in enumerate(zip(features, labels, wrong, strict=True))
    ]
    frame = spark.createDataFrame(
        rows, "features array<double>, label double, trust double, test boolean"
    )
    estimator = SparkstromEstimator(
        model=DenseNetwork([3, 1], loss="squared_error", updater=Sgd(0.02), seed=1),
        weightCol="trust", validationIndicatorCol="test", epochs=40, master=TWO,
        earlyStopping=EarlyStopping(patience=40),
    )  # fmt: skip
    estimator.save(str(tmp_path / "estimator"))
    again = SparkstromEstimator.load(str(tmp_path / "estimator"))
    assert again.getOrDefault("earlyStopping") == EarlyStopping(patience=40)
    assert again.getOrDefault("master").given == TWO.given
    model = again.fit(frame)
    assert model.summary.rows_held_out == 80
    assert model.summary.best.epoch > 1
    found = model.transform(frame).where("trust > 0").select("label", "prediction").collect()
    error = [row.label - row.prediction for row in found]
    assert np.mean(np.square(error)) < 0.1
    model.save(str(tmp_path / "model"))
    loaded = SparkstromModel.load(str(tmp_path / "model"))
    assert loaded.parameters.tobytes() == model.parameters.tobytes()
    assert loaded.epochs_trained == len(model.summary.history)
    wanted = predict_flattened(model.model, features[:3].astype(np.float32))
    np.testing.assert_array_equal(loaded.predict(features[:3]), model.predict(features[:3]))
    np.testing.assert_allclose(loaded.predict(features[:3]), wanted, rtol=1e-5)


def test_estimator_with_several_feature_columns_is_saved(spark, tmp_path):
    """Features may be several columns and the label a vector; loading keeps lists and tuples."""
    random = np.random.default_rng(3)
    x = random.normal(size=(200, 2))
    rows = [(float(a), float(b), Vectors.dense(a + b, a - b)) for a, b in x]
    frame = spark.createDataFrame(rows, ["a", "b.c", "sums"]).cache()
    estimator = SparkstromEstimator(
        model=DenseNetwork([2, 2], loss="squared_error", updater=Sgd(0.1), seed=1),
        featuresCol=["a", "b.c"], labelCol="sums", epochs=30, batchSize=8, master=TWO,
    )  # fmt: skip
    estimator.save(str(tmp_path / "estimator"))
    model = SparkstromEstimator.load(str(tmp_path / "estimator")).fit(frame)
    model.save(str(tmp_path / "model"))
    loaded = SparkstromModel.load(str(tmp_path / "model"))
    assert loaded.getFeaturesCol() == ["a", "b.c"]
    found = loaded.transform(frame).collect()
    errors = [np.subtract(row.prediction, row.sums.toArray()) for row in found]
    assert np.mean(np.square(errors)) < 0.2
    other = model.copy({model.predictionCol: "other"})
    assert other.transform(frame).columns == [*frame.columns, "other"]
    assert model.transform(frame).columns == [*frame.columns, "prediction"]
    assert "featuresCol: what the model reads" in model.explainParams()
    estimator = SparkstromEstimator(featuresCol=("a", ["b.c"]), labelCol={"y": "sums"})
    estimator.save(str(tmp_path / "several"))
    again = SparkstromEstimator.load(str(tmp_path / "several"))
    assert again.getFeaturesCol() == ("a", ["b.c"])
    assert again.getLabelCol() == {"y": "sums"}
    with pytest.raises(UsageError, match="3: give a column's name"):
        estimator.setFeaturesCol(3)


class RecordingListener:
    """A listener that records all events."""

    def __init__(self):
        self.events = []

    def on_fit_begin(self, event):
        self.events.append(event)

    def on_epoch(self, event):
        self.events.append(event)

    def on_fit_end(self, event):
        self.events.append(event)


def test_listeners_get_every_fit_and_are_not_saved(frame, tmp_path):
    heard = RecordingListener()
    estimator = SparkstromEstimator(
        model=MODEL, featuresCol="pixels", labelCol="digit", epochs=2, master=TWO, listeners=[heard]
    )
    for _ in range(2):
        estimator.fit(frame)
    kinds = [type(event).__name__ for event in heard.events]
    assert kinds == 2 * ["FitBegin", "EpochEnd", "EpochEnd", "FitEnd"]
    assert heard.events[-1].summary.replicas_equal
    estimator.save(str(tmp_path / "saved"))
    assert SparkstromEstimator.load(str(tmp_path / "saved")).get_or_none("listeners") is None
    with pytest.raises(UsageError, match="has no method for events"):
        SparkstromEstimator(listeners=[3])


def test_a_model_with_its_own_loss_needs_no_labels(frame, tmp_path):
    torch = pytest.importorskip("torch", reason="not installed: pip install 'sparkstrom[torch]'")
    from sparkstrom.models.torch import TorchModel

    class AutoEncoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = torch.nn.Linear(64, 16), torch.nn.Linear(16, 64)

        def forward(self, x):
            values = self.outer(torch.relu(self.inner(x)))
            return {"loss": ((values - x) ** 2).mean(), "values": values}

    torch.manual_seed(1)
    optimizer = functools.partial(torch.optim.SGD, lr=0.5)
    model = TorchModel(AutoEncoder(), lambda out, _: out["loss"], optimizer, outputs="values")
    estimator = SparkstromEstimator(
        model=model, featuresCol="pixels", labelCol=None, epochs=6, master=TWO
    )
    estimator.save(str(tmp_path / "saved"))
    again = SparkstromEstimator.load(str(tmp_path / "saved"))
    assert again.getOrDefault("labelCol") is None
    fitted = again.fit(frame)
    losses = [epoch.loss for epoch in fitted.summary.history]
    assert losses[-1] < losses[0]
    fitted.save(str(tmp_path / "fitted"))
    (made,) = SparkstromModel.load(str(tmp_path / "fitted")).transform(frame.limit(1)).collect()
    assert len(made.prediction) == 64


def test_missing_model_column_or_param_is_named(spark, frame, tmp_path):
    with pytest.raises(UsageError, match="model is not set"):
        SparkstromEstimator(labelCol="digit").fit(frame)
    with pytest.raises(UsageError, match=r"setParams\(epoch=...\): there is no such Param"):
        SparkstromEstimator().setParams(epoch=3)
    with pytest.raises(ValueError, match="model=3: pass a model"):
        SparkstromEstimator(model=3)
    estimator = SparkstromEstimator(model=MODEL, labelCol="digit")
    with pytest.raises(UsageError, match="there is no column 'features'"):
        estimator.fit(frame)
    master = SharedTrainingMaster(checkpoint_directory=str(tmp_path / "checkpoints"))
    with pytest.raises(UsageError, match="an estimator may run several equal fits"):
        SparkstromEstimator(model=MODEL, labelCol="digit", master=master).fit(frame)
    assert not (tmp_path / "checkpoints").exists()
    estimator.save(str(tmp_path / "no model"))
    with pytest.raises(UsageError, match="this is not the directory of a saved model"):
        SparkstromModel.load(str(tmp_path / "no model"))
