"""Residual age: how long what a worker learns waits in its residual.

By Little's law: the mass that waits, over all steps, for each mass that leaves. The residual is
looked at now and then, right after a publication, and taken to change evenly in between.
"""

from __future__ import annotations

import time

from sparkstrom.runtime.replica import Replica

LOOK_S = 1.0
SHARE_MAX = 0.002  # of a worker's time that looking may take


class ResidualAge:
    """One worker's. Masses are sums of absolute values, in parameter units."""

    def __init__(self) -> None:
        self.waited = 0.0  # mass x own steps
        self.mass = 0.0  # when it was last looked at
        self._steps = 0  # at that time
        self._next_steps, self._next_s = 1, 0.0

    def look(self, replica: Replica, steps: int) -> None:
        """Measure if it is time: after 1, 2, 4, 8 ... steps, and every second."""
        if steps < self._next_steps and time.monotonic() < self._next_s:
            return
        self.measure(replica, steps)

    def measure(self, replica: Replica, steps: int) -> None:
        """The residual as it is after so many own steps."""
        began_s = time.monotonic()
        mass = replica.residual_mass()
        self.waited += (self.mass + mass) / 2 * (steps - self._steps)
        self.mass, self._steps = mass, steps
        now_s = time.monotonic()
        self._next_s = now_s + max(LOOK_S, (now_s - began_s) / SHARE_MAX)
        while self._next_steps <= steps:
            self._next_steps *= 2
