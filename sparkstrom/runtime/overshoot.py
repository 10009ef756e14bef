"""Notices that the summed steps of the workers overshoot, and has the fit sum fewer of them.

With ``scaling="sequential"`` the updates of all workers are added, as if one process had taken
their steps one after the other. They were computed side by side, though, from almost the same
parameters: with many workers the sum can be larger than the task bears. Each round of updates then
undoes part of the one before it, and the loss oscillates or grows.
"""

from __future__ import annotations

import logging
import math

import numpy as np

from sparkstrom.models.base import Flat
from sparkstrom.runtime.theta import Theta

log = logging.getLogger(__name__)

SAMPLE_MAX = 16_384  # parameters that are compared
# Weight of the newest round in the mean cosine. Where a sum overshoots, rounds have cosines of -0.3
# to -0.7 at once; where it does not, they are positive with momentum and about 0 without.
SMOOTHING = 0.3
OVERSHOOT_COSINE = -0.1
REDUCTION = 0.7  # of the workers that are summed, in each round that overshoots


class OvershootControl:
    """Chooses how many workers' updates are summed in full.

    A round is as many commits as workers train. The control compares how two successive rounds
    changed the parameters, by the cosine of the angle between the changes. While its running mean
    is clearly negative, fewer workers are summed: with a limit of n, k workers train as n would,
    with the momentum of n, and their updates are weighted n / k. At n = 1 updates are averaged.

    Not a part of the state of a fit: a fit that resumes finds its limit again.

    Args:
        theta: the controller's replica; it is only read.
        limit: most workers that are summed from the start; None: all.
    """

    def __init__(self, theta: Theta, limit: int | None = None) -> None:
        self.limit = limit
        self.reduced_at: int | None = None  # commits before the first reduction
        self._theta = theta
        self._commits = self._round_commits = 0
        self._mean = 0.0
        self._before = theta.sample(SAMPLE_MAX)
        self._change: Flat | None = None  # in the previous round

    def after_commit(self, workers: int) -> bool:
        """Count an applied update, of one of ``workers``; return whether ``limit`` was reduced."""
        self._commits += 1
        self._round_commits += 1
        if self._round_commits < workers:
            return False
        self._round_commits = 0
        now = self._theta.sample(SAMPLE_MAX)
        change, before = now - self._before, self._change
        self._before, self._change = now, change
        if before is None:
            return False
        self._mean += SMOOTHING * (cosine(change, before) - self._mean)
        summed = workers if self.limit is None else min(workers, self.limit)
        if summed == 1 or self._mean >= OVERSHOOT_COSINE:
            return False
        self.limit = max(1, math.floor(REDUCTION * summed))
        if self.reduced_at is None:
            self.reduced_at = self._commits
        log.info("summing %d of %d workers: cosine %.2f", self.limit, workers, self._mean)
        return True


def cosine(a: Flat, b: Flat) -> float:
    """Return the cosine of the angle between two vectors; 0.0 if one of them is zero."""
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size > 0.0 and np.isfinite(size) else 0.0
