"""CPU kernels that scan for hits, apply updates and clip residuals; exports all CPU kernels.

The kernels are compiled with Numba; ``encoding.reference_kernels`` documents the arguments. Callers
get all kernels of a backend from one module, which is this one for the CPU, so it also exports
those of ``bitmaps`` and ``levels``.

A scan finds hits: parameters whose residual (what is learned but not sent) has reached the
threshold tau. It examines each block of parameters in one vectorised loop. If the block has hits,
it compares again, stores the results for 64 parameters as the bits of one word, and extracts the
hits from the lowest bit up. An overflow is a parameter that has left the range in which float32
sums are exact.

The maximum of ``bits & 0x7fffffff`` over all values reveals NaN and infinity at no cost: as
integers, the bits of absolute values sort like the values, with infinity and NaN above all others.
Indices are unsigned, because Numba tests each signed index for negative values, which count from
the end of the array. Arrays are not sliced, because making a slice for each block would lengthen a
scan by more than 6 %.
"""

# Compiled code mixes NumPy's and Python's scalars, which Numba treats alike, unlike mypy.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparkstrom.encoding.cpu.bitmaps import (
    bitmap_add,
    bitmap_add_both,
    bitmap_count,
    bitmap_decode,
    bitmap_local,
    bitmap_replica,
)
from sparkstrom.encoding.cpu.intrinsics import lowest_bit, prefetch
from sparkstrom.encoding.cpu.kernel_loader import helper, kernel
from sparkstrom.encoding.cpu.levels import (
    choose_local,
    choose_replica,
    find_levels_local,
    find_levels_replica,
    move_by_levels,
    sample,
    shift_codes,
)
from sparkstrom.encoding.grid import EXACT_QUANTA

__all__ = [
    "add_quanta",
    "add_quanta_both",
    "apply_hits",
    "apply_hits_both",
    "bitmap_add",
    "bitmap_add_both",
    "bitmap_count",
    "bitmap_decode",
    "bitmap_local",
    "bitmap_replica",
    "choose_local",
    "choose_replica",
    "clip_local",
    "clip_replica",
    "find_levels_local",
    "find_levels_replica",
    "move",
    "move_by_levels",
    "residual_sums_local",
    "residual_sums_replica",
    "sample",
    "scan_local",
    "scan_replica",
    "shift_codes",
    "sum_hits",
]

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
U64 = np.uint64

BLOCK = 256  # parameters per block; a constant, so that the loop is fully vectorised
WORD = 64  # parameters per word of hit bits
LIKELY = 2  # hits per word written without a branch; garbage if there are fewer, overwritten later
AHEAD = 16  # memory is prefetched for the hit that is this number of hits ahead
MAGNITUDE = np.int32(0x7FFFFFFF)  # mask that removes a float's sign bit
ONE = U64(1)


@helper
def _append_if_hit(value: float, tau: float, i: int, codes: I32, hits: np.uint64) -> np.uint64:
    """Append the code of parameter ``i`` if its residual ``value`` is a hit.

    Return the new number of hits; ``hits`` is the old one. If ``codes`` is full, only count the
    hit.
    """
    if not abs(value) >= tau:
        return hits
    if hits < U64(codes.shape[0]):
        codes[hits] = i if value > 0 else ~i
    return hits + ONE


@helper
def _append_block_hits(
    values: F32, tau: float, start: np.uint64, codes: I32, hits: np.uint64
) -> np.uint64:
    """Append the codes of the hits in the block that begins at ``start``; there must be room.

    Return the new number of hits; ``hits`` is the old one.
    """
    bits = values.view(np.int32)
    for part in range(0, BLOCK, WORD):
        base, word = start + U64(part), U64(0)
        for i in range(WORD):
            word |= U64(abs(values[base + U64(i)]) >= tau) << U64(i)
        for _ in range(LIKELY):
            at = base + (lowest_bit(word) & U64(WORD - 1))
            codes[hits] = np.int32(at) ^ (bits[at] >> np.int32(31))  # ^ -1 is ~
            hits += U64(word != U64(0))
            word &= word - ONE
        while word:
            at = base + lowest_bit(word)
            codes[hits] = np.int32(at) ^ (bits[at] >> np.int32(31))
            hits += ONE
            word &= word - ONE
    return hits


@helper
def _append_block_hits_of_difference(
    local: F32, theta: F32, tau: float, start: np.uint64, codes: I32, hits: np.uint64
) -> np.uint64:
    """Append the codes of hits in a block of local - theta, like ``_append_block_hits``."""
    for part in range(0, BLOCK, WORD):
        base, word = start + U64(part), U64(0)
        for i in range(WORD):
            word |= U64(abs(local[base + U64(i)] - theta[base + U64(i)]) >= tau) << U64(i)
        for _ in range(LIKELY):
            at = base + (lowest_bit(word) & U64(WORD - 1))
            codes[hits] = np.int32(at) ^ -np.int32(local[at] < theta[at])
            hits += U64(word != U64(0))
            word &= word - ONE
        while word:
            at = base + lowest_bit(word)
            codes[hits] = np.int32(at) ^ -np.int32(local[at] < theta[at])
            hits += ONE
            word &= word - ONE
    return hits


@kernel("UniTuple(i8, 2)(f4[::1], f4[::1], f4, i4[::1])")
def scan_local(local: F32, theta: F32, tau: float, codes: I32) -> tuple[int, int]:
    """Write the codes of the hits in local - theta; return (hits, bits of the largest |local|)."""
    hits, worst, n = U64(0), np.int32(0), local.shape[0]
    bits = local.view(np.int32)
    for block in range(n // BLOCK):
        start, found = U64(block * BLOCK), np.int32(0)
        for i in range(BLOCK):
            worst = max(worst, np.int32(bits[start + U64(i)] & MAGNITUDE))
            found |= np.int32(abs(local[start + U64(i)] - theta[start + U64(i)]) >= tau)
        if found == 0:
            continue
        if hits + U64(BLOCK) <= U64(codes.shape[0]):
            hits = _append_block_hits_of_difference(local, theta, tau, start, codes, hits)
        elif hits < U64(codes.shape[0]):
            for i in range(start, start + U64(BLOCK)):
                hits = _append_if_hit(local[i] - theta[i], tau, i, codes, hits)
        else:
            for i in range(BLOCK):
                hits += U64(abs(local[start + U64(i)] - theta[start + U64(i)]) >= tau)
    for i in range(n - n % BLOCK, n):
        worst = max(worst, np.int32(bits[i] & MAGNITUDE))
        hits = _append_if_hit(local[i] - theta[i], tau, i, codes, hits)
    return int(hits), int(worst)


@kernel("UniTuple(i8, 2)(f4[::1], f4[::1], f4, i4[::1])")
def scan_replica(residual: F32, delta: F32, tau: float, codes: I32) -> tuple[int, int]:
    """Add delta to the residual and write the codes of its hits.

    Return (hits, bits of the largest |residual|).
    """
    hits, worst, n = U64(0), np.int32(0), residual.shape[0]
    bits, tau_bits = residual.view(np.int32), np.float32(tau).view(np.int32)
    for block in range(n // BLOCK):
        start, largest = U64(block * BLOCK), np.int32(0)
        for i in range(BLOCK):
            residual[start + U64(i)] += delta[start + U64(i)]
            largest = max(largest, np.int32(bits[start + U64(i)] & MAGNITUDE))
        worst = max(worst, largest)
        if largest < tau_bits:  # bits of positive floats have the order of the floats
            continue
        if hits + U64(BLOCK) <= U64(codes.shape[0]):
            hits = _append_block_hits(residual, tau, start, codes, hits)
        elif hits < U64(codes.shape[0]):
            for i in range(start, start + U64(BLOCK)):
                hits = _append_if_hit(residual[i], tau, i, codes, hits)
        else:
            for i in range(BLOCK):
                hits += U64(abs(residual[start + U64(i)]) >= tau)
    for i in range(n - n % BLOCK, n):
        residual[i] += delta[i]
        worst = max(worst, np.int32(bits[i] & MAGNITUDE))
        hits = _append_if_hit(residual[i], tau, i, codes, hits)
    return int(hits), int(worst)


@helper
def _index_of_code(code: np.int32) -> np.uint64:
    """Return the parameter index in a hit code, which is ``index`` or ``~index``."""
    return U64(np.uint32(code ^ (code >> np.int32(31))))


@kernel("UniTuple(i8, 2)(f4[::1], f4[::1], i4[::1], f4, f4, f8)")
def move(
    theta: F32, other: F32, codes: I32, step: float, other_step: float, q: float
) -> tuple[int, int]:
    """Add +-step to theta and +-other_step to ``other`` at the hits in ``codes``.

    Return (overflows of theta, index of the first one or -1).
    """
    overflows, first, hits = 0, -1, codes.shape[0]
    limit, both = EXACT_QUANTA * q, other_step != 0
    for j in range(hits):
        soon = _index_of_code(codes[U64(min(j + AHEAD, hits - 1))])
        prefetch(theta, soon)
        if both:
            prefetch(other, soon)
        at, sign = _index_of_code(codes[j]), np.float32((codes[j] >> np.int32(31)) | np.int32(1))
        exact = np.float64(theta[at]) + np.float64(sign * step)
        theta[at] = exact
        if both:
            other[at] += sign * other_step
        if abs(exact) > limit:
            overflows, first = overflows + 1, (np.int64(at) if first < 0 else first)
    return overflows, first


@kernel("UniTuple(i8, 2)(f4[::1], i4[::1], i4[::1], f8)")
def apply_hits(theta: F32, indices: I32, quanta: I32, q: float) -> tuple[int, int]:
    """Add quanta * q to theta at ``indices``; return (overflows, index of the first or -1)."""
    overflows, first, hits = 0, -1, indices.shape[0]
    limit = EXACT_QUANTA * q
    for j in range(hits):
        prefetch(theta, U64(np.uint32(indices[U64(min(j + AHEAD, hits - 1))])))
        at = U64(np.uint32(indices[j]))
        exact = theta[at] + quanta[j] * q
        theta[at] = exact
        if abs(exact) > limit:
            overflows, first = overflows + 1, (np.int64(at) if first < 0 else first)
    return overflows, first


@kernel("UniTuple(i8, 2)(f4[::1], f4[::1], i4[::1], i4[::1], f8)")
def apply_hits_both(theta: F32, local: F32, indices: I32, quanta: I32, q: float) -> tuple[int, int]:
    """Add quanta * q to theta and local at ``indices``; return theta's (overflows, first or -1)."""
    hits = indices.shape[0]
    for j in range(hits):
        prefetch(local, U64(np.uint32(indices[U64(min(j + AHEAD, hits - 1))])))
        local[U64(np.uint32(indices[j]))] += quanta[j] * q
    return apply_hits(theta, indices, quanta, q)


@kernel("UniTuple(i8, 2)(i4[::1], i4[::1], i4[::1])")
def sum_hits(total: I32, indices: I32, quanta: I32) -> tuple[int, int]:
    """Add quanta to integer sums at ``indices``; return (number wrapped around, first or -1)."""
    overflows, first = 0, -1
    for j in range(indices.shape[0]):
        at = U64(np.uint32(indices[j]))
        exact = np.int64(total[at]) + np.int64(quanta[j])
        total[at] = exact
        if total[at] != exact:
            overflows, first = overflows + 1, (np.int64(at) if first < 0 else first)
    return overflows, first


@kernel("UniTuple(i8, 2)(f4[::1], i4[::1], f8)")
def add_quanta(theta: F32, total: I32, q: float) -> tuple[int, int]:
    """Add ``total`` * q, a sum of updates, to theta; return (overflows, first or -1)."""
    overflows, first = 0, -1
    for i in range(theta.shape[0]):
        exact = theta[i] + total[i] * q
        theta[i] = exact
        if abs(exact) > EXACT_QUANTA * q:
            overflows, first = overflows + 1, (i if first < 0 else first)
    return overflows, first


@kernel("UniTuple(i8, 2)(f4[::1], f4[::1], i4[::1], f8)")
def add_quanta_both(theta: F32, local: F32, total: I32, q: float) -> tuple[int, int]:
    """Add ``total`` * q to theta and local; return (overflows of theta, first or -1)."""
    for i in range(local.shape[0]):
        local[i] += total[i] * q
    return add_quanta(theta, total, q)


@kernel("f8(f4[::1], f4[::1], f4)")
def clip_local(local: F32, theta: F32, limit: float) -> float:
    """Clip local to within ``limit`` of theta; return the sum of absolute changes."""
    mass = 0.0
    for i in range(local.shape[0]):
        residual = local[i] - theta[i]
        if abs(residual) > limit:
            before = np.float64(local[i])
            local[i] = theta[i] + limit if residual > 0 else theta[i] - limit
            mass += abs(before - local[i])
    return mass


@kernel("f8(f4[::1], f4)")
def clip_replica(residual: F32, limit: float) -> float:
    """Clip the residual to +-``limit``; return the sum of absolute changes."""
    mass = 0.0
    for i in range(residual.shape[0]):
        if abs(residual[i]) > limit:
            before = np.float64(residual[i])
            residual[i] = limit if residual[i] > 0 else -limit
            mass += abs(before - residual[i])
    return mass


@kernel("UniTuple(f8, 2)(f4[::1], f4[::1])")
def residual_sums_local(local: F32, theta: F32) -> tuple[float, float]:
    """Return (sum of |local - theta|, sum of (local - theta)^2), in float64."""
    mass, square = 0.0, 0.0
    for i in range(local.shape[0]):
        value = np.float64(local[i] - theta[i])
        mass, square = mass + abs(value), square + value * value
    return mass, square


@kernel("UniTuple(f8, 2)(f4[::1])")
def residual_sums_replica(residual: F32) -> tuple[float, float]:
    """Return (sum of |residual|, sum of residual^2), in float64."""
    mass, square = 0.0, 0.0
    for i in range(residual.shape[0]):
        value = np.float64(residual[i])
        mass, square = mass + abs(value), square + value * value
    return mass, square
