"""Tests of models on JAX and Keras, trained by real executors."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import AdaptiveThreshold
from sparkstrom.base.errors import UsageError

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
for wanted in ("jax", "optax"):
    pytest.importorskip(wanted, reason="not installed: pip install 'sparkstrom[jax]'")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

from sparkstrom.models.jax import JaxModel  # noqa: E402

EPOCHS = 12


def mlp(**options: Any) -> JaxModel:
    """Return a perceptron; its local functions are pickled by value, as executors lack tests."""
    widths = (64, 64, 10)

    def init(key: Any) -> Any:
        keys = jax.random.split(key, len(widths) - 1)
        return [
            {"kernel": jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, "bias": jnp.zeros(m)}
            for k, n, m in zip(keys, widths[:-1], widths[1:], strict=True)
        ]

    def apply(params: Any, x: Any) -> Any:
        *hidden, last = params
        for layer in hidden:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return x @ last["kernel"] + last["bias"]

    loss = optax.softmax_cross_entropy_with_integer_labels
    return JaxModel(init, apply, loss, optax.adam(3e-3), **options)


def accuracy(network: Any, digits: Any) -> float:
    features, labels = digits.held_out
    return float((network.predict(features).argmax(1) == labels).mean())


def test_jax_model_learns_digits_on_two_workers(spark, digits, make_network):
    network = make_network(mlp(), workers_per_node=1, threshold=AdaptiveThreshold(1e-3))
    data = spark.sparkContext.parallelize(digits.rows(), 2)
    summary = network.fit(data, epochs=EPOCHS)
    assert summary.replicas_equal, summary.hashes
    assert len(summary.hashes) == 3  # two workers and the driver
    assert summary.examples == EPOCHS * len(digits.labels)
    assert accuracy(network, digits) >= 0.95
    again = network.fit(data, epochs=1)  # Adam's state was kept on the executors
    assert again.grants == 2
    network.close()


def report_worker_state(_: Iterator[Any]) -> Iterator[tuple[bool, str | None]]:
    """Yield whether Spark's daemon, which forks workers, has loaded JAX, and XLA's thread count."""
    maps = (Path("/proc") / str(os.getppid()) / "maps").read_text()
    yield "jaxlib" in maps, os.environ.get("NPROC")


def test_spark_daemon_does_not_load_jax(spark, digits, make_network):
    """After a fit, only workers have loaded JAX, with as many threads as a task has CPUs."""
    network = make_network(mlp(), workers_per_node=1)
    data = spark.sparkContext.parallelize(digits.rows()[:64], 2)
    network.fit(data, epochs=1)
    report_worker_state.__module__ = "__main__"  # pickled by value
    seen = spark.sparkContext.parallelize(range(4), 4).mapPartitions(report_worker_state).collect()
    assert not any(loaded for loaded, _ in seen)
    assert {threads for _, threads in seen} <= {"1", None}  # spark.task.cpus, in workers with JAX
    assert "1" in {threads for _, threads in seen}
    network.close()


def test_out_of_range_label_error_names_row(spark, digits, make_network):
    rows = [*digits.rows()[:100], (digits.features[0], 10)]
    with pytest.raises(UsageError, match=r"row \d+ .*label.* is 10: labels must be 0 to 9"):
        make_network(mlp(), workers_per_node=1).fit(spark.sparkContext.parallelize(rows, 2))


def test_unpicklable_model_is_rejected_before_job(spark, digits, make_network):
    lock = threading.Lock()

    def apply(params: Any, features: Any) -> Any:
        with lock:
            return features @ params

    model = JaxModel(lambda key: jnp.zeros((64, 10)), apply, optax.squared_error, optax.sgd(1))
    with pytest.raises(UsageError, match=r"JaxModel\._apply .*lock"):
        make_network(model).fit(spark.sparkContext.parallelize(digits.rows()[:64], 2))


@pytest.mark.slow
def test_keras_model_with_batch_norm_and_dropout_learns(spark, digits, make_network):
    pytest.importorskip("keras", reason="keras is not installed: pip install 'sparkstrom[keras]'")
    from sparkstrom.models.keras import KerasModel
    from sparkstrom.models.keras_support import keras

    keras.utils.set_random_seed(1)
    module = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(64),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = KerasModel(module, loss, keras.optimizers.Adam(3e-3))
    network = make_network(model, workers_per_node=1, threshold=AdaptiveThreshold(1e-3))
    summary = network.fit(spark.sparkContext.parallelize(digits.rows(), 2), epochs=EPOCHS)
    assert summary.replicas_equal, summary.hashes
    assert accuracy(network, digits) >= 0.95
    statistics = network.module.layers[1]  # of the first layer's outputs
    assert np.abs(statistics.moving_mean.numpy()).max() > 0.1
    network.close()
