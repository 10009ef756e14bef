"""Classify handwritten digits with JAX and optax: spark-submit examples/jax_digits.py"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from sparkstrom import SparkNetwork
from sparkstrom.models.jax import JaxModel

WIDTHS = [64, 128, 10]
ACCURACY_WANTED = 0.95


def init(key):
    keys = jax.random.split(key, len(WIDTHS) - 1)
    return [
        {"kernel": jax.random.normal(k, (n, m)) * (2 / n) ** 0.5, "bias": jnp.zeros(m)}
        for k, n, m in zip(keys, WIDTHS[:-1], WIDTHS[1:], strict=True)
    ]


def apply(params, x):
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return x @ last["kernel"] + last["bias"]


def main() -> int:
    digits = load_digits()
    features, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, held_out = order[:1437], order[1437:]

    spark = SparkSession.builder.appName("digits with JAX").getOrCreate()
    data = spark.sparkContext.parallelize([(features[i], int(labels[i])) for i in train])
    loss = optax.softmax_cross_entropy_with_integer_labels
    model = JaxModel(init, apply, loss, optax.adam(2e-3), seed=1)
    network = SparkNetwork(spark, model)
    summary = network.fit(data, epochs=20)
    accuracy = float((network.predict(features[held_out]).argmax(1) == labels[held_out]).mean())
    params = model.parameters(network.parameters)  # a pytree like that of init
    network.close()
    spark.stop()
    norms = [float(np.linalg.norm(layer["kernel"])) for layer in params]
    print(f"{'held-out accuracy':<20}{accuracy:.4f}\n{'norms of kernels':<20}{norms}")
    print(summary.table())
    return 0 if summary.replicas_equal and accuracy >= ACCURACY_WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
