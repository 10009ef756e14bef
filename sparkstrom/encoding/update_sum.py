"""Add up updates as a sorted sparse list, or as a dense array if there are many entries.

An entry is the index of a parameter, and the amount to add to it in quanta. A quantum is the number
of which all parameters are multiples. A sum of a hundred updates of a large model changes only a
few percent of the parameters, so it takes less memory as a list. This module also encodes such sums
for the network. An encoded list has, for each entry, the Rice-coded gap between its index and the
previous one, and the Exp-Golomb-coded size of its amount. If an integer of 1, 2 or 4 bytes for each
parameter takes less, the sum is encoded in that form. The comment above ``encode`` has the formats.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import WireError
from sparkstrom.encoding import gaps
from sparkstrom.encoding.backends import host
from sparkstrom.encoding.cpu.intrinsics import lowest_bit, store_word
from sparkstrom.encoding.cpu.kernel_loader import BYTES, helper, kernel
from sparkstrom.encoding.gaps import bits_from, next_one

# Compiled code mixes NumPy's and Python's scalars, which Numba treats alike, unlike mypy.
# mypy: disable-error-code="arg-type, assignment, no-any-return"


I32 = NDArray[np.int32]
Hits = tuple[I32, I32]  # (indices, ascending and unique; quanta to add there)

SPARSE_MAX = 8  # parameters per entry, below which a dense array is smaller and faster


@kernel("UniTuple(i8, 2)(i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[::1])")
def merge(
    ones: I32, one: I32, others: I32, other: I32, indices: I32, quanta: I32
) -> tuple[int, int]:
    """Add two updates, each a list of entries sorted by index; leave out sums that are 0.

    Returns (number of entries written, number of sums that wrapped around).

        ones, others     i32[any]  in   indices of the two lists, ascending and unique
        one, other       i32[any]  in   quanta of the two lists; a sum beyond i32 wraps around
        indices, quanta  i32[sum]  out  the result, with room for all entries of both lists
    """
    i, j, made, overflows = 0, 0, 0, 0
    while i < ones.shape[0] or j < others.shape[0]:
        if j == others.shape[0] or (i < ones.shape[0] and ones[i] < others[j]):
            indices[made], quanta[made], i = ones[i], one[i], i + 1
        elif i == ones.shape[0] or others[j] < ones[i]:
            indices[made], quanta[made], j = others[j], other[j], j + 1
        else:
            exact = np.int64(one[i]) + np.int64(other[j])
            indices[made], quanta[made] = ones[i], np.int32(exact)
            overflows += int(quanta[made] != exact)
            i, j = i + 1, j + 1
        made += int(quanta[made] != 0)
    return made, overflows


class UpdateSum:
    """A running sum of updates to ``n_params`` parameters.

    ``overflows`` counts sums that left the range of int32 and so are wrong by 2 ** 32 quanta.
    """

    def __init__(self, n_params: int) -> None:
        """Create an empty sum, which is sparse at first."""
        self.n_params, self.overflows = n_params, 0
        self._hits: Hits = (np.empty(0, np.int32), np.empty(0, np.int32))
        self.array: I32 | None = None  # i32[n_params] if the sum is dense; None if sparse

    @classmethod
    def of_array(cls, array: I32) -> UpdateSum:
        """Create a dense sum that uses ``array``, i32[n_params], without a copy."""
        total = cls(array.size)
        total.array = array
        return total

    @property
    def hits(self) -> Hits:
        """The non-zero entries, as (ascending indices, quanta)."""
        if self.array is None:
            return self._hits
        where = np.flatnonzero(self.array).astype(np.int32)
        return where, self.array[where]

    def dense(self) -> I32:
        """Return a copy of the sum as i32[n_params]."""
        if self.array is not None:
            return self.array.copy()
        array = np.zeros(self.n_params, np.int32)
        array[self._hits[0]] = self._hits[1]
        return array

    def add(self, hits: Hits) -> None:
        """Add an update's entries, (indices, quanta). Many entries make this sum dense.

        Sums beyond int32 wrap around, and ``overflows`` counts them.
        """
        if self.array is None and (self._hits[0].size + hits[0].size) * SPARSE_MAX > self.n_params:
            self.array = self.dense()
        if self.array is not None:
            self.overflows += host().kernels.sum_hits(self.array, *hits)[0]
            return
        room = self._hits[0].size + hits[0].size
        indices, quanta = np.empty(room, np.int32), np.empty(room, np.int32)
        made, overflows = merge(*self._hits, *hits, indices, quanta)
        self.overflows += int(overflows)
        self._hits = (indices[:made], quanta[:made])

    def add_total(self, other: UpdateSum) -> None:
        """Add another sum over the same parameters."""
        self.overflows += other.overflows
        if other.array is None:
            self.add(other._hits)
        elif self.array is None:
            mine, self.array = self._hits, other.array.copy()
            self.overflows += host().kernels.sum_hits(self.array, *mine)[0]
        else:
            before = self.array.copy()
            self.array += other.array
            # Where the sum wrapped around, it has neither operand's sign.
            wrapped = (before ^ self.array) & (other.array ^ self.array)
            self.overflows += int(np.count_nonzero(wrapped < 0))


# The wire format of a sum:
#
#     sparse: u8 1 | u32 count | u32 unit | u32 least | u8 rice | u8 order | per entry, bits from
#             the lowest of each byte upwards: gap >> rice as that many 0s and a 1 | rice low bits
#             of the gap | sign (1 = minus) | (size + 2^order) with as many 0s before it as it has
#             bits beyond order + 1, then a 1 for its highest bit, then its other bits, lowest first
#     dense:  u8 2, 3 or 4 | u32 unit | i8, i16 or i32 per parameter
#
# An entry is +-(size + least) * unit: ``unit`` divides all entries, and ``least`` is the smallest
# absolute value in units. Gaps are as in ``gaps``. Sizes are in Exp-Golomb code whose order is
# chosen per message, because the thresholds of updates from the same time are similar and those of
# older sums are not.

U8 = NDArray[np.uint8]
U64 = np.uint64

SPARSE, DENSE = 1, {2: "<i1", 3: "<i2", 4: "<i4"}
SPARSE_HEADER = struct.Struct("<BIIIBB")  # layout, count, unit, least, rice, order
DENSE_HEADER = struct.Struct("<BI")  # layout, unit
ORDER_MAX = 30  # sizes are below 2^31
ENTRY_BITS_MIN = 3  # the gap's 1, the sign, the size's 1
UNIT_END = 2**31  # valid units are below this; the unit is 2^31 if all entries are -2^31
SAMPLE = 4096  # entries from which the order is estimated
FLUSH_BYTES = 8  # room after the entries, because the encoder writes whole 8-byte words
NEAR = U64(57 - 32)  # after fewer 0s than this, the rest of a code is in the same 64-bit word


def encode(total: UpdateSum) -> bytes:
    """Encode a sum in the shortest of its layouts."""
    indices, quanta = total.hits
    unit, least, largest = (int(value) for value in unit_and_bounds(quanta))
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


def decode_untrusted(payload: bytes, n_params: int) -> UpdateSum:
    """Decode a sum that ``encode`` wrote. Raise WireError, and no other error, if it is invalid.

    A sparse payload needs at most 100 bytes of memory per byte.
    """
    if len(payload) and payload[0] == SPARSE and len(payload) >= SPARSE_HEADER.size:
        return _decode_sparse(payload, n_params)
    if len(payload) and payload[0] in DENSE and len(payload) >= DENSE_HEADER.size:
        return _decode_dense(payload, n_params)
    raise WireError(f"a sum of {len(payload)} bytes whose layout is none of 1 .. 4")


def _sparse_header(
    indices: I32, quanta: I32, unit: int, least: int, largest: int, n_params: int
) -> tuple[bytes, int]:
    """Return (header of the shortest sparse encoding, number of bits that follow the header).

    ``least`` and ``largest`` are the smallest and largest absolute value of ``quanta`` in units.
    """
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
    """Return the total number of bits of ``sizes`` in the Exp-Golomb code of ``order``."""
    lengths = np.frexp((sizes + 2**order).astype(np.float64))[1]
    return int((2 * lengths - 1 - order).sum())


def _decode_sparse(payload: bytes, n_params: int) -> UpdateSum:
    """Decode a sum in the sparse layout. Raise WireError if it is invalid."""
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
    total = UpdateSum(n_params)
    total.add((indices, quanta))
    return total


def _decode_dense(payload: bytes, n_params: int) -> UpdateSum:
    """Decode a sum in a dense layout. Raise WireError if it is invalid."""
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
    return UpdateSum.of_array(array)


# ``read_sparse`` returns an index into this tuple; 0 is success.
REASONS = (
    "fine",
    "they do not fit into so few bytes",
    "an index is beyond the parameters",
    "an entry is beyond an i32",
    "bits are left over",
)


@kernel("UniTuple(i8, 3)(i4[::1])")
def unit_and_bounds(quanta: I32) -> tuple[int, int, int]:
    """Return (unit, smallest, largest) of a sum's entries ``quanta``, which are all nonzero.

    The unit is their greatest common divisor, and the others are the smallest and largest absolute
    value in units. Without entries all three are 1.
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
    """Return the number of bits of a 32-bit value up to its highest 1; 0 for the value 0."""
    length = U64(0)
    for shift in (U64(16), U64(8), U64(4), U64(2), U64(1)):
        if value >> shift:
            value, length = value >> shift, length + shift
    return length + value


@kernel("i8(i4[::1], i4[::1], i8, i8, i8, i8)")
def sparse_bits(indices: I32, quanta: I32, unit: int, least: int, rice: int, order: int) -> int:
    """Return the number of bits that ``write_sparse`` will write for the same arguments."""
    bits, next_index = 0, 0
    for j in range(indices.shape[0]):
        size = U64(abs(np.int64(quanta[j])) // unit - least)
        length = np.int64(_bit_length(size + (U64(1) << U64(order))))
        bits += ((indices[j] - next_index) >> rice) + rice + 1 + 2 * length - order
        next_index = np.int64(indices[j]) + 1
    return bits


@helper
def _append_bits(
    out: U8, at: np.uint64, word: np.uint64, bits: np.uint64, zeros: np.uint64, field: np.uint64,
    width: np.uint64,
) -> tuple[np.uint64, np.uint64, np.uint64]:  # fmt: skip
    """Append ``zeros`` 0s and ``field``, of ``width`` <= 32 bits; return the new (at, word, bits).

    The message so far is out[:at], and then the lowest ``bits`` (fewer than 8) bits of ``word``.
    """
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
    """Write the entries of a sparse sum; return their length in bytes, ``sparse_bits`` rounded up.

    indices i32[count]    in   ascending and unique
    quanta  i32[count]    in   multiples of ``unit``, in absolute value at least ``least * unit``
    rice    i64           in   parameter of the Rice code of gaps
    order   i64           in   order of the Exp-Golomb code of sizes
    out     u8[capacity]  out  capacity >= length + FLUSH_BYTES
    """
    at, word, bits, next_index = U64(0), U64(0), U64(0), np.int64(0)
    shift, base, one = U64(rice), U64(1) << U64(order), U64(1)
    for j in range(indices.shape[0]):
        gap = U64(np.int64(indices[j]) - next_index)
        next_index = np.int64(indices[j]) + 1
        field = one | ((gap & ((one << shift) - one)) << one)
        field |= U64(quanta[j] < 0) << (shift + one)
        at, word, bits = _append_bits(out, at, word, bits, gap >> shift, field, shift + U64(2))
        size = U64(abs(np.int64(quanta[j])) // unit - least) + base
        rest = _bit_length(size) - one  # bits below the highest
        field = one | ((size ^ (one << rest)) << one)
        at, word, bits = _append_bits(out, at, word, bits, rest - U64(order), field, rest + one)
    return int(at) + int(bits > U64(0))


@helper
def _read_zeros(payload: U8, position: np.uint64) -> tuple[np.uint64, np.uint64]:
    """Return (number of 0s from ``position`` to the next 1, 32 or more bits that follow that 1)."""
    word = bits_from(payload, position)
    zeros = lowest_bit(word)
    if zeros <= NEAR - U64(1):
        return zeros, word >> (zeros + U64(1))
    zeros = next_one(payload, position) - position
    return zeros, bits_from(payload, position + zeros + U64(1))


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
    """Decode the entries of an untrusted sparse sum; return 0 or an index into ``REASONS``.

    ``unit``, ``least``, ``rice`` and ``order`` come from the header, as in ``write_sparse``.

    indices i32[count]  out  ascending, below n_params; garbage unless the result is 0
    quanta  i32[count]  out  all nonzero; garbage unless the result is 0
    returns i64              0, or an index into ``REASONS``
    """
    end, one = U64(payload.shape[0]) << U64(3), U64(1)
    shift, farthest = U64(rice), U64(n_params) >> U64(rice)
    position, index, base = U64(0), U64(0), one << U64(order)
    for j in range(indices.shape[0]):
        zeros, word = _read_zeros(payload, position)
        position += zeros + shift + U64(2)
        if position > end:
            return 1
        if zeros > farthest:  # checked first, because 1 GiB of zeros would overflow the shift
            return 2
        index += (zeros << shift) + (word & ((one << shift) - one))
        if index >= U64(n_params):
            return 2
        minus = (word >> shift) & one
        zeros, word = _read_zeros(payload, position)
        rest = zeros + U64(order)
        if rest > U64(31):
            return 1 if position + zeros >= end else 3
        position += zeros + one + rest
        if position > end:
            return 1
        size = ((one << rest) | (word & ((one << rest) - one))) - base
        # Fewer than 2^32 units, each below 2^32, so 64 bits suffice.
        value = (size + U64(least)) * U64(unit)
        if value > U64(2**31 - 1) + minus:
            return 3
        indices[j] = np.int32(index)
        quanta[j] = np.int32(-np.int64(value)) if minus else np.int32(value)
        index += one
    left_over = end - position >= U64(8) or bits_from(payload, position) != U64(0)
    return 4 if left_over else 0
