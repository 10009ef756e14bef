"""Encode sparse updates whose entries have different magnitudes, in nearly as few bits as possible.

A hit is an entry of the update; it adds +-tau * 2^level to a parameter, where tau is the threshold
for sending. Few hits have a level above 0. The message lists which hits have level 1 or more, then
which of these have level 2 or more, and so on up to ``top``, the highest level of a hit. The hits
themselves follow, in the format of module ``gaps``.
Layout:

    u8 top | per level from 1 to top: u8 rice, gaps, 0s up to a whole byte | the hits

The part for one level is called a section. Its candidates are the hits that reached the level
below. Each gap is the number of candidates before the next hit of this level; one more gap follows
the last hit. A gap is written in the Rice code with the parameter ``rice``: gap >> rice zeros, a 1,
and the low ``rice`` bits of the gap, lowest first. The decoder does not trust its input, as in
``gaps``.
"""

# Compiled code mixes NumPy's and Python's scalars, which Numba treats alike, unlike mypy.
# mypy: disable-error-code="arg-type, assignment, no-any-return"

from __future__ import annotations

import numpy as np

from sparkstrom.encoding import gaps
from sparkstrom.encoding.cpu.kernel_loader import BYTES, helper, kernel
from sparkstrom.encoding.gaps import FLUSH_BYTES, I32, RICE_MAX, U8
from sparkstrom.encoding.thresholds import LEVELS_MAX

TOP_MAX = LEVELS_MAX - 1


def bytes_max(count: int, n_params: int, top: int) -> int:
    """Return the largest message size in bytes for ``count`` hits with levels up to ``top``."""
    section = 1 + (2 * (count + 1) + 7) // 8  # at most 1.7 bits per candidate (``gaps.rice_guess``)
    return 1 + top * section + gaps.bytes_max(count, n_params)


def encode(codes: I32, levels: U8, top: int, n_params: int, out: U8) -> int:
    """Encode hits and their levels as a message; return its length in bytes.

    codes  i32[hits]     in   ascending by index; ``index``, or ``~index`` if negative; not empty
    levels u8[hits]      in   level of each hit, <= top
    top    int           in   1 .. ``TOP_MAX``
    out    u8[capacity]  out  capacity >= bytes_max + FLUSH_BYTES
    """
    assert 1 <= top <= TOP_MAX
    assert out.size >= bytes_max(codes.size, n_params, top) + FLUSH_BYTES
    out[0], at = top, 1
    candidates = codes.size
    for level in range(1, top + 1):
        members = int(np.count_nonzero(levels >= level))
        guess = gaps.rice_guess(members + 1, candidates + 1)
        out[at] = best_rice(levels, level, guess)
        at, candidates = int(write_level(levels, level, out, at)), members
    return at + gaps.encode(codes, n_params, out[at:])


def read(payload: U8, n_params: int, quanta: int, indices: I32, amounts: I32) -> str:
    """Decode an untrusted message to indices and signed quanta; return "", or why it is invalid.

    payload u8[bytes]   in
    quanta  i32         in   tau in quanta; tau * 2^TOP_MAX is an i32
    indices i32[count]  out  ascending, below n_params; garbage unless the result is ""
    amounts i32[count]  out  +-quanta * 2^level; garbage unless the result is ""
    """
    if payload.size == 0 or not 1 <= payload[0] <= TOP_MAX:
        return "the highest level is out of range"
    levels, at = np.zeros(indices.size, np.uint8), 1
    for level in range(1, int(payload[0]) + 1):
        at = int(read_level(payload, at, level, levels))
        if at < 0:
            return "the levels do not fit the hits"
    if reason := gaps.read(payload[at:], n_params, quanta, indices, amounts):
        return reason
    np.left_shift(amounts, levels, out=amounts)
    return ""


@kernel("i8(u1[::1], i8, i8)")
def best_rice(levels: U8, level: int, guess: int) -> int:
    """Return the Rice parameter, ``guess`` or a neighbour, for the shortest section of ``level``.

    ``levels`` has the level of each hit.
    """
    down, up = max(0, guess - 1), min(RICE_MAX, guess + 1)
    lower, same, higher, gap = down + 1, guess + 1, up + 1, 0
    for j in range(levels.shape[0]):
        if levels[j] >= level:
            lower, same = lower + (gap >> down) + 1 + down, same + (gap >> guess) + 1 + guess
            higher, gap = higher + (gap >> up) + 1 + up, 0
        elif levels[j] == level - 1:
            gap += 1
    lower, same, higher = lower + (gap >> down), same + (gap >> guess), higher + (gap >> up)
    if lower < same and lower <= higher:
        return down
    return up if higher < same else guess


@helper
def _write_rice_code(out: U8, position: int, gap: int, rice: int) -> int:
    """Write the Rice code of ``gap`` to zeroed bits; return the position in bits after the code."""
    position += gap >> rice
    out[position >> 3] |= np.uint8(1 << (position & 7))
    for bit in range(rice):
        position += 1
        out[position >> 3] |= np.uint8(((gap >> bit) & 1) << (position & 7))
    return position + 1


@kernel("i8(u1[::1], i8, u1[::1], i8)")
def write_level(levels: U8, level: int, out: U8, at: int) -> int:
    """Write the section of ``level`` to ``out``; return the position in bytes after the section.

    The section lists which candidates (hits of ``level`` - 1 or more) reach ``level``. The caller
    has written its Rice parameter to out[at]; the gaps follow. ``levels`` has each hit's level.
    """
    rice, position, gap = np.int64(out[at]), 8 * (at + 1), 0
    room = min(out.shape[0], at + 3 + (2 * (levels.shape[0] + 1) + 7) // 8)
    for byte in range(at + 1, room):
        out[byte] = 0
    for j in range(levels.shape[0]):
        if levels[j] >= level:
            position, gap = _write_rice_code(out, position, gap, rice), 0
        elif levels[j] == level - 1:
            gap += 1
    return (_write_rice_code(out, position, gap, rice) + 7) >> 3


@helper
def _read_rice_code(payload: U8, position: int, rice: int, most: int) -> tuple[int, int]:
    """Read a Rice code with the parameter ``rice``; return (gap, position after the code).

    Positions count bits of the payload. The gap is -1 if the code is incomplete or its value is
    above ``most``; the returned position then has no meaning.
    """
    end, zeros = 8 * payload.shape[0], 0
    while position < end and not (payload[position >> 3] >> (position & 7)) & 1:
        zeros, position = zeros + 1, position + 1
    if position + 1 + rice > end or zeros > most >> rice:
        return -1, position
    gap = zeros << rice
    for bit in range(rice):
        position += 1
        gap |= np.int64((payload[position >> 3] >> (position & 7)) & 1) << bit
    return (gap if gap <= most else -1), position + 1


@kernel(f"i8({BYTES}, i8, i8, u1[::1])")
def read_level(payload: U8, at: int, level: int, levels: U8) -> int:
    """Set ``level`` for the hits that a section of the message lists.

    payload u8[bytes]  in
    at      i64        in      start of the section (its Rice parameter), in bytes
    levels  u8[hits]   in/out  candidates, from which the section selects, have level - 1
    returns i64                end of the section in bytes, or -1 if the section is invalid
    """
    if at >= payload.shape[0] or payload[at] > RICE_MAX:
        return -1
    hits = levels.shape[0]
    rice, position = np.int64(payload[at]), 8 * (at + 1)
    left, position = _read_rice_code(payload, position, rice, hits)
    for j in range(hits):
        if left < 0:
            return -1
        if levels[j] == level - 1:
            if left == 0:
                levels[j] = level
                left, position = _read_rice_code(payload, position, rice, hits)
            else:
                left -= 1
    if left != 0:
        return -1
    while position & 7:
        if (payload[position >> 3] >> (position & 7)) & 1:
            return -1
        position += 1
    return position >> 3
