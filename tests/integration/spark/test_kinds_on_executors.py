"""Tests of all kinds of models, with momentum, on real executors.

Rounds of averaging equal the same arithmetic in one process, and functions of columns predict.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pyspark import cloudpickle

from sparkstrom import ParameterAveragingTrainingMaster, SparkNetwork
from sparkstrom.data.row_store import Batches
from sparkstrom.models import Nesterov, Sgd
from sparkstrom.models.base import Batch
from tests.integration import model_kinds
from tests.integration.averaged_rounds import train_in_one_process
from tests.integration.model_kinds import BY_CHANCE, KINDS

os.environ.setdefault("KERAS_BACKEND", "jax")
PARTS = (48, 32, 30, 26)  # rows of the partitions
EPOCHS, BATCH, FREQUENCY = 2, 16, 2
DILOCO = {"save_updater": "own", "outer": Nesterov(0.7, 0.9)}
AVERAGED: dict[str, Any] = {"save_updater": True, "outer": None}
FRESH = {"save_updater": False, "outer": Sgd(0.9)}


@pytest.fixture(autouse=True, scope="module")
def _by_value() -> Iterator[None]:
    cloudpickle.register_pickle_by_value(model_kinds.by_value())
    yield
    cloudpickle.unregister_pickle_by_value(model_kinds.by_value())


def parts_of(digits: Any, workers: int) -> list[tuple[Any, Any]]:
    edges = np.cumsum((0, *PARTS[:workers]))
    return [
        (digits.features[first:end], digits.labels[first:end].astype(np.int64))
        for first, end in itertools.pairwise(edges)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "workers", "options"),
    [
        ("jax", 2, DILOCO),  # few workers, because each imports and compiles
        ("jax", 1, AVERAGED),
        ("keras", 2, AVERAGED),
        ("lightning", 2, DILOCO),
        ("dl4j-module", 2, DILOCO),
        ("dl4j-dense", 4, AVERAGED),
        ("dl4j-dense", 1, DILOCO),
        ("own", 4, FRESH),
    ],
)
def test_rounds_equal_training_in_one_process(
    spark: Any, digits: Any, kind: str, workers: int, options: dict[str, Any]
) -> None:
    parts = parts_of(digits, workers)
    rows = [list(zip(x, map(int, y), strict=True)) for x, y in parts]
    data = spark.sparkContext.parallelize(range(workers), workers).flatMap(lambda i: rows[i])
    master = ParameterAveragingTrainingMaster(
        repartition="never",
        batch_size_per_worker=BATCH,
        averaging_frequency=FREQUENCY,
        **options,
    )
    network = SparkNetwork(spark, KINDS[kind](), master, progress=False)
    summary = network.fit(data, epochs=EPOCHS)
    assert summary.minibatches == summary.minibatches_expected
    assert summary.updates == EPOCHS * 2
    if kind in BY_CHANCE:  # rounds have their own random numbers, so another fit is equal
        again = SparkNetwork(spark, KINDS[kind](), master, progress=False)
        again.fit(data, epochs=EPOCHS)
        np.testing.assert_array_equal(again.parameters, network.parameters)
        return
    each = [
        Batches(x, y, batch_rows=BATCH, seed=master.rng_seed, partition=index)
        for index, (x, y) in enumerate(parts)
    ]
    wanted = train_in_one_process(KINDS[kind](), each, EPOCHS, frequency=FREQUENCY, **options)
    np.testing.assert_allclose(network.parameters, wanted, atol=1e-5)


def make_two_input_model() -> Any:
    """Return a JAX model with a dictionary of inputs and one of outputs."""
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    from sparkstrom.models.jax import JaxModel

    def init(key: Any) -> Any:
        return {"a": jax.random.normal(key, (60, 3)), "b": jax.random.normal(key, (4, 3))}

    def apply(weights: Any, features: Any) -> Any:
        logits = features["a"].reshape(-1, 60) @ weights["a"] + features["b"] @ weights["b"]
        return {"logits": logits, "first": features["b"][:, :1]}

    loss = optax.softmax_cross_entropy_with_integer_labels
    return JaxModel(init, apply, lambda o, y: loss(o["logits"], y), optax.sgd(0.1, momentum=0.9))


@pytest.mark.slow
def test_udfs_of_all_model_kinds_equal_local_prediction(spark: Any, digits: Any) -> None:
    """Functions predict like their networks, also if two models differ only in their code."""
    models = {kind: make() for kind, make in KINDS.items()}
    for model in models.values():
        model.bind(model.initial())
        model.step(Batch(digits.features[:64], digits.labels[:64]))  # changes statistics
    networks = {
        kind.replace("-", "_"): SparkNetwork(spark, model, progress=False)
        for kind, model in models.items()
    }
    twice = model_kinds.jax_model(2.0)
    twice.load_buffers_bytes(models["jax"].buffers_bytes())
    networks["twice"] = SparkNetwork(spark, twice, progress=False)
    frame = spark.createDataFrame(
        [(x.tolist(), x[:60].tolist(), x[60:].tolist()) for x in digits.features[:70]],
        "features array<float>, a array<float>, b array<float>",
    ).coalesce(1)
    two = SparkNetwork(spark, make_two_input_model(), progress=False)
    both = two.udf(inputs=("a", "b"), shapes=[(6, 10), (4,)], output={"logits": "l", "first": "f"})
    features, outputs = digits.features[:70], dict[str, Any]()
    for name, network in networks.items():
        found = frame.select(network.udf()("features").alias("made")).collect()
        outputs[name] = np.array([row.made for row in found], np.float32)
        wanted = network.predict(features)
        np.testing.assert_allclose(outputs[name], wanted, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(outputs["twice"], 2 * outputs["jax"], atol=1e-5)
    found = frame.select(both("a", "b").alias("both")).collect()
    wanted = two.predict({"a": features[:, :60].reshape(-1, 6, 10), "b": features[:, 60:]})
    for output, field in (("logits", "l"), ("first", "f")):
        rows = np.array([row.both[field] for row in found], np.float32)
        np.testing.assert_allclose(rows, wanted[output], atol=1e-5)
