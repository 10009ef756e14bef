"""Sums of updates on the wire: as sparse as what they hold, or an array of the narrowest kind.

    sparse: u8 1 | u32 count | u32 unit | u32 least | u8 rice | u8 order | per entry, bits from the
            lowest of each byte upwards: gap >> rice as that many 0s and a 1 | rice low bits of the
            gap | sign (1 = minus) | (size + 2^order) with as many 0s before it as it has bits
            beyond order + 1, then a 1 for its highest bit, then its other bits, lowest first
    dense:  u8 2, 3 or 4 | u32 unit | i8, i16 or i32 per parameter

An entry is +-(size + least) * unit: ``unit`` divides all entries, ``least`` is the smallest of them
in units. Gaps are as in ``gaps``; sizes are in Exp-Golomb code, with the order chosen per message:
thresholds of one time are much alike, sums of several spread far.
"""

# Compiled code mixes NumPy's scalars with Python's, which are the same to Numba, not to mypy.
# mypy: disable-error-code="arg-type, assignment, no-any-return"

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import WireError
from sparkstrom.encoding import gaps
from sparkstrom.encoding.cpu.compiled import BYTES, helper, kernel
from sparkstrom.encoding.cpu.intrinsics import load_word, lowest_bit, store_word
from sparkstrom.encoding.totals import I32, Total

U8 = NDArray[np.uint8]
U64 = np.uint64

SPARSE, DENSE = 1, {2: "<i1", 3: "<i2", 4: "<i4"}
SPARSE_HEADER = struct.Struct("<BIIIBB")  # layout, count, unit, least, rice, order
DENSE_HEADER = struct.Struct("<BI")  # layout, unit
ORDER_MAX = 30  # sizes are below 2^31
ENTRY_BITS_MIN = 3  # a gap's 1, a sign, a size's 1
UNIT_END = 2**31  # units are below; that of entries which all are -2^31 is not
SAMPLE = 4096  # entries that the order is guessed from
FLUSH_BYTES = 8  # the encoder writes whole words
NEAR = U64(57 - 32)  # 0s after which the rest of a code is within the bits at hand


def encode(total: Total) -> bytes:
    """The sum in its shortest layout."""
    indices, quanta = total.hits
    unit, least, largest = (int(value) for value in figures(quanta))
    head, bits = _sparse_header(indices, quanta, unit, least, largest, total.n_params)
    narrow = ((2, 2**7), (3, 2**15)) if unit < UNIT_END else ()
    kind = next((k for k, bound in narrow if largest < bound), 4)
    width = np.dtype(DENSE[kind])
    if DENSE_HEADER.size + width.itemsize * total.n_params <= len(head) + (bits + 7) // 8:
        unit = unit if kind < max(DENSE) else 1
        in_units = total.dense() // np.int32(unit) if unit > 1 else total.dense()
        return DENSE_HEADER.pack(kind, unit) + in_units.astype(width).tobytes()
    out = np.empty((bits + 7) // 8 + FLUSH_BYTES, np.uint8)
    size = int(write_sparse(indices, quanta, unit, least, head[-2], head[-1], out))
    return head + out[:size].tobytes()


def decode_untrusted(payload: bytes, n_params: int) -> Total:
    """The sum that ``encode`` wrote. Raise WireError and nothing else.

    Takes at most 100 bytes of memory per byte of a sparse payload.
    """
    if len(payload) and payload[0] == SPARSE and len(payload) >= SPARSE_HEADER.size:
        return _decode_sparse(payload, n_params)
    if len(payload) and payload[0] in DENSE and len(payload) >= DENSE_HEADER.size:
        return _decode_dense(payload, n_params)
    raise WireError(f"a sum of {len(payload)} bytes whose layout is none of 1 .. 4")


def _sparse_header(
    indices: I32, quanta: I32, unit: int, least: int, largest: int, n_params: int
) -> tuple[bytes, int]:
    """The header of the shortest sparse sum, and the bits that follow it."""
    if indices.size == 0:
        return SPARSE_HEADER.pack(SPARSE, 0, 1, 1, 0, 0), 0
    rice = int(gaps.best_rice(indices, gaps.rice_guess(indices.size, n_params)))
    some = quanta[:: max(1, quanta.size // SAMPLE)]
    sizes = np.abs(some.astype(np.int64)) // unit - least
    guess = min(range(ORDER_MAX + 1), key=lambda order: _golomb_bits(sizes, order))
    widest = min(ORDER_MAX, (largest - least).bit_length())  # never more bits than this per size
    bits, order = min(
        (int(sparse_bits(indices, quanta, unit, least, rice, order)), order)
        for order in (guess, widest)
    )
    return SPARSE_HEADER.pack(SPARSE, indices.size, unit, least, rice, order), bits


def _golomb_bits(sizes: NDArray[np.int64], order: int) -> int:
    lengths = np.frexp((sizes + 2**order).astype(np.float64))[1]
    return int((2 * lengths - 1 - order).sum())


def _decode_sparse(payload: bytes, n_params: int) -> Total:
    _, count, unit, least, rice, order = SPARSE_HEADER.unpack_from(payload)
    if rice > gaps.RICE_MAX or order > ORDER_MAX or unit < 1 or least < 1:
        raise WireError(f"a sum of unit {unit}, least {least}, rice {rice}, order {order}")
    body = np.frombuffer(payload, np.uint8)[SPARSE_HEADER.size :]
    if count > n_params or count * (ENTRY_BITS_MIN + rice + order) > 8 * body.size:
        raise WireError(f"a sum of {count} entries for {n_params} parameters in {body.size} bytes")
    indices, quanta = np.empty(count, np.int32), np.empty(count, np.int32)
    answer = read_sparse(body, n_params, unit, least, rice, order, indices, quanta)
    if answer:
        raise WireError(f"a sum of {count} entries in {body.size} bytes: {REASONS[answer]}")
    total = Total(n_params)
    total.add((indices, quanta))
    return total


def _decode_dense(payload: bytes, n_params: int) -> Total:
    kind, unit = DENSE_HEADER.unpack_from(payload)
    width = np.dtype(DENSE[kind])
    if len(payload) != DENSE_HEADER.size + width.itemsize * n_params:
        raise WireError(f"a dense sum of {len(payload)} bytes for {n_params} parameters")
    array = np.frombuffer(payload, width, offset=DENSE_HEADER.size).astype(np.int32)
    largest = max(int(array.max(initial=0)), -int(array.min(initial=0)))
    if not 1 <= unit < UNIT_END or (unit > 1 and unit * largest >= UNIT_END):
        raise WireError(f"a dense sum of unit {unit} whose entries are beyond an i32")
    if unit > 1:
        array *= np.int32(unit)
    return Total.of_array(array)


# What reading a sparse sum answers besides 0.
REASONS = (
    "fine",
    "they do not fit into so few bytes",
    "an index is beyond the parameters",
    "an entry is beyond an i32",
    "bits are left over",
)


@kernel("UniTuple(i8, 3)(i4[::1])")
def figures(quanta: I32) -> tuple[int, int, int]:
    """(unit, smallest, largest): the greatest divisor of all, and sizes as multiples of it.

    quanta i32[count] in  none is 0; of no entries: 1, 1, 1
    """
    unit, smallest, largest = np.int64(0), np.int64(2**31), np.int64(0)
    for j in range(quanta.shape[0]):
        size = abs(np.int64(quanta[j]))
        smallest, largest = min(smallest, size), max(largest, size)
        if unit != 1 and (unit == 0 or size % unit != 0):
            while size != 0:
                unit, size = size, unit % size
    if unit == 0:
        return 1, 1, 1
    return int(unit), int(smallest // unit), int(largest // unit)


@helper
def _bit_length(value: np.uint64) -> np.uint64:
    length = U64(0)
    for shift in (U64(16), U64(8), U64(4), U64(2), U64(1)):
        if value >> shift:
            value, length = value >> shift, length + shift
    return length + value


@kernel("i8(i4[::1], i4[::1], i8, i8, i8, i8)")
def sparse_bits(indices: I32, quanta: I32, unit: int, least: int, rice: int, order: int) -> int:
    """How many bits ``write_sparse`` will write."""
    bits, next_index = 0, 0
    for j in range(indices.shape[0]):
        size = U64(abs(np.int64(quanta[j])) // unit - least)
        length = np.int64(_bit_length(size + (U64(1) << U64(order))))
        bits += ((indices[j] - next_index) >> rice) + rice + 1 + 2 * length - order
        next_index = np.int64(indices[j]) + 1
    return bits


@helper
def _put(
    out: U8, at: np.uint64, word: np.uint64, bits: np.uint64, zeros: np.uint64, field: np.uint64,
    width: np.uint64,
) -> tuple[np.uint64, np.uint64, np.uint64]:  # fmt: skip
    """Append 0s and a field of up to 32 bits to fewer than 8 bits that wait in the word."""
    bits += zeros
    while bits >= U64(32):
        store_word(out, at, word)
        at, word, bits = at + U64(4), word >> U64(32), bits - U64(32)
    word |= field << bits
    bits += width
    store_word(out, at, word)
    return at + (bits >> U64(3)), word >> (bits & U64(56)), bits & U64(7)


@kernel("i8(i4[::1], i4[::1], i8, i8, i8, i8, u1[::1])")
def write_sparse(
    indices: I32, quanta: I32, unit: int, least: int, rice: int, order: int, out: U8
) -> int:
    """Write the entries; return the bytes, at most ``sparse_bits`` rounded up.

    indices i32[count]    in   ascending, no index twice
    quanta  i32[count]    in   none is 0; multiples of ``unit``, none smaller than ``least`` of it
    out     u8[capacity]  out  capacity >= the bytes + FLUSH_BYTES
    """
    at, word, bits, next_index = U64(0), U64(0), U64(0), np.int64(0)
    shift, base, one = U64(rice), U64(1) << U64(order), U64(1)
    for j in range(indices.shape[0]):
        gap = U64(np.int64(indices[j]) - next_index)
        next_index = np.int64(indices[j]) + 1
        field = one | ((gap & ((one << shift) - one)) << one)
        field |= U64(quanta[j] < 0) << (shift + one)
        at, word, bits = _put(out, at, word, bits, gap >> shift, field, shift + U64(2))
        size = U64(abs(np.int64(quanta[j])) // unit - least) + base
        rest = _bit_length(size) - one  # bits below the highest
        field = one | ((size ^ (one << rest)) << one)
        at, word, bits = _put(out, at, word, bits, rest - U64(order), field, rest + one)
    return int(at) + int(bits > U64(0))


@helper
def _bits_from(payload: U8, position: np.uint64) -> np.uint64:
    """57 bits or more, from this bit on; 0s where the payload has ended."""
    at, size = position >> U64(3), U64(payload.shape[0])
    word = U64(0)
    if at + U64(8) <= size:
        word = load_word(payload, at)
    elif at < size:
        for byte in range(size - at):
            word |= U64(payload[at + U64(byte)]) << U64(8 * byte)
    return word >> (position & U64(7))


@helper
def _next_one(payload: U8, position: np.uint64) -> np.uint64:
    """Where the next 1 is, from this bit on; beyond the payload where there is none."""
    end = U64(payload.shape[0]) << U64(3)
    while position < end:
        word = _bits_from(payload, position)
        if word != U64(0):
            return position + lowest_bit(word)
        position += U64(56) - (position & U64(7))  # bytes of which all bits are 0
    return end


@helper
def _prefix(payload: U8, position: np.uint64) -> tuple[np.uint64, np.uint64]:
    """(0s before the next 1, the bits behind that 1), 32 at least."""
    word = _bits_from(payload, position)
    zeros = lowest_bit(word)
    if zeros <= NEAR - U64(1):
        return zeros, word >> (zeros + U64(1))
    zeros = _next_one(payload, position) - position
    return zeros, _bits_from(payload, position + zeros + U64(1))


@kernel(f"i8({BYTES}, i8, i8, i8, i8, i8, i4[::1], i4[::1])")
def read_sparse(
    payload: U8,
    n_params: int,
    unit: int,
    least: int,
    rice: int,
    order: int,
    indices: I32,
    quanta: I32,
) -> int:
    """Turn bits into entries; hostile bytes are expected.

    indices i32[count]  out  ascending, all within n_params; garbage unless the answer is 0
    quanta  i32[count]  out  none is 0; likewise
    returns i64              0, or an index into ``REASONS``
    """
    end, one = U64(payload.shape[0]) << U64(3), U64(1)
    shift, farthest = U64(rice), U64(n_params) >> U64(rice)
    position, index, base = U64(0), U64(0), one << U64(order)
    for j in range(indices.shape[0]):
        zeros, word = _prefix(payload, position)
        position += zeros + shift + U64(2)
        if position > end:
            return 1
        if zeros > farthest:  # before the shift: 1 GiB of zeros would overflow it
            return 2
        index += (zeros << shift) + (word & ((one << shift) - one))
        if index >= U64(n_params):
            return 2
        minus = (word >> shift) & one
        zeros, word = _prefix(payload, position)
        rest = zeros + U64(order)
        if rest > U64(31):
            return 1 if position + zeros >= end else 3
        position += zeros + one + rest
        if position > end:
            return 1
        size = ((one << rest) | (word & ((one << rest) - one))) - base
        # Below 2^32 units of below 2^32 each: no overflow in 64 bits.
        value = (size + U64(least)) * U64(unit)
        if value > U64(2**31 - 1) + minus:
            return 3
        indices[j] = np.int32(index)
        quanta[j] = np.int32(-np.int64(value)) if minus else np.int32(value)
        index += one
    left_over = end - position >= U64(8) or _bits_from(payload, position) != U64(0)
    return 4 if left_over else 0
