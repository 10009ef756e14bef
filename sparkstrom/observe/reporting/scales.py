"""Scales: where a value stands on an axis, and which values are written there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
LOG_STEPS = ((1, 2, 5), (1, 3), (1,))  # in each power of ten, the finest that is few enough
HUGE = 1e300  # beyond it sums of two values are infinite
NARROW = 1e-9  # a range that is less of its values than this has no width


@dataclass(frozen=True, slots=True)
class Scale:
    """From ``low`` to ``high``, both of which it shows; in powers of ten where ``is_log``."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def of(cls, values: Iterable[float], *, is_log: bool = False, from_zero: bool = False) -> Scale:
        """One that holds these values with a little room; what is not above 0 has no logarithm."""
        least = 1 / HUGE if is_log else -HUGE
        known = [value for value in values if least < value < HUGE]
        if not known:
            return cls(0.1, 1.0, True) if is_log else cls(0.0, 1.0)
        low, high = min(known), max(known)
        if is_log:
            return cls(low / 1.25, high * 1.25, True)
        if from_zero:
            low, high = min(0.0, low), max(0.0, high)
        if high - low <= NARROW * max(abs(low), abs(high), NARROW):
            room = abs(high) / 2 or 1.0
            return cls(low if from_zero else low - room, high + room)
        room = (high - low) * 0.05
        return cls(low if from_zero and low == 0.0 else low - room, high + room)

    def place(self, value: float) -> float:
        """0 at the low end, 1 at the high one."""
        if self.is_log:
            low = math.log(self.low)
            return (math.log(value) - low) / (math.log(self.high) - low)
        return (value - self.low) / (self.high - self.low)

    def holds(self, value: float | None) -> bool:
        """Can it be drawn?"""
        return value is not None and self.low <= value <= self.high

    def ticks(self, most: int = 6) -> list[float]:
        """Round values inside, at most ``most`` or little more."""
        if self.is_log and self.high / self.low > 8:
            return self._log_ticks(most)
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(step for step in (s * power for s in STEPS) if step >= rough * 0.999)
        first = math.ceil(self.low / step - NARROW)
        last = math.floor(self.high / step + NARROW)
        return [i * step for i in range(first, last + 1)]

    def _log_ticks(self, most: int) -> list[float]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for digits in LOG_STEPS:
            found = [d * 10.0**power for power in range(first, last + 1) for d in digits]
            found = [value for value in found if self.holds(value)]
            if len(found) <= most:
                return found
        every = -(-len(found) // most)
        return found[::every]


def label(value: float) -> str:
    """Short: 0, 0.25, 1500, 20k, 3M, 1e-5."""
    size = abs(value)
    if size >= 1e4:
        for letter, unit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if size >= unit:
                return f"{value / unit:.4g}{letter}"
    return f"{value:.4g}".replace("e-0", "e-")
