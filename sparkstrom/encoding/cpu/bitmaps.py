"""CPU kernels for bitmaps; ``sparkstrom.encoding.reference_kernels`` documents the arguments.

A bitmap stores an update with two bits per parameter. They are the parameter's state: unchanged,
+step, -step or half a step; all half steps of a bitmap have the same sign. Each block of parameters
is processed by several small loops, each over numbers of one type, because the compiler can
vectorise these but not one large loop. States are packed and unpacked four at a time, as the bytes
of one 32-bit word. An overflow is a parameter that has left the range in which float32 sums are
exact.

Arguments of helpers: ``half`` is tau / 2, ``toward`` is the sign of half steps as a float, ``part``
is a half step with its sign, ``states`` has one byte for each state of a block, and ``q`` is the
quantum, the unit of parameters.
"""

# Compiled code mixes NumPy's and Python's scalars, which Numba treats alike, unlike mypy.
# mypy: disable-error-code="arg-type, assignment, return-value"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparkstrom.encoding.cpu.kernel_loader import BYTES, helper, kernel
from sparkstrom.encoding.grid import EXACT_QUANTA

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
U32, U64 = np.uint32, np.uint64

PACKED = 256  # bytes of a bitmap that are counted in one inner loop
BLOCK = 512  # parameters per block, whose memory fits into the L1 cache
MAGNITUDE = np.int32(0x7FFFFFFF)  # mask that removes a float's sign bit
STATES = U32(0x03030303)  # mask of the state in each byte of a word
LOWEST = U32(0x01010101)  # mask of the lowest bit in each byte of a word


@helper
def _sent_amount(
    value: float, tau: float, half: float, toward: float, step: float, part: float
) -> float:
    """Return the amount sent for a residual: +-step, ``part`` (a half step), or 0."""
    amount = np.float32(0)
    if value * toward >= half:
        amount = part
    if value >= tau:
        amount = step
    if value <= -tau:
        amount = -step
    return amount


@helper
def _bitmap_state(value: float, tau: float, half: float, toward: float) -> np.uint8:
    """Return the bitmap state for a residual: 1 is +tau, 2 -tau, 3 a half step, 0 nothing."""
    state = np.uint8(0)
    if value * toward >= half:
        state = np.uint8(3)
    if value >= tau:
        state = np.uint8(1)
    if value <= -tau:
        state = np.uint8(2)
    return state


@helper
def _may_overflow(theta: F32, start: np.uint64, size: int, step: float, q: float) -> bool:
    """Return whether adding +-``step`` could make one of theta[start : start + size] overflow."""
    bits, largest = theta.view(np.int32), np.int32(0)
    for i in range(size):
        largest = max(largest, np.int32(bits[start + U64(i)] & MAGNITUDE))
    return largest > np.float32(EXACT_QUANTA * q - step).view(np.int32)


@helper
def _count_overflow(
    value: float, amount: float, at: np.uint64, q: float, so_far: tuple[int, int]
) -> tuple[int, int]:
    """Return ``so_far``, updated for the parameter ``at``, to which ``amount`` will be added.

    ``value`` is the parameter's value before; ``so_far`` is (overflows, index of the first or -1).
    """
    overflows, first = so_far
    if amount != 0 and abs(np.float64(value) + np.float64(amount)) > EXACT_QUANTA * q:
        overflows, first = overflows + 1, (np.int64(at) if first < 0 else first)
    return overflows, first


@helper
def _sum_bytes(lanes: np.uint32) -> int:
    """Return the sum of the four bytes of the word ``lanes``."""
    pairs = (lanes & U32(0xFF00FF)) + ((lanes >> U32(8)) & U32(0xFF00FF))
    return np.int64((pairs & U32(0xFFFF)) + (pairs >> U32(16)))


@helper
def _pack_states(states: U8, size: int, out: U8, at: np.uint64) -> tuple[int, int]:
    """Pack ``size`` states into bytes from out[at] on; return (nonzero states, half steps)."""
    for i in range(size, (size + 3) // 4 * 4):
        states[U64(i)] = 0
    words, used, halves = states.view(np.uint32), U32(0), U32(0)
    for j in range((size + 3) // 4):  # at most 128 iterations, so a byte can hold each count
        word = words[U64(j)]
        high = word >> U32(1)
        used += (word | high) & LOWEST
        halves += (word & high) & LOWEST
        out[at + U64(j)] = np.uint8(word | (word >> U32(6)) | (word >> U32(12)) | (word >> U32(18)))
    return _sum_bytes(used), _sum_bytes(halves)


@helper
def _unpack_states(packed: U8, at: np.uint64, size: int, states: U8) -> None:
    """Unpack ``size`` states of a bitmap, from byte ``at`` on, to one byte each in ``states``."""
    words = states.view(np.uint32)
    for j in range((size + 3) // 4):
        byte = U32(packed[at + U64(j)])
        words[U64(j)] = (byte | (byte << U32(6)) | (byte << U32(12)) | (byte << U32(18))) & STATES


@kernel("UniTuple(i8, 4)(f4[::1], f4[::1], f4, f4, i8, f8, u1[::1], u1[::1])")
def bitmap_local(
    local: F32, theta: F32, tau: float, step: float, side: int, q: float, scratch: U8, out: U8
) -> tuple[int, int, int, int]:
    """Write local - theta as a bitmap and apply it; return (hits, halves, overflows, first)."""
    n, used, halves, overflows = local.shape[0], 0, 0, (0, -1)
    toward, half, rest = np.float32(side), tau * np.float32(0.5), step - tau
    part, rest_part = step * np.float32(0.5) * toward, rest * np.float32(0.5) * toward
    for block in range((n + BLOCK - 1) // BLOCK):
        start, size = U64(block * BLOCK), min(BLOCK, n - block * BLOCK)
        for i in range(size):
            value = local[start + U64(i)] - theta[start + U64(i)]
            scratch[U64(i)] = _bitmap_state(value, tau, half, toward)
        if _may_overflow(theta, start, size, step, q):
            for i in range(start, start + U64(size)):
                amount = _sent_amount(local[i] - theta[i], tau, half, toward, step, part)
                overflows = _count_overflow(theta[i], amount, i, q, overflows)
        if rest == 0:
            for i in range(size):
                value = local[start + U64(i)] - theta[start + U64(i)]
                theta[start + U64(i)] += _sent_amount(value, tau, half, toward, step, part)
        else:
            for i in range(size):
                value = local[start + U64(i)] - theta[start + U64(i)]
                theta[start + U64(i)] += _sent_amount(value, tau, half, toward, step, part)
                local[start + U64(i)] += _sent_amount(value, tau, half, toward, rest, rest_part)
        counted = _pack_states(scratch, size, out, start // U64(4))
        used, halves = used + counted[0], halves + counted[1]
    return used - halves, halves, overflows[0], overflows[1]


@kernel("UniTuple(i8, 4)(f4[::1], f4[::1], f4, f4, i8, f8, u1[::1], u1[::1])")
def bitmap_replica(
    residual: F32, theta: F32, tau: float, step: float, side: int, q: float, scratch: U8, out: U8
) -> tuple[int, int, int, int]:
    """Write the residual as a bitmap and apply it; return (hits, halves, overflows, first)."""
    n, used, halves, overflows = residual.shape[0], 0, 0, (0, -1)
    toward, half = np.float32(side), tau * np.float32(0.5)
    part, tau_part = step * np.float32(0.5) * toward, half * toward
    for block in range((n + BLOCK - 1) // BLOCK):
        start, size = U64(block * BLOCK), min(BLOCK, n - block * BLOCK)
        for i in range(size):
            scratch[U64(i)] = _bitmap_state(residual[start + U64(i)], tau, half, toward)
        if _may_overflow(theta, start, size, step, q):
            for i in range(start, start + U64(size)):
                amount = _sent_amount(residual[i], tau, half, toward, step, part)
                overflows = _count_overflow(theta[i], amount, i, q, overflows)
        for i in range(size):
            at = start + U64(i)
            value = residual[at]
            theta[at] += _sent_amount(value, tau, half, toward, step, part)
            residual[at] = value - _sent_amount(value, tau, half, toward, tau, tau_part)
        counted = _pack_states(scratch, size, out, start // U64(4))
        used, halves = used + counted[0], halves + counted[1]
    return used - halves, halves, overflows[0], overflows[1]


@helper
def _count_entries(byte: np.uint8) -> np.uint32:
    """Return how many of the four 2-bit states in a byte are nonzero."""
    used = (byte | (byte >> 1)) & np.uint8(0x55)
    pairs = (used & np.uint8(0x33)) + ((used >> 2) & np.uint8(0x33))
    return U32((pairs & np.uint8(0x0F)) + (pairs >> 4))


@kernel(f"i8({BYTES}, i8)")
def bitmap_count(packed: U8, n: int) -> int:
    """Return the number of entries in a bitmap of n parameters, or -1 if padding bits are set."""
    count, whole = 0, packed.shape[0] - packed.shape[0] % PACKED
    for start in range(0, whole, PACKED):
        lanes = U32(0)
        for j in range(PACKED):
            lanes += _count_entries(packed[U64(start) + U64(j)])
        count += int(lanes)
    for j in range(whole, packed.shape[0]):
        count += int(_count_entries(packed[j]))
    if n % 4 and packed[n // 4] >> (2 * (n % 4)):
        return -1
    return count


@helper
def _signed_quanta(state: int, side: int, quanta: int) -> np.int32:
    """Return what a state adds: 0 for 0, +quanta for 1, -quanta for 2, side * quanta / 2 for 3."""
    full = np.int32(quanta) * np.int32((state & 1) - (state >> 1))
    return full + np.int32(state == 3) * np.int32(side * (quanta // 2))


@kernel(f"i8({BYTES}, i8, i8, i4, i4[::1], i4[::1])")
def bitmap_decode(packed: U8, n: int, side: int, quanta: int, indices: I32, amounts: I32) -> int:
    """Unpack a bitmap to indices and signed quanta; return the number of entries."""
    written, room = U64(0), U64(indices.shape[0])
    for j in range(packed.shape[0]):
        byte = packed[j]
        if byte == 0:
            continue
        for slot in range(4):
            state = (byte >> (2 * slot)) & 3
            if written < room and 4 * j + slot < n:  # an entry for state 0 is overwritten
                indices[written] = 4 * j + slot
                amounts[written] = _signed_quanta(state, side, quanta)
                written += U64(state != 0)
    return int(written)


@helper
def _state_amount(state: np.uint8, step: float, part: float) -> float:
    """Return what a state adds: 0 for 0, +step for 1, -step for 2, ``part`` (a half step) for 3."""
    amount = np.float32(0)
    if state == 1:
        amount = step
    if state == 2:
        amount = -step
    if state == 3:
        amount = part
    return amount


@kernel(f"UniTuple(i8, 2)(f4[::1], {BYTES}, i8, f4, f8, u1[::1])")
def bitmap_add(
    theta: F32, packed: U8, side: int, step: float, q: float, scratch: U8
) -> tuple[int, int]:
    """Add a bitmap's steps to theta; return (overflows, index of the first or -1)."""
    n, overflows = theta.shape[0], (0, -1)
    part = step * np.float32(0.5) * np.float32(side)
    for block in range((n + BLOCK - 1) // BLOCK):
        start, size = U64(block * BLOCK), min(BLOCK, n - block * BLOCK)
        _unpack_states(packed, start // U64(4), size, scratch)
        if _may_overflow(theta, start, size, step, q):
            for i in range(size):
                at = start + U64(i)
                overflows = _count_overflow(
                    theta[at], _state_amount(scratch[U64(i)], step, part), at, q, overflows
                )
        for i in range(size):
            theta[start + U64(i)] += _state_amount(scratch[U64(i)], step, part)
    return overflows


@kernel(f"UniTuple(i8, 2)(f4[::1], f4[::1], {BYTES}, i8, f4, f8, u1[::1])")
def bitmap_add_both(
    theta: F32, local: F32, packed: U8, side: int, step: float, q: float, scratch: U8
) -> tuple[int, int]:
    """Add a bitmap's steps to theta and local.

    Return (overflows of theta, index of the first or -1). Overflows of local are not counted.
    ``scratch`` is working memory.
    """
    n, part = local.shape[0], step * np.float32(0.5) * np.float32(side)
    for block in range((n + BLOCK - 1) // BLOCK):
        start, size = U64(block * BLOCK), min(BLOCK, n - block * BLOCK)
        _unpack_states(packed, start // U64(4), size, scratch)
        for i in range(size):
            local[start + U64(i)] += _state_amount(scratch[U64(i)], step, part)
    return bitmap_add(theta, packed, side, step, q, scratch)
