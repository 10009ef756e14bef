"""What moves parameters on the device: one thread per hit or per parameter, each entry by itself.

No index comes twice, so nothing depends on the order of threads. What is summed up for the host
(clipped mass, norms) is added in a tree per tile and then tile by tile: the same bits every time,
though not those of the CPU's one long sum. Squares of float32 are exact in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from sparkstrom.encoding.cuda.cuda_blocks import LAST, index_of, note_if, sum_of_block
from sparkstrom.encoding.cuda.cuda_device import (
    ITEMS,
    THREADS,
    TILE,
    DeviceArray,
    blocks_of,
    kernel,
    scratch,
    taken,
    tiles_of,
    total,
)
from sparkstrom.encoding.grid import EXACT_QUANTA

F32, F64, I32 = np.float32, np.float64, np.int32


@kernel("void(f4[::1], f4[::1], i4[::1], f4, f4, f8, i4[::1])")
def _move(
    theta: Any, other: Any, codes: Any, step: Any, other_step: Any, limit: Any, answer: Any
) -> None:
    j = cuda.grid(1)
    if j < codes.shape[0]:
        code = codes[j]
        at = index_of(code)
        exact = F64(theta[at]) + F64(step if code >= 0 else -step)
        theta[at] = F32(exact)
        if other_step != F32(0):
            other[at] = F32(other[at] + (other_step if code >= 0 else -other_step))
        note_if(abs(exact) > limit, j, answer)


@kernel("void(f4[::1], i4[::1], i4[::1], f8, f8, i4[::1])")
def _apply(theta: Any, indices: Any, quanta: Any, q: Any, limit: Any, answer: Any) -> None:
    j = cuda.grid(1)
    if j < indices.shape[0]:
        exact = F64(theta[indices[j]]) + F64(quanta[j]) * q
        theta[indices[j]] = F32(exact)
        note_if(abs(exact) > limit, j, answer)


@kernel("void(i4[::1], i4[::1], i4[::1], i4[::1])")
def _sum(totals: Any, indices: Any, quanta: Any, answer: Any) -> None:
    j = cuda.grid(1)
    if j < indices.shape[0]:
        exact = np.int64(totals[indices[j]]) + np.int64(quanta[j])
        wrapped = ((exact + np.int64(2**31)) & np.int64(2**32 - 1)) - np.int64(2**31)
        totals[indices[j]] = I32(wrapped)
        note_if(wrapped != exact, j, answer)


@kernel("void(f4[::1], i4[::1], f8, f8, i4[::1])")
def _add(theta: Any, totals: Any, q: Any, limit: Any, answer: Any) -> None:
    i = cuda.grid(1)
    if i < theta.shape[0]:
        exact = F64(theta[i]) + F64(totals[i]) * q
        theta[i] = F32(exact)
        note_if(abs(exact) > limit, i, answer)


@kernel("void(f4[::1], f4[::1])")
def _accumulate(residual: Any, delta: Any) -> None:
    i = cuda.grid(1)
    if i < residual.shape[0]:
        residual[i] = F32(residual[i] + delta[i])


@kernel("void(f4[::1], f4[::1], f4[::1])")
def _subtract(target: Any, one: Any, other: Any) -> None:
    i = cuda.grid(1)
    if i < target.shape[0]:
        target[i] = F32(one[i] - other[i])


@kernel("void(f4[::1], f4[::1], b1, f4, f8[::1])")
def _clip(values: Any, theta: Any, difference: Any, limit: Any, masses: Any) -> None:
    """``values`` is local, and the residual its difference to theta; or the residual itself."""
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
def _norms(values: Any, theta: Any, difference: Any, masses: Any, squares: Any) -> None:
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
    """See ``reference.move``."""
    to, also, where = _floats("theta", theta), _floats("other", other), _ints("codes", codes)
    answer, steps = noting(), (np.float32(step), np.float32(other_step))
    if where.size:
        _move[blocks_of(where.size), THREADS](to, also, where, *steps, EXACT_QUANTA * q, answer)
    return noted(answer, where)


def apply_hits(theta: Any, indices: Any, quanta: Any, q: float) -> tuple[int, int]:
    """See ``reference.apply_hits``."""
    return _apply_hits(theta, indices, quanta, q, EXACT_QUANTA * q)


def apply_hits_both(theta: Any, local: Any, indices: Any, quanta: Any, q: float) -> tuple[int, int]:
    """See ``reference.apply_hits_both``."""
    _apply_hits(local, indices, quanta, q, np.inf)
    return apply_hits(theta, indices, quanta, q)


def _apply_hits(theta: Any, indices: Any, quanta: Any, q: float, limit: float) -> tuple[int, int]:
    to, where, much = _floats("theta", theta), _ints("indices", indices), _ints("quanta", quanta)
    answer = noting()
    if where.size:
        _apply[blocks_of(where.size), THREADS](to, where, much, q, limit, answer)
    return noted(answer, where)


def sum_hits(total: Any, indices: Any, quanta: Any) -> tuple[int, int]:
    """See ``reference.sum_hits``."""
    to, where, much = _ints("total", total), _ints("indices", indices), _ints("quanta", quanta)
    answer = noting()
    if where.size:
        _sum[blocks_of(where.size), THREADS](to, where, much, answer)
    return noted(answer, where)


def add_quanta(theta: Any, total: Any, q: float) -> tuple[int, int]:
    """See ``reference.add_quanta``."""
    return _add_quanta(theta, total, q, EXACT_QUANTA * q)


def add_quanta_both(theta: Any, local: Any, total: Any, q: float) -> tuple[int, int]:
    """See ``reference.add_quanta_both``."""
    _add_quanta(local, total, q, np.inf)
    return add_quanta(theta, total, q)


def _add_quanta(theta: Any, total: Any, q: float, limit: float) -> tuple[int, int]:
    to, much, answer = _floats("theta", theta), _ints("total", total), noting()
    if to.size:
        _add[blocks_of(to.size), THREADS](to, much, q, limit, answer)
    return noted(answer, None)


def accumulate(residual: Any, delta: Any) -> None:
    """residual += delta, f32[n] both."""
    to, much = _floats("residual", residual), _floats("delta", delta)
    if to.size:
        _accumulate[blocks_of(to.size), THREADS](to, much)
    cuda.synchronize()


def difference(target: Any, one: Any, other: Any) -> None:
    """target := one - other, f32[n] all."""
    to, minuend, less = (_floats("target", target), _floats("one", one), _floats("other", other))
    if to.size:
        _subtract[blocks_of(to.size), THREADS](to, minuend, less)
    cuda.synchronize()


def clip_local(local: Any, theta: Any, limit: float) -> float:
    """See ``reference.clip_local``."""
    return _clipped(_floats("local", local), _floats("theta", theta), True, limit)


def clip_replica(residual: Any, limit: float) -> float:
    """See ``reference.clip_replica``."""
    values = _floats("residual", residual)
    return _clipped(values, values, False, limit)


def _clipped(values: DeviceArray, theta: DeviceArray, difference: bool, limit: float) -> float:
    tiles = tiles_of(values.size)
    masses = scratch.get("masses", tiles, np.float64)
    if tiles:
        _clip[tiles, THREADS](values, theta, difference, np.float32(limit), masses)
    return total(masses, tiles)


def norms_local(local: Any, theta: Any) -> tuple[float, float]:
    """See ``reference.norms_local``; sums are added in another order."""
    return _norms_of(_floats("local", local), _floats("theta", theta), True)


def norms_replica(residual: Any) -> tuple[float, float]:
    """See ``reference.norms_replica``; sums are added in another order."""
    values = _floats("residual", residual)
    return _norms_of(values, values, False)


def _norms_of(values: DeviceArray, theta: DeviceArray, difference: bool) -> tuple[float, float]:
    tiles = tiles_of(values.size)
    masses, squares = (scratch.get(name, tiles, np.float64) for name in ("masses", "squares"))
    if tiles:
        _norms[tiles, THREADS](values, theta, difference, masses, squares)
    return total(masses, tiles), total(squares, tiles)


def noting() -> DeviceArray:
    """Where ``note_if`` counts, until ``noted`` is asked: all 0 now."""
    return scratch.zeros("noted", 2)


def noted(answer: DeviceArray, where: DeviceArray | None) -> tuple[int, int]:
    """How many were noted, and the index of the first; ``where`` has the index of each position."""
    count, last = answer.copy_to_host().tolist()
    if count == 0:
        return 0, -1
    answer.copy_to_device(np.zeros(2, np.int32))
    position = LAST - last
    if where is None:
        return count, position
    code = int(where[position])
    return count, code if code >= 0 else ~code


def _floats(name: str, array: Any) -> DeviceArray:
    return taken(array, np.float32, name)


def _ints(name: str, array: Any) -> DeviceArray:
    return taken(array, np.int32, name)
