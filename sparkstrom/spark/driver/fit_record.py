"""Fit record: how a fit ended, and when; what a summary is made of."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.spark.driver.fit_listeners import FitDone, FitListener


@dataclass(slots=True)
class FitRecord(FitListener):
    """Keeps what a summary is made of: how a fit ended, and when, on the driver's clock."""

    began_s: float = field(default_factory=time.monotonic)  # ``fit`` was called
    submitted_s: float = math.nan
    ended_s: float = math.nan
    end: FitDone | None = None
    first_s: float = math.nan  # ``submitted_s`` of the first run, where a controller was lost
    lost: list[tuple[float, str]] = field(default_factory=list)  # controllers: when, and which

    def on_fit_begin(self, spec: FitSpec) -> None:
        self.submitted_s = time.monotonic()
        if math.isnan(self.first_s):
            self.first_s = self.submitted_s

    @property
    def origin_s(self) -> float:
        """Where the time of the fit's events begins."""
        return self.submitted_s if math.isnan(self.first_s) else self.first_s

    def loses(self, what: str) -> None:
        """A controller, now."""
        self.lost.append((time.monotonic(), what))

    def on_fit_end(self, end: FitDone) -> None:
        self.end, self.ended_s = end, time.monotonic()
