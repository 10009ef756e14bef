"""Tests of Keras' momenta and schedules with several workers: the fit's minibatches count."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkstrom.models.base import Batch, Paced

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
pytest.importorskip("jax", reason="jax is not installed: pip install 'sparkstrom[keras]'")
pytest.importorskip("keras", reason="keras is not installed: pip install 'sparkstrom[keras]'")
from sparkstrom.models.keras import KerasModel
from sparkstrom.models.keras_support import keras

OPTIMIZERS = keras.optimizers
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
CHANCE = np.random.default_rng(0)
BATCH = Batch(CHANCE.normal(size=(8, 6)).astype(np.float32), CHANCE.integers(0, 3, 8))
WAYS: dict[str, tuple[Callable[[float], Any], str]] = {
    "nesterov": (lambda m: OPTIMIZERS.SGD(0.1, momentum=m, nesterov=True), "momentum"),
    "rmsprop": (lambda m: OPTIMIZERS.RMSprop(0.01, momentum=m), "momentum"),
    "adamw": (lambda m: OPTIMIZERS.AdamW(0.01, beta_1=m), "beta_1"),
    "nadam": (lambda m: OPTIMIZERS.Nadam(0.01, beta_1=m), "beta_1"),
}
FOUR = ((4, 0), (4, 4), (4, 8))


def make(optimizer: Any) -> tuple[KerasModel, Any]:
    keras.utils.set_random_seed(3)
    model = KerasModel(
        keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)]), LOSS, optimizer
    )
    params = model.initial()
    model.bind(params)
    return model, params


def train_steps(optimizer: Any, *paces: tuple[int, int] | None) -> Any:
    """Return the parameters after a step per pace; None: without keep_pace."""
    model, params = make(optimizer)
    for pace in paces:
        if pace is not None:
            model.keep_pace(*pace, 0)
        model.step(BATCH)
    return params


@pytest.mark.parametrize("name", WAYS)
def test_four_workers_raise_momentum_to_fourth_power(name: str) -> None:
    """With four workers, momentum 0.9 is 0.9 ** 4."""
    of, called = WAYS[name]
    own = of(0.9)
    four = train_steps(own, *FOUR)
    np.testing.assert_allclose(four, train_steps(of(0.9**4), *[None] * 3), rtol=1e-4, atol=1e-6)
    assert getattr(own, called) == 0.9
    model, _ = make(own)
    assert isinstance(model, Paced)
    assert model.horizons(4) == {called: "0.9 -> 0.6561"}


@pytest.mark.parametrize(
    ("name", "adaptive"),
    [
        ("SGD", False),
        ("Lion", False),
        ("Adam", True),
        ("RMSprop", True),
        ("Adagrad", True),
        ("Adafactor", True),
        ("Ftrl", True),
    ],
)
def test_adaptive_keras_optimizers_are_recognized(name: str, adaptive: bool) -> None:
    model, _ = make(getattr(OPTIMIZERS, name)(0.1))
    assert model.has_adaptive_optimizer() == adaptive


def test_keep_pace_with_one_worker_has_no_effect() -> None:
    """With one worker, keep_pace has no effect."""
    alone = train_steps(OPTIMIZERS.Adam(0.01), (1, 0), (1, 1), (1, 2))
    np.testing.assert_array_equal(alone, train_steps(OPTIMIZERS.Adam(0.01), *[None] * 3))


def test_schedule_follows_minibatches_of_fit() -> None:
    """A schedule is at the fit's minibatch, not at this worker's step."""
    rate = OPTIMIZERS.schedules.PolynomialDecay(0.001, 100, end_learning_rate=0.101)
    rising = OPTIMIZERS.SGD(rate)
    params = train_steps(rising, (4, 9))
    np.testing.assert_allclose(params, train_steps(OPTIMIZERS.SGD(0.01), None), rtol=1e-5)
    model, _ = make(rising)
    assert model.horizons(4) == {"scheduler": "steps by the fit's minibatches"}


def test_optimizer_without_momentum_has_no_horizons() -> None:
    model, _ = make(OPTIMIZERS.SGD(0.1))
    assert model.horizons(4) == {}


def with_statistics(momentum: float) -> KerasModel:
    """Return a model with BatchNormalization."""
    keras.utils.set_random_seed(3)
    layers = keras.layers.Dense(4), keras.layers.BatchNormalization(momentum=momentum)
    module = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
    model = KerasModel(module, LOSS, OPTIMIZERS.SGD(0.1))
    model.bind(model.initial())
    return model


def test_four_workers_raise_momentum_of_batch_normalization() -> None:
    """With four workers, BatchNormalization's momentum 0.9 is 0.9 ** 4."""
    four, by_hand = with_statistics(0.9), with_statistics(0.9**4)
    four.keep_pace(4, 0, 0)
    for model in (four, by_hand):
        model.step(BATCH)
    kept, wanted = (np.frombuffer(m.buffers_bytes(), np.float32) for m in (four, by_hand))
    np.testing.assert_allclose(kept, wanted, rtol=1e-5)
    assert four.horizons(4) == {"statistics": "0.9 -> 0.6561"}
