"""Detect that the summed updates of many workers overshoot, and reduce how many are summed.

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

# Fits of up to so many workers are never limited. Plain SGD at a large learning rate has rounds
# that undo each other and still trains well; averaging its updates would only slow it.
UNLIMITED_WORKERS = 8
SAMPLE_MAX = 16_384  # parameters that are compared
SMOOTHING = 0.3  # weight of the newest round in the mean cosine
OVERSHOOT_COSINE = -0.1
REDUCTION = 0.7  # of the workers that are summed, in each round that overshoots


class OvershootControl:
    """Reduces how many workers' updates are summed in full while their sum overshoots.

    With a limit of n, the updates of k workers have the weight n / k, and with horizon="fit" their
    momentum is that of n workers; with a limit of 1, updates are averaged. A round is as many
    commits as workers train. The control computes the cosine of the angle between the parameter
    changes of two successive rounds, and keeps its running mean. While the mean is below
    ``OVERSHOOT_COSINE``, each round reduces the limit, which never rises again.

    Checkpoints do not contain the limit: a resumed fit starts with the limit of its options.

    Args:
        theta: the controller's replica; it is only read.
        limit: most workers that are summed from the start; None: all.
        is_enabled: False keeps this limit.
    """

    def __init__(self, theta: Theta, limit: int | None = None, *, is_enabled: bool = True) -> None:
        self.limit = limit
        self._is_enabled = is_enabled
        self.is_reduced = False
        self._theta = theta
        self._commits = 0  # of the present round
        self._mean = 0.0
        self._before = theta.sample(SAMPLE_MAX)
        self._change: Flat | None = None  # in the previous round

    def after_commit(self, workers: int) -> SummedWorkersLimited | None:
        """Count an applied update of one of ``workers``; return the limit if it was reduced."""
        self._commits += 1
        if self._commits < workers:
            return None
        self._commits = 0
        if workers <= UNLIMITED_WORKERS or not self._is_enabled:
            return None
        self._compare_rounds()
        summed = min(workers, self.limit or workers)
        if summed == 1 or self._mean >= OVERSHOOT_COSINE:
            return None
        self.limit, self.is_reduced = max(1, math.floor(REDUCTION * summed)), True
        return SummedWorkersLimited(self.limit)

    def _compare_rounds(self) -> None:
        """Compare what the round that has just ended changed with what the one before changed."""
        now = self._theta.sample(SAMPLE_MAX)
        change, before = now - self._before, self._change
        self._before, self._change = now, change
        if before is not None:
            self._mean += SMOOTHING * (cosine(change, before) - self._mean)


def cosine(a: Flat, b: Flat) -> float:
    """Return the cosine of the angle between two vectors; 0.0 if one of them is zero."""
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size > 0.0 and np.isfinite(size) else 0.0
