"""Bitmaps on the device: written by the block, added to theta parameter by parameter.

The threads of a block look at parameters side by side and leave each one's state in shared memory;
when all of the tile is there, they make bytes of four. Signs are chosen, not multiplied by.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from sparkstrom.encoding.cuda.cuda_blocks import LAST, note_if
from sparkstrom.encoding.cuda.cuda_device import (
    ITEMS,
    THREADS,
    TILE,
    DeviceArray,
    blocks_of,
    helper,
    kernel,
    scratch,
    taken,
    tiles_of,
)
from sparkstrom.encoding.grid import EXACT_QUANTA

F32, F64, I32, U8 = np.float32, np.float64, np.int32, np.uint8


@helper
def _state(value: Any, tau: Any, half: Any, side: Any) -> Any:
    if value >= tau:
        return U8(1)
    if value <= -tau:
        return U8(2)
    toward = value if side > 0 else -value
    return U8(3) if toward >= half else U8(0)


@helper
def _amount(state: Any, step: Any, part: Any) -> Any:
    if state == U8(3):
        return part
    return step if state == U8(1) else -step


@kernel("void(f4[::1], f4[::1], b1, f4, i8, f4, f4, f8, u1[::1], i4[::1])")
def _write(
    other: Any,
    theta: Any,
    difference: Any,
    tau: Any,
    side: Any,
    step: Any,
    other_step: Any,
    limit: Any,
    out: Any,
    answer: Any,
) -> None:
    """``other`` is local, and the residual its difference to theta; or the residual itself."""
    states = cuda.shared.array(TILE, np.uint8)
    counts = cuda.shared.array(2, np.int32)
    n, thread = other.shape[0], cuda.threadIdx.x
    hits, halves = I32(0), I32(0)
    half, toward = tau / F32(2), F32(0.5) if side > 0 else F32(-0.5)
    if thread < 2:
        counts[thread] = I32(0)
    for item in range(ITEMS):
        place = item * THREADS + thread
        i, state = cuda.blockIdx.x * TILE + place, U8(0)
        if i < n:
            value = other[i] - theta[i] if difference else other[i]
            state = _state(value, tau, half, side)
            if state != U8(0):
                exact = F64(theta[i]) + F64(_amount(state, step, F32(step * toward)))
                theta[i] = F32(exact)
                if other_step != F32(0):
                    change = _amount(state, other_step, F32(other_step * toward))
                    other[i] = F32(other[i] + change)
                note_if(abs(exact) > limit, i, answer)
                hits += I32(state != U8(3))
                halves += I32(state == U8(3))
        states[place] = state
    cuda.syncthreads()
    for item in range(ITEMS // 4):
        place = item * THREADS + thread
        byte = cuda.blockIdx.x * (TILE // 4) + place
        if byte < out.shape[0]:
            low = states[4 * place] | states[4 * place + 1] << U8(2)
            out[byte] = U8(low | states[4 * place + 2] << U8(4) | states[4 * place + 3] << U8(6))
    cuda.atomic.add(counts, 0, hits)
    cuda.atomic.add(counts, 1, halves)
    cuda.syncthreads()
    if thread < 2:
        cuda.atomic.add(answer, 2 + thread, counts[thread])


@kernel("void(f4[::1], u1[::1], f4, f4, f8, i4[::1])")
def _add(theta: Any, packed: Any, step: Any, part: Any, limit: Any, answer: Any) -> None:
    i = cuda.grid(1)
    if i < theta.shape[0]:
        state = U8(I32(packed[i >> 2]) >> I32(2 * (i & 3)) & I32(3))
        if state != U8(0):
            exact = F64(theta[i]) + F64(_amount(state, step, part))
            theta[i] = F32(exact)
            note_if(abs(exact) > limit, i, answer)


def bitmap_local(
    local: Any, theta: Any, tau: float, step: float, side: int, q: float, unused: Any, out: Any
) -> tuple[int, int, int, int]:
    """See ``reference.bitmap_local``."""
    return _written(local, theta, True, tau, step, step - tau, side, q, out)


def bitmap_replica(
    residual: Any, theta: Any, tau: float, step: float, side: int, q: float, unused: Any, out: Any
) -> tuple[int, int, int, int]:
    """See ``reference.bitmap_replica``."""
    return _written(residual, theta, False, tau, step, -tau, side, q, out)


def _written(
    other: Any,
    theta: Any,
    difference: bool,
    tau: float,
    step: float,
    other_step: float,
    side: int,
    q: float,
    out: Any,
) -> tuple[int, int, int, int]:
    values, to = taken(other, np.float32, "local or residual"), taken(theta, np.float32, "theta")
    packed, answer = taken(out, np.uint8, "out"), _answer()
    if to.size:
        _write[tiles_of(to.size), THREADS](
            values,
            to,
            difference,
            np.float32(tau),
            side,
            np.float32(step),
            np.float32(other_step),
            EXACT_QUANTA * q,
            packed,
            answer,
        )
    return _noted(answer)


def bitmap_add(
    theta: Any, packed: Any, side: int, step: float, q: float, unused: Any
) -> tuple[int, int]:
    """See ``reference.bitmap_add``."""
    return _added(theta, packed, side, step, EXACT_QUANTA * q)


def bitmap_add_both(
    theta: Any, local: Any, packed: Any, side: int, step: float, q: float, unused: Any
) -> tuple[int, int]:
    """See ``reference.bitmap_add_both``."""
    _added(local, packed, side, step, np.inf)
    return bitmap_add(theta, packed, side, step, q, unused)


def _added(theta: Any, packed: Any, side: int, step: float, limit: float) -> tuple[int, int]:
    to, states, answer = (
        taken(theta, np.float32, "theta"),
        taken(packed, np.uint8, "packed"),
        _answer(),
    )
    steps = np.float32(step), np.float32(side * step / 2)
    if to.size:
        _add[blocks_of(to.size), THREADS](to, states, *steps, limit, answer)
    return _noted(answer)[2:]


def _answer() -> DeviceArray:
    return scratch.zeros("bitmap", 4)


def _noted(answer: DeviceArray) -> tuple[int, int, int, int]:
    """(hits, half steps, overflows, first overflow); ``answer`` is 0 again."""
    overflows, last, hits, halves = answer.copy_to_host().tolist()
    if overflows or hits or halves:
        answer.copy_to_device(np.zeros(4, np.int32))
    return hits, halves, overflows, LAST - last if overflows else -1
