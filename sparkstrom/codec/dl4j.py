"""Encode and decode updates in DL4J's two int32 layouts, bit for bit.

The layouts serve interchange with DL4J and conformance tests; sparkstrom's own messages have other
forms. What is encoded is a residual: N values, the changes that a worker has not sent yet. A
message is an int32 array: a header of four words, then the hits, which are the values that reach
the threshold tau or -tau.

    word  threshold                       bitmap
    0     number of entries               N
    1     N                               N
    2     bits of tau as float32          the same
    3     0                               1
    4..   i+1 for +tau, -(i+1) for -tau   N//16 + 1 words: value i in word 4 + i//16,
                                          bit i%16 "hit" and bit 16 + i%16 "sign"

Both layouts list what is *subtracted* from the residual: tau where value >= tau, and -tau where
value <= -tau; tau is rounded to float32 first. In a bitmap, a sign bit without a hit bit encodes
-tau/2, for a value with -tau < value <= -tau/2; there is no half step of +tau/2. NaN is never a
hit.
Source: ND4J's operators ``encode_threshold``, ``encode_bitmap`` and their decoders.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError, WireError

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Mask = NDArray[np.bool_]

HEADER_WORDS = 4
THRESHOLD, BITMAP = 0, 1  # the layout, in word 3
ENTRIES_MIN = 2  # a message with a single hit is never sent
WORD_VALUES = 16  # values per word of a bitmap
VALUES_MAX = 2**31 - 1  # an entry is a signed index from 1


def encode_threshold(values: F32, tau: float, limit: int | None = None) -> I32 | None:
    """Encode index and sign of each value of magnitude >= tau, and subtract tau or -tau there.

    Args:
        values: float32[n], the residual, changed in place (parameter units).
        tau: threshold > 0, rounded to float32 (parameter units).
        limit: maximum number of values to encode, those with the lowest indices; None: all.

    Returns:
        The int32 message (see the module). As in ND4J, None if fewer than two values would be
        encoded; ``values`` is then unchanged.

    Raises:
        UsageError: an argument has an invalid type or value.
    """
    _check_array("values", values)
    step = _round_tau(tau)
    most = _check_limit(limit, values.size)
    with np.errstate(invalid="ignore"):
        hits = np.flatnonzero(np.abs(values) >= step)[:most]
    if hits.size < ENTRIES_MIN:
        return None
    down = values[hits] < 0
    values[hits] -= np.where(down, -step, step)
    message = np.empty(HEADER_WORDS + hits.size, np.int32)
    message[:HEADER_WORDS] = hits.size, values.size, step.view(np.int32), THRESHOLD
    message[HEADER_WORDS:] = np.where(down, -(hits + 1), hits + 1)
    return message


def encode_bitmap(values: F32, tau: float) -> I32:
    """Encode each value as tau, -tau, -tau/2 or 0 in two bits, and subtract that from the value.

    Return the int32 message; like ND4J, return it even if every value is encoded as 0. Arguments
    and errors are those of ``encode_threshold``.
    """
    _check_array("values", values)
    step = _round_tau(tau)
    with np.errstate(invalid="ignore"):
        size, down = np.abs(values), values < 0
        hit = size >= step
        sign = down & (size >= step / np.float32(2))
    message = np.empty(_bitmap_words(values.size), np.int32)
    message[:HEADER_WORDS] = values.size, values.size, step.view(np.int32), BITMAP
    low, high = (_pack_mask(mask, values.size) for mask in (hit, sign))
    message[HEADER_WORDS:] = (low | high << WORD_VALUES).view(np.int32)
    _subtract(values, step, hit, sign)
    return message


def decode_threshold(message: I32, out: F32) -> None:
    """Decode a message of ``encode_threshold``: add tau or -tau to ``out`` for every entry.

    Args:
        message: int32[4 + entries].
        out: float32[n], changed in place; several messages may be added up (parameter units).

    Raises:
        WireError: the message is invalid for an array of n values; ``out`` is unchanged.
        UsageError: ``out`` is not a writable float32[n].
    """
    step = _check_message(message, out, THRESHOLD)
    if message[0] != message.size - HEADER_WORDS:
        raise WireError(f"{message[0]} entries announced, {message.size - HEADER_WORDS} came")
    entries = message[HEADER_WORDS:].astype(np.int64)
    indices = np.abs(entries) - 1
    wrong = (indices < 0) | (indices >= out.size)
    if wrong.any():
        entry = entries[np.argmax(wrong)]
        raise WireError(f"entry {entry} is not a signed index from 1 to {out.size}")
    seen = np.zeros(out.size, np.bool_)
    seen[indices] = True
    if np.count_nonzero(seen) != indices.size:
        raise WireError("an index comes twice; a message moves a value once")
    with np.errstate(over="ignore", invalid="ignore"):
        out[indices] += np.where(entries < 0, -step, step)


def decode_bitmap(message: I32, out: F32) -> None:
    """Decode a message of ``encode_bitmap``: add tau, -tau or -tau/2 to ``out`` where bits are set.

    Arguments and errors are those of ``decode_threshold``.
    """
    step = _check_message(message, out, BITMAP)
    if message[0] != out.size:
        raise WireError(f"a bitmap of {message[0]} values in word 0, {out.size} in word 1")
    if message.size != _bitmap_words(out.size):
        words = _bitmap_words(out.size)
        raise WireError(f"a bitmap of {out.size} values has {words} words, not {message.size}")
    halves = np.ascontiguousarray(message[HEADER_WORDS:]).astype("<i4").view("<u2")
    low, high = (_unpack_mask(halves[side::2]) for side in (0, 1))
    if low[out.size :].any() or high[out.size :].any():
        raise WireError(f"bits are set beyond the bitmap's {out.size} values")
    _subtract(out, -step, low[: out.size], high[: out.size])


def _subtract(values: F32, step: np.float32, hit: Mask, sign: Mask) -> None:
    """Subtract from each value what its bits in ``hit`` and ``sign`` encode.

    That is step, -step, -step/2 or 0; decoders pass -tau as ``step``, and thereby add. Subtracting
    0 preserves -0.0; adding 0 would not.
    """
    states = hit.view(np.uint8) | sign.view(np.uint8) << 1
    table = np.array([0, step, -step / np.float32(2), -step], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        values -= table[states]


def _bitmap_words(n_values: int) -> int:
    """Return the number of words in a bitmap message: N // 16 + 5, as in ND4J.

    If N is a multiple of 16, the last word is unused.
    """
    return HEADER_WORDS + n_values // WORD_VALUES + 1


def _pack_mask(mask: Mask, n_values: int) -> NDArray[np.uint32]:
    """Pack a boolean mask into the low halves of uint32 words, with 16 values per word."""
    bits = np.zeros((_bitmap_words(n_values) - HEADER_WORDS) * WORD_VALUES, np.bool_)
    bits[:n_values] = mask
    return np.packbits(bits, bitorder="little").view("<u2").astype(np.uint32)


def _unpack_mask(halves: NDArray[np.uint16]) -> Mask:
    """Unpack the 16-bit halves of words into a boolean mask with one element per value."""
    packed = np.ascontiguousarray(halves).view(np.uint8)
    return np.unpackbits(packed, bitorder="little").view(np.bool_)


def _check_array(name: str, array: Any) -> None:
    """Raise UsageError unless ``array`` is a float32 vector that can be changed in place."""
    fits = isinstance(array, np.ndarray) and array.dtype == np.float32 and array.ndim == 1
    if not (fits and array.flags.c_contiguous and array.flags.writeable):
        what = getattr(array, "dtype", type(array).__name__), getattr(array, "shape", "no shape")
        raise UsageError(
            f"{name} of {what[0]}, {what[1]}: must be a writable, contiguous, one-dimensional"
            " float32 array, since it is changed in place"
        )
    if array.size > VALUES_MAX:
        raise UsageError(f"{name} has {array.size} entries: int32 messages end at {VALUES_MAX}")


def _round_tau(tau: float) -> np.float32:
    """Round tau to float32, as ND4J does. Raise UsageError unless tau is positive and finite."""
    if isinstance(tau, bool) or not isinstance(tau, int | float | np.integer | np.floating):
        raise UsageError(f"tau={tau!r}: a threshold is a number, such as 1e-3")
    with np.errstate(over="ignore"):
        step = np.float32(tau) if abs(tau) < 2.0**128 else np.float32(np.inf)
    if not (step > 0 and math.isfinite(step)):
        raise UsageError(f"tau={tau!r}: must be positive and finite as a float32, such as 1e-3")
    return step


def _check_limit(limit: int | None, n_values: int) -> int:
    """Return ``limit``, or ``n_values`` if it is None. Raise UsageError if it is invalid."""
    if limit is None:
        return n_values
    try:
        most = operator.index(limit)
    except TypeError:
        most = -1
    if most < 0:
        raise UsageError(f"limit={limit!r}: must be a whole number of entries, or None for all")
    return most


def _check_message(message: Any, out: F32, kind: int) -> np.float32:
    """Check a message's header, which both layouts share; return its tau.

    ``kind`` is the expected layout, THRESHOLD or BITMAP. Raise WireError for an invalid message,
    and UsageError for an unsuitable ``out``.
    """
    _check_array("out", out)
    if not isinstance(message, np.ndarray) or message.dtype != np.int32 or message.ndim != 1:
        what = getattr(message, "dtype", type(message).__name__)
        raise WireError(f"a message is a one-dimensional int32 array, not {what}")
    if message.size < HEADER_WORDS:
        raise WireError(f"a message has at least {HEADER_WORDS} words, not {message.size}")
    if message[3] != kind:
        raise WireError(f"kind {message[3]} in word 3, expected {kind}")
    if message[1] != out.size:
        raise WireError(f"a message for {message[1]} values, decoded onto {out.size}")
    tau = np.float32(message[2:3].astype(np.int32).view(np.float32)[0])
    if not (tau > 0 and math.isfinite(tau)):
        raise WireError(f"a threshold of {tau}: must be positive and finite")
    return tau
