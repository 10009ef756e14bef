"""Tests of networks from DL4J, and of methods with DL4J's names, on real executors."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import (
    MaxEpochsTerminationCondition,
    MaxScoreIterationTerminationCondition,
    MaxTimeIterationTerminationCondition,
    SharedTrainingMaster,
    SparkNetwork,
)
from sparkstrom.base.errors import UsageError
from sparkstrom.checkpoint.directory import open_checkpoint
from sparkstrom.models import DenseNetwork, Sgd, from_dl4j
from sparkstrom.models.base import Batch
from sparkstrom.models.output_interpretation import predict_flattened
from sparkstrom.runtime.optimizer_states import decode_optimizer_state

DATA = Path(__file__).parents[2] / "conformance/data"


def test_dl4j_network_continues_with_its_optimizer_state(spark: Any, tmp_path: Path) -> None:
    """After one minibatch, the saved optimizer state is DL4J's after one step in this process."""
    model = from_dl4j(DATA / "dl4j-mlp0.zip")
    rows = np.loadtxt(DATA / "dl4j-mlp0-input.csv", delimiter=",", dtype=np.float32)
    labels = model.predict(rows).argmax(axis=1)
    here = copy.deepcopy(model)
    here.bind(here.initial())
    here.load_updater_state(here.continuing_state())
    here.step(Batch(rows, labels))
    folder = str(tmp_path / "checkpoints")
    master = SharedTrainingMaster(
        repartition="never", batch_size_per_worker=64, checkpoint_directory=folder
    )
    network = SparkNetwork(spark, model, master, progress=False)
    data = spark.sparkContext.parallelize(list(zip(rows, map(int, labels), strict=True)), 1)
    summary = network.fit(data, epochs=1)
    assert summary.replicas_equal, summary.hashes
    _, checkpoint = open_checkpoint(folder, print)
    state = decode_optimizer_state(checkpoint.arrays["state"].tobytes())
    assert state["steps"] == 226
    for vector in ("mean", "square"):
        np.testing.assert_allclose(
            state[vector], here.updater_state()[vector], rtol=1e-3, atol=1e-9
        )
    network.close()


@pytest.mark.slow
def test_dl4j_module_learns_and_loads_after_saving(spark: Any, digits: Any, tmp_path: Path) -> None:
    """A network with BatchNormalization, dropout, Nesterovs and l2 trains, and loads once saved."""
    pytest.importorskip("torch")
    model = from_dl4j(DATA / "dl4j-mlp1.zip")
    network = SparkNetwork(spark, model, SharedTrainingMaster(), progress=False)
    data = spark.sparkContext.parallelize(digits.rows(), 4)
    summary = network.fit(data, epochs=3)
    assert summary.replicas_equal, summary.hashes
    assert summary.minibatches == summary.minibatches_expected
    assert network.evaluate(digits.held_out).classification.accuracy > 0.9
    network.save(tmp_path / "m.npz")
    again = SparkNetwork.load(tmp_path / "m.npz", spark, progress=False)
    x = digits.held_out[0]
    np.testing.assert_array_equal(again.predict(x), network.predict(x))
    network.close()


def test_dl4j_method_names_score_and_predict(spark: Any, digits: Any) -> None:
    """Methods with DL4J's names score and predict rows; unsupported names name a replacement."""
    pairs = list(zip(*digits.held_out, strict=True))[:90]
    rows = [(f.tolist(), int(y), f"k{i}") for i, (f, y) in enumerate(pairs)]
    frame = spark.createDataFrame(rows, "features array<float>, label int, id string")
    frame = frame.repartition(3).cache()
    model = DenseNetwork([64, 16, 10], updater=Sgd(0.1), seed=1, l2=0.01)
    network = SparkNetwork(spark, model, progress=False)
    found = {row.id: row.score for row in network.score_examples(frame).collect()}
    each = [model_loss(network.model, f, y) for f, y, _ in rows]
    np.testing.assert_allclose([found[key] for _, _, key in rows], each, rtol=1e-6)
    np.testing.assert_allclose(np.mean(each), network.calculate_score(frame), rtol=1e-6)
    summed = network.calculate_score(frame, average=False)
    np.testing.assert_allclose(np.sum(each), summed, rtol=1e-6)
    rdd = spark.sparkContext.parallelize([(f, y) for f, y, _ in rows], 2)
    penalized = network.score_examples(rdd, include_regularization=True).collect()
    np.testing.assert_allclose(penalized, np.array(each) + network.model.penalty(), rtol=1e-6)
    assert network.model.penalty() > 0.1
    keyed = network.feed_forward_with_key(frame, "id")
    assert keyed.columns == ["id", "prediction"]
    outputs = predict_flattened(network.model, np.array([f for f, _, _ in rows], np.float32))
    by_key = {row.id: row.prediction for row in keyed.collect()}
    np.testing.assert_array_equal([by_key[key] for _, _, key in rows], outputs)
    pairs = spark.sparkContext.parallelize([(key, f) for f, _, key in rows], 2)
    by_key = dict(network.feed_forward_with_key(pairs).collect())
    np.testing.assert_array_equal([by_key[key] for _, _, key in rows], outputs)
    with pytest.raises(UsageError, match="there is no column"):
        network.feed_forward_with_key(frame, ["id", "key"])
    with pytest.raises(AttributeError, match=r"evaluate_roc': use evaluate\(data, 'roc'\)"):
        network.evaluate_roc(frame)
    with pytest.raises(AttributeError, match="scoreExamples': use score_examples"):
        network.scoreExamples(frame)
    assert not hasattr(network, "evaluate_rocs")


def model_loss(model: Any, features: Any, label: int) -> float:
    total, weight = model.loss(Batch(np.array([features], np.float32), np.array([label])))
    return float(total / weight)


def test_fit_paths_ends_when_termination_condition_is_met(
    spark: Any, digits: Any, tmp_path: Path
) -> None:
    """Fits of npz or Parquet files end if a condition on epochs, time or loss is met."""
    for i in range(4):
        part = slice(50 * i, 50 * i + 50)
        np.savez(
            tmp_path / f"part-{i}.npz", features=digits.features[part], labels=digits.labels[part]
        )
    model = DenseNetwork([64, 16, 10], updater=Sgd(0.1), seed=1)
    network = SparkNetwork(
        spark, model, SharedTrainingMaster(debug_longer_iterations=5), progress=False
    )
    ends = [MaxEpochsTerminationCondition(2), MaxTimeIterationTerminationCondition(1, "hours")]
    summary = network.fit_paths(f"{tmp_path}/*.npz", 400, early_stopping=ends)
    assert summary.replicas_equal, summary.hashes
    assert summary.stopped.startswith("early stopping: MaxEpochsTerminationCondition(max_epochs=2)")
    assert len(summary.history) == summary.epochs == 2  # and no minibatch more
    assert summary.rows_trained == 200
    assert summary.best is None  # nothing was held out
    frame = spark.createDataFrame(
        [(f.tolist(), y) for f, y in digits.rows()[:200]], "features array<float>, label int"
    )
    frame.write.parquet(f"{tmp_path}/written")
    late = MaxTimeIterationTerminationCondition(1.5)
    summary = network.fit_paths(f"{tmp_path}/written", 4000, early_stopping=[late])
    assert summary.stopped.startswith("early stopping: MaxTimeIterationTerminationCondition(")
    high = MaxScoreIterationTerminationCondition(1e-9)
    summary = network.fit_paths(f"{tmp_path}/written", 4000, early_stopping=high)
    assert (
        "MaxScoreIterationTerminationCondition(max_score=1e-09) is met on node" in summary.stopped
    )
    assert summary.minibatches < summary.minibatches_expected
    network.close()
