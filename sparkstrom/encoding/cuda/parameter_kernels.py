"""CUDA kernels that apply hits and sums of updates, add arrays, clip and sum residuals.

A hit is an entry of an update: the index of a parameter and the change of this parameter. No index
occurs twice in an update, so results do not depend on the order of threads.
``encoding.reference_kernels`` documents the arguments.

A parameter overflows if its absolute value exceeds ``limit``, up to which float32 sums are exact.
Kernels call ``count_if`` with each result; it counts the overflows in ``answer`` i32[2], and also
stores there which came first. Functions return (overflows, first): their number, and the index of
the first one or -1.

Some functions return a sum: of the changes by clipping, or of a residual's absolute values or
squares. They add the values in a tree within each tile of ``device.TILE`` parameters, and the sums
of all tiles on the host. The result is reproducible to the bit, but may differ from the CPU's
sequential sum. Squares of float32 are computed in float64, where they are exact.
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
    kernel,
    scratch,
    sum_partial,
    tiles_of,
)
from sparkstrom.encoding.cuda.device_functions import LAST, count_if, index_of_code, sum_of_block
from sparkstrom.encoding.grid import EXACT_QUANTA

F32, F64, I32 = np.float32, np.float64, np.int32


@kernel("void(f4[::1], f4[::1], i4[::1], f4, f4, f8, i4[::1])")
def _move_kernel(
    theta: Any, other: Any, codes: Any, step: Any, other_step: Any, limit: Any, answer: Any
) -> None:
    """Add +-step to theta and +-other_step to ``other`` at each hit; count overflows of theta."""
    j = cuda.grid(1)
    if j < codes.shape[0]:
        code = codes[j]
        at = index_of_code(code)
        exact = F64(theta[at]) + F64(step if code >= 0 else -step)
        theta[at] = F32(exact)
        if other_step != F32(0):
            other[at] = F32(other[at] + (other_step if code >= 0 else -other_step))
        count_if(abs(exact) > limit, j, answer)


@kernel("void(f4[::1], i4[::1], i4[::1], f8, f8, i4[::1])")
def _apply_kernel(theta: Any, indices: Any, quanta: Any, q: Any, limit: Any, answer: Any) -> None:
    """Add quanta * q to theta at each index; count overflows."""
    j = cuda.grid(1)
    if j < indices.shape[0]:
        exact = F64(theta[indices[j]]) + F64(quanta[j]) * q
        theta[indices[j]] = F32(exact)
        count_if(abs(exact) > limit, j, answer)


@kernel("void(i4[::1], i4[::1], i4[::1], i4[::1])")
def _sum_kernel(totals: Any, indices: Any, quanta: Any, answer: Any) -> None:
    """Add quanta to an integer sum at each index; count sums that wrap around."""
    j = cuda.grid(1)
    if j < indices.shape[0]:
        exact = np.int64(totals[indices[j]]) + np.int64(quanta[j])
        wrapped = ((exact + np.int64(2**31)) & np.int64(2**32 - 1)) - np.int64(2**31)
        totals[indices[j]] = I32(wrapped)
        count_if(wrapped != exact, j, answer)


@kernel("void(f4[::1], i4[::1], f8, f8, i4[::1])")
def _add_kernel(theta: Any, totals: Any, q: Any, limit: Any, answer: Any) -> None:
    """Add totals * q to theta; count overflows."""
    i = cuda.grid(1)
    if i < theta.shape[0]:
        exact = F64(theta[i]) + F64(totals[i]) * q
        theta[i] = F32(exact)
        count_if(abs(exact) > limit, i, answer)


@kernel("void(f4[::1], f4[::1])")
def _accumulate(residual: Any, delta: Any) -> None:
    """Add delta to the residual."""
    i = cuda.grid(1)
    if i < residual.shape[0]:
        residual[i] = F32(residual[i] + delta[i])


@kernel("void(f4[::1], f4[::1], f4[::1])")
def _subtract(target: Any, one: Any, other: Any) -> None:
    """Set target to one - other, all f32[n]."""
    i = cuda.grid(1)
    if i < target.shape[0]:
        target[i] = F32(one[i] - other[i])


@kernel("void(f4[::1], f4[::1], b1, f4, f8[::1])")
def _clip_kernel(values: Any, theta: Any, difference: Any, limit: Any, masses: Any) -> None:
    """Clip the residual to +-limit; write each tile's sum of absolute changes to ``masses``.

    If ``difference`` is True, ``values`` is local and the residual is values - theta; otherwise
    ``values`` is the residual.
    """
    sums = cuda.shared.array(THREADS, np.float64)
    start, mass = cuda.blockIdx.x * TILE + cuda.threadIdx.x, F64(0)
    for item in range(ITEMS):
        i = start + item * THREADS
        if i < values.shape[0]:
            before = values[i]
            centre = theta[i] if difference else F32(0)
            residual = before - centre if difference else before
            if abs(residual) > limit:
                after = centre + limit if residual > F32(0) else centre - limit
                values[i] = F32(after)
                mass += abs(F64(before) - F64(F32(after)))
    mass = sum_of_block(sums, mass)
    if cuda.threadIdx.x == 0:
        masses[cuda.blockIdx.x] = mass


@kernel("void(f4[::1], f4[::1], b1, f8[::1], f8[::1])")
def _sums_kernel(values: Any, theta: Any, difference: Any, masses: Any, squares: Any) -> None:
    """Write each tile's sum of |residual| to ``masses``, and of its squares to ``squares``.

    ``values``, ``theta`` and ``difference`` are as in ``_clip_kernel``.
    """
    mass_sums = cuda.shared.array(THREADS, np.float64)
    square_sums = cuda.shared.array(THREADS, np.float64)
    start, mass, square = cuda.blockIdx.x * TILE + cuda.threadIdx.x, F64(0), F64(0)
    for item in range(ITEMS):
        i = start + item * THREADS
        if i < values.shape[0]:
            value = F64(values[i] - theta[i] if difference else values[i])
            mass, square = mass + abs(value), square + value * value
    mass, square = sum_of_block(mass_sums, mass), sum_of_block(square_sums, square)
    if cuda.threadIdx.x == 0:
        masses[cuda.blockIdx.x], squares[cuda.blockIdx.x] = mass, square


def move(
    theta: Any, other: Any, codes: Any, step: float, other_step: float, q: float
) -> tuple[int, int]:
    """Add +-step to theta and +-other_step to ``other`` at the hits in ``codes``.

    Return (overflows of theta, index of the first one or -1).
    """
    to, also, where = (
        _float_array("theta", theta),
        _float_array("other", other),
        _int_array("codes", codes),
    )
    answer, steps = overflow_counter(), (np.float32(step), np.float32(other_step))
    if where.size:
        _move_kernel[blocks_of(where.size), THREADS](
            to, also, where, *steps, EXACT_QUANTA * q, answer
        )
    return read_overflows(answer, where)


def apply_hits(theta: Any, indices: Any, quanta: Any, q: float) -> tuple[int, int]:
    """Add quanta * q to theta at ``indices``; return (overflows, index of the first or -1)."""
    return _apply_hits(theta, indices, quanta, q, EXACT_QUANTA * q)


def apply_hits_both(theta: Any, local: Any, indices: Any, quanta: Any, q: float) -> tuple[int, int]:
    """Add quanta * q to theta and local at ``indices``; return theta's (overflows, first or -1)."""
    _apply_hits(local, indices, quanta, q, np.inf)
    return apply_hits(theta, indices, quanta, q)


def _apply_hits(theta: Any, indices: Any, quanta: Any, q: float, limit: float) -> tuple[int, int]:
    """Add quanta * q to one array at ``indices``; return (overflows, index of the first or -1)."""
    to, where, much = (
        _float_array("theta", theta),
        _int_array("indices", indices),
        _int_array("quanta", quanta),
    )
    answer = overflow_counter()
    if where.size:
        _apply_kernel[blocks_of(where.size), THREADS](to, where, much, q, limit, answer)
    return read_overflows(answer, where)


def sum_hits(total: Any, indices: Any, quanta: Any) -> tuple[int, int]:
    """Add quanta to integer sums at ``indices``; return (number wrapped around, first or -1)."""
    to, where, much = (
        _int_array("total", total),
        _int_array("indices", indices),
        _int_array("quanta", quanta),
    )
    answer = overflow_counter()
    if where.size:
        _sum_kernel[blocks_of(where.size), THREADS](to, where, much, answer)
    return read_overflows(answer, where)


def add_quanta(theta: Any, total: Any, q: float) -> tuple[int, int]:
    """Add ``total`` * q, a sum of updates, to theta; return (overflows, first or -1)."""
    return _add_quanta(theta, total, q, EXACT_QUANTA * q)


def add_quanta_both(theta: Any, local: Any, total: Any, q: float) -> tuple[int, int]:
    """Add ``total`` * q to theta and local; return theta's (overflows, first or -1)."""
    _add_quanta(local, total, q, np.inf)
    return add_quanta(theta, total, q)


def _add_quanta(theta: Any, total: Any, q: float, limit: float) -> tuple[int, int]:
    """Add ``total`` * q to one array; return (overflows, index of the first or -1)."""
    to, much, answer = _float_array("theta", theta), _int_array("total", total), overflow_counter()
    if to.size:
        _add_kernel[blocks_of(to.size), THREADS](to, much, q, limit, answer)
    return read_overflows(answer, None)


def accumulate(residual: Any, delta: Any) -> None:
    """Add ``delta`` to ``residual``; both are f32[n]."""
    to, much = _float_array("residual", residual), _float_array("delta", delta)
    if to.size:
        _accumulate[blocks_of(to.size), THREADS](to, much)
    cuda.synchronize()


def subtract_arrays(target: Any, one: Any, other: Any) -> None:
    """Set ``target`` to one - other, all f32[n] on the device."""
    to, minuend, less = (
        _float_array("target", target),
        _float_array("one", one),
        _float_array("other", other),
    )
    if to.size:
        _subtract[blocks_of(to.size), THREADS](to, minuend, less)
    cuda.synchronize()


def clip_local(local: Any, theta: Any, limit: float) -> float:
    """Clip local to within ``limit`` of theta; return the sum of absolute changes."""
    return _clip_residual(_float_array("local", local), _float_array("theta", theta), True, limit)


def clip_replica(residual: Any, limit: float) -> float:
    """Clip the residual to +-``limit``; return the sum of absolute changes."""
    values = _float_array("residual", residual)
    return _clip_residual(values, values, False, limit)


def _clip_residual(
    values: DeviceArray, theta: DeviceArray, difference: bool, limit: float
) -> float:
    """Clip a residual, given as for ``_clip_kernel``; return the sum of absolute changes."""
    tiles = tiles_of(values.size)
    masses = scratch.get("masses", tiles, np.float64)
    if tiles:
        _clip_kernel[tiles, THREADS](values, theta, difference, np.float32(limit), masses)
    return sum_partial(masses, tiles)


def residual_sums_local(local: Any, theta: Any) -> tuple[float, float]:
    """Return (sum of |local - theta|, sum of (local - theta)^2), in float64."""
    return _residual_sums(_float_array("local", local), _float_array("theta", theta), True)


def residual_sums_replica(residual: Any) -> tuple[float, float]:
    """Return (sum of |residual|, sum of residual^2), in float64."""
    values = _float_array("residual", residual)
    return _residual_sums(values, values, False)


def _residual_sums(
    values: DeviceArray, theta: DeviceArray, difference: bool
) -> tuple[float, float]:
    """Return a residual's (sum of absolute values, sum of squares); see ``_clip_kernel``."""
    tiles = tiles_of(values.size)
    masses, squares = (scratch.get(name, tiles, np.float64) for name in ("masses", "squares"))
    if tiles:
        _sums_kernel[tiles, THREADS](values, theta, difference, masses, squares)
    return sum_partial(masses, tiles), sum_partial(squares, tiles)


def overflow_counter() -> DeviceArray:
    """Return a zeroed device array i32[2] for ``count_if`` to count in."""
    return scratch.zeros("noted", 2)


def read_overflows(answer: DeviceArray, where: DeviceArray | None) -> tuple[int, int]:
    """Return (number of positions that ``count_if`` counted, index of the first or -1).

    ``where`` contains the index or hit code of each position; None: positions are indices. Resets
    ``answer`` to 0.
    """
    count, last = answer.copy_to_host().tolist()
    if count == 0:
        return 0, -1
    answer.copy_to_device(np.zeros(2, np.int32))
    position = LAST - last
    if where is None:
        return count, position
    code = int(where[position])
    return count, code if code >= 0 else ~code


def _float_array(name: str, array: Any) -> DeviceArray:
    """Return the array as a float32 device array; see ``checked_array``."""
    return checked_array(array, np.float32, name)


def _int_array(name: str, array: Any) -> DeviceArray:
    """Return the array as an int32 device array; see ``checked_array``."""
    return checked_array(array, np.int32, name)
