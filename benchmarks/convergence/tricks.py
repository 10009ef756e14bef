"""What a worker might do about stale updates beside what is built in; each is tried by a setting.

look_ahead   the gradient is taken where the parameters will be when it arrives: theta plus
             residual plus so many times what the others moved since the last step
gain         the weight of an update between mean and sum, by how much the workers agree
             (AdaScale, Johnson et al. 2020): gain / k, where the gain is
             (noise + signal) / (noise / k + signal), and the signal is the product of a
             worker's step with the others' updates, which is the mean step's square
average      what is delivered is the mean of theta over the last share of the fit
"""

from __future__ import annotations

import numpy as np

from benchmarks.convergence.settings import Settings
from benchmarks.convergence.trial import Flat
from sparkstrom.models.base import Batch
from sparkstrom.runtime.theta import Replica

MEMORY = 0.9  # of the gain's measurements, per step


class Stepping:
    """One worker's steps, with what it has seen the others do since the last one."""

    def __init__(self, replica: Replica, settings: Settings, workers: int) -> None:
        self._replica, self._settings, self._workers = replica, settings, workers
        self._moved = np.zeros(replica.theta.n_params, np.float32)  # by the others
        self._updates = 0
        self._signal = self._square = 0.0

    @property
    def executor_monitors(self) -> bool:
        """Does anything depend on what the others do?"""
        return bool(self._settings.look_ahead or self._settings.aggregation == "gain")

    def others_moved(self, by: Flat, updates: int) -> None:
        """theta, f32[n_params], by so many updates."""
        self._moved += by
        self._updates += updates

    def step(self, batch: Batch) -> None:
        """Train on a minibatch."""
        if not self.executor_monitors:
            self._replica.step(batch)
            return
        local = self._replica.local
        assert local is not None, "look_ahead and gain need train_on=local"
        before, ahead = local.copy(), np.float32(self._settings.look_ahead) * self._moved
        local += ahead
        self._replica.step(batch)
        local -= ahead
        if self._settings.aggregation == "gain":
            self._measure(local - before)
        self._moved[:] = 0
        self._updates = 0

    def _measure(self, step: Flat) -> None:
        if self._updates:
            signal = float(step @ self._moved) / self._updates
            self._signal += (1 - MEMORY) * (signal - self._signal)
            self._square += (1 - MEMORY) * (float(step @ step) - self._square)
        signal = min(max(self._signal, 0.0), self._square)
        noise = self._square - signal
        if self._square > 0:
            gain = self._square / (noise / self._workers + signal)
            self._replica.encoder.scale = max(1.0, gain) / self._workers
