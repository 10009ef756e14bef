"""Choose how many workers' updates are summed in full, so that their sum does not overshoot.

With ``scaling="sequential"`` the updates of all workers are added, as if one process had taken
their steps one after the other. They were computed side by side, though, from almost the same
parameters: with many workers the sum can be larger than the task bears. Each round of updates then
undoes part of the one before it, and the loss oscillates or grows.
"""

from __future__ import annotations

import math

import numpy as np

from sparkstrom.models.base import Flat
from sparkstrom.protocol.common.events import SummedWorkersLimited
from sparkstrom.runtime.theta import Theta

# The values below were chosen by measurements: benchmarks/records/convergence.md.
# Fits of up to so many workers are never limited. Plain SGD at a large learning rate has rounds
# that undo each other and still trains well; averaging its updates would only slow it.
UNLIMITED_WORKERS = 8
FIRST_LIMIT = 4
SAMPLE_MAX = 16_384  # parameters that are compared
SMOOTHING = 0.3  # weight of the newest round in the mean cosine
OVERSHOOT_COSINE = -0.15  # a round with less undoes too much of the round before it
REDUCTION_POWER = 1.5  # a round with cosine c multiplies the limit by (1 + c) to this power
# While the mean has never reached this, rounds are mostly the noise of minibatches, whose sum is
# harmless: the limit grows fast.
NOISE_COSINE = 0.45
GROWTH_IN_NOISE = 2.0
# In other fits the limit grows slowly, up to UNLIMITED_WORKERS after rounds with at least the
# first of these cosines, and further while the mean is below the second.
ALIGNED_COSINE = 0.6
LATE_NOISE_COSINE = 0.25
GROWTH = 1.2


class OvershootControl:
    """Limits how many workers' updates are summed in full, by the directions of the fit's rounds.

    With a limit of n, the updates of k workers have the weight n / k, and with horizon="fit" their
    momentum is that of n workers; with a limit of 1, updates are averaged. A round is as many
    commits as workers train. After each round, the control computes the cosine of the angle between
    the parameter changes of this round and of the round before it. In fits of more than
    ``UNLIMITED_WORKERS`` workers the limit starts at ``FIRST_LIMIT`` and grows, until a negative
    cosine shows the first overshoot. This round and later ones like it reduce the limit, which
    then never grows again. The limit starts low because an overshoot in the first rounds can do
    lasting damage, such as units that are never active again.

    Checkpoints do not contain the limit: a resumed fit starts with ``FIRST_LIMIT`` again.

    Args:
        theta: the controller's replica; it is only read.
        workers: number of the fit's workers.
        most: most workers that are ever summed; None: all.
        is_enabled: False keeps ``most`` throughout.
    """

    def __init__(
        self, theta: Theta, workers: int, most: int | None = None, *, is_enabled: bool = True
    ) -> None:
        self._is_enabled = is_enabled and workers > UNLIMITED_WORKERS
        self.limit = FIRST_LIMIT if self._is_enabled else most
        self.is_reduced = False
        self._theta, self._workers, self._most = theta, workers, most or workers
        self._limit = float(FIRST_LIMIT)  # before rounding down
        self._commits = 0  # of the present round
        self._before = theta.sample(SAMPLE_MAX)
        self._change: Flat | None = None  # in the previous round
        self._mean: float | None = None  # of the cosines
        self._is_noisy = True  # the mean has never reached NOISE_COSINE

    @property
    def summed_workers(self) -> int | None:
        """Most workers whose updates are summed in full; None: all."""
        return None if self.limit is None or self.limit >= self._workers else self.limit

    def after_commit(self, workers: int) -> SummedWorkersLimited | None:
        """Count an applied update of one of ``workers``; return the limit if it has changed."""
        self._commits += 1
        if not self._is_enabled or self._commits < workers:
            return None
        self._commits = 0
        known = self.limit
        self._adapt(workers)
        return SummedWorkersLimited(self.limit) if self.limit not in (None, known) else None

    def _adapt(self, workers: int) -> None:
        """Compare the round of ``workers`` that has just ended with the one before; adapt."""
        now = self._theta.sample(SAMPLE_MAX)
        change, before = now - self._before, self._change
        self._before, self._change = now, change
        if before is None:
            return
        alignment = cosine(change, before)
        known = alignment if self._mean is None else self._mean
        mean = self._mean = known + SMOOTHING * (alignment - known)
        self._is_noisy = self._is_noisy and mean < NOISE_COSINE
        if alignment < OVERSHOOT_COSINE:
            summed = min(int(self._limit), workers)
            self._limit = max(1, math.floor(summed * (1 + alignment) ** REDUCTION_POWER))
            self.is_reduced = self.is_reduced or self._limit < summed
        elif not self.is_reduced:
            self._grow(alignment, mean)
        self.limit = int(self._limit)

    def _grow(self, alignment: float, mean: float) -> None:
        """Raise the limit if the newest cosine and the mean cosine allow it."""
        most, growth = self._most, 1.0
        if self._is_noisy:
            growth = GROWTH_IN_NOISE
        elif mean < LATE_NOISE_COSINE:
            growth = GROWTH
        elif alignment > ALIGNED_COSINE:
            most, growth = min(self._most, UNLIMITED_WORKERS), GROWTH
        self._limit = max(self._limit, min(most, self._limit * growth))


def cosine(a: Flat, b: Flat) -> float:
    """Return the cosine of the angle between two vectors; 0.0 if one of them is zero."""
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size > 0.0 and np.isfinite(size) else 0.0
