"""Detect pauses of the whole process, so that they do not count as waiting for a message."""

from __future__ import annotations

from typing import NamedTuple


class ProcessPause(NamedTuple):
    """A time in which this process did not run, for instance because its container was suspended.

    The process received nothing during the pause, so deadlines are shifted by it.
    """

    pause_s: float  # length of the pause
    now_s: float  # when it was noticed, after the pause

    def shift(self, since_s: float) -> float:
        """Return the start of a wait, ``since_s``, moved later by the pause, at most to now."""
        return min(self.now_s, since_s + self.pause_s)


class PauseDetector:
    """Detects that this process did not run for over a quarter of a lease.

    A longer time between two calls of ``pause_before`` counts as a pause.
    """

    def __init__(self, lease_s: float, now_s: float) -> None:
        self._nap_s_max, self._ran_s = lease_s / 4, now_s

    def pause_before(self, now_s: float) -> ProcessPause | None:
        """Return the pause since the last call; None if that call was a short time ago."""
        slept_s, self._ran_s = now_s - self._ran_s, now_s
        return ProcessPause(slept_s, now_s) if slept_s > self._nap_s_max else None
