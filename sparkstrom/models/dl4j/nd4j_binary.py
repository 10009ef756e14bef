"""ND4J's binary form of an array, as ``Nd4j.write`` makes it; all bytes are untrusted.

An array is two buffers: its shape information and its values. A buffer is

    UTF allocation mode | length, i32 in modes of before 1.0.0-beta, else i64 | UTF type | values

with a UTF string as u16 byte count and bytes, and everything big endian. The shape information of
rank r is r, r sizes, r strides, an offset or flags, the element-wise stride, and the order as a
character's number: 99 for 'c', 102 for 'f'. Values lie without gaps, as the strides say: what DL4J
computed is often permuted, whatever its order says.
"""

from __future__ import annotations

import struct
from math import prod
from typing import IO

import numpy as np
from numpy.typing import NDArray

SHORT_LENGTHS = ("DIRECT", "HEAP", "JAVACPP")  # modes of 0.x: lengths are i32
LONG_LENGTHS = ("LONG_SHAPE", "MIXED_DATA_TYPES")
WHOLE = {"INT": ">i4", "LONG": ">i8"}
NUMBERS = {"FLOAT": ">f4", "DOUBLE": ">f8", "HALF": ">f2", "BFLOAT16": ">u2"}
RANK_MAX = 32
CHUNK_BYTES = 1 << 20


class BadArray(Exception):
    """Bytes that are no array, or not the one that was expected; the message says why."""


class ArrayReader:
    """Reads arrays and Java's primitive values from a stream of at most ``bytes_max`` bytes."""

    def __init__(self, stream: IO[bytes], bytes_max: int) -> None:
        self._stream, self._left = stream, bytes_max

    def array(self, expected: int | None = None) -> NDArray[np.float32]:
        """The next array, f32 of its own shape. Raise BadArray where it is not as expected.

        ``expected``: how many values it must have; nothing is allocated for another number.
        """
        kind, count = self._header("shape information")
        if kind not in WHOLE or not 4 <= count <= 2 * RANK_MAX + 4:
            raise BadArray(f"shape information of {count} values of type {kind}")
        info = [int(v) for v in self._values(WHOLE[kind], count)]
        shape, axes = _shape_of(info)
        kind, count = self._header("values")
        if kind not in NUMBERS:
            raise BadArray(f"values of type {kind}; FLOAT, DOUBLE, HALF and BFLOAT16 are read")
        if count != prod(shape):
            raise BadArray(f"{count} values for shape {shape}")
        if expected is not None and count != expected:
            raise BadArray(f"{count} values, where the layers need {expected}")
        values = self._values(NUMBERS[kind], count)
        if kind == "BFLOAT16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        flat: NDArray[np.float32] = values.astype(np.float32)
        return flat.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes))

    def text(self) -> str:
        """A string of ``DataOutput.writeUTF``."""
        (count,) = struct.unpack(">H", self._bytes(2))
        try:
            return self._bytes(count).decode()
        except UnicodeDecodeError:
            raise BadArray("a name that is no text") from None

    def flag(self) -> bool:
        """A boolean."""
        return self._bytes(1) != b"\0"

    def whole(self) -> int:
        """An int."""
        return int(struct.unpack(">i", self._bytes(4))[0])

    def double(self) -> float:
        """A double."""
        return float(struct.unpack(">d", self._bytes(8))[0])

    def _header(self, what: str) -> tuple[str, int]:
        mode = self.text()
        if mode in SHORT_LENGTHS:
            count = self.whole()
        elif mode in LONG_LENGTHS:
            (count,) = struct.unpack(">q", self._bytes(8))
        else:
            raise BadArray(f"allocation mode {mode[:40]!r} before the {what}")
        kind = self.text()
        if not 0 <= count <= self._left:
            raise BadArray(f"{count} values announced, {self._left} bytes are left")
        return kind[:40], count

    def _values(self, dtype: str, count: int) -> NDArray[np.generic]:
        size = count * np.dtype(dtype).itemsize
        if size > self._left:
            raise BadArray(f"{size} bytes of values announced, {self._left} are left")
        values = np.empty(count, dtype)
        memory = values.view(np.uint8).data
        for first in range(0, size, CHUNK_BYTES):
            part = memory[first : first + CHUNK_BYTES]
            part[:] = self._bytes(len(part))
        return values

    def _bytes(self, count: int) -> bytes:
        found = self._stream.read(count) if count <= self._left else b""
        if len(found) != count:
            raise BadArray("it ends in the middle of an array")
        self._left -= count
        return found


def _shape_of(info: list[int]) -> tuple[tuple[int, ...], list[int]]:
    """Sizes, and dimensions from the slowest to the fastest in memory.

    Raise BadArray for what is none, or for values with gaps.
    """
    rank = info[0]
    if not 0 <= rank <= RANK_MAX or len(info) != 2 * rank + 4:
        raise BadArray(f"shape information {info[:8]} is of no rank")
    shape, strides, order = tuple(info[1 : 1 + rank]), info[1 + rank : 1 + 2 * rank], info[-1]
    if order not in (ord("c"), ord("f")) or min(shape, default=1) < 1:
        raise BadArray(f"shape {shape} of order {order}")
    long = [axis for axis in range(rank) if shape[axis] > 1]
    long.sort(key=lambda axis: -strides[axis])
    for number, axis in enumerate(long if len(long) > 1 else ()):  # a vector's may be a view's
        if strides[axis] != prod(shape[other] for other in long[number + 1 :]):
            raise BadArray(f"shape {shape} with strides {tuple(strides)}")
    return shape, [axis for axis in range(rank) if shape[axis] == 1] + long
