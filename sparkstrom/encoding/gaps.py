"""Sorted indices as Rice-coded gaps: what remains of a sparse update at its entropy.

At density p an index gap is geometric, and Rice codes with the right parameter come within a few
percent of its entropy. Layout, bits from the lowest of each byte upwards:

    u8 rice | per hit: gap >> rice as that many 0s and a 1 | sign (1 = down) | rice low bits of gap

The gap is ``index - previous - 1`` (the first one: the index). Bits after the last hit are 0 and
fewer than 8, so that a message has one length. Decoding trusts nothing: every read is within the
payload, every index within the model, or the answer is a reason why not.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from sparkstrom.encoding.compiled import BYTES, helper, kernel

I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]

RICE_MAX = 30  # indices are i32
FLUSH_BYTES = 8  # the encoder writes whole words; what it overhangs is not part of the message

# What decoding answers besides 0.
REASONS = (
    "fine",
    "the Rice parameter is out of range",
    "the hits do not fit into so few bytes",
    "an index is beyond the parameters",
    "bits are left over",
)


def rice_guess(count: int, n_params: int) -> int:
    """The parameter that suits ``count`` hits spread evenly: about log2 of ln 2 mean gaps."""
    mean_gap = max(1.0, math.log(2) * n_params / max(1, count))
    return min(RICE_MAX, int(math.log2(mean_gap)))


def bytes_max(count: int, n_params: int) -> int:
    """The longest message for ``count`` hits, wherever they lie, known before anything moves."""
    rice = rice_guess(count, n_params)
    bits = count * (rice + 2) + ((n_params - count) >> rice)
    return 1 + (bits + 7) // 8


def encode(codes: I32, n_params: int, out: U8) -> int:
    """Write hits as a message; return its length in bytes, at most ``bytes_max``.

    codes i32[hits]     in   ascending indices, ``~index`` for hits downwards; at least one
    out   u8[capacity]  out  capacity >= bytes_max + FLUSH_BYTES
    """
    assert out.size >= bytes_max(codes.size, n_params) + FLUSH_BYTES
    rice = int(best_rice(codes, rice_guess(codes.size, n_params)))
    return int(write_gaps(codes, rice, out))


@helper
def _index(code: int) -> int:
    return code ^ (code >> 31)


@kernel("i8(i4[::1], i8)")
def best_rice(codes: I32, guess: int) -> int:
    """The best of ``guess`` and its two neighbours, by counting bits."""
    lower, same, higher = 0, 0, 0
    down, up = max(0, guess - 1), min(RICE_MAX, guess + 1)
    previous = -1
    for j in range(codes.shape[0]):
        index = _index(codes[j])
        gap = index - previous - 1
        lower, same, higher = lower + (gap >> down), same + (gap >> guess), higher + (gap >> up)
        previous = index
    lower, higher = lower + down * codes.shape[0], higher + up * codes.shape[0]
    same += guess * codes.shape[0]
    if lower < same and lower <= higher:
        return down
    return up if higher < same else guess


@kernel("i8(i4[::1], i8, u1[::1])")
def write_gaps(codes: I32, rice: int, out: U8) -> int:
    """The bit loop of ``encode``: gather bits in a word, write whole bytes."""
    out[0] = rice
    at, word, bits = 1, np.uint64(0), 0
    low = (1 << rice) - 1
    previous = -1
    for j in range(codes.shape[0]):
        index = _index(codes[j])
        gap = index - previous - 1
        previous = index
        bits += gap >> rice
        while bits >= 8:
            out[at], word, bits, at = np.uint8(word), word >> np.uint64(8), bits - 8, at + 1
        tail = 1 | (int(codes[j] < 0) << 1) | ((gap & low) << 2)
        word |= np.uint64(tail) << np.uint64(bits)
        bits += rice + 2
        while bits >= 8:
            out[at], word, bits, at = np.uint8(word), word >> np.uint64(8), bits - 8, at + 1
    if bits:
        out[at], at = np.uint8(word), at + 1
    return at


@helper
def _trailing_zeros(word: np.uint64) -> int:
    """Zeros below the lowest set bit of a word that is not 0."""
    zeros = 0
    while word & np.uint64(0xFF) == 0:
        word, zeros = word >> np.uint64(8), zeros + 8
    while word & np.uint64(1) == 0:
        word, zeros = word >> np.uint64(1), zeros + 1
    return zeros


@kernel(f"i8({BYTES}, i8, i4, i4[::1], i4[::1])")
def read_gaps(payload: U8, n_params: int, quanta: int, indices: I32, amounts: I32) -> int:
    """Turn a message into indices and signed quanta to add; hostile bytes are expected.

    payload u8[bytes]   in
    quanta  i32         in   tau in quanta
    indices i32[count]  out  ascending, all within n_params; garbage unless the answer is 0
    amounts i32[count]  out  +-quanta; likewise
    returns i64              0, or an index into ``REASONS``
    """
    if payload.shape[0] == 0 or payload[0] > RICE_MAX:
        return 1
    rice = int(payload[0])
    low = (1 << rice) - 1
    at, word, bits = 1, np.uint64(0), 0
    index = -1
    for j in range(indices.shape[0]):
        quotient = 0
        while word == 0:
            quotient, bits = quotient + bits, 0
            if at >= payload.shape[0]:
                return 2
            while bits <= 48 and at < payload.shape[0]:
                word |= np.uint64(payload[at]) << np.uint64(bits)
                at, bits = at + 1, bits + 8
        zeros = _trailing_zeros(word)
        quotient += zeros
        word, bits = word >> np.uint64(zeros) >> np.uint64(1), bits - zeros - 1
        while bits <= 48 and at < payload.shape[0]:
            word |= np.uint64(payload[at]) << np.uint64(bits)
            at, bits = at + 1, bits + 8
        if bits < rice + 1:
            return 2
        if quotient > n_params >> rice:  # before the shift: 1 GiB of zeros would overflow it
            return 3
        index += 1 + (quotient << rice) + (int(word >> np.uint64(1)) & low)
        if index >= n_params:
            return 3
        indices[j] = index
        amounts[j] = -quanta if word & np.uint64(1) else quanta
        word, bits = word >> np.uint64(rice + 1), bits - rice - 1
    return 4 if word != 0 or at < payload.shape[0] or bits >= 8 else 0
