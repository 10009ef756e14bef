"""CUDA kernels that find hits in one pass over the arrays, and list them in index order.

A hit is a parameter whose residual has reached the threshold in absolute value. A hit's code is its
index if the residual is positive, and ``~index`` if negative. The entries of bitmaps are found and
listed in the same way. ``encoding.reference_kernels`` documents the arguments.

The pass records one bit per parameter. Each block examines a tile of parameters (adjacent threads
read adjacent memory), and stores hits as bits of 32-bit words, with each word's rank: the number of
hits before the word in the tile. A prefix sum over the tiles' hit counts then gives the position of
each tile's first code. A last kernel writes the codes; it reads only the words, with one bit per
parameter, where the first kernel read two floats (64 bits). The codes are thus ascending, as on the
CPU, in whatever order the blocks run.

Arrays between these kernels: ``words`` (hit bits), ``downs`` (bits of hits with negative residual),
``ranks`` (per word), ``counts`` (hits per tile), ``worsts`` (per tile, the bits of the largest
absolute value, which show NaN and infinity).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from sparkstrom.encoding.cuda.device import (
    ITEMS,
    PREFIX_THREADS,
    THREADS,
    TILE,
    DeviceArray,
    checked_array,
    kernel,
    scratch,
    tiles_of,
)
from sparkstrom.encoding.cuda.device_functions import ONE, larger, prefix_sum, record_hits

U32, I32 = np.uint32, np.int32
MAGNITUDE = np.int32(0x7FFFFFFF)  # mask that removes a float's sign bit
GROUP = 8  # number of values that a thread reads before it writes any


@kernel("void(f4[::1], f4[::1], f4, u4[::1], u4[::1], i4[::1], i4[::1], i4[::1])")
def _find_local(
    local: Any, theta: Any, tau: Any, words: Any, downs: Any, ranks: Any, counts: Any, worsts: Any
) -> None:
    """Record the hits in local - theta, and the float32 bits of the largest |local|."""
    n = local.shape[0]
    start = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    hits, down, worst = U32(0), U32(0), I32(0)
    for item in range(ITEMS):
        i = start + item * THREADS
        near = i if i < n else n - 1  # read unconditionally: a condition would delay later reads
        value = local[near]
        residual = value - theta[near]
        worst = larger(worst, I32(value.view(np.int32) & MAGNITUDE))
        hits = U32(hits | U32(U32(abs(residual) >= tau and i < n) << U32(item)))
        down = U32(down | U32(U32(residual < np.float32(0)) << U32(item)))
    record_hits(hits, down, worst, words, downs, ranks, counts, worsts)


@kernel("void(f4[::1], f4[::1], f4, u4[::1], u4[::1], i4[::1], i4[::1], i4[::1])")
def _find_replica(
    residual: Any,
    delta: Any,
    tau: Any,
    words: Any,
    downs: Any,
    ranks: Any,
    counts: Any,
    worsts: Any,
) -> None:
    """Add delta to the residual, then record its hits and the bits of its largest |value|."""
    n = residual.shape[0]
    start = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    hits, down, worst = U32(0), U32(0), I32(0)
    sums = cuda.local.array(GROUP, np.float32)  # in registers: loops over it are unrolled
    for group in range(ITEMS // GROUP):
        for k in range(GROUP):  # all reads before any write, which would delay them
            i = start + (group * GROUP + k) * THREADS
            near = i if i < n else n - 1
            sums[k] = residual[near] + delta[near]
        for k in range(GROUP):
            item = group * GROUP + k
            i = start + item * THREADS
            if i < n:
                value = sums[k]
                residual[i] = value
                worst = larger(worst, I32(value.view(np.int32) & MAGNITUDE))
                hits = U32(hits | U32(U32(abs(value) >= tau) << U32(item)))
                down = U32(down | U32(U32(value < np.float32(0)) << U32(item)))
    record_hits(hits, down, worst, words, downs, ranks, counts, worsts)


@kernel("void(u1[::1], i8, u4[::1], u4[::1], i4[::1], i4[::1], i4[::1])")
def _find_states(
    packed: Any, n: Any, words: Any, downs: Any, ranks: Any, counts: Any, worsts: Any
) -> None:
    """Record the entries of a bitmap as hits; ``worsts`` becomes 1 where padding bits are set."""
    start = cuda.blockIdx.x * TILE + cuda.threadIdx.x
    hits, worst = U32(0), I32(0)
    for item in range(ITEMS):
        i = start + item * THREADS
        if i >> 2 < packed.shape[0]:
            state = U32(packed[i >> 2]) >> U32(2 * (i & 3)) & U32(3)
            if state != U32(0):
                if i < n:
                    hits = U32(hits | U32(ONE << U32(item)))
                else:
                    worst = I32(1)
    record_hits(hits, U32(0), worst, words, downs, ranks, counts, worsts)


@kernel("void(i4[::1], i4[::1], i8, i4[::1], i4[::1])")
def _sum_counts(counts: Any, worsts: Any, tiles: Any, offsets: Any, answer: Any) -> None:
    """Write the number of hits before each tile to ``offsets``; compute totals.

    ``answer`` gets (number of all hits, largest of ``worsts``). Runs as a single block.
    """
    sums = cuda.shared.array(PREFIX_THREADS, np.int32)
    largest = cuda.shared.array(1, np.int32)
    thread = cuda.threadIdx.x
    if thread == 0:
        largest[0] = I32(0)
    share = (tiles + PREFIX_THREADS - 1) // PREFIX_THREADS
    first = thread * share
    last = first + share if first + share < tiles else tiles
    own, worst = I32(0), I32(0)
    for tile in range(first, last):
        own = I32(own + counts[tile])
        worst = larger(worst, worsts[tile])
    prefix_sum(sums, own, PREFIX_THREADS)
    cuda.atomic.max(largest, 0, worst)
    offset = I32(sums[thread] - own)
    for tile in range(first, last):
        offsets[tile] = offset
        offset = I32(offset + counts[tile])
    cuda.syncthreads()
    if thread == 0:
        answer[0] = sums[PREFIX_THREADS - 1]
        answer[1] = largest[0]


@kernel("void(u4[::1], u4[::1], i4[::1], i4[::1], i4[::1])")
def _write_codes(words: Any, downs: Any, ranks: Any, offsets: Any, codes: Any) -> None:
    """Write the code of each recorded hit to its place in ``codes``, as long as there is room."""
    at = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    word = words[at]
    if word != U32(0):
        rank, down = offsets[cuda.blockIdx.x] + ranks[at], downs[at]
        while word != U32(0):
            bit = U32(cuda.ffs(word) - 1)
            if rank < codes.shape[0]:
                index = I32(at * 32 + I32(bit))
                codes[rank] = ~index if U32(down >> bit) & ONE else index
            rank += 1
            word = U32(word & U32(word - ONE))


@kernel("void(u1[::1], u4[::1], i4[::1], i4[::1], i4, i4, i4[::1], i4[::1])")
def _write_amounts(
    packed: Any,
    words: Any,
    ranks: Any,
    offsets: Any,
    full: Any,
    half: Any,
    indices: Any,
    amounts: Any,
) -> None:
    """Write the index and signed quanta of each recorded bitmap entry to its place.

    ``full`` are the quanta of a full step, and ``half`` those of a half step with its sign.
    """
    at = cuda.blockIdx.x * THREADS + cuda.threadIdx.x
    word = words[at]
    if word != U32(0):
        rank = offsets[cuda.blockIdx.x] + ranks[at]
        while word != U32(0):
            i = at * 32 + cuda.ffs(word) - 1
            state = U32(packed[i >> 2]) >> U32(2 * (i & 3)) & U32(3)
            indices[rank] = I32(i)
            amounts[rank] = full if state == U32(1) else -full if state == U32(2) else half
            rank += 1
            word = U32(word & U32(word - ONE))


def _get_scan_arrays(n: int) -> list[DeviceArray]:
    """Return the working arrays of a scan of n parameters; later scans use the same memory.

    They are words, downs, ranks, counts and worsts; the module docstring describes them.
    """
    tiles = tiles_of(n)
    words = [scratch.get(name, tiles * THREADS, np.uint32) for name in ("words", "downs")]
    ranks = scratch.get("ranks", tiles * THREADS, np.int32)
    return [*words, ranks, *(scratch.get(name, tiles, np.int32) for name in ("counts", "worsts"))]


def _compute_offsets(n: int, tables: list[DeviceArray]) -> tuple[DeviceArray, DeviceArray]:
    """Sum the numbers of hits in a scan's tiles, on the device.

    ``tables`` are the arrays of ``_get_scan_arrays``, which a kernel has filled. Return the number
    of hits before each tile, and i32[2]: the number of all hits, and the largest of ``worsts``.
    """
    offsets = scratch.get("offsets", tiles_of(n), np.int32)
    answer = scratch.get("placed", 2, np.int32)
    _sum_counts[1, PREFIX_THREADS](tables[3], tables[4], tiles_of(n), offsets, answer)
    return offsets, answer


def run_scan(find: Any, codes: DeviceArray, one: DeviceArray, *rest: Any) -> tuple[int, int]:
    """Run the scan kernel ``find`` on arrays, and write the codes of the hits that it records.

    find   a kernel that passes its last five arguments, allocated here, to ``record_hits``
    codes  i32[capacity]  out  ascending, then garbage; hits beyond capacity are only counted
    one    T[n]           the first argument of ``find``; ``rest`` are the next ones
    returns (number of hits, largest ``worst`` recorded)
    """
    n = int(one.size)
    if n == 0:
        return 0, 0
    tables = _get_scan_arrays(n)
    find[tiles_of(n), THREADS](one, *rest, *tables)
    offsets, answer = _compute_offsets(n, tables)
    if codes.size:
        words, downs, ranks = tables[:3]
        _write_codes[tiles_of(n), THREADS](words, downs, ranks, offsets, codes)
    hits, worst = answer.copy_to_host().tolist()
    return hits, worst


def scan_local(local: Any, theta: Any, tau: float, codes: Any) -> tuple[int, int]:
    """Write the codes of the hits in local - theta; return (hits, bits of the largest |local|)."""
    one, other = (
        checked_array(local, np.float32, "local"),
        checked_array(theta, np.float32, "theta"),
    )
    return run_scan(
        _find_local, checked_array(codes, np.int32, "codes"), one, other, np.float32(tau)
    )


def scan_replica(residual: Any, delta: Any, tau: float, codes: Any) -> tuple[int, int]:
    """Add delta to the residual and write the codes of its hits.

    Return (hits, bits of the largest |residual|). The bits of a NaN may depend on the hardware.
    """
    one, other = (
        checked_array(residual, np.float32, "residual"),
        checked_array(delta, np.float32, "delta"),
    )
    return run_scan(
        _find_replica, checked_array(codes, np.int32, "codes"), one, other, np.float32(tau)
    )


def bitmap_count(packed: Any, n: int) -> int:
    """Return the number of entries in a bitmap of n parameters, or -1 if padding bits are set."""
    device = checked_array(packed, np.uint8, "packed")
    if device.size == 0:
        return 0
    _, answer = _find_bitmap(device, n)
    count, padding = answer.copy_to_host().tolist()
    return -1 if padding else count


def bitmap_decode(packed: Any, n: int, side: int, quanta: int, indices: Any, amounts: Any) -> int:
    """Unpack a bitmap to indices and signed quanta; return the number of entries."""
    device = checked_array(packed, np.uint8, "packed")
    to_indices = checked_array(indices, np.int32, "indices")
    to_amounts = checked_array(amounts, np.int32, "amounts")
    if device.size == 0 or to_indices.size == 0:
        return 0
    offsets, answer = _find_bitmap(device, n)
    words, _, ranks = _get_scan_arrays(4 * device.size)[:3]
    _write_amounts[tiles_of(4 * device.size), THREADS](
        device,
        words,
        ranks,
        offsets,
        np.int32(quanta),
        np.int32(side * (quanta // 2)),
        to_indices,
        to_amounts,
    )
    return int(answer.copy_to_host()[0])


def _find_bitmap(packed: DeviceArray, n: int) -> tuple[DeviceArray, DeviceArray]:
    """Record a bitmap's entries as hits.

    Return the number of entries before each tile, and i32[2]: the number of all entries, and 1 if
    padding bits are set, else 0.
    """
    places = 4 * int(packed.size)
    tables = _get_scan_arrays(places)
    _find_states[tiles_of(places), THREADS](packed, n, *tables)
    return _compute_offsets(places, tables)
