"""Encode sparse updates as Rice-coded gaps between sorted indices, within a few percent of entropy.

The entries of an update are called hits. If they are spread randomly, the gaps between indices are
geometrically distributed, which suits Rice codes. The gap is ``index - previous - 1`` (for the
first hit: its index). A message begins with the Rice parameter ``rice``, a byte. Then each hit
follows in three parts, with bits from the lowest of each byte upwards:

    gap >> rice  in unary: as many zeros, then a 1
    sign         one bit, 1 if negative
    gap          its lowest ``rice`` bits

The last hit is followed by fewer than 8 bits, all 0, so that each message has only one valid
length. The decoder does not trust its input: if a read would leave the payload, or an index is
beyond the parameters, it returns the reason.
"""

# Compiled code mixes NumPy's and Python's scalars, which Numba treats alike, unlike mypy.
# mypy: disable-error-code="assignment, no-any-return"

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sparkstrom.encoding.cpu.intrinsics import load_word, lowest_bit, store_word
from sparkstrom.encoding.cpu.kernel_loader import BYTES, helper, kernel

I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]
U64 = np.uint64  # unsigned, so that Numba does not ask whether an index counts from the end

RICE_MAX = 30  # indices are i32
NEAR = U64(57 - RICE_MAX - 2)  # after up to 25 zeros, the rest of a hit is in the same word
FLUSH_BYTES = 8  # room after the message, because the encoder writes whole 8-byte words

# ``read_gaps`` returns an index into this tuple; 0 is success.
REASONS = (
    "fine",
    "the Rice parameter is out of range",
    "the hits do not fit into so few bytes",
    "an index is beyond the parameters",
    "bits are left over",
)


def rice_guess(count: int, n_params: int) -> int:
    """Return the Rice parameter that suits ``count`` evenly spread hits: log2(ln 2 * mean gap)."""
    mean_gap = max(1.0, math.log(2) * n_params / max(1, count))
    return min(RICE_MAX, int(math.log2(mean_gap)))


def bytes_max(count: int, n_params: int) -> int:
    """Return the largest possible message size for ``count`` hits, in bytes."""
    rice = rice_guess(count, n_params)
    bits = count * (rice + 2) + ((n_params - count) >> rice)
    return 1 + (bits + 7) // 8


def encode(codes: I32, n_params: int, out: U8) -> int:
    """Encode hits as a message; return its length in bytes, at most ``bytes_max``.

    codes i32[hits]     in   ascending by index; ``index``, or ``~index`` if negative; not empty
    out   u8[capacity]  out  capacity >= bytes_max + FLUSH_BYTES
    """
    assert out.size >= bytes_max(codes.size, n_params) + FLUSH_BYTES
    rice = int(best_rice(codes, rice_guess(codes.size, n_params)))
    return int(write_gaps(codes, rice, out))


@helper
def _index_of_code(code: int) -> int:
    """Return the parameter index in a hit code, which is ``index`` or ``~index``."""
    return code ^ (code >> 31)


@kernel("i8(i4[::1], i8)")
def best_rice(codes: I32, guess: int) -> int:
    """Return the Rice parameter, ``guess`` or a neighbour, that encodes hits in the fewest bits."""
    down, up, count = max(0, guess - 1), min(RICE_MAX, guess + 1), codes.shape[0]
    first = _index_of_code(codes[0]) if count else 0
    lower, same, higher = first >> down, first >> guess, first >> up
    for j in range(1, count):
        gap = np.int64(_index_of_code(codes[j]) - _index_of_code(codes[j - 1]) - np.int32(1))
        lower, same, higher = lower + (gap >> down), same + (gap >> guess), higher + (gap >> up)
    lower, same, higher = lower + down * count, same + guess * count, higher + up * count
    if lower < same and lower <= higher:
        return down
    return up if higher < same else guess


@kernel("i8(i4[::1], i8, u1[::1])")
def write_gaps(codes: I32, rice: int, out: U8) -> int:
    """Write a message with the hits in ``codes`` for a Rice parameter; return its length in bytes.

    Bits are collected in a 64-bit word. After each hit, the word's complete bytes are written.
    """
    out[0] = rice
    at, word, bits = U64(1), U64(0), U64(0)  # fewer than 8 bits wait in the word
    shift, low = U64(rice), (U64(1) << U64(rice)) - U64(1)
    previous = np.int32(-1)
    for j in range(codes.shape[0]):
        index = _index_of_code(codes[j])
        gap = U64(index - previous - np.int32(1))
        previous = index
        bits += gap >> shift
        while bits >= U64(32):
            store_word(out, at, word)
            at, word, bits = at + U64(4), word >> U64(32), bits - U64(32)
        down = U64(codes[j] < 0)
        word |= (U64(1) | (down << U64(1)) | ((gap & low) << U64(2))) << bits
        bits += shift + U64(2)  # 31 + 32 at most
        store_word(out, at, word)
        at, word, bits = at + (bits >> U64(3)), word >> (bits & U64(56)), bits & U64(7)
    return int(at) + int(bits > U64(0))


@helper
def bits_from(payload: U8, position: np.uint64) -> np.uint64:
    """Return 57 or more bits from bit ``position`` on, the first one lowest; 0s beyond the end."""
    at, size = position >> U64(3), U64(payload.shape[0])
    word = U64(0)
    if at + U64(8) <= size:
        word = load_word(payload, at)
    elif at < size:
        for byte in range(size - at):
            word |= U64(payload[at + U64(byte)]) << U64(8 * byte)
    return word >> (position & U64(7))


@helper
def next_one(payload: U8, position: np.uint64) -> np.uint64:
    """Return the position of the next 1 bit from ``position`` on, or the payload's end in bits."""
    end = U64(payload.shape[0]) << U64(3)
    while position < end:
        word = bits_from(payload, position)
        if word != U64(0):
            return position + lowest_bit(word)
        position += U64(56) - (position & U64(7))  # skip bytes whose bits are all 0
    return end


@kernel(f"i8({BYTES}, i8, i4, i4[::1], i4[::1])")
def read_gaps(payload: U8, n_params: int, quanta: int, indices: I32, amounts: I32) -> int:
    """Decode an untrusted message into indices and signed quanta to add.

    payload u8[bytes]   in
    quanta  i32         in   tau in quanta
    indices i32[count]  out  ascending, below n_params; garbage unless the result is 0
    amounts i32[count]  out  +-quanta; garbage unless the result is 0
    returns i64              0, or an index into ``REASONS``
    """
    if payload.shape[0] == 0 or payload[0] > RICE_MAX:
        return 1
    rice, end = U64(payload[0]), U64(payload.shape[0]) << U64(3)
    low, farthest = (U64(1) << rice) - U64(1), U64(n_params) >> rice
    position, index = U64(8), U64(0)  # index: the lowest possible next index
    for j in range(indices.shape[0]):
        word = bits_from(payload, position)
        zeros = lowest_bit(word)
        if zeros > NEAR:
            zeros = next_one(payload, position) - position
            word = bits_from(payload, position + zeros)
        else:
            word >>= zeros
        position += zeros + rice + U64(2)
        if position > end:
            return 2
        if zeros > farthest:  # checked first, because 1 GiB of zeros would overflow the shift
            return 3
        index += (zeros << rice) + ((word >> U64(2)) & low)
        if index >= U64(n_params):
            return 3
        down = np.int32((word >> U64(1)) & U64(1))
        indices[j], amounts[j] = np.int32(index), (quanta ^ -down) + down
        index += U64(1)
    left_over = end - position >= U64(8) or bits_from(payload, position) != U64(0)
    return 4 if left_over else 0


def read(payload: U8, n_params: int, quanta: int, indices: I32, amounts: I32) -> str:
    """Decode an untrusted message with ``read_gaps``; return "", or why the message is invalid."""
    answer = read_gaps(payload, n_params, quanta, indices, amounts)
    return REASONS[answer] if answer else ""
