"""The exact grid: why replicas that add in different orders still hold the same bits.

Every parameter and every step of an update is a multiple of one quantum q = 2^-k. float32 adds
multiples of q exactly while the result stays within 2^24 q, and exact sums commute: any order,
any grouping, any device. So q is chosen once per job, with room for parameters to grow, and
whatever enters theta is rounded to it first.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError

Flat = NDArray[np.float32]  # f32[n_params], contiguous

EXACT_QUANTA = 2**24  # float32 has a 24-bit significand: up to here every integer is a float32
KEPT_QUANTA = 2**22  # a later fit keeps its quantum while there is still a factor 4 of room
RANGE_MIN = 16.0  # parameters may grow to this however small they start; gives k = 20
RANGE_HEADROOM = 8.0  # or to this many times the largest initial parameter
COARSE_BITS = 3  # with 2 a sum takes 15 % less, and a step may be two thirds of its threshold
RANGE_MAX = 2.0**127  # beyond, the grid's own range would not be a float32


def quantum(k: int) -> float:
    """The job's quantum q = 2^-k (parameter units), exact as float32 and float64."""
    return math.ldexp(1.0, -k)


def first_exponent(theta: Flat) -> int:
    """Choose k for a first fit: the finest grid whose exact range is max(16, 8 max|theta|).

    Raises UsageError naming the index where a parameter is not finite or too large for any grid.
    """
    reach = max(RANGE_MIN, RANGE_HEADROOM * largest(theta))
    if reach > RANGE_MAX:
        index = int(np.argmax(np.abs(theta)))
        raise UsageError(
            f"initial parameter {index} is {theta[index]}: no float32 grid has room for values"
            " of that size; scale the model down"
        )
    fraction, exponent = math.frexp(reach)  # reach = fraction * 2^exponent, fraction in [1/2, 1)
    return 24 - (exponent - 1 if fraction == 0.5 else exponent)


def next_exponent(theta: Flat, k: int) -> int:
    """Choose k for a later fit: unchanged while max|theta| <= 2^22 q, else coarser."""
    if largest(theta) <= KEPT_QUANTA * quantum(k):
        return k
    return min(k, first_exponent(theta))


def largest(theta: Flat) -> float:
    """max|theta|, 0.0 for no parameters. Raises UsageError by index where one is not finite."""
    finite = np.isfinite(theta)
    if not finite.all():
        index = int(np.argmin(finite))
        raise UsageError(
            f"initial parameter {index} is {theta[index]}: training can only start from finite"
            " parameters; look at the model's initialisation or the loaded file"
        )
    return float(np.max(np.abs(theta), initial=0.0))


def round_to_grid(theta: Flat, k: int) -> Flat:
    """A copy of theta with every value the nearest multiple of 2^-k (ties to even), no -0.0."""
    quanta = np.rint(np.ldexp(theta.astype(np.float64), k))
    return (np.ldexp(quanta, -k) + 0.0).astype(np.float32)


def tau_quanta(tau: float, k: int) -> int:
    """The threshold as a positive even number of quanta (the bitmap's half step is half of it).

    The nearest such number, within 2 .. 2^24: above, tau itself would not be a float32.
    """
    return _even(math.ldexp(tau, k), EXACT_QUANTA)


def rounded_down(tau: float, k: int) -> float:
    """The largest threshold on the grid that ``tau`` reaches; 0.0 where there is none."""
    return math.ldexp(math.floor(math.ldexp(tau, k) / 2) * 2, -k)


def coarse(quanta: int) -> int:
    """An even number of quanta rounded down to 3 significant bits: at least four fifths of it.

    Workers whose thresholds are much alike then move by few different steps with a large common
    divisor, and a sum of their updates takes half the bytes.
    """
    half = quanta // 2
    spare = max(0, half.bit_length() - COARSE_BITS)
    return half >> spare << spare + 1


def scaled_quanta(quanta: int, scale: float) -> int:
    """What a hit of ``quanta`` moves theta by under aggregation: positive, even, <= ``quanta``."""
    return _even(quanta * scale, quanta)


def _even(quanta: float, most: int) -> int:
    return max(2, 2 * round(min(quanta, most) / 2))


def tau_limits(k: int, multiplier: int = 1) -> tuple[float, float]:
    """The smallest and largest threshold that this grid can express (parameter units).

    ``multiplier``: so many times the threshold must be expressible, too.
    """
    return 2 * quantum(k), EXACT_QUANTA // multiplier // 2 * 2 * quantum(k)
