"""When the limit on summed workers falls, and when it does not."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from sparkstrom.models.base import Batch, Flat
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.runtime.overshoot import OvershootControl, cosine
from sparkstrom.runtime.theta import Theta
from tests.unit.runtime.fits import Mesh, check_whole

ROUNDS = 12
TEN = 10  # workers: above eight, which are never limited


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
            if limited := control.after_commit(workers):
                assert limited.workers == control.limit != before
            else:
                assert control.limit == before
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


def test_what_is_turned_off_keeps_the_limit_from_the_start() -> None:
    control = OvershootControl(Theta(4, 10), 12, is_enabled=False)
    assert [control.after_commit(9) for _ in range(100)] == [None] * 100
    assert control.limit == 12


class Alternating(DenseNetwork):
    """Each step undoes the one before; the workers take their steps at the same time."""

    def __init__(self, together: threading.Barrier) -> None:
        super().__init__([5, 8, 3])
        self._together, self._move = together, np.float32(0.01)

    def bind(self, params: Flat) -> None:
        super().bind(params)
        self._value = params[:1]  # one, so that each update contains it

    def step(self, batch: Batch) -> float:
        self._together.wait(60)  # no worker has another's update of this round
        self._move = -self._move
        self._value += self._move
        return abs(float(self._value[0]))


@pytest.mark.parametrize("is_limited", [True, False])
def test_a_controller_tells_all_workers_of_a_fit(
    make_mesh: Callable[..., Mesh], is_limited: bool
) -> None:
    """A whole fit of ten workers, on threads."""
    mesh = make_mesh(partitions=TEN)
    mesh.node_limits["max_lead"] = 1  # in step, as by default
    mesh.begin(limits_overshoot=is_limited)
    together = threading.Barrier(TEN)
    for partition in range(TEN):
        mesh.add_worker(partition, model=Alternating(together), rows=80)
    outcome = mesh.finish()
    check_whole(mesh, outcome)
    warned = [note for note in outcome.notes if note.startswith("the summed updates of 10 workers")]
    if is_limited:
        assert outcome.summed_workers is not None
        assert 1 <= outcome.summed_workers <= 7
        assert len(warned) == 1
    else:
        assert (outcome.summed_workers, warned) == (None, [])


def test_a_limit_from_the_start_falls_from_there() -> None:
    assert limits_of(16, [1, -1, 1], limit=8) == [8, 5, 3]


def test_no_change_and_no_number_have_no_direction() -> None:
    zero, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert cosine(zero, one) == 0.0
    assert cosine(one * np.float32(np.nan), one) == 0.0
    assert cosine(one, -2 * one) == pytest.approx(-1.0)
