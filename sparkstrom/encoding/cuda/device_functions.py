"""Define device functions that kernels of several modules call.

Some work for one thread: they get the parameter index from the code of a hit, compare values, and
count overflows. Others work for all threads of a block together: they add values up, and record
hits (parameters whose residual reaches the threshold). Numba's cache does not notice edits of this
file: after an edit, touch the files that import it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkstrom.encoding.cuda.device import THREADS, helper
from sparkstrom.encoding.cuda.device import running as cuda

I32, U32 = np.int32, np.uint32
ONE = np.uint32(1)
LAST = 2**31 - 1  # positions are stored as LAST - position: max finds the first, and 0 is none


@helper
def index_of_code(code: Any) -> Any:
    """Return the parameter index in a hit code, which is ``index`` or ``~index``."""
    return I32(code ^ (code >> I32(31)))


@helper
def larger(one: Any, other: Any) -> Any:
    """Return the larger of two values; Numba 0.68 fails to compile ``max`` for CUDA."""
    return one if one > other else other


@helper
def count_if(over: bool, position: Any, answer: Any) -> None:
    """If ``over``, add 1 to answer[0], and keep the smallest position so far in answer[1].

    ``answer`` is i32[2], initially 0; positions are stored as ``LAST - position``.
    """
    if over:
        cuda.atomic.add(answer, 0, I32(1))
        cuda.atomic.max(answer, 1, I32(LAST - position))


@helper
def sum_of_block(sums: Any, value: Any) -> Any:
    """Return to each thread the sum of ``value`` over all threads of the block, added in a tree.

    ``sums`` is a shared array with an entry per thread.
    """
    thread, half = cuda.threadIdx.x, THREADS // 2
    sums[thread] = value
    cuda.syncthreads()
    while half > 0:
        if thread < half:
            sums[thread] += sums[thread + half]
        cuda.syncthreads()
        half //= 2
    return sums[0]


@helper
def prefix_sum(sums: Any, value: Any, threads: int) -> None:
    """Set sums[t], in a shared array, to the sum of ``value`` over threads 0 to t of the block."""
    thread, step = cuda.threadIdx.x, 1
    sums[thread] = value
    cuda.syncthreads()
    while step < threads:
        before = I32(0)
        if thread >= step:
            before = sums[thread - step]
        cuda.syncthreads()
        sums[thread] += before
        cuda.syncthreads()
        step *= 2


@helper
def record_hits(
    hits: Any, down: Any, worst: Any, words: Any, downs: Any, ranks: Any, counts: Any, worsts: Any
) -> None:
    """Write the hits of all threads of a block as words of bits in index order, with ranks.

    The first three arguments are this thread's. Bit k of ``hits`` is set if parameter k * THREADS +
    thread of the block's tile is a hit, and that of ``down`` if its residual is negative; ``worst``
    is a number, such as the bits of an absolute value. The last five are outputs, which the module
    ``scan`` describes: ``counts`` gets the tile's number of hits, ``worsts`` the largest ``worst``.
    """
    shared_hits = cuda.shared.array(THREADS, np.uint32)
    shared_down = cuda.shared.array(THREADS, np.uint32)
    sums = cuda.shared.array(THREADS, np.int32)
    largest = cuda.shared.array(1, np.int32)
    thread, tile = cuda.threadIdx.x, cuda.blockIdx.x
    shared_hits[thread] = U32(0)
    shared_down[thread] = U32(0)
    if thread == 0:
        largest[0] = I32(0)
    any_hit = cuda.syncthreads_or(I32(hits != U32(0)))
    if worst > largest[0]:  # with an outdated value, the atomic is unnecessary
        cuda.atomic.max(largest, 0, worst)
    at = tile * THREADS + thread
    if not any_hit:
        words[at] = U32(0)
        cuda.syncthreads()
        if thread == 0:
            counts[tile] = I32(0)
            worsts[tile] = largest[0]
        return
    while hits != U32(0):
        item = U32(cuda.ffs(hits) - 1)
        place = U32(item * U32(THREADS) + U32(thread))
        bit = U32(ONE << U32(place & U32(31)))
        cuda.atomic.or_(shared_hits, place >> U32(5), bit)
        if U32(down >> item) & ONE:
            cuda.atomic.or_(shared_down, place >> U32(5), bit)
        hits = U32(hits & U32(hits - ONE))
    cuda.syncthreads()
    word = shared_hits[thread]
    found = I32(cuda.popc(word))
    prefix_sum(sums, found, THREADS)
    words[at] = word
    if word != U32(0):
        downs[at] = shared_down[thread]
        ranks[at] = sums[thread] - found
    if thread == 0:
        counts[tile] = sums[THREADS - 1]
        worsts[tile] = largest[0]
