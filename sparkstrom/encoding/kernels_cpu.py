"""The kernels in Numba: same names and argument tables as in ``reference``, at memory speed.

A scan looks at blocks with one loop that the compiler vectorises, and looks again only where a
block holds a hit, in groups of 16 and there without branches. Integer maxima over
``bits & 0x7fffffff`` find NaN and infinity for nothing. Helpers live in this file: Numba's cache
does not see edits of imported ones.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparkstrom.encoding.compiled import BYTES, helper, kernel
from sparkstrom.encoding.grid import EXACT_QUANTA

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]

BLOCK = 128  # parameters per first look: a constant, so that the loop is vectors only
GROUP = 16  # parameters per second look
BITMAP_BLOCK = 512  # parameters per round of bitmap loops: all their memory stays in the L1 cache
MAGNITUDE = np.int32(0x7FFFFFFF)


@helper
def _note(value: float, tau: float, i: int, codes: I32, hits: int) -> int:
    if not abs(value) >= tau:
        return hits
    if hits < codes.shape[0]:
        codes[hits] = i if value > 0 else ~i
    return hits + 1


@helper
def _gather(values: F32, tau: float, start: int, codes: I32, hits: int) -> int:
    """Append the hits among a block of values; one branch per group, none per value."""
    for first in range(0, BLOCK, GROUP):
        group = values[first : first + GROUP]
        found = np.int32(0)
        for i in range(GROUP):
            found |= np.int32(abs(group[i]) >= tau)
        if found == 0:
            continue
        if hits + GROUP > codes.shape[0]:
            for i in range(GROUP):
                hits = _note(group[i], tau, start + first + i, codes, hits)
            continue
        for i in range(GROUP):
            codes[hits] = np.int32(start + first + i) ^ -np.int32(group[i] < 0)  # ^ -1 is ~
            hits += abs(group[i]) >= tau
    return hits


@helper
def _gather_difference(
    local: F32, theta: F32, tau: float, start: int, codes: I32, hits: int
) -> int:
    """``_gather`` for local - theta."""
    for first in range(0, BLOCK, GROUP):
        mine, shared = local[first : first + GROUP], theta[first : first + GROUP]
        found = np.int32(0)
        for i in range(GROUP):
            found |= np.int32(abs(mine[i] - shared[i]) >= tau)
        if found == 0:
            continue
        if hits + GROUP > codes.shape[0]:
            for i in range(GROUP):
                hits = _note(mine[i] - shared[i], tau, start + first + i, codes, hits)
            continue
        for i in range(GROUP):
            value = mine[i] - shared[i]
            codes[hits] = np.int32(start + first + i) ^ -np.int32(value < 0)
            hits += abs(value) >= tau
    return hits


@kernel("UniTuple(i8, 2)(f4[::1], f4[::1], f4, i4[::1])")
def scan_local(local: F32, theta: F32, tau: float, codes: I32) -> tuple[int, int]:
    """See ``reference.scan_local``."""
    hits, worst = 0, np.int32(0)
    tail = local.shape[0] - local.shape[0] % BLOCK
    for start in range(0, tail, BLOCK):
        mine, shared = local[start : start + BLOCK], theta[start : start + BLOCK]
        bits = mine.view(np.int32)
        found = np.int32(0)
        for i in range(BLOCK):
            worst = max(worst, np.int32(bits[i] & MAGNITUDE))
            found |= np.int32(abs(mine[i] - shared[i]) >= tau)
        if found:
            hits = _gather_difference(mine, shared, tau, start, codes, hits)
    for i in range(tail, local.shape[0]):
        worst = max(worst, np.int32(local.view(np.int32)[i] & MAGNITUDE))
        hits = _note(local[i] - theta[i], tau, i, codes, hits)
    return hits, int(worst)


@kernel("UniTuple(i8, 2)(f4[::1], f4[::1], f4, i4[::1])")
def scan_replica(residual: F32, delta: F32, tau: float, codes: I32) -> tuple[int, int]:
    """See ``reference.scan_replica``."""
    hits, worst = 0, np.int32(0)
    tau_bits = np.float32(tau).view(np.int32)
    tail = residual.shape[0] - residual.shape[0] % BLOCK
    for start in range(0, tail, BLOCK):
        kept, new = residual[start : start + BLOCK], delta[start : start + BLOCK]
        bits = kept.view(np.int32)
        largest = np.int32(0)
        for i in range(BLOCK):
            kept[i] += new[i]
            largest = max(largest, np.int32(bits[i] & MAGNITUDE))
        worst = max(worst, largest)
        if largest >= tau_bits:  # the bits of positive floats are ordered as the floats are
            hits = _gather(kept, tau, start, codes, hits)
    for i in range(tail, residual.shape[0]):
        residual[i] += delta[i]
        worst = max(worst, np.int32(residual.view(np.int32)[i] & MAGNITUDE))
        hits = _note(residual[i], tau, i, codes, hits)
    return hits, int(worst)


@kernel("UniTuple(i8, 2)(f4[::1], f4[::1], i4[::1], f4, f4, f8)")
def move(
    theta: F32, other: F32, codes: I32, step: float, other_step: float, q: float
) -> tuple[int, int]:
    """See ``reference.move``."""
    breaches, first = 0, -1
    for j in range(codes.shape[0]):
        i, sign = codes[j], np.float32(1)
        if i < 0:
            i, sign = ~i, np.float32(-1)
        exact = np.float64(theta[i]) + np.float64(sign * step)
        theta[i] = exact
        other[i] += sign * other_step
        if abs(exact) > EXACT_QUANTA * q:
            breaches, first = breaches + 1, (i if first < 0 else first)
    return breaches, first


@helper
def _states(values: F32, tau: float, side: int, states: U8) -> None:
    half = np.float32(tau / 2)
    toward = np.float32(side)
    for i in range(values.shape[0]):
        up, down = np.uint8(values[i] >= tau), np.uint8(values[i] <= -tau)
        halfway = np.uint8(values[i] * toward >= half)
        states[i] = up | (down << 1) | ((halfway & ~(up | down)) * 3)


@helper
def _states_of_difference(local: F32, theta: F32, tau: float, side: int, states: U8) -> None:
    half = np.float32(tau / 2)
    toward = np.float32(side)
    for i in range(local.shape[0]):
        value = local[i] - theta[i]
        up, down = np.uint8(value >= tau), np.uint8(value <= -tau)
        halfway = np.uint8(value * toward >= half)
        states[i] = up | (down << 1) | ((halfway & ~(up | down)) * 3)


@helper
def _sign(state: np.uint8, side: int) -> np.float32:
    half = np.float32(state == 3) * np.float32(side) * np.float32(0.5)
    return np.float32(np.float32(state == 1) - np.float32(state == 2) + half)


@helper
def _look_for_breaches(
    states: U8, theta: F32, step: float, side: int, start: int, q: float, so_far: tuple[int, int]
) -> tuple[int, int]:
    """Count the parameters that are about to leave the exact range."""
    limit, found = EXACT_QUANTA * q, np.int32(0)
    for i in range(states.shape[0]):
        found |= np.int32(abs(theta[i] + np.float64(_sign(states[i], side) * step)) > limit)
    breaches, first = so_far
    if found:
        for i in range(states.shape[0]):
            over = abs(theta[i] + np.float64(_sign(states[i], side) * step)) > limit
            if over and states[i]:
                breaches, first = breaches + 1, (start + i if first < 0 else first)
    return breaches, first


@helper
def _move_states(states: U8, values: F32, step: float, side: int) -> None:
    for i in range(states.shape[0]):
        values[i] += _sign(states[i], side) * step


@helper
def _pack(states: U8, out: U8) -> tuple[int, int]:
    """Four states to a byte; return how many are hits, and how many half steps."""
    hits, halves = 0, 0
    for i in range(states.shape[0]):
        hits += (states[i] == 1) | (states[i] == 2)
        halves += states[i] == 3
    whole = states.shape[0] // 4
    for j in range(whole):
        low = states[4 * j] | (states[4 * j + 1] << 2)
        out[j] = low | (states[4 * j + 2] << 4) | (states[4 * j + 3] << 6)
    if states.shape[0] % 4:
        out[whole] = 0
        for i in range(4 * whole, states.shape[0]):
            out[whole] |= states[i] << (2 * (i % 4))
    return hits, halves


@kernel("UniTuple(i8, 4)(f4[::1], f4[::1], f4, f4, i8, f8, u1[::1], u1[::1])")
def bitmap_local(
    local: F32, theta: F32, tau: float, step: float, side: int, q: float, scratch: U8, out: U8
) -> tuple[int, int, int, int]:
    """See ``reference.bitmap_local``."""
    hits, halves, breaches = 0, 0, (0, -1)
    for start in range(0, local.shape[0], BITMAP_BLOCK):
        mine, shared = local[start : start + BITMAP_BLOCK], theta[start : start + BITMAP_BLOCK]
        states = scratch[: mine.shape[0]]
        _states_of_difference(mine, shared, tau, side, states)
        breaches = _look_for_breaches(states, shared, step, side, start, q, breaches)
        _move_states(states, shared, step, side)
        if step != tau:
            _move_states(states, mine, step - tau, side)
        counted = _pack(states, out[start // 4 :])
        hits, halves = hits + counted[0], halves + counted[1]
    return hits, halves, breaches[0], breaches[1]


@kernel("UniTuple(i8, 4)(f4[::1], f4[::1], f4, f4, i8, f8, u1[::1], u1[::1])")
def bitmap_replica(
    residual: F32, theta: F32, tau: float, step: float, side: int, q: float, scratch: U8, out: U8
) -> tuple[int, int, int, int]:
    """See ``reference.bitmap_replica``."""
    hits, halves, breaches = 0, 0, (0, -1)
    for start in range(0, residual.shape[0], BITMAP_BLOCK):
        mine, shared = residual[start : start + BITMAP_BLOCK], theta[start : start + BITMAP_BLOCK]
        states = scratch[: mine.shape[0]]
        _states(mine, tau, side, states)
        breaches = _look_for_breaches(states, shared, step, side, start, q, breaches)
        _move_states(states, shared, step, side)
        _move_states(states, mine, -tau, side)
        counted = _pack(states, out[start // 4 :])
        hits, halves = hits + counted[0], halves + counted[1]
    return hits, halves, breaches[0], breaches[1]


@kernel(f"i8({BYTES}, i8)")
def bitmap_count(packed: U8, n: int) -> int:
    """See ``reference.bitmap_count``."""
    count = 0
    for j in range(packed.shape[0]):
        used = (packed[j] | (packed[j] >> 1)) & 0x55
        count += (used & 1) + ((used >> 2) & 1) + ((used >> 4) & 1) + (used >> 6)
    if n % 4 and packed[n // 4] >> (2 * (n % 4)):
        return -1
    return count


@kernel(f"i8({BYTES}, i8, i8, i4, i4[::1], i4[::1])")
def bitmap_decode(packed: U8, n: int, side: int, quanta: int, indices: I32, amounts: I32) -> int:
    """See ``reference.bitmap_decode``."""
    written = 0
    for j in range(packed.shape[0]):
        if packed[j] == 0:
            continue
        for slot in range(4):
            state = (packed[j] >> (2 * slot)) & 3
            if state == 0 or 4 * j + slot >= n or written >= indices.shape[0]:
                continue
            amount = side * (quanta // 2) if state == 3 else (quanta if state == 1 else -quanta)
            indices[written], amounts[written] = 4 * j + slot, amount
            written += 1
    return written


@kernel("UniTuple(i8, 2)(f4[::1], i4[::1], i4[::1], f8)")
def apply_hits(theta: F32, indices: I32, quanta: I32, q: float) -> tuple[int, int]:
    """See ``reference.apply_hits``."""
    breaches, first = 0, -1
    for j in range(indices.shape[0]):
        exact = theta[indices[j]] + quanta[j] * q
        theta[indices[j]] = exact
        if abs(exact) > EXACT_QUANTA * q:
            breaches, first = breaches + 1, (indices[j] if first < 0 else first)
    return breaches, first


@kernel("UniTuple(i8, 2)(f4[::1], f4[::1], i4[::1], i4[::1], f8)")
def apply_hits_both(theta: F32, local: F32, indices: I32, quanta: I32, q: float) -> tuple[int, int]:
    """See ``reference.apply_hits_both``."""
    for j in range(indices.shape[0]):
        local[indices[j]] += quanta[j] * q
    return apply_hits(theta, indices, quanta, q)


@kernel("UniTuple(i8, 2)(i4[::1], i4[::1], i4[::1])")
def sum_hits(total: I32, indices: I32, quanta: I32) -> tuple[int, int]:
    """See ``reference.sum_hits``."""
    overflows, first = 0, -1
    for j in range(indices.shape[0]):
        exact = np.int64(total[indices[j]]) + np.int64(quanta[j])
        total[indices[j]] = exact
        if total[indices[j]] != exact:
            overflows, first = overflows + 1, (indices[j] if first < 0 else first)
    return overflows, first


@kernel("UniTuple(i8, 2)(f4[::1], i4[::1], f8)")
def add_quanta(theta: F32, total: I32, q: float) -> tuple[int, int]:
    """See ``reference.add_quanta``."""
    breaches, first = 0, -1
    for i in range(theta.shape[0]):
        exact = theta[i] + total[i] * q
        theta[i] = exact
        if abs(exact) > EXACT_QUANTA * q:
            breaches, first = breaches + 1, (i if first < 0 else first)
    return breaches, first


@kernel("UniTuple(i8, 2)(f4[::1], f4[::1], i4[::1], f8)")
def add_quanta_both(theta: F32, local: F32, total: I32, q: float) -> tuple[int, int]:
    """See ``reference.add_quanta_both``."""
    for i in range(local.shape[0]):
        local[i] += total[i] * q
    return add_quanta(theta, total, q)


@kernel("f8(f4[::1], f4[::1], f4)")
def clip_local(local: F32, theta: F32, limit: float) -> float:
    """See ``reference.clip_local``."""
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
    """See ``reference.clip_replica``."""
    mass = 0.0
    for i in range(residual.shape[0]):
        if abs(residual[i]) > limit:
            before = np.float64(residual[i])
            residual[i] = limit if residual[i] > 0 else -limit
            mass += abs(before - residual[i])
    return mass


@kernel("UniTuple(f8, 2)(f4[::1], f4[::1])")
def norms_local(local: F32, theta: F32) -> tuple[float, float]:
    """See ``reference.norms_local``."""
    mass, square = 0.0, 0.0
    for i in range(local.shape[0]):
        value = np.float64(local[i] - theta[i])
        mass, square = mass + abs(value), square + value * value
    return mass, square


@kernel("UniTuple(f8, 2)(f4[::1])")
def norms_replica(residual: F32) -> tuple[float, float]:
    """See ``reference.norms_replica``."""
    mass, square = 0.0, 0.0
    for i in range(residual.shape[0]):
        value = np.float64(residual[i])
        mass, square = mass + abs(value), square + value * value
    return mass, square
