"""When the limit on summed workers rises and falls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from sparkstrom.models.base import Batch, Flat
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.runtime.overshoot import OvershootControl, cosine
from sparkstrom.runtime.theta import Theta
from tests.unit.runtime.fits import Mesh, check_whole

ROUNDS = 12
TEN = 10  # workers: above eight, which are never limited


def control_after(
    workers: int, signs: list[int | None], most: int | None = None
) -> tuple[OvershootControl, list[int | None]]:
    """Return a control and its limit after each round.

    A round moves all parameters in the direction of its sign, or at random if that is None.
    """
    chance = np.random.default_rng(0)
    theta = Theta(40_000, 10)
    values = theta.to_host()
    control = OvershootControl(theta, workers, most)
    limits = []
    for sign in signs:
        signs_now = chance.choice([-1, 1], values.size) if sign is None else np.array(sign)
        for _ in range(workers):
            values += np.float32(2.0**-10) * signs_now.astype(np.float32)
            theta.load(values)
            before = control.limit
            if limited := control.after_commit(workers):
                assert limited.workers == control.limit != before
            else:
                assert control.limit == before
        limits.append(control.limit)
    return control, limits


def test_rounds_in_one_direction_sum_up_to_eight_workers() -> None:
    control, limits = control_after(16, [1] * ROUNDS)
    assert limits == [4, 4, 5, 6] + [8] * (ROUNDS - 4)
    assert (control.summed_workers, control.is_reduced) == (8, False)


def test_rounds_of_noise_soon_sum_all_workers() -> None:
    control, limits = control_after(16, [None] * 6)
    assert limits == [4, 8, 16, 16, 16, 16]
    assert (control.summed_workers, control.is_reduced) == (None, False)


def test_rounds_that_become_noise_sum_more_slowly() -> None:
    _, limits = control_after(16, [1, 1, 1, *[None] * 20])
    assert limits[:5] == [4, 4, 5, 5, 5]
    assert limits[-1] == 16
    assert all(b is not None and a is not None and b <= 1.5 * a for a, b in pairwise(limits))


@pytest.mark.parametrize("then", [1, None])
def test_a_round_that_undoes_the_one_before_ends_the_growth(then: int | None) -> None:
    control, limits = control_after(16, [1, 1, -1, *[then] * ROUNDS])
    assert limits == [4, 4] + [1] * (ROUNDS + 1)
    assert (control.summed_workers, control.is_reduced) == (1, True)


def test_a_round_that_undoes_a_part_leaves_a_part() -> None:
    theta = Theta(40_000, 10)
    values = theta.to_host()
    control = OvershootControl(theta, 16)
    back = np.ones(values.size, np.float32)
    back[:15_000] = -1  # the cosine of both rounds is -0.25
    for change in (back, -np.ones_like(back)):
        values += np.float32(2.0**-10) * change
        theta.load(values)
        for _ in range(16):
            control.after_commit(16)
    assert control.limit == 2  # 4 * 0.75 ** 1.5


def test_up_to_eight_workers_are_always_summed() -> None:
    control, limits = control_after(8, [1, -1] * ROUNDS)
    assert limits == [None] * (2 * ROUNDS)
    assert control.summed_workers is None


def test_a_limit_of_the_options_is_never_exceeded() -> None:
    control, limits = control_after(16, [None] * 6, most=8)
    assert limits == [4, 8, 8, 8, 8, 8]
    assert control.summed_workers == 8


def test_a_lost_worker_does_not_stop_the_growth() -> None:
    theta = Theta(40_000, 10)
    control = OvershootControl(theta, 16)
    chance, values = np.random.default_rng(0), theta.to_host()
    for _ in range(6):
        values += np.float32(2.0**-10) * chance.choice([-1, 1], values.size).astype(np.float32)
        theta.load(values)
        for _ in range(15):
            control.after_commit(15)
    assert control.limit == 16


def test_what_is_turned_off_keeps_the_limit_from_the_start() -> None:
    control = OvershootControl(Theta(4, 10), 16, 12, is_enabled=False)
    assert [control.after_commit(9) for _ in range(100)] == [None] * 100
    assert control.limit == control.summed_workers == 12


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


def test_no_change_and_no_number_have_no_direction() -> None:
    zero, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert cosine(zero, one) == 0.0
    assert cosine(one * np.float32(np.nan), one) == 0.0
    assert cosine(one, -2 * one) == pytest.approx(-1.0)
