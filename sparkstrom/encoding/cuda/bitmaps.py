"""CUDA kernels that write bitmaps, and add bitmaps to parameters.

A bitmap stores an update with two bits per parameter. They are the parameter's state: unchanged,
+step, -step or half a step; all half steps of a bitmap have the same sign. To write a bitmap, the
threads of a block examine adjacent parameters (a tile) and store the states in shared memory. When
the tile is complete, they pack four states into each byte. Adding uses one thread per parameter.
Kernels select +step or -step instead of multiplying by a sign, so that results have the same bits
as on the CPU; ``device`` explains why. A parameter overflows if it leaves the range in which
float32 sums are exact. ``encoding.reference_kernels`` documents the arguments. ``unused`` is
ignored: the CPU kernels, which have the same signatures, get working memory in its place.
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
    tiles_of,
)
from sparkstrom.encoding.cuda.device_functions import LAST, count_if
from sparkstrom.encoding.grid import EXACT_QUANTA

F32, F64, I32, U8 = np.float32, np.float64, np.int32, np.uint8


@helper
def _bitmap_state(value: Any, tau: Any, half: Any, side: Any) -> Any:
    """Return the bitmap state for a residual: 1 is +tau, 2 -tau, 3 a half step, 0 nothing.

    ``half`` is tau / 2, and ``side`` (+1 or -1) is the sign of half steps.
    """
    if value >= tau:
        return U8(1)
    if value <= -tau:
        return U8(2)
    toward = value if side > 0 else -value
    return U8(3) if toward >= half else U8(0)


@helper
def _state_amount(state: Any, step: Any, part: Any) -> Any:
    """Return the amount that a nonzero state adds: +-step, or ``part`` (a half step)."""
    if state == U8(3):
        return part
    return step if state == U8(1) else -step


@kernel("void(f4[::1], f4[::1], b1, f4, i8, f4, f4, f8, u1[::1], i4[::1])")
def _write_kernel(
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
    """Write a residual as a bitmap, and apply the bitmap to theta and ``other``.

    A hit adds its sign * step to theta, and its sign * other_step to ``other``. A smaller residual
    of at least tau / 2 adds half of that if it has the sign ``side`` (a half step).

    other       f32[n]        in/out  local if ``difference`` is True, otherwise the residual
    theta       f32[n]        in/out  the shared parameters
    difference  b1            in      whether the residual is other - theta, not ``other``
    tau         f32           in      the threshold
    side        i64           in      +1 or -1: the sign of half steps
    step        f32           in      > 0
    other_step  f32           in      0: ``other`` is not changed
    limit       f64           in      a larger absolute value of theta is an overflow
    out         u8[(n+3)//4]  out     the bitmap, with four parameters per byte
    answer      i32[4]        in/out  overflows, first overflow (see ``count_if``), hits, half steps
    """
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
            state = _bitmap_state(value, tau, half, side)
            if state != U8(0):
                exact = F64(theta[i]) + F64(_state_amount(state, step, F32(step * toward)))
                theta[i] = F32(exact)
                if other_step != F32(0):
                    change = _state_amount(state, other_step, F32(other_step * toward))
                    other[i] = F32(other[i] + change)
                count_if(abs(exact) > limit, i, answer)
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
def _add_kernel(theta: Any, packed: Any, step: Any, part: Any, limit: Any, answer: Any) -> None:
    """Add a bitmap to theta; count overflows in ``answer``, as ``count_if`` does.

    ``part`` is a half step with its sign; values of theta above ``limit`` are overflows.
    """
    i = cuda.grid(1)
    if i < theta.shape[0]:
        state = U8(I32(packed[i >> 2]) >> I32(2 * (i & 3)) & I32(3))
        if state != U8(0):
            exact = F64(theta[i]) + F64(_state_amount(state, step, part))
            theta[i] = F32(exact)
            count_if(abs(exact) > limit, i, answer)


def bitmap_local(
    local: Any, theta: Any, tau: float, step: float, side: int, q: float, unused: Any, out: Any
) -> tuple[int, int, int, int]:
    """Write local - theta as a bitmap and apply it; return (hits, halves, overflows, first)."""
    return _write_bitmap(local, theta, True, tau, step, step - tau, side, q, out)


def bitmap_replica(
    residual: Any, theta: Any, tau: float, step: float, side: int, q: float, unused: Any, out: Any
) -> tuple[int, int, int, int]:
    """Write the residual as a bitmap and apply it; return (hits, halves, overflows, first)."""
    return _write_bitmap(residual, theta, False, tau, step, -tau, side, q, out)


def _write_bitmap(
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
    """Write a residual as a bitmap and apply it; return (hits, halves, overflows, first or -1).

    The arguments are as for ``_write_kernel``; ``q`` is the quantum.
    """
    values, to = (
        checked_array(other, np.float32, "local or residual"),
        checked_array(theta, np.float32, "theta"),
    )
    packed, answer = checked_array(out, np.uint8, "out"), _bitmap_counters()
    if to.size:
        _write_kernel[tiles_of(to.size), THREADS](
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
    return _read_counters(answer)


def bitmap_add(
    theta: Any, packed: Any, side: int, step: float, q: float, unused: Any
) -> tuple[int, int]:
    """Add a bitmap's steps to theta; return (overflows, index of the first or -1)."""
    return _add_bitmap(theta, packed, side, step, EXACT_QUANTA * q)


def bitmap_add_both(
    theta: Any, local: Any, packed: Any, side: int, step: float, q: float, unused: Any
) -> tuple[int, int]:
    """Add a bitmap's steps to theta and local.

    Return (overflows of theta, index of the first or -1). Overflows of local are not counted, and
    ``unused`` is ignored.
    """
    _add_bitmap(local, packed, side, step, np.inf)
    return bitmap_add(theta, packed, side, step, q, unused)


def _add_bitmap(theta: Any, packed: Any, side: int, step: float, limit: float) -> tuple[int, int]:
    """Add a bitmap to ``theta``, or another array; return (values above ``limit``, first or -1)."""
    to, states, answer = (
        checked_array(theta, np.float32, "theta"),
        checked_array(packed, np.uint8, "packed"),
        _bitmap_counters(),
    )
    steps = np.float32(step), np.float32(side * step / 2)
    if to.size:
        _add_kernel[blocks_of(to.size), THREADS](to, states, *steps, limit, answer)
    return _read_counters(answer)[2:]


def _bitmap_counters() -> DeviceArray:
    """Return a zeroed device array in which the kernels of this module count."""
    return scratch.zeros("bitmap", 4)


def _read_counters(answer: DeviceArray) -> tuple[int, int, int, int]:
    """Return (hits, half steps, overflows, first overflow or -1); reset ``answer`` to 0."""
    overflows, last, hits, halves = answer.copy_to_host().tolist()
    if overflows or hits or halves:
        answer.copy_to_device(np.zeros(4, np.int32))
    return hits, halves, overflows, LAST - last if overflows else -1
