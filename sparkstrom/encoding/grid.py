"""Round parameters to multiples of 2^-k (a grid), so that sums do not depend on their order.

Every parameter and every step of an update is a multiple of one quantum q = 2^-k. float32 adds
multiples of q exactly as long as the result is within +-2^24 q (the exact range). Exact sums are
independent of order and grouping, so replicas on all devices get the same bits. q is chosen once
per fit, with room for parameters to grow, and every value is rounded to the grid before it is added
to the shared parameters (theta).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError

Flat = NDArray[np.float32]  # f32[n_params], contiguous

EXACT_QUANTA = 2**24  # float32 has a 24-bit significand: integers up to this are exact
KEPT_QUANTA = 2**22  # a later fit keeps the quantum as long as parameters can still grow fourfold
RANGE_MIN = 16.0  # the exact range is at least this, for small initial parameters; gives k = 20
RANGE_HEADROOM = 8.0  # and at least this many times the largest initial parameter
# Significant bits of a coarsely rounded step. With 2 bits, sums would take 15 % fewer bytes, but a
# step could be only 2/3 of its threshold.
COARSE_BITS = 3
RANGE_MAX = 2.0**127  # above this, the grid's exact range would not be a float32


def quantum(k: int) -> float:
    """Return the quantum q = 2^-k (parameter units), which is exact in float32 and float64."""
    return math.ldexp(1.0, -k)


def first_exponent(theta: Flat) -> int:
    """Return k of the finest grid whose exact range is at least max(16, 8 max|theta|).

    It is the grid of a model's first fit.

    Raises UsageError naming the index if a parameter is not finite or too large for any grid.
    """
    reach = max(RANGE_MIN, RANGE_HEADROOM * max_absolute(theta))
    if reach > RANGE_MAX:
        index = int(np.argmax(np.abs(theta)))
        raise UsageError(
            f"initial parameter {index} is {theta[index]}: no float32 grid has room for values"
            " of that size; scale the model down"
        )
    fraction, exponent = math.frexp(reach)  # reach = fraction * 2^exponent, fraction in [1/2, 1)
    return 24 - (exponent - 1 if fraction == 0.5 else exponent)


def next_exponent(theta: Flat, k: int) -> int:
    """Return k for a later fit: unchanged if max|theta| <= 2^22 q, else that of a coarser grid."""
    if max_absolute(theta) <= KEPT_QUANTA * quantum(k):
        return k
    return min(k, first_exponent(theta))


def max_absolute(theta: Flat) -> float:
    """Return max|theta|, or 0.0 if theta is empty. Raise UsageError if a value is not finite."""
    finite = np.isfinite(theta)
    if not finite.all():
        index = int(np.argmin(finite))
        raise UsageError(
            f"initial parameter {index} is {theta[index]}: training can only start from finite"
            " parameters; look at the model's initialisation or the loaded file"
        )
    return float(np.max(np.abs(theta), initial=0.0))


def round_to_grid(theta: Flat, k: int) -> Flat:
    """Return a copy of theta rounded to multiples of 2^-k (ties to even), without -0.0."""
    quanta = np.rint(np.ldexp(theta.astype(np.float64), k))
    return (np.ldexp(quanta, -k) + 0.0).astype(np.float32)


def tau_quanta(tau: float, k: int) -> int:
    """Convert a threshold to the nearest even number of quanta (2^-k), from 2 to 2^24.

    The number is even so that a bitmap's half step is a whole number of quanta. Above 2^24 it
    would not be an exact float32.
    """
    return _find_nearest_even_number(math.ldexp(tau, k), EXACT_QUANTA)


def round_tau_down(tau: float, k: int) -> float:
    """Round a threshold down to an even multiple of 2^-k; return 0.0 if it is below 2 * 2^-k."""
    return math.ldexp(math.floor(math.ldexp(tau, k) / 2) * 2, -k)


def round_coarsely(quanta: int) -> int:
    """Round an even number of quanta down to 3 significant bits, by less than a fifth.

    Workers with similar thresholds then use few different steps with a large common divisor, so
    that an encoded sum of their updates takes half the bytes.
    """
    half = quanta // 2
    spare = max(0, half.bit_length() - COARSE_BITS)
    return half >> spare << spare + 1


def scaled_quanta(quanta: int, scale: float) -> int:
    """Return ``quanta`` * ``scale`` (0 to 1), rounded to an even number from 2 to ``quanta``."""
    return _find_nearest_even_number(quanta * scale, quanta)


def unscaled_quanta(quanta: int, scale: float, most: int) -> int:
    """Return ``quanta`` divided by ``scale``, rounded to an even number from 2 to ``most``."""
    return _find_nearest_even_number(quanta / scale, most)


def _find_nearest_even_number(quanta: float, most: int) -> int:
    """Return the even integer nearest to ``quanta``, from 2 to ``most`` (which is even)."""
    return max(2, 2 * round(min(quanta, most) / 2))


def tau_limits(k: int, multiplier: int = 1) -> tuple[float, float]:
    """Return the smallest and largest threshold that this grid can represent (parameter units).

    ``multiplier`` times the largest threshold is representable as well.
    """
    return 2 * quantum(k), EXACT_QUANTA // multiplier // 2 * 2 * quantum(k)
