"""The clock, as a value that is passed in: real here, virtual under simulation."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a clock that never goes back; only differences mean anything."""

    def monotonic_s(self) -> float: ...


class SystemClock:
    """The machine's monotonic clock."""

    def monotonic_s(self) -> float:
        return time.monotonic()
