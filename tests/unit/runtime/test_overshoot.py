"""The limit on summed workers: which rounds raise it, which lower it, and whole fits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

from sparkstrom.models.base import Batch, Flat
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.runtime.overshoot import OvershootControl, cosine
from sparkstrom.runtime.theta import Theta
from tests.unit.runtime.fits import Mesh, assert_fit_complete

ROUNDS = 12
TEN = 10  # workers: above eight, which are never limited


class SimulatedRounds:
    """An overshoot control, with parameters that rounds of updates change.

    A round moves all parameters by the same amount, with the round's sign; if the sign is None, the
    signs are random.
    """

    def __init__(self, workers: int = 16, most: int | None = None) -> None:
        self._chance = np.random.default_rng(0)
        self._theta = Theta(40_000, 10)
        self._values = self._theta.to_host()
        self.control = OvershootControl(self._theta, workers, most)

    def limits(self, signs: Sequence[int | None], workers: int = 16) -> list[int | None]:
        """Apply a round for each sign while ``workers`` train; return the limit after each."""
        limits = []
        for sign in signs:
            size = self._values.size
            move = self._chance.choice([-1, 1], size) if sign is None else np.full(size, sign)
            for _ in range(workers):
                self.commit(move.astype(np.float32), workers)
            limits.append(self.control.limit)
        return limits

    def commit(self, move: Flat, workers: int = 16) -> None:
        """Apply one update while ``workers`` train; check that a changed limit is returned."""
        self._values += np.float32(2.0**-10) * move
        self._theta.load(self._values)
        before = self.control.limit
        limited = self.control.after_commit(workers)
        assert (limited is None) == (self.control.limit == before)
        assert limited is None or limited.workers == self.control.limit


def test_aligned_rounds_raise_limit_to_half_of_16_workers() -> None:
    """In aligned rounds the limit grows to 8 of 16 workers, and stays at 4 of 32."""
    rounds = SimulatedRounds()
    assert rounds.limits([1] * ROUNDS) == [4, 4, 5, 6] + [8] * (ROUNDS - 4)
    assert (rounds.control.summed_workers, rounds.control.is_reduced) == (8, False)
    assert SimulatedRounds(32).limits([1] * ROUNDS, workers=32) == [4] * ROUNDS


def test_random_rounds_raise_limit_to_all_workers() -> None:
    rounds = SimulatedRounds()
    assert rounds.limits([None] * 6) == [4, 8, 16, 16, 16, 16]
    assert (rounds.control.summed_workers, rounds.control.is_reduced) == (None, False)


def test_random_rounds_after_aligned_ones_raise_limit_slowly() -> None:
    """Noise after aligned rounds raises the limit slowly, up to all workers."""
    limits = SimulatedRounds().limits([1, 1, 1, *[None] * 50])
    assert limits[:5] == [4, 4, 5, 5, 5]
    assert limits[-1] == 16
    assert all(b is not None and a is not None and b <= a + 1 for a, b in pairwise(limits))


def test_opposite_round_lowers_limit_and_ends_growth() -> None:
    """After the first round that undoes another, the limit falls, and never grows again."""
    rounds = SimulatedRounds()
    assert rounds.limits([1, 1, -1, *[None] * ROUNDS]) == [4, 4] + [2] * (ROUNDS + 1)
    assert (rounds.control.summed_workers, rounds.control.is_reduced) == (2, True)


def test_opposite_rounds_at_limit_two_lower_limit_to_one() -> None:
    """The limit falls to 1 if rounds undo each other even at a limit of 2."""
    rounds = SimulatedRounds()
    assert rounds.limits([1, -1, 1, *[None] * ROUNDS]) == [4, 2] + [1] * (ROUNDS + 1)
    assert rounds.control.summed_workers == 1


def test_partly_opposite_round_lowers_limit_less() -> None:
    """A round that partly undoes the one before it reduces the limit less."""
    rounds = SimulatedRounds()
    back = np.ones(40_000, np.float32)
    back[:15_000] = -1  # the cosine of both rounds is -0.25
    for move in (back, -np.ones_like(back)):
        for _ in range(16):
            rounds.commit(move)
    assert rounds.control.limit == 2  # 4 * 0.75 ** 1.5


def test_partly_opposite_round_keeps_limit_of_two() -> None:
    """A limit of 2 is not reduced by a round that only partly undoes the one before it."""
    rounds = SimulatedRounds()
    assert rounds.limits([1, -1]) == [4, 2]
    back = np.ones(40_000, np.float32)
    back[:15_000] = -1  # the cosine with the last round is -0.25
    for _ in range(16):
        rounds.commit(back)
    assert (rounds.control.limit, rounds.control.is_reduced) == (2, True)


def test_highest_limit_depends_on_all_workers_not_active_ones() -> None:
    """The highest limit depends on the fit's 32 workers, not on the nine that train."""
    rounds = SimulatedRounds(32)
    assert rounds.limits([1] * ROUNDS, workers=9) == [4] * ROUNDS


def test_updates_of_up_to_eight_workers_are_never_limited() -> None:
    rounds = SimulatedRounds(8)
    assert rounds.limits([1, -1] * ROUNDS, workers=8) == [None] * (2 * ROUNDS)
    assert rounds.control.summed_workers is None


def test_rounds_with_few_active_workers_are_not_compared() -> None:
    """While at most eight workers train, nothing is limited, and their rounds are not compared."""
    rounds = SimulatedRounds()
    assert rounds.limits([1, -1] * 3, workers=8) == [16] * 6
    assert rounds.control.summed_workers is None
    assert rounds.limits([1, 1]) == [4, 4]
    assert rounds.limits([-1], workers=3) == [16]
    assert rounds.limits([-1]) == [4]  # nothing to compare it with
    assert not rounds.control.is_reduced
    assert rounds.control.summed_workers == 4


def test_reduced_limit_stays_while_few_workers_train() -> None:
    """A reduced limit stays while at most eight workers train, and afterwards."""
    rounds = SimulatedRounds()
    assert rounds.limits([1, 1, -1]) == [4, 4, 2]
    assert rounds.limits([1, -1, 1], workers=8) == [2] * 3
    assert rounds.limits([1] * 3) == [2] * 3


def test_updates_without_active_workers_keep_limit() -> None:
    """Updates that arrive when no worker trains any more do not change the limit."""
    rounds = SimulatedRounds()
    rounds.limits([1, 1, 1])
    for sign in (-1, 1, -1):
        rounds.commit(np.full(40_000, sign, np.float32), workers=0)
    assert (rounds.control.limit, rounds.control.is_reduced) == (5, False)


def test_zero_or_nan_rounds_keep_limit() -> None:
    """Rounds whose change is 0 or not finite do not change the limit."""
    rounds = SimulatedRounds()
    assert rounds.limits([1, 0, 0, 0]) == [4] * 4
    with np.errstate(invalid="ignore"):
        assert rounds.limits([1] * 1) == [4]
        for _ in range(48):
            rounds.commit(np.full(40_000, np.nan, np.float32))
    assert rounds.control.limit == 4


def test_limit_from_options_applies_from_start_and_only_falls() -> None:
    """A limit given in the options applies from the start; it is never raised, but reduced."""
    rounds = SimulatedRounds(most=8)
    assert rounds.control.limit == 8
    assert rounds.limits([None] * 6) == [8] * 6
    assert rounds.control.summed_workers == 8
    assert rounds.limits([1, -1]) == [8, 2]


def test_limit_grows_to_all_workers_despite_lost_worker() -> None:
    """The limit grows to all 16 workers although one of them is lost."""
    assert SimulatedRounds().limits([None] * 6, workers=15)[-1] == 16


def test_disabled_control_keeps_initial_limit() -> None:
    """A disabled control keeps the initial limit."""
    control = OvershootControl(Theta(4, 10), 16, 12, is_enabled=False)
    assert [control.after_commit(9) for _ in range(100)] == [None] * 100
    assert control.limit == control.summed_workers == 12


class AlternatingModel(DenseNetwork):
    """A model whose steps undo each other, at the same time in all workers."""

    def __init__(self, together: threading.Barrier) -> None:
        super().__init__([5, 8, 3])
        self._together, self._move = together, np.float32(0.01)

    def bind(self, params: Flat) -> None:
        super().bind(params)
        self._value = params[:1]  # a single parameter, so that each update contains it

    def step(self, batch: Batch) -> float:
        self._together.wait(60)  # before a worker gets another's update of this round
        self._move = -self._move
        self._value += self._move
        return abs(float(self._value[0]))


@pytest.mark.parametrize("is_limited", [True, False])
def test_enabled_control_limits_fit_and_warns_once(
    make_mesh: Callable[..., Mesh], is_limited: bool
) -> None:
    """In a fit of ten workers, the controller limits their weight and warns once, if enabled."""
    mesh = make_mesh(partitions=TEN)
    mesh.node_limits["max_lead"] = 1  # in step, as by default
    mesh.begin(limits_overshoot=is_limited)
    together = threading.Barrier(TEN)
    for partition in range(TEN):
        mesh.add_worker(partition, model=AlternatingModel(together), rows=80)
    outcome = mesh.finish()
    assert_fit_complete(mesh, outcome)
    warned = [note for note in outcome.notes if note.startswith("the summed updates of 10 workers")]
    if is_limited:
        assert outcome.summed_workers is not None
        assert 1 <= outcome.summed_workers <= 7
        assert len(warned) == 1
    else:
        assert (outcome.summed_workers, warned) == (None, [])


def test_cosine_of_zero_or_nan_vector_is_none() -> None:
    """The cosine with a zero vector, or of a vector with NaN, is None."""
    zero, one = np.zeros(3, np.float32), np.ones(3, np.float32)
    assert cosine(zero, one) is None
    assert cosine(one * np.float32(np.nan), one) is None
    assert cosine(one, -2 * one) == pytest.approx(-1.0)


def test_cosine_of_opposite_vectors_is_not_below_minus_one() -> None:
    """Rounding would give -1.0000001; a power of 1 plus that would be a complex number."""
    chance = np.random.default_rng(0)
    changes = [chance.normal(size=2).astype(np.float32) for _ in range(100)]
    found = [cosine(change, np.float32(-1.1) * change) for change in changes]
    assert all(value is not None and -1.0 <= value < -0.999 for value in found)
    for change in changes[:20]:
        rounds = SimulatedRounds()
        for sign in (1, -1):
            for _ in range(16):
                rounds.commit(np.resize(sign * change, 40_000))
        assert rounds.control.limit == 2
