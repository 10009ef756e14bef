"""CUDA kernels: find and apply the levels of hits, choose hits at random, and sample residuals.

A hit is a parameter whose residual (what is learned but not sent) reaches the threshold tau. A hit
of level l reaches tau * 2^l, and its step (the change that is sent) is multiplied by 2^l. If only
some hits may be sent, all of at least 2 tau and random smaller ones are chosen. From a sample of
residuals, callers estimate the tau that a given fraction of them reach. An overflow is a parameter
that has left the range in which float32 sums are exact. Kernels named ``*_local`` compute the
residual as a worker's own parameters (local) minus the shared ones (theta); those named
``*_replica`` get it as an array.
``encoding.reference_kernels`` documents the arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from sparkstrom.encoding.cuda.device import (
    ITEMS,
    THREADS,
    TILE,
    DeviceArray,
    blocks_of,
    checked_array,
    helper,
    kernel,
    scratch,
)
from sparkstrom.encoding.cuda.device_functions import count_if, index_of_code, record_hits
from sparkstrom.encoding.cuda.parameter_kernels import overflow_counter, read_overflows
from sparkstrom.encoding.cuda.scan import run_scan
from sparkstrom.encoding.grid import EXACT_QUANTA

F32, F64, I32, I64, U8, U32, U64 = (
    np.float32,
    np.float64,
    np.int32,
    np.int64,
    np.uint8,
    np.uint32,
    np.uint64,
)
LOW32 = np.uint64(0xFFFFFFFF)


@helper
def _hash_index(i: Any, seed: Any) -> Any:
    """Hash an index with the seed to 32 bits; see ``reference_kernels.hash_indices``."""
    x = (U64(i) * U64(0x9E3779B1) + U64(seed)) & LOW32
    x = ((x ^ (x >> U64(16))) * U64(0x85EBCA6B)) & LOW32
    x = ((x ^ (x >> U64(13))) * U64(0xC2B2AE35)) & LOW32
    return x ^ (x >> U64(16))


@kernel("void(f4[::1], f4[::1], b1, f4, u8, u8, u4[::1], u4[::1], i4[::1], i4[::1], i4[::1])")
def _find_chosen(
    values: Any,
    theta: Any,
    difference: Any,
    tau: Any,
    limit: Any,
    seed: Any,
    words: Any,
    downs: Any,
    ranks: Any,
    counts: Any,
    worsts: Any,
) -> None:
    """Record the hits that are at least 2 tau, and randomly chosen smaller ones.

    If ``difference`` is True, ``values`` is local and the residual is values - theta; otherwise
    ``values`` is the residual. A hit below 2 tau is chosen if the hash of its index and ``seed`` is
    below ``limit``. The last five arguments are those of ``record_hits``.
    """
    n = values.shape[0]
    start = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    hits, down = U32(0), U32(0)
    for item in range(ITEMS):
        i = start + item * THREADS
        near = i if i < n else n - 1  # read unconditionally, as in a scan
        residual = values[near] - theta[near] if difference else values[near]
        size = abs(residual)
        if size >= tau and i < n and (size >= tau + tau or _hash_index(i, seed) < limit):
            hits = U32(hits | U32(U32(1) << U32(item)))
        down = U32(down | U32(U32(residual < F32(0)) << U32(item)))
    record_hits(hits, down, I32(0), words, downs, ranks, counts, worsts)


@kernel("void(f4[::1], f4[::1], b1, i4[::1], f4, i8, u1[::1], i4[::1])")
def _find_levels(
    values: Any,
    theta: Any,
    difference: Any,
    codes: Any,
    tau: Any,
    top: Any,
    levels: Any,
    highest: Any,
) -> None:
    """Write the level of each hit, and the highest level to ``highest`` i32[1], which starts at 0.

    ``values``, ``theta`` and ``difference`` are as in ``_find_chosen``.
    """
    j = cuda.grid(1)
    if j < codes.shape[0]:
        at = index_of_code(codes[j])
        size = abs(values[at] - theta[at] if difference else values[at])
        level, next_tau = I32(0), F32(tau + tau)
        while level < top and size >= next_tau:
            level, next_tau = I32(level + 1), F32(next_tau + next_tau)
        levels[j] = U8(level)
        if level > highest[0]:  # with an outdated value, the atomic is unnecessary
            cuda.atomic.max(highest, 0, level)


@kernel("void(f4[::1], f4[::1], i4[::1], u1[::1], f4, f4, f8, i4[::1])")
def _move_by_levels(
    theta: Any,
    other: Any,
    codes: Any,
    levels: Any,
    step: Any,
    other_step: Any,
    limit: Any,
    answer: Any,
) -> None:
    """Add each hit's signed steps times 2^level to theta and ``other``; count overflows.

    Overflows are values of theta above ``limit``; ``answer`` is as in ``count_if``.
    """
    j = cuda.grid(1)
    if j < codes.shape[0]:
        at, times = index_of_code(codes[j]), F32(I32(1) << I32(levels[j]))
        if codes[j] < 0:
            times = F32(-times)
        exact = F64(theta[at]) + F64(F32(times * step))  # exact: times is a power of two
        theta[at] = F32(exact)
        if other_step != F32(0):
            other[at] = F32(other[at] + F32(times * other_step))
        count_if(abs(exact) > limit, j, answer)


@kernel("void(i4[::1], i4)")
def _shift(codes: Any, start: Any) -> None:
    """Add ``start`` to the index in each hit code."""
    j = cuda.grid(1)
    if j < codes.shape[0]:
        codes[j] = I32(codes[j] - start if codes[j] < 0 else codes[j] + start)


@kernel("void(f4[::1], f4[::1], f4, u8, i4[::1], f4[::1])")
def _sample(one: Any, other: Any, sign: Any, seed: Any, where: Any, sizes: Any) -> None:
    """Sample residuals: write random indices to ``where``, |one + sign * other| to ``sizes``."""
    j = cuda.grid(1)
    if j < where.shape[0]:
        at = (_hash_index(j, seed) * U64(one.shape[0])) >> U64(32)
        where[j] = I32(at)
        sizes[j] = abs(F32(one[at] + F32(sign * other[at])))


def sample(one: Any, other: Any, sign: int, seed: int, where: Any, sizes: Any) -> None:
    """Sample residuals: write random indices to ``where``, |one + sign * other| to ``sizes``."""
    of = (
        checked_array(one, F32, "one"),
        checked_array(other, F32, "other"),
        F32(sign),
        U64(seed) & LOW32,
    )
    out = checked_array(where, I32, "where"), checked_array(sizes, F32, "sizes")
    if out[0].size:
        _sample[blocks_of(out[0].size), THREADS](*of, *out)


def choose_local(local: Any, theta: Any, tau: float, limit: int, seed: int, codes: Any) -> int:
    """Write codes of hits in local - theta, a random part of those below 2 tau; return how many."""
    values = checked_array(local, F32, "local")
    return _choose_hits((values, checked_array(theta, F32, "theta"), True), tau, limit, seed, codes)


def choose_replica(residual: Any, tau: float, limit: int, seed: int, codes: Any) -> int:
    """Write codes of hits in the residual, a random part of those below 2 tau; return how many."""
    values = checked_array(residual, F32, "residual")
    return _choose_hits((values, values, False), tau, limit, seed, codes)


def _choose_hits(
    residual: tuple[DeviceArray, DeviceArray, bool], tau: float, limit: int, seed: int, codes: Any
) -> int:
    """Write codes of hits, those below 2 tau at random; return the number of chosen hits.

    ``residual`` is (values, theta, difference), as in ``_find_chosen``.
    """
    chance = U64(limit), U64(seed) & LOW32
    return run_scan(_find_chosen, checked_array(codes, I32, "codes"), *residual, F32(tau), *chance)[
        0
    ]


def find_levels_local(local: Any, theta: Any, codes: Any, tau: float, top: int, levels: Any) -> int:
    """Write the level of each hit in ``codes`` to ``levels``; return the highest one, or 0.

    A level is at most ``top``; the residual is local - theta.
    """
    values = checked_array(local, F32, "local")
    return _find_hit_levels(
        (values, checked_array(theta, F32, "theta"), True), codes, tau, top, levels
    )


def find_levels_replica(residual: Any, codes: Any, tau: float, top: int, levels: Any) -> int:
    """Write the level of each hit in ``codes`` to ``levels``; return the highest one, or 0.

    A level is at most ``top``.
    """
    values = checked_array(residual, F32, "residual")
    return _find_hit_levels((values, values, False), codes, tau, top, levels)


def _find_hit_levels(
    residual: tuple[DeviceArray, DeviceArray, bool], codes: Any, tau: float, top: int, levels: Any
) -> int:
    """Write each hit's level; return the highest or 0. ``residual`` is as in ``_choose_hits``."""
    where, found = checked_array(codes, I32, "codes"), checked_array(levels, U8, "levels")
    highest = scratch.zeros("highest", 1)
    if where.size:
        _find_levels[blocks_of(where.size), THREADS](
            *residual, where, F32(tau), I64(top), found, highest
        )
    answer = int(highest.copy_to_host()[0])
    if answer:
        highest.copy_to_device(np.zeros(1, np.int32))
    return answer


def move_by_levels(
    theta: Any, other: Any, codes: Any, levels: Any, step: float, other_step: float, q: float
) -> tuple[int, int]:
    """Add each hit's signed ``step`` * 2^level to theta, and ``other_step`` likewise to ``other``.

    ``codes`` i32[hits] has the indices and signs, ``levels`` u8[hits] the levels. ``other`` is
    f32[n], like theta; it is not used if ``other_step`` is 0. ``q`` is the quantum, of which all
    parameters are multiples. Return (overflows of theta, index of the first one or -1).
    """
    to, also = checked_array(theta, F32, "theta"), checked_array(other, F32, "other")
    where, found, answer = (
        checked_array(codes, I32, "codes"),
        checked_array(levels, U8, "levels"),
        overflow_counter(),
    )
    if where.size:
        _move_by_levels[blocks_of(where.size), THREADS](
            to, also, where, found, F32(step), F32(other_step), EXACT_QUANTA * q, answer
        )
    return read_overflows(answer, where)


def shift_codes(codes: Any, start: int) -> None:
    """Add ``start`` to the index in each hit code (``index`` or ``~index``), in place."""
    where = checked_array(codes, I32, "codes")
    if where.size and start:
        _shift[blocks_of(where.size), THREADS](where, I32(start))
        cuda.synchronize()
