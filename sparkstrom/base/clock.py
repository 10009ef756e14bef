"""Define the interface of a monotonic clock, and implement it with the system's clock.

Code takes a ``Clock`` instead of calling ``time.monotonic``, so that tests can supply the time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds; only differences between readings are meaningful."""

    def monotonic_s(self) -> float:
        """Return the reading in seconds."""


class SystemClock:
    """The machine's monotonic clock."""

    def monotonic_s(self) -> float:
        """Return the seconds since an arbitrary moment; they never decrease."""
        return time.monotonic()
