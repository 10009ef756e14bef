"""Reduce the weight of updates in fits of many workers, so that their sum does not overshoot.

With ``scaling="sequential"`` the updates of all workers are added, as if one process had taken
their steps one after the other. But the workers computed them at the same time, from almost the
same parameters. With many workers the sum can be too large a step: each round of updates then
undoes part of the one before it, and the loss oscillates or grows.

``OvershootControl`` therefore sets a limit n: together, the updates of all workers count as those
of n workers. It compares the parameter changes of successive rounds, and lowers the limit when a
round undoes too much of the one before it.
"""

from __future__ import annotations

import math

from sparkstrom.models.base import Flat
from sparkstrom.protocol.common.events_and_effects import SummedWorkersLimited
from sparkstrom.runtime.theta import Theta

# The values below were chosen by measurements: benchmarks/records/convergence.md.
# While at most this many workers train, nothing is limited. Plain SGD at a large learning rate has
# rounds that undo each other and still trains well; averaging its updates would only slow it.
UNLIMITED_WORKERS = 8
FIRST_LIMIT = 4
SAMPLE_MAX = 16_384  # parameters that are compared
SMOOTHING = 0.3  # weight of the newest round in the mean cosine
OVERSHOOT_COSINE = -0.15  # a lower cosine: the round undid too much of the one before it
REDUCTION_POWER = 1.5  # a round with cosine c then multiplies the limit by (1 + c) to this power
# A limit of 1 is slow: it is set only if a round at a limit of 2 has a cosine below this.
UNSTABLE_COSINE = -0.6
# While the mean has never reached this, rounds are mostly the noise of minibatches, whose sum is
# harmless: the limit grows fast. Later it grows slowly: while the mean is below LATE_NOISE_COSINE,
# up to all workers; otherwise after each round above ALIGNED_COSINE, up to ALIGNED_MOST divided by
# the number of workers (never below the current limit).
NOISE_COSINE = 0.45
GROWTH_IN_NOISE = 2.0
LATE_NOISE_COSINE = 0.25
LATE_GROWTH = 1.05
ALIGNED_COSINE = 0.6
ALIGNED_GROWTH = 1.2
ALIGNED_MOST = 128


class OvershootControl:
    """Limits the weight of updates, by the directions of the fit's rounds.

    With a limit of n, the updates of k workers have the weight n / k, so that together they count
    as n workers' updates; with horizon="fit" their momentum is that of n workers. A limit of 1
    averages the updates. A round is a series of applied updates, as many as workers train. After
    each round, the control computes the cosine of the angle between the parameter changes of this
    round and of the round before it. The limit starts at ``FIRST_LIMIT`` and grows, until a cosine
    below ``OVERSHOOT_COSINE`` shows the first overshoot. This round and later ones like it reduce
    the limit, to 2 at the lowest, or to 1 if a round at 2 is below ``UNSTABLE_COSINE``. After the
    first reduction, the limit never grows again. It starts low because an overshoot in the first
    rounds can do lasting damage, such as units that are never active again.

    If successive updates change different parameters, as in large models at a low density, cosines
    are near zero, and the limit grows as fast as in noise.

    Checkpoints do not contain the limit: a resumed fit starts with ``FIRST_LIMIT`` again.

    Args:
        theta: the controller's replica; it is only read.
        workers: number of the fit's workers.
        limit_max: limit at the start and maximum of the limit; None: as described above.
        is_enabled: False keeps ``limit_max`` throughout, as do fits of at most
            ``UNLIMITED_WORKERS``.
    """

    def __init__(
        self, theta: Theta, workers: int, limit_max: int | None = None, *, is_enabled: bool = True
    ) -> None:
        self._is_enabled = is_enabled and workers > UNLIMITED_WORKERS
        self._theta, self._workers, self._limit_max = theta, workers, limit_max or workers
        self._limit = float(limit_max or FIRST_LIMIT)  # before rounding down
        self.limit = int(self._limit) if self._is_enabled else limit_max
        self.is_reduced = False
        self._is_used = not self._is_enabled  # more than UNLIMITED_WORKERS have trained
        self._commits = 0  # of the current round
        # A sample of the parameters before the current round; None: no round has begun.
        self._before: Flat | None = theta.sample(SAMPLE_MAX)
        self._change: Flat | None = None  # in the previous round
        self._mean: float | None = None  # of the cosines
        self._is_noisy = True  # the mean has never reached NOISE_COSINE

    @property
    def summed_workers(self) -> int | None:
        """The number of workers as which all workers' updates together count.

        This is the limit when more than ``UNLIMITED_WORKERS`` workers last trained. None: the
        updates were never limited, because so many never trained or the limit was no smaller than
        the number of workers.
        """
        limit = int(self._limit) if self._is_enabled else self.limit
        has_effect = self._is_used and limit is not None and limit < self._workers
        return limit if has_effect else None

    def after_commit(self, workers: int) -> SummedWorkersLimited | None:
        """Count an applied update while ``workers`` train; return a changed limit, or None."""
        if not self._is_enabled or workers == 0:  # 0: the last updates, which no step follows
            return None
        known = self.limit
        self.limit = self._next_limit(workers)
        return SummedWorkersLimited(self.limit) if self.limit != known else None

    def _next_limit(self, workers: int) -> int:
        """Count an update while ``workers`` train; return the limit, adapted after each round."""
        if workers <= UNLIMITED_WORKERS:
            self._before = self._change = None
            return int(self._limit) if self.is_reduced else self._limit_max
        self._is_used = True
        if self._before is None:
            self._commits, self._before = 0, self._theta.sample(SAMPLE_MAX)
        self._commits += 1
        if self._commits >= workers:
            self._commits = 0
            self._adapt(workers, self._before)
        return int(self._limit)

    def _adapt(self, workers: int, before: Flat) -> None:
        """Adapt the limit to the round that has ended; ``before`` is the sample at its start."""
        now = self._theta.sample(SAMPLE_MAX)
        change, last_change = now - before, self._change
        self._before, self._change = now, change
        alignment = None if last_change is None else cosine(change, last_change)
        if alignment is None:
            return
        known = alignment if self._mean is None else self._mean
        mean = self._mean = known + SMOOTHING * (alignment - known)
        self._is_noisy = self._is_noisy and mean < NOISE_COSINE
        if alignment < OVERSHOOT_COSINE:
            summed = min(int(self._limit), workers)
            least = 1 if summed <= 2 and alignment < UNSTABLE_COSINE else 2
            cut = math.floor(summed * (1 + alignment) ** REDUCTION_POWER)
            self._limit = min(self._limit, max(least, cut))
            self.is_reduced = True
        elif not self.is_reduced:
            self._grow(alignment, mean)

    def _grow(self, alignment: float, mean: float) -> None:
        """Raise the limit if the newest cosine and the mean cosine allow it."""
        limit_max, growth = self._limit_max, 1.0
        if self._is_noisy:
            growth = GROWTH_IN_NOISE
        elif mean < LATE_NOISE_COSINE:
            growth = LATE_GROWTH
        elif alignment > ALIGNED_COSINE:
            limit_max, growth = min(self._limit_max, ALIGNED_MOST // self._workers), ALIGNED_GROWTH
        self._limit = max(self._limit, min(limit_max, self._limit * growth))


def cosine(a: Flat, b: Flat) -> float | None:
    """Return the cosine of the angle between two vectors; None if one is 0 or not finite."""
    size = math.sqrt(float(a @ a) * float(b @ b))
    if not (size > 0.0 and math.isfinite(size)):
        return None
    return max(-1.0, min(1.0, float(a @ b) / size))  # rounding exceeds 1 a little
