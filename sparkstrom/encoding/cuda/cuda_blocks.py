"""What kernels of several files call: each thread for itself, or all threads of a block together.

Numba's cache does not see edits of this file: after one, touch the files that import it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparkstrom.encoding.cuda.cuda_device import THREADS, helper
from sparkstrom.encoding.cuda.cuda_device import running as cuda

I32, U32 = np.int32, np.uint32
ONE = np.uint32(1)
LAST = 2**31 - 1  # positions are kept as LAST - position: the first is the largest, and 0 is none


@helper
def index_of(code: Any) -> Any:
    """The index of a hit, from its code."""
    return I32(code ^ (code >> I32(31)))


@helper
def larger(one: Any, other: Any) -> Any:
    """The larger of two: Numba 0.68 fails at compiling ``max`` for CUDA."""
    return one if one > other else other


@helper
def note_if(over: bool, position: Any, answer: Any) -> None:
    """Count, and remember the first: answer i32[2], all 0 where there was none."""
    if over:
        cuda.atomic.add(answer, 0, I32(1))
        cuda.atomic.max(answer, 1, I32(LAST - position))


@helper
def sum_of_block(sums: Any, value: Any) -> Any:
    """The sum over all threads of a block, added in a tree; for every thread to see."""
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
    """sums[t] = the values of threads 0 to t, in log2(threads) rounds."""
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
def record(
    hits: Any, down: Any, worst: Any, words: Any, downs: Any, ranks: Any, counts: Any, worsts: Any
) -> None:
    """Turn a thread's hits (bit k: parameter k * THREADS + thread) into words in index order."""
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
    if worst > largest[0]:  # an old value at worst asks for an atomic too many
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
