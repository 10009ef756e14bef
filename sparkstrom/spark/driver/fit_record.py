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

    def on_fit_begin(self, spec: FitSpec) -> None:
        self.submitted_s = time.monotonic()

    def on_fit_end(self, end: FitDone) -> None:
        self.end, self.ended_s = end, time.monotonic()
