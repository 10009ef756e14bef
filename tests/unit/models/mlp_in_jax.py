"""Helpers of JaxModel's tests: a small MLP of pure functions, its rows, and its pickling."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pyspark import cloudpickle

from sparkstrom.models.base import Batch
from sparkstrom.models.jax import JaxModel

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def init(key: Any) -> Any:
    """Return the parameters of an MLP with 6 inputs and 3 outputs."""
    first, second = jax.random.split(key)
    return {
        "hidden": [jax.random.normal(first, (6, 5)) / 2, jnp.zeros(5)],
        "out": {"kernel": jax.random.normal(second, (5, 3)) / 2, "bias": jnp.zeros(3)},
    }


def apply(params: Any, features: Any) -> Any:
    weights, biases = params["hidden"]
    hidden = jax.nn.tanh(features @ weights + biases)
    return hidden @ params["out"]["kernel"] + params["out"]["bias"]


def apply_train(params: Any, features: Any, key: Any) -> Any:
    """Return the outputs with dropout of the features."""
    kept = jax.random.bernoulli(key, 0.5, features.shape)
    return apply(params, features * kept)


def batch(rows: int = 8, seed: int = 3, *, weighted: bool = False) -> Batch:
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, 6)).astype(np.float32)
    weights = random.integers(0, 3, rows).astype(np.float32) if weighted else None
    return Batch(features, random.integers(0, 3, rows), weights)


def bound(model: JaxModel) -> Any:
    """Bind the model to its initial parameters; return these."""
    params = model.initial()
    model.bind(params)
    return params


def make(optimizer: Any = None, loss: Any = cross_entropy, **options: Any) -> JaxModel:
    """Return a JaxModel of the MLP, by default with Adam."""
    return JaxModel(init, apply, loss, optimizer or optax.adam(0.05), **options)


def pickle_round_trip(model: JaxModel) -> JaxModel:
    """Return the model as an executor gets it: through Spark's cloudpickle."""
    return cloudpickle.loads(cloudpickle.dumps(model))
