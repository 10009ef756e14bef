"""Tests of built-in updaters with several workers: momentum counts the minibatches of all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparkstrom.models.base import Batch, Paced
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.models.updaters import AdaGrad, Adam, Nesterov, RmsProp, Sgd, Updater

CHANCE = np.random.default_rng(0)
BATCH = Batch(CHANCE.normal(size=(16, 6)).astype(np.float32), CHANCE.integers(0, 3, 16))
RAISED = [
    pytest.param(Nesterov(0.1, 0.9), {"momentum": 0.9**4}, id="nesterov"),
    pytest.param(Adam(0.01, 0.8), {"beta1": 0.8**4}, id="adam"),
]


def train_steps(updater: Updater, *workers: int) -> np.ndarray:
    """Return the parameters after a step per number of workers; 0: without keep_pace."""
    model = DenseNetwork([6, 5, 3], updater=updater)
    params = model.initial()
    model.bind(params)
    for number, count in enumerate(workers):
        if count:
            model.keep_pace(count, number * count, 0)
        model.step(BATCH)
    return params


@pytest.mark.parametrize("updater", [Nesterov(), Adam(), RmsProp(), Sgd(0.1)], ids=lambda u: u.name)
def test_keep_pace_with_one_worker_has_no_effect(updater: Updater) -> None:
    """With one worker, keep_pace has no effect."""
    assert isinstance(DenseNetwork([6, 3]), Paced)
    np.testing.assert_array_equal(
        train_steps(updater, 0, 0, 0, 0), train_steps(updater, 1, 1, 1, 1)
    )


@pytest.mark.parametrize(("updater", "other"), RAISED)
def test_four_workers_raise_momentum_to_fourth_power(
    updater: Updater, other: dict[str, float]
) -> None:
    """With four workers, momentum is raised to the fourth power."""
    by_hand = replace(updater, **other)  # type: ignore[type-var]
    np.testing.assert_array_equal(
        train_steps(updater, 4, 4, 4, 4), train_steps(by_hand, 0, 0, 0, 0)
    )
    assert (train_steps(updater, 4, 4, 4, 4) != train_steps(updater, 1, 1, 1, 1)).any()


def test_momentum_returns_to_own_value_when_workers_finish() -> None:
    """When workers finish, momentum returns to the user's own value."""
    model, by_hand = (DenseNetwork([6, 3], updater=Nesterov(0.1, m)) for m in (0.9, 0.9**4))
    params, expected = model.initial(), by_hand.initial()
    model.bind(params), by_hand.bind(expected)
    for workers in (4, 4, 1, 1):
        model.keep_pace(workers, 0, 0)
        model.step(BATCH)
    by_hand.step(BATCH), by_hand.step(BATCH)
    alone = DenseNetwork([6, 3], updater=Nesterov(0.1, 0.9))
    alone.bind(expected)
    alone.load_updater_state(by_hand.updater_state())
    alone.step(BATCH), alone.step(BATCH)
    np.testing.assert_array_equal(params, expected)


@pytest.mark.parametrize(
    ("updater", "adaptive"),
    [(Sgd(), False), (Nesterov(), False), (Adam(), True), (RmsProp(), True), (AdaGrad(), True)],
)
def test_adaptive_updaters_are_recognized(updater: Updater, adaptive: bool) -> None:
    assert DenseNetwork([6, 3], updater=updater).has_adaptive_optimizer() == adaptive


def test_description_has_momentum_as_given_by_user() -> None:
    """A description has the user's momentum, not its power for four workers."""
    model = DenseNetwork([6, 3], updater=Nesterov(0.1, 0.9))
    model.keep_pace(4, 0, 0)
    assert model.describe()["updater"]["momentum"] == 0.9
    assert model.horizons(4) == {"momentum": "0.9 -> 0.6561"}
    assert DenseNetwork([6, 3], updater=Nesterov(0.1, 0.0)).horizons(4) == {}
