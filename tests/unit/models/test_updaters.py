"""Tests of updaters: two steps by hand each, the state's types, refused values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.updaters import UPDATERS, AdaGrad, Adam, Nesterov, RmsProp, Sgd, Updater

G1, G2 = 0.5, -0.25


def adam_by_hand() -> list[float]:
    first = -0.1 * (0.1 * G1 / 0.1) / (math.sqrt(0.01 * G1**2 / 0.01) + 1e-8)
    mean = 0.9 * 0.1 * G1 + 0.1 * G2
    square = 0.99 * 0.01 * G1**2 + 0.01 * G2**2
    unbiased = mean / (1 - 0.9**2), square / (1 - 0.99**2)
    return [first, -0.1 * unbiased[0] / (math.sqrt(unbiased[1]) + 1e-8)]


def nesterov_by_hand() -> list[float]:
    v1 = -0.1 * G1
    v2 = 0.9 * v1 - 0.1 * G2
    return [0.9 * v1 - 0.1 * G1, 0.9 * v2 - 0.1 * G2]


CASES = [
    (Sgd(0.1), [-0.1 * G1, -0.1 * G2]),
    (Nesterov(0.1, 0.9), nesterov_by_hand()),
    (Adam(0.1, 0.9, 0.99), adam_by_hand()),
    (
        RmsProp(0.1, 0.5, 1e-8),
        [
            -0.1 * G1 / math.sqrt(0.5 * G1**2 + 1e-8),
            -0.1 * G2 / math.sqrt(0.25 * G1**2 + 0.5 * G2**2 + 1e-8),
        ],
    ),
    (AdaGrad(0.1, 1e-6), [-0.1, -0.1 * G2 / (math.hypot(G1, G2) + 1e-6)]),
]


@pytest.mark.parametrize(("updater", "steps"), CASES)
def test_two_steps_equal_formula_of_updater(updater: Updater, steps: list[float]) -> None:
    state = updater.init(3)
    for gradient, step in zip((G1, G2), steps, strict=True):
        memory = np.full(3, gradient, np.float32)
        answer = updater.update(memory, state)
        assert answer is memory
        np.testing.assert_allclose(answer, step, rtol=1e-5)


@pytest.mark.parametrize("make", UPDATERS.values())
def test_updater_state_is_arrays_and_plain_scalars(make: Any) -> None:
    updater = make()
    state = updater.init(4)
    updater.update(np.ones(4, np.float32), state)
    for value in state.values():
        assert isinstance(value, int | float) or (value.shape, value.dtype) == ((4,), np.float32)


def test_updater_defaults_equal_dl4j() -> None:
    assert Sgd() == Sgd(1e-3)
    assert Nesterov() == Nesterov(0.1, 0.9)
    assert Adam() == Adam(1e-3, 0.9, 0.999, 1e-8)
    assert RmsProp() == RmsProp(0.1, 0.95, 1e-8)
    assert AdaGrad() == AdaGrad(0.1, 1e-6)


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        (Sgd, "learning_rate", 0.0),
        (Sgd, "learning_rate", math.nan),
        (Nesterov, "momentum", 1.0),
        (Adam, "beta1", -0.1),
        (Adam, "beta2", 1.0),
        (Adam, "epsilon", 0.0),
        (RmsProp, "decay", 1.0),
        (AdaGrad, "learning_rate", math.inf),
    ],
)
def test_updater_value_out_of_range_is_refused_by_name(
    make: Any, option: str, value: float
) -> None:
    with pytest.raises(UsageError, match=f"{make.__name__}: {option}={value}"):
        make(**{option: value})
