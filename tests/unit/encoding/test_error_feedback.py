"""Tests of both kinds of residual, for training on local and on the replica: equal values."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding import backends
from sparkstrom.encoding.layers import Layers
from sparkstrom.encoding.residual import PublicationArrays, Residual, StepSizes, create_residual

F32 = NDArray[np.float32]
Q = 0.125
N = 6
WAYS = ("local", "replica")
# Tau is 4 quanta. With HALF, theta moves by 2 quanta per hit, as in the mean of 2 workers.
HALF = StepSizes(0.5, 0.5, 0.25, 2, Q)
WHOLE = StepSizes(0.5, 0.5, 0.5, 4, Q)


def flat(*values: float) -> F32:
    return np.array(values, np.float32)


class Learner:
    """A residual of one kind after the scan of a step with changes ``delta``."""

    def __init__(
        self, train_on: str, delta: F32, layers: Layers | None = None, tau: float = 0.5
    ) -> None:
        self.residual: Residual = create_residual(train_on, N, backends.backend(), layers)
        theta = np.ones(N, np.float32)
        learnt = theta + delta if train_on == "local" else delta.copy()
        self.at = PublicationArrays(learnt, theta)
        self.codes = np.empty(N, np.int32)
        self.hits, self.worst = self.residual.scan(self.at, tau, self.codes)
        self.found = self.codes[: self.hits]

    def left(self) -> list[float]:
        """Return the residual."""
        return self.residual.copy(self.at).tolist()

    def moved(self) -> list[float]:
        """Return theta's changes."""
        return (self.at.theta - 1).tolist()


DELTA = flat(0.5, 0.375, -1.25, 0, 3, 0)


@pytest.mark.parametrize("train_on", WAYS)
def test_hit_residual_loses_whole_tau_if_theta_moves_by_half(
    train_on: str,
) -> None:
    """A hit's residual loses tau, even if theta moves by half of tau."""
    learner = Learner(train_on, DELTA)
    assert learner.found.tolist() == [0, ~2, 4]
    assert learner.residual.move(learner.at, learner.found, HALF) == (0, -1)
    assert learner.moved() == [0.25, 0, -0.25, 0, 0.25, 0]
    assert learner.left() == [0, 0.375, -0.75, 0, 2.5, 0]


@pytest.mark.parametrize("train_on", WAYS)
def test_level_multiplies_theta_move_and_residual_loss(train_on: str) -> None:
    """Level n multiplies theta's move and the residual's loss by 2 ** n."""
    learner = Learner(train_on, DELTA)
    levels = np.empty(learner.hits, np.uint8)
    assert learner.residual.find_levels(learner.at, learner.found, 0.5, 3, levels) == 2
    assert levels.tolist() == [0, 1, 2]
    learner.residual.move_by_levels(learner.at, learner.found, levels, HALF)
    assert learner.moved() == [0.25, 0, -0.5, 0, 1, 0]
    assert learner.left() == [0, 0.375, -0.25, 0, 1, 0]


@pytest.mark.parametrize("train_on", WAYS)
def test_bitmap_moves_half_steps_of_one_sign(train_on: str) -> None:
    learner = Learner(train_on, DELTA)
    scratch = np.empty(backends.SCRATCH_BYTES, np.uint8)
    out = np.empty(2, np.uint8)
    hits, halves, *_ = learner.residual.bitmap(learner.at, WHOLE, 1, scratch, out)
    assert (hits, halves) == (3, 1)
    assert learner.moved() == [0.5, 0.25, -0.5, 0, 0.5, 0]
    assert learner.left() == [0, 0.125, -0.75, 0, 2.5, 0]


@pytest.mark.parametrize("train_on", WAYS)
def test_each_layer_has_its_own_tau_and_clipping_limit(train_on: str) -> None:
    learner = Learner(train_on, DELTA, Layers((2, N), (1, 4)))
    assert learner.found.tolist() == [0, 4]
    learner.residual.move(learner.at, learner.found, WHOLE)
    assert learner.left() == [0, 0.375, -1.25, 0, 1, 0]
    assert learner.residual.clip(learner.at, 0.25) == 0.125 + 0.25
    assert learner.left() == [0, 0.25, -1, 0, 1, 0]


@pytest.mark.parametrize("train_on", WAYS)
def test_residual_sums_are_current_and_terms_are_of_next_scan(train_on: str) -> None:
    """sums() is of the residual as it is, terms() of the residual at the next scan."""
    learner = Learner(train_on, DELTA)
    mass, squares = learner.residual.sums(learner.at)
    assert mass == float(np.abs(DELTA).sum())
    assert squares == float((DELTA**2).sum())
    one, other, sign = learner.residual.terms(learner.at)
    after = DELTA if train_on == "local" else 2 * DELTA  # the next scan would add delta again
    assert (one + sign * other).tolist() == after.tolist()


@pytest.mark.parametrize("train_on", WAYS)
def test_saved_residual_of_earlier_fit_is_added(train_on: str) -> None:
    learner = Learner(train_on, DELTA)
    learner.residual.add_saved(np.ones(N, np.float32), learner.at.learnt)
    assert learner.left() == (DELTA + 1).tolist()
    with pytest.raises(UsageError, match=r"shape \(2,\) for 6 parameters"):
        learner.residual.add_saved(flat(1, 2), learner.at.learnt)


def test_state_contains_residual_of_replica_training_only() -> None:
    """The state has the replica's residual; that of local training is local - theta."""
    local, own = (Learner(train_on, DELTA).residual for train_on in WAYS)
    assert local.state() == {}
    other = create_residual("replica", N, backends.backend())
    other.accumulate(np.ones(N, np.float32))
    other.load_state(own.state())
    assert other.copy(PublicationArrays(DELTA, DELTA)).tolist() == (DELTA + 1).tolist()
    other.load_state(local.state())  # of a fit that trained on local: nothing to take over
    assert other.copy(PublicationArrays(DELTA, DELTA)).tolist() == (DELTA + 1).tolist()


def test_accumulate_is_refused_in_local_training() -> None:
    """accumulate() is refused in local training, whose changes are in local already."""
    with pytest.raises(AssertionError, match="already contains every step"):
        create_residual("local", N, backends.backend()).accumulate(DELTA)
