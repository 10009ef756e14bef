"""Exact sums: any order, any grouping, the same bits.

Every float64 is a whole number of quanta 2^-1126, and whole numbers add without rounding. So what
partitions have summed merges into exactly the sum of all rows, however the rows were spread;
rounding happens once, when somebody asks for the value (as in ``math.fsum``).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError

MANTISSA_BITS = 53
HALF_BITS = 26  # mantissas are summed in two halves, so that 2^36 rows fit an int64
EXPONENT_MIN = -1073  # of the smallest float64, 0.5 x 2^-1073
SCALE = 1 << (MANTISSA_BITS - EXPONENT_MIN)  # quanta in 1


@dataclass(frozen=True, slots=True)
class ExactSum:
    """A sum of float64 values, without rounding."""

    quanta: int = 0  # of 2^-1126

    @classmethod
    def of(cls, values: NDArray[np.floating]) -> ExactSum:
        """The sum of an array. Raise UsageError where a value is not finite."""
        values = np.asarray(values, np.float64).ravel()
        if not np.isfinite(values).all():
            bad = values[~np.isfinite(values)][0]
            raise UsageError(f"a sum meets the value {bad}: fill or drop it, or lower the rate")
        fractions, exponents = np.frexp(values)
        mantissas = np.ldexp(fractions, MANTISSA_BITS).astype(np.int64)
        steps, where = np.unique(exponents, return_inverse=True)
        high = np.zeros(len(steps), np.int64)
        low = np.zeros(len(steps), np.int64)
        np.add.at(high, where, mantissas >> HALF_BITS)
        np.add.at(low, where, mantissas & ((1 << HALF_BITS) - 1))
        return cls(
            sum(
                ((int(h) << HALF_BITS) + int(rest)) << (int(step) - EXPONENT_MIN)
                for step, h, rest in zip(steps, high, low, strict=True)
            )
        )

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.quanta + other.quanta)

    @property
    def exact(self) -> Fraction:
        """The sum as a ratio of whole numbers."""
        return Fraction(self.quanta, SCALE)

    def __float__(self) -> float:
        return self.quanta / SCALE  # rounds once, to nearest
