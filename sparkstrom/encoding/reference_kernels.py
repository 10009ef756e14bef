"""Implement all kernels in NumPy, as the specification that faster backends must reproduce.

``theta`` are the parameters that all workers share, and tau is the threshold for sending. The
residual is what a worker has learned but not yet sent. Kernels named ``*_local`` compute it as
``local - theta``, where ``local`` are the worker's own parameters; for kernels named ``*_replica``
it is a separate array.

A hit is a parameter whose residual has reached tau in absolute value. A hit's code is its index if
the residual is positive, and ``~index`` if negative; "sign" is +1 or -1 accordingly. Callers
allocate all memory.

Theta and all its changes are multiples of the quantum q, so that float32 sums are exact as long as
|theta| <= 2^24 q (the exact range). Kernels that change theta return (overflows, first): how many
parameters left this range, and the index of the first of them, or -1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparkstrom.encoding.forms import DOWN, HALF, NOTHING, UP
from sparkstrom.encoding.grid import EXACT_QUANTA

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


def scan_local(local: F32, theta: F32, tau: float, codes: I32) -> tuple[int, int]:
    """Write the codes of all hits, where |local - theta| >= tau.

    local   f32[n]         in                            (parameter units)
    theta   f32[n]         in                            (parameter units)
    tau     f32            in    > 0                     (parameter units)
    codes   i32[capacity]  out   ascending, then garbage; hits beyond capacity are only counted
    returns (hits, worst)  number of hits; largest bits(local) & 0x7fffffff, NaN or infinite if
                           >= 0x7f800000
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return _write_codes(local - theta, tau, codes), _largest_bits(local)


def scan_replica(residual: F32, delta: F32, tau: float, codes: I32) -> tuple[int, int]:
    """Add delta to the residual, then write the codes of all hits, where |residual| >= tau.

    residual f32[n]         in/out                        (parameter units)
    delta    f32[n]         in                            (parameter units)
    tau      f32            in    > 0                     (parameter units)
    codes    i32[capacity]  out   ascending, then garbage; hits beyond capacity are only counted
    returns  (hits, worst)  as in ``scan_local``, with the bits of the residual
    """
    with np.errstate(invalid="ignore", over="ignore"):
        residual += delta
        return _write_codes(residual, tau, codes), _largest_bits(residual)


def move(
    theta: F32, other: F32, codes: I32, step: float, other_step: float, q: float
) -> tuple[int, int]:
    """Apply hits: add sign * step to theta, and sign * other_step to ``other``, at their indices.

    theta      f32[n]     in/out                               (parameter units)
    other      f32[n]     in/out  local or residual            (parameter units)
    codes      i32[hits]  in      from a scan, no index twice
    step       f32        in      > 0, a multiple of q         (parameter units)
    other_step f32        in      multiple of q; 0: ``other`` is not used
    """
    sign = np.where(codes >= 0, 1.0, -1.0)
    where = np.where(codes >= 0, codes, ~codes)
    exact = theta[where] + sign * step
    theta[where] = exact
    if other_step:
        other[where] += (sign * other_step).astype(np.float32)
    return _count_overflows(exact, where, q)


def choose_local(local: F32, theta: F32, tau: float, limit: int, seed: int, codes: I32) -> int:
    """Write the codes of hits like ``scan_local``, but select hits below 2 tau at random.

    local   f32[n]         in                            (parameter units)
    theta   f32[n]         in                            (parameter units)
    tau     f32            in    > 0                     (parameter units)
    limit   i64            in    0 .. 2^32: a hit below 2 tau needs ``hash_indices`` < limit
    seed    i64            in    >= 0
    codes   i32[capacity]  out   ascending, then garbage; hits beyond capacity are only counted
    returns i64                  number of selected hits
    """
    return choose_replica(local - theta, tau, limit, seed, codes)


def choose_replica(residual: F32, tau: float, limit: int, seed: int, codes: I32) -> int:
    """Select hits like ``choose_local``, with the residual f32[n] in place of local and theta."""
    sizes, least = np.abs(residual), np.float32(tau)
    by_chance = hash_indices(np.arange(residual.size), seed) < limit
    taken = np.flatnonzero((sizes >= least + least) | ((sizes >= least) & by_chance))
    written = taken[: codes.size]
    codes[: written.size] = np.where(residual[written] > 0, written, ~written)
    return int(taken.size)


def hash_indices(i: NDArray[np.integer], seed: int) -> NDArray[np.uint64]:
    """Hash each index with the seed to a pseudo-random number in [0, 2^32).

    The hash is the finaliser of MurmurHash3.
    """
    low = np.uint64(0xFFFFFFFF)
    x = (i.astype(np.uint64) * np.uint64(0x9E3779B1) + np.uint64(seed)) & low
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & low
    x = ((x ^ (x >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & low
    mixed: NDArray[np.uint64] = x ^ (x >> np.uint64(16))
    return mixed


def sample(one: F32, other: F32, sign: int, seed: int, where: I32, sizes: F32) -> None:
    """Sample the absolute values of the residuals ``one + sign * other`` at random indices.

    An index may occur twice.

        one, other  f32[n]  in                                          (parameter units)
        sign        i64     in   -1 or 1
        seed        i64     in   >= 0
        where       i32[m]  out  indices: n / 2^32 times ``hash_indices`` of 0, 1, 2 ...
        sizes       f32[m]  out  absolute values at these indices, including NaN and infinity
    """
    where[:] = (hash_indices(np.arange(where.size), seed) * np.uint64(one.size)) >> np.uint64(32)
    with np.errstate(invalid="ignore", over="ignore"):
        sizes[:] = np.abs(one[where] + np.float32(sign) * other[where])


def find_levels_local(local: F32, theta: F32, codes: I32, tau: float, top: int, levels: U8) -> int:
    """Write each hit's level: the largest l <= top with |local - theta| >= tau * 2^l.

    codes   i32[hits]  in    from a scan with this tau, no index twice
    top     i64        in    0 .. 7: the highest level to use
    levels  u8[hits]   out   level of each hit
    returns i64              the highest of the levels; 0 without hits
    """
    return find_levels_replica(local - theta, codes, tau, top, levels)


def find_levels_replica(residual: F32, codes: I32, tau: float, top: int, levels: U8) -> int:
    """Write each hit's level like ``find_levels_local``, in the array ``residual`` f32[n]."""
    sizes = np.abs(residual[np.where(codes >= 0, codes, ~codes)])
    levels[:] = 0
    for level in range(1, top + 1):
        levels[sizes >= np.float32(tau) * np.float32(2**level)] = level
    return int(np.max(levels, initial=0))


def move_by_levels(
    theta: F32, other: F32, codes: I32, levels: U8, step: float, other_step: float, q: float
) -> tuple[int, int]:
    """Apply hits like ``move``, with each hit's steps multiplied by 2^level.

    levels     u8[hits]   in      level of each hit
    """
    times = np.where(codes >= 0, 1.0, -1.0) * 2.0**levels
    where = np.where(codes >= 0, codes, ~codes)
    exact = theta[where] + times * step
    theta[where] = exact
    if other_step:
        other[where] += (times * other_step).astype(np.float32)
    return _count_overflows(exact, where, q)


def shift_codes(codes: I32, start: int) -> None:
    """Add ``start`` to the index in each hit code, in place.

    This turns codes for a part of the parameters into codes for all parameters.

    codes  i32[hits]  in/out
    start  i64        in      index at which the part begins
    """
    codes += np.where(codes < 0, -start, start).astype(np.int32)


def bitmap_local(
    local: F32, theta: F32, tau: float, step: float, side: int, q: float, scratch: U8, out: U8
) -> tuple[int, int, int, int]:
    """Write local - theta as a bitmap, and apply the bitmap to theta and local.

    local   f32[n]        in/out  += sign * (step - tau)       (parameter units)
    theta   f32[n]        in/out  += sign * step               (parameter units)
    tau     f32           in      > 0, an even multiple of q   (parameter units)
    step    f32           in      > 0, <= tau, even multiple   (parameter units)
    side    i64           in      +1 or -1: the sign of half steps (tau/2, step/2) to send
    scratch u8[512]       -       working memory
    out     u8[(n+3)//4]  out     parameter i in bits 2(i%4), 2(i%4)+1 of byte i//4; padding 0
    returns (hits, half steps, overflows, first overflow)
    """
    with np.errstate(invalid="ignore", over="ignore"):
        states = _bitmap_states(local - theta, tau, side)
    signs = _step_multiples(states, side)
    exact = theta + signs * step
    theta[:] = exact
    if step != tau:
        local += (signs * (step - tau)).astype(np.float32)
    return _pack_bitmap(states, out, exact, q)


def bitmap_replica(
    residual: F32, theta: F32, tau: float, step: float, side: int, q: float, scratch: U8, out: U8
) -> tuple[int, int, int, int]:
    """Write the residual as a bitmap, and apply the bitmap to theta and the residual.

    Like ``bitmap_local``, but sign * tau is subtracted from the residual, f32[n] in/out.
    """
    states = _bitmap_states(residual, tau, side)
    signs = _step_multiples(states, side)
    exact = theta + signs * step
    theta[:] = exact
    residual -= (signs * tau).astype(np.float32)
    return _pack_bitmap(states, out, exact, q)


def bitmap_count(packed: U8, n: int) -> int:
    """Count the entries of a bitmap of n parameters; return -1 if padding bits are set.

    packed u8[(n+3)//4] in
    """
    states = _unpack_bitmap(packed)
    return -1 if states[n:].any() else int(np.count_nonzero(states))


def bitmap_decode(packed: U8, n: int, side: int, quanta: int, indices: I32, amounts: I32) -> int:
    """Unpack a bitmap to indices and signed quanta to add.

    packed  u8[(n+3)//4]  in
    quanta  i32           in   tau in quanta, even
    indices i32[count]    out  ascending; count is the result of ``bitmap_count``
    amounts i32[count]    out  +-quanta, or +-quanta/2 for half steps
    returns i64                number of entries written
    """
    states = _unpack_bitmap(packed)[:n]
    where = np.flatnonzero(states)
    indices[: where.size] = where
    table = np.array([0, quanta, -quanta, side * (quanta // 2)], np.int32)
    amounts[: where.size] = table[states[where]]
    return int(where.size)


def bitmap_add(
    theta: F32, packed: U8, side: int, step: float, q: float, scratch: U8
) -> tuple[int, int]:
    """Add a bitmap to theta, like ``bitmap_decode`` and ``apply_hits`` together.

    theta   f32[n]        in/out                               (parameter units)
    packed  u8[(n+3)//4]  in
    side    i64           in      +1 or -1: the sign of half steps
    step    f32           in      > 0, an even multiple of q   (parameter units)
    scratch u8[512]       -       working memory
    """
    signs = _step_multiples(_unpack_bitmap(packed)[: theta.size], side)
    exact = theta + signs * step
    theta[:] = exact
    moved = np.flatnonzero(signs)
    return _count_overflows(exact[moved], moved, q)


def bitmap_add_both(
    theta: F32, local: F32, packed: U8, side: int, step: float, q: float, scratch: U8
) -> tuple[int, int]:
    """Add a bitmap to theta and local; local - theta stays the same, up to rounding of local.

    Return the overflows of theta; those of local are not counted. The other arguments are those of
    ``bitmap_add``.
    """
    local[:] = local + _step_multiples(_unpack_bitmap(packed)[: local.size], side) * step
    return bitmap_add(theta, packed, side, step, q, scratch)


def apply_hits(theta: F32, indices: I32, quanta: I32, q: float) -> tuple[int, int]:
    """Add quanta * q to theta at ``indices``, exactly.

    theta   f32[n]     in/out                         (parameter units)
    indices i32[hits]  in   no index twice
    quanta  i32[hits]  in                             (multiples of q)
    """
    exact = theta[indices] + quanta.astype(np.float64) * q
    theta[indices] = exact
    return _count_overflows(exact, indices, q)


def apply_hits_both(theta: F32, local: F32, indices: I32, quanta: I32, q: float) -> tuple[int, int]:
    """Add ``quanta * q`` to theta and local at ``indices``; return what ``apply_hits`` returns.

    The difference local - theta stays the same, up to the rounding of local to float32.
    """
    local[indices] = local[indices] + quanta.astype(np.float64) * q
    return apply_hits(theta, indices, quanta, q)


def sum_hits(total: I32, indices: I32, quanta: I32) -> tuple[int, int]:
    """Add quanta to ``total`` at ``indices``, as integers that wrap around.

    total   i32[n]   in/out                           (multiples of q)
    returns (number of sums that wrapped around, index of the first or -1)
    """
    exact = total[indices].astype(np.int64) + quanta
    wrapped = exact.astype(np.int32)
    total[indices] = wrapped
    over = np.flatnonzero(wrapped != exact)
    return int(over.size), int(indices[over[0]]) if over.size else -1


def add_quanta(theta: F32, total: I32, q: float) -> tuple[int, int]:
    """Add total * q to theta, exactly.

    theta f32[n]  in/out                              (parameter units)
    total i32[n]  in                                  (multiples of q)
    """
    exact = theta + total.astype(np.float64) * q
    theta[:] = exact
    return _count_overflows(exact, np.arange(theta.size), q)


def add_quanta_both(theta: F32, local: F32, total: I32, q: float) -> tuple[int, int]:
    """Add total * q to theta and local; local - theta stays the same, up to rounding of local."""
    local[:] = local + total.astype(np.float64) * q
    return add_quanta(theta, total, q)


def clip_local(local: F32, theta: F32, limit: float) -> float:
    """Clip local to within ``limit`` of theta; return the sum of absolute changes.

    local f32[n]  in/out                              (parameter units)
    theta f32[n]  in                                  (parameter units)
    limit f32     in    > 0                           (parameter units)
    """
    before = local.astype(np.float64)
    residual = local - theta
    most = np.float32(limit)
    np.copyto(local, theta + most, where=residual > most)
    np.copyto(local, theta - most, where=residual < -most)
    return float(np.abs(before - local).sum())


def clip_replica(residual: F32, limit: float) -> float:
    """Clip the residual f32[n] to +-limit; return the sum of absolute changes."""
    before = residual.astype(np.float64)
    np.clip(residual, -np.float32(limit), np.float32(limit), out=residual)
    return float(np.abs(before - residual).sum())


def residual_sums_local(local: F32, theta: F32) -> tuple[float, float]:
    """Return (sum of |local - theta|, sum of (local - theta)^2), in float64."""
    return residual_sums_replica(local - theta)


def residual_sums_replica(residual: F32) -> tuple[float, float]:
    """Return (sum of |residual|, sum of residual^2), in float64."""
    wide = residual.astype(np.float64)
    return float(np.abs(wide).sum()), float(np.square(wide).sum())


def _write_codes(residual: F32, tau: float, codes: I32) -> int:
    """Write the codes of a residual's hits as long as there is room; return the number of hits."""
    hits = np.flatnonzero(np.abs(residual) >= np.float32(tau))
    written = hits[: codes.size]
    codes[: written.size] = np.where(residual[written] > 0, written, ~written)
    return int(hits.size)


def _largest_bits(values: F32) -> int:
    """Return the largest bit pattern of all absolute values, which reveals NaN and infinity."""
    return int(np.max(values.view(np.int32) & 0x7FFFFFFF, initial=0))


def _count_overflows(
    exact: NDArray[np.float64], where: NDArray[np.integer], q: float
) -> tuple[int, int]:
    """Return (number of values beyond the exact range, index of the first or -1)."""
    over = np.flatnonzero(np.abs(exact) > EXACT_QUANTA * q)
    return int(over.size), int(where[over[0]]) if over.size else -1


def _bitmap_states(residual: F32, tau: float, side: int) -> U8:
    """Return each parameter's bitmap state for this tau, with half steps of the sign ``side``."""
    states = np.full(residual.size, NOTHING, np.uint8)
    states[residual * np.float32(side) >= np.float32(tau / 2)] = HALF
    states[residual >= np.float32(tau)] = UP
    states[residual <= -np.float32(tau)] = DOWN
    return states


def _step_multiples(states: U8, side: int) -> NDArray[np.float64]:
    """Return each state's multiple of a step: 0, 1, -1 or side / 2."""
    return np.array([0, 1, -1, side / 2])[states]


def _pack_bitmap(
    states: U8, out: U8, exact: NDArray[np.float64], q: float
) -> tuple[int, int, int, int]:
    """Pack states into the bitmap ``out``; return (hits, half steps, overflows, first overflow).

    ``exact`` f64[n] are the new values of theta, among which overflows are counted.
    """
    quads = np.zeros((out.size, 4), np.uint8)
    quads.reshape(-1)[: states.size] = states
    out[:] = quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6
    halves = int(np.count_nonzero(states == HALF))
    hits = int(np.count_nonzero(states)) - halves
    moved = np.flatnonzero(states)
    return (hits, halves, *_count_overflows(exact[moved], moved, q))


def _unpack_bitmap(packed: U8) -> U8:
    """Unpack a bitmap to an array of states, one per parameter (and padding)."""
    states = np.empty((packed.size, 4), np.uint8)
    for slot in range(4):
        states[:, slot] = packed >> (2 * slot) & 3
    return states.reshape(-1)
