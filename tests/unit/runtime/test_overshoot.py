"""When the limit on summed workers falls, and when it does not."""

from __future__ import annotations

import numpy as np
import pytest

from sparkstrom.runtime.overshoot import OvershootControl, cosine
from sparkstrom.runtime.theta import Theta

ROUNDS = 12


def limits_of(workers: int, signs: list[int], limit: int | None = None) -> list[int | None]:
    """Return the limit after each round; ``signs``: the direction in which each round moves."""
    theta = Theta(40_000, 10)
    values = theta.to_host()
    control = OvershootControl(theta, limit)
    limits = []
    for sign in signs:
        for _ in range(workers):
            values += np.float32(sign * 2.0**-10)
            theta.load(values)
            before = control.limit
            assert control.after_commit(workers) == (control.limit != before)
        limits.append(control.limit)
    return limits


def test_rounds_that_undo_each_other_sum_fewer_workers_down_to_one() -> None:
    limits = limits_of(16, [1, -1] * (ROUNDS // 2))
    assert limits[:2] == [None, 11]
    assert list(dict.fromkeys(limits)) == [None, 11, 7, 4, 2, 1]


@pytest.mark.parametrize("signs", [[1] * ROUNDS, [1] * ROUNDS + [-1]])
def test_rounds_in_one_direction_and_one_turn_change_nothing(signs: list[int]) -> None:
    assert limits_of(16, signs) == [None] * len(signs)


def test_up_to_eight_workers_are_always_summed() -> None:
    assert limits_of(8, [1, -1] * ROUNDS) == [None] * (2 * ROUNDS)


def test_a_limit_from_the_start_falls_from_there() -> None:
    assert limits_of(16, [1, -1, 1], limit=8) == [8, 5, 3]


def test_no_change_and_no_number_have_no_direction() -> None:
    zero, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert cosine(zero, one) == 0.0
    assert cosine(one * np.float32(np.nan), one) == 0.0
    assert cosine(one, -2 * one) == pytest.approx(-1.0)
