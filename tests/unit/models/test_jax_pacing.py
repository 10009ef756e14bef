"""Tests of optax's momenta and schedules with several workers: the fit's minibatches count."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.models.base import Paced

pytest.importorskip("jax", reason="jax is not installed: pip install 'sparkstrom[jax]'")
optax = pytest.importorskip("optax", reason="optax is not installed: 'sparkstrom[jax]'")
pytest.importorskip("pyspark.cloudpickle", reason="what ships is pickled by Spark's")

from tests.unit.models.mlp_in_jax import batch, bound, make, pickle_round_trip  # noqa: E402

MASK = {"hidden": [True, False], "out": {"kernel": True, "bias": False}}
WAYS: dict[str, tuple[Callable[[float], Any], str]] = {
    "nesterov": (lambda m: optax.sgd(0.1, momentum=m, nesterov=True), "decay"),
    "adamw": (lambda m: optax.adamw(0.01, b1=m), "b1"),
    "injected adam": (lambda m: optax.inject_hyperparams(optax.adam)(0.01, b1=m), "b1"),
    "injected sgd": (lambda m: optax.inject_hyperparams(optax.sgd)(0.1, momentum=m), "momentum"),
    "masked": (lambda m: optax.masked(optax.sgd(0.1, momentum=m), MASK), "decay"),
    "multi-steps": (lambda m: optax.MultiSteps(optax.adam(0.01, b1=m), 2), "b1"),
}
FOUR = ((4, 0), (4, 4), (4, 8), (4, 12))


def train_steps(optimizer: Any, *paces: tuple[int, int] | None) -> np.ndarray:
    """Return the parameters after a step per pace; None: without keep_pace."""
    model = make(optimizer)
    params = bound(model)
    for number, pace in enumerate(paces):
        if pace is not None:
            model.keep_pace(*pace, 0)
        model.step(batch(seed=number))
    return params


@pytest.mark.parametrize("name", WAYS)
def test_four_workers_raise_momentum_to_fourth_power(name: str) -> None:
    """With four workers, momentum 0.9 is 0.9 ** 4."""
    of, called = WAYS[name]
    four = train_steps(of(0.9), *FOUR)
    np.testing.assert_allclose(four, train_steps(of(0.9**4), *[None] * 4), rtol=1e-4, atol=1e-6)
    assert make(of(0.9)).horizons(4)[called] == "0.9 -> 0.6561"


@pytest.mark.parametrize(
    ("optimizer", "adaptive"),
    [
        (optax.sgd(0.1, momentum=0.9), False),
        (optax.lion(0.1), False),
        (optax.adamw(0.1), True),
        (optax.rmsprop(0.1), True),
        (optax.adagrad(0.1), True),
        (optax.adadelta(0.1), True),
        (optax.adafactor(0.1, min_dim_size_to_factor=2), True),
        (optax.adan(0.1), True),
        (optax.contrib.prodigy(0.1), True),
        (optax.contrib.madgrad(0.1), True),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), True),
        (optax.inject_hyperparams(optax.adam)(0.1), True),
    ],
)
def test_adaptive_optax_optimizers_are_recognized(optimizer: Any, adaptive: bool) -> None:
    assert make(optimizer).has_adaptive_optimizer() == adaptive


def test_keep_pace_with_one_worker_has_no_effect() -> None:
    """With one worker, keep_pace has no effect."""
    alone = train_steps(optax.adam(0.01), (1, 0), (1, 1), (1, 2), (1, 3))
    np.testing.assert_array_equal(alone, train_steps(optax.adam(0.01), *[None] * 4))
    assert np.abs(train_steps(optax.adam(0.01), *FOUR) - alone).max() > 1e-4


def test_optimizer_without_momentum_ignores_worker_count() -> None:
    """RMSProp without momentum is not changed by the number of workers."""
    assert isinstance(make(), Paced)
    optimizer = optax.rmsprop(0.1)
    np.testing.assert_array_equal(
        train_steps(optimizer, *FOUR), train_steps(optimizer, *[None] * 4)
    )
    assert make(optimizer).horizons(4) == {}


def test_changed_worker_count_does_not_recompile_step() -> None:
    """Momentum follows the number of workers in mid-fit, and the step is compiled once."""
    model, expected = make(optax.sgd(0.1, momentum=0.9)), make(optax.sgd(0.1, momentum=0.9**4))
    params, others = bound(model), bound(expected)
    for pace, number in (((4, 0), 0), ((4, 4), 1)):
        model.keep_pace(*pace, 0)
        model.step(batch(seed=number)), expected.step(batch(seed=number))
    compiled = model._jit_step._cache_size()
    model.keep_pace(1, 8, 8)
    model.step(batch(seed=2))
    alone = make(optax.sgd(0.1, momentum=0.9))
    alone.bind(others)
    alone.load_updater_state(expected.updater_state())
    alone.step(batch(seed=2))
    np.testing.assert_allclose(params, others, rtol=1e-4, atol=1e-6)
    assert model._jit_step._cache_size() == compiled == 1


def rising(position: Any) -> Any:
    """Return a learning rate that grows with each step."""
    return 0.001 * (position + 1)


@pytest.mark.parametrize(
    "optimizer",
    [optax.sgd(rising), optax.inject_hyperparams(optax.sgd)(rising)],
    ids=["plain", "injected"],
)
def test_schedule_follows_minibatches_of_fit(optimizer: Any) -> None:
    """A schedule is at the fit's minibatch, not at this worker's step."""
    model = make(optimizer)
    params = bound(model)
    before = params.copy()
    model.keep_pace(4, 9, 9)
    model.step(batch())
    by_hand = make(optax.sgd(0.01))
    by_hand.bind(before)
    by_hand.step(batch())
    np.testing.assert_allclose(params, before, rtol=1e-5)
    assert model.horizons(4)["scheduler"] == "steps by the fit's minibatches"


def fewer_later(gradient_step: Any) -> Any:
    """Return 3 minibatches for the first gradient step, 2 for later ones."""
    return np.int32(3) - (gradient_step > 0)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.MultiSteps(optax.adam(rising), 2),
        optax.chain(
            optax.clip(1.0),
            optax.MultiSteps(
                optax.inject_hyperparams(optax.sgd)(rising), fewer_later
            ).gradient_transformation(),
        ),
    ],
    ids=["plain", "in a chain"],
)
def test_schedule_inside_multi_steps_counts_gradient_steps(optimizer: Any) -> None:
    """With one worker, a schedule inside MultiSteps has the same rates as without keep_pace."""
    alone = train_steps(optimizer, *[(1, i) for i in range(6)])
    np.testing.assert_allclose(alone, train_steps(optimizer, *[None] * 6), rtol=1e-6)


def test_schedule_inside_multi_steps_follows_minibatches_of_fit() -> None:
    four = train_steps(optax.MultiSteps(optax.sgd(rising), 2), (4, 9), (4, 13))
    by_hand = train_steps(optax.MultiSteps(optax.sgd(0.007), 2), None, None)
    np.testing.assert_allclose(four, by_hand, rtol=1e-5)


def test_schedule_continues_from_loaded_state_and_never_rewinds() -> None:
    """A schedule continues from a loaded state, even if the fit reports fewer minibatches."""
    model = make(optax.sgd(rising))
    bound(model)
    model.keep_pace(4, 9, 9)
    model.step(batch())
    other = pickle_round_trip(model)
    bound(other)
    other.load_updater_state(model.updater_state())
    other.keep_pace(4, 3, 3)
    other.step(batch())
    (count,) = (v for name, v in other.updater_state().items() if name.endswith("count"))
    assert count == 11


def test_schedule_with_unset_closure_variable_follows_fit() -> None:
    """``exponential_decay`` without ``end_value`` has a closure variable without a value."""
    optimizer = optax.sgd(optax.exponential_decay(0.1, 1, 0.5), momentum=0.9)
    four = train_steps(optimizer, (4, 1), (4, 2))
    schedule = optax.exponential_decay(0.05, 1, 0.5)
    by_hand = train_steps(optax.sgd(schedule, momentum=0.9**4), None, None)
    np.testing.assert_allclose(four, by_hand, rtol=1e-4, atol=1e-6)
    assert make(optimizer).horizons(4)["scheduler"] == "steps by the fit's minibatches"
    assert "parameters" in repr(make(optimizer))


def test_momentum_is_raised_inside_user_closures_and_partials() -> None:
    """Momentum is found and raised inside a user's closures and partials."""

    def clipped(inner: Any) -> Any:
        return optax.GradientTransformation(
            inner.init, partial(lambda updates, state, params=None: inner.update(updates, state))
        )

    four = train_steps(clipped(optax.trace(0.9)), *FOUR)
    by_hand = train_steps(clipped(optax.trace(0.9**4)), *[None] * 4)
    np.testing.assert_allclose(four, by_hand, rtol=1e-4, atol=1e-5)
