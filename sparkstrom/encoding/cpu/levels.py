"""CPU kernels: find and apply the levels of hits, choose hits at random, and sample residuals.

A hit is a parameter whose residual (what is learned but not sent) reaches the threshold tau. A hit
of level l reaches tau * 2^l, and its step (the change that is sent) is multiplied by 2^l. If only
some hits may be sent, all of at least 2 tau and random smaller ones are chosen. From a sample of
residuals, callers estimate the tau that a given fraction of them reach. An overflow is a parameter
that has left the range in which float32 sums are exact. Kernels named ``*_local`` compute the
residual as a worker's own parameters (local) minus the shared ones (theta); those named
``*_replica`` get it as an array. Loops over hits prefetch memory for later hits, because hits are
far apart in memory. ``encoding.reference_kernels`` documents the arguments.
"""

# Compiled code mixes NumPy's and Python's scalars, which Numba treats alike, unlike mypy.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparkstrom.encoding.cpu.intrinsics import lowest_bit, prefetch
from sparkstrom.encoding.cpu.kernel_loader import helper, kernel
from sparkstrom.encoding.grid import EXACT_QUANTA

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
U64 = np.uint64

AHEAD = 16  # memory is prefetched for the hit that is this number of hits ahead
LOW32 = U64(0xFFFFFFFF)
WORD = 64  # parameters per word of hit bits
ONE = U64(1)


@helper
def _index_of_code(code: np.int32) -> np.uint64:
    """Return the parameter index in a hit code, which is ``index`` or ``~index``."""
    return U64(np.uint32(code ^ (code >> np.int32(31))))


@helper
def _hash_index(i: np.uint64, seed: np.uint64) -> np.uint64:
    """Hash an index with the seed; see ``reference_kernels.hash_indices``."""
    x = (i * U64(0x9E3779B1) + seed) & LOW32
    x = ((x ^ (x >> U64(16))) * U64(0x85EBCA6B)) & LOW32
    x = ((x ^ (x >> U64(13))) * U64(0xC2B2AE35)) & LOW32
    return x ^ (x >> U64(16))


@helper
def _append_if_chosen(
    value: float, tau: float, i: int, limit: int, seed: int, codes: I32, hits: np.uint64
) -> np.uint64:
    """Append the code of parameter ``i`` if |value| >= 2 tau, or if it is a chosen smaller hit.

    ``limit`` and ``seed`` choose hits at random. Return the new number of hits; ``hits`` is the old
    one. Without room in ``codes``, the hit is only counted.
    """
    size = abs(value)
    if not size >= tau:
        return hits
    if not size >= tau + tau and _hash_index(U64(i), U64(seed)) >= U64(limit):
        return hits
    if hits < U64(codes.shape[0]):
        codes[hits] = i if value > 0 else ~i
    return hits + U64(1)


@kernel("i8(f4[::1], f4[::1], f4, i8, i8, i4[::1])")
def choose_local(local: F32, theta: F32, tau: float, limit: int, seed: int, codes: I32) -> int:
    """Write codes of hits in local - theta, a random part of those below 2 tau; return how many."""
    hits, n = U64(0), local.shape[0]
    for part in range(n // WORD):
        base, word = U64(part * WORD), U64(0)
        for i in range(WORD):
            word |= U64(abs(local[base + U64(i)] - theta[base + U64(i)]) >= tau) << U64(i)
        while word:
            at = base + lowest_bit(word)
            hits = _append_if_chosen(local[at] - theta[at], tau, at, limit, seed, codes, hits)
            word &= word - ONE
    for i in range(n - n % WORD, n):
        hits = _append_if_chosen(local[i] - theta[i], tau, i, limit, seed, codes, hits)
    return int(hits)


@kernel("i8(f4[::1], f4, i8, i8, i4[::1])")
def choose_replica(residual: F32, tau: float, limit: int, seed: int, codes: I32) -> int:
    """Write codes of hits in the residual, a random part of those below 2 tau; return how many."""
    hits, n = U64(0), residual.shape[0]
    for part in range(n // WORD):
        base, word = U64(part * WORD), U64(0)
        for i in range(WORD):
            word |= U64(abs(residual[base + U64(i)]) >= tau) << U64(i)
        while word:
            at = base + lowest_bit(word)
            hits = _append_if_chosen(residual[at], tau, at, limit, seed, codes, hits)
            word &= word - ONE
    for i in range(n - n % WORD, n):
        hits = _append_if_chosen(residual[i], tau, i, limit, seed, codes, hits)
    return int(hits)


@kernel("void(f4[::1], f4[::1], i8, i8, i4[::1], f4[::1])")
def sample(one: F32, other: F32, sign: int, seed: int, where: I32, sizes: F32) -> None:
    """Sample residuals: write random indices to ``where``, |one + sign * other| to ``sizes``."""
    n, taken, factor = U64(one.shape[0]), where.shape[0], np.float32(sign)
    for j in range(taken):
        where[j] = (_hash_index(U64(j), U64(seed)) * n) >> U64(32)
    for j in range(taken):
        soon = U64(where[U64(min(j + AHEAD, taken - 1))])
        prefetch(one, soon)
        prefetch(other, soon)
        at = U64(where[j])
        sizes[j] = abs(one[at] + factor * other[at])


@helper
def _hit_level(value: float, tau: float, top: int) -> int:
    """Return the largest l <= top with |value| >= tau * 2^l."""
    level, next_tau = 0, np.float32(tau + tau)
    while level < top and abs(value) >= next_tau:
        level, next_tau = level + 1, np.float32(next_tau + next_tau)
    return level


@kernel("i8(f4[::1], f4[::1], i4[::1], f4, i8, u1[::1])")
def find_levels_local(local: F32, theta: F32, codes: I32, tau: float, top: int, levels: U8) -> int:
    """Write the level of each hit in ``codes`` to ``levels``; return the highest one, or 0.

    A level is at most ``top``; the residual is local - theta.
    """
    highest, hits = 0, codes.shape[0]
    for j in range(hits):
        soon = _index_of_code(codes[U64(min(j + AHEAD, hits - 1))])
        prefetch(local, soon)
        prefetch(theta, soon)
        at = _index_of_code(codes[j])
        level = _hit_level(local[at] - theta[at], tau, top)
        levels[j] = level
        highest = max(highest, level)
    return highest


@kernel("i8(f4[::1], i4[::1], f4, i8, u1[::1])")
def find_levels_replica(residual: F32, codes: I32, tau: float, top: int, levels: U8) -> int:
    """Write the level of each hit in ``codes`` to ``levels``; return the highest one, or 0.

    A level is at most ``top``.
    """
    highest, hits = 0, codes.shape[0]
    for j in range(hits):
        prefetch(residual, _index_of_code(codes[U64(min(j + AHEAD, hits - 1))]))
        level = _hit_level(residual[_index_of_code(codes[j])], tau, top)
        levels[j] = level
        highest = max(highest, level)
    return highest


@kernel("UniTuple(i8, 2)(f4[::1], f4[::1], i4[::1], u1[::1], f4, f4, f8)")
def move_by_levels(
    theta: F32, other: F32, codes: I32, levels: U8, step: float, other_step: float, q: float
) -> tuple[int, int]:
    """Add each hit's signed ``step`` * 2^level to theta, and ``other_step`` likewise to ``other``.

    ``codes`` i32[hits] has the indices and signs, ``levels`` u8[hits] the levels. ``other`` is
    f32[n], like theta; it is not used if ``other_step`` is 0. ``q`` is the quantum, of which all
    parameters are multiples. Return (overflows of theta, index of the first one or -1).
    """
    overflows, first, hits = 0, -1, codes.shape[0]
    limit, both = EXACT_QUANTA * q, other_step != 0
    for j in range(hits):
        soon = _index_of_code(codes[U64(min(j + AHEAD, hits - 1))])
        prefetch(theta, soon)
        if both:
            prefetch(other, soon)
        sign = (codes[j] >> np.int32(31)) | np.int32(1)
        at, times = _index_of_code(codes[j]), np.float32(sign * np.int32(1 << levels[j]))
        exact = np.float64(theta[at]) + np.float64(times * step)
        theta[at] = exact
        if both:
            other[at] += times * other_step
        if abs(exact) > limit:
            overflows, first = overflows + 1, (np.int64(at) if first < 0 else first)
    return overflows, first


@kernel("void(i4[::1], i8)")
def shift_codes(codes: I32, start: int) -> None:
    """Add ``start`` to the index in each hit code (``index`` or ``~index``), in place."""
    for j in range(codes.shape[0]):
        codes[j] += -start if codes[j] < 0 else start
