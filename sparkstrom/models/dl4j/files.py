"""Read the files that DL4J saves: the zip of ``ModelSerializer.writeModel``, and ND4J's arrays.

The zip contains

    configuration.json    the network, and how it is trained
    coefficients.bin      all parameters, one after the other
    updaterState.bin      the updater's state, if it was saved
    normalizer.bin        the normalizer of the data, if one was added

An array (``Nd4j.write``) consists of two buffers: its shape information and its values. A buffer is

    allocation mode (UTF) | number of values (i32 or i64) | data type (UTF) | values

in big endian; a UTF string is its byte count as u16, then its bytes. The allocation mode is a name
such as HEAP. Here it only determines the type of the number that follows: i32 for the modes of
versions before 1.0.0-beta, i64 for newer modes.

The shape information for rank r is r, r sizes, r strides, an offset or flags, the element-wise
stride, and the character code of the order: 99 for 'c', 102 for 'f'. Values have no gaps and are
ordered by the strides, not by the order character: computed arrays are often permuted.

All bytes are untrusted. A reader never allocates more memory than the file's actual size can fill,
given that deflate expands one byte to at most 1,032.
"""

from __future__ import annotations

import json
import struct
import zipfile
import zlib
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.base.untrusted_files import EXPANSION_MAX, check_members


class NoDl4jNetwork(UsageError):
    """Raised for a file that DL4J did not write, or that is damaged.

    Attributes:
        path: the file.
        why: what is wrong with the file.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(path, why)
        self.path, self.why = path, why

    def __str__(self) -> str:
        return (
            f"{self.path} is not a complete network of DL4J: {self.why}; save it again with"
            " ModelSerializer.writeModel(network, file, true)"
        )


class NotImported(UsageError):
    """Raised for a feature of DL4J that sparkstrom does not support.

    Attributes:
        path: the file.
        where: the layer or part with the feature.
        what: the feature.
        remedy: what the user can do.
    """

    def __init__(self, path: str, where: str, what: str, remedy: str) -> None:
        super().__init__(path, where, what, remedy)
        self.path, self.where, self.what, self.remedy = path, where, what, remedy

    def __str__(self) -> str:
        return f"{self.path}: {self.where} is not imported: {self.what}; {self.remedy}"


INT32_LENGTH_MODES = ("DIRECT", "HEAP", "JAVACPP")  # allocation modes in DL4J 0.x
INT64_LENGTH_MODES = ("LONG_SHAPE", "MIXED_DATA_TYPES")
INTEGER_DTYPES = {"INT": ">i4", "LONG": ">i8"}
FLOAT_DTYPES = {"FLOAT": ">f4", "DOUBLE": ">f8", "HALF": ">f2", "BFLOAT16": ">u2"}
RANK_MAX = 32
CHUNK_BYTES = 1 << 20


class BadArray(Exception):
    """Raised if bytes are not an array, or not the expected one; the message is the reason."""


class ArrayReader:
    """Reads arrays and Java's primitive values from a stream of at most ``bytes_max`` bytes."""

    def __init__(self, stream: IO[bytes], bytes_max: int) -> None:
        self._stream, self._bytes_left = stream, bytes_max

    def read_array(self, expected: int | None = None) -> NDArray[np.float32]:
        """Read an array; return it as float32 in its stored shape.

        Args:
            expected: the required number of values; for any other number, nothing is allocated.

        Raises:
            BadArray: the bytes are not an array, or it has a different number of values.
        """
        kind, count = self._read_header("shape information")
        if kind not in INTEGER_DTYPES or not 4 <= count <= 2 * RANK_MAX + 4:
            raise BadArray(f"shape information of {count} values of type {kind}")
        info = [int(v) for v in self._read_values(INTEGER_DTYPES[kind], count)]
        shape, axes = _parse_shape(info)
        kind, count = self._read_header("values")
        if kind not in FLOAT_DTYPES:
            raise BadArray(f"values of type {kind}; FLOAT, DOUBLE, HALF and BFLOAT16 are read")
        if count != prod(shape):
            raise BadArray(f"{count} values for shape {shape}")
        if expected is not None and count != expected:
            raise BadArray(f"{count} values, where the layers need {expected}")
        values = self._read_values(FLOAT_DTYPES[kind], count)
        if kind == "BFLOAT16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        flat: NDArray[np.float32] = values.astype(np.float32)
        return flat.reshape([shape[axis] for axis in axes]).transpose(np.argsort(axes))

    def read_text(self) -> str:
        """Read a string that Java's ``DataOutput.writeUTF`` wrote."""
        (count,) = struct.unpack(">H", self._read_bytes(2))
        try:
            return self._read_bytes(count).decode()
        except UnicodeDecodeError:
            raise BadArray("a name that is not UTF-8") from None

    def read_bool(self) -> bool:
        """Read a Java boolean."""
        return self._read_bytes(1) != b"\0"

    def read_int(self) -> int:
        """Read a Java int."""
        return int(struct.unpack(">i", self._read_bytes(4))[0])

    def read_double(self) -> float:
        """Read a Java double."""
        return float(struct.unpack(">d", self._read_bytes(8))[0])

    def _read_header(self, what: str) -> tuple[str, int]:
        """Read a buffer's (type, number of values); ``what`` describes the buffer in errors."""
        mode = self.read_text()
        if mode in INT32_LENGTH_MODES:
            count = self.read_int()
        elif mode in INT64_LENGTH_MODES:
            (count,) = struct.unpack(">q", self._read_bytes(8))
        else:
            raise BadArray(f"allocation mode {mode[:40]!r} before the {what}")
        kind = self.read_text()
        if not 0 <= count <= self._bytes_left:
            raise BadArray(f"{count} values announced, {self._bytes_left} bytes are left")
        return kind[:40], count

    def _read_values(self, dtype: str, count: int) -> NDArray[np.generic]:
        """Read ``count`` values; never allocate more memory than the stream can fill."""
        size = count * np.dtype(dtype).itemsize
        if size > self._bytes_left:
            raise BadArray(f"{size} bytes of values announced, {self._bytes_left} are left")
        values = np.empty(count, dtype)
        memory = values.view(np.uint8).data
        for first in range(0, size, CHUNK_BYTES):
            part = memory[first : first + CHUNK_BYTES]
            part[:] = self._read_bytes(len(part))
        return values

    def _read_bytes(self, count: int) -> bytes:
        """Read ``count`` bytes. Raise BadArray if the stream ends too early."""
        found = self._stream.read(count) if count <= self._bytes_left else b""
        if len(found) != count:
            raise BadArray("it ends within an array")
        self._bytes_left -= count
        return found


def _parse_shape(info: list[int]) -> tuple[tuple[int, ...], list[int]]:
    """Return an array's sizes, and its axes ordered from the slowest to the fastest in memory.

    ``info`` is the shape information, as in the module's docstring. Raise BadArray if it is
    invalid, or if values would have gaps.
    """
    rank = info[0]
    if not 0 <= rank <= RANK_MAX or len(info) != 2 * rank + 4:
        raise BadArray(f"shape information {info[:8]} is of no rank")
    shape, strides, order = tuple(info[1 : 1 + rank]), info[1 + rank : 1 + 2 * rank], info[-1]
    if order not in (ord("c"), ord("f")) or min(shape, default=1) < 1:
        raise BadArray(f"shape {shape} of order {order}")
    long = [axis for axis in range(rank) if shape[axis] > 1]
    long.sort(key=lambda axis: -strides[axis])
    # The stride of a vector may be that of the view it was saved from.
    for number, axis in enumerate(long if len(long) > 1 else ()):
        if strides[axis] != prod(shape[other] for other in long[number + 1 :]):
            raise BadArray(f"shape {shape} with strides {tuple(strides)}")
    return shape, [axis for axis in range(rank) if shape[axis] == 1] + long


CONFIGURATION_ENTRY = "configuration.json"
COEFFICIENTS_ENTRY = "coefficients.bin"
UPDATER_ENTRY = "updaterState.bin"
NORMALIZER_ENTRY = "normalizer.bin"
CONFIGURATION_BYTES_MAX = 64 << 20
Result = TypeVar("Result")

DAMAGE_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError),
    *(NotImplementedError, RuntimeError, ValueError),
)


class ModelZip:
    """A saved network's zip file. Methods raise NoDl4jNetwork if an entry is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        if not path.is_file():
            raise UsageError(
                f"path={self.path!r}: the file does not exist; pass a zip that DL4J saved"
            )
        try:
            self._file = zipfile.ZipFile(path)
            check_members(self._file, path.stat().st_size)
        except DAMAGE_ERRORS as error:
            raise NoDl4jNetwork(self.path, f"it cannot be opened as a zip ({error})") from None
        self._sizes = {info.filename: info for info in self._file.infolist()}

    def __enter__(self) -> ModelZip:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def has_entry(self, entry: str) -> bool:
        """Return whether the entry exists and is not empty."""
        return entry in self._sizes and self._sizes[entry].file_size > 0

    def read_configuration(self) -> dict[str, Any]:
        """Return the parsed configuration.json."""
        info = self._find_entry(CONFIGURATION_ENTRY)
        if info.file_size > CONFIGURATION_BYTES_MAX:
            raise NoDl4jNetwork(
                self.path,
                f"{CONFIGURATION_ENTRY} has {info.file_size} bytes, more than any network needs",
            )
        try:
            found = json.loads(self._file.open(info).read(CONFIGURATION_BYTES_MAX))
        except DAMAGE_ERRORS as error:
            why = f"{CONFIGURATION_ENTRY} cannot be read ({type(error).__name__}: {error})"
            raise NoDl4jNetwork(self.path, why) from None
        if not isinstance(found, dict):
            raise NoDl4jNetwork(self.path, f"{CONFIGURATION_ENTRY} is no JSON object")
        return found

    def read_array(self, entry: str, expected: int) -> NDArray[np.float32]:
        """Return the array of an entry, flattened to f32[expected]."""
        return self.read(entry, lambda reader: reader.read_array(expected).reshape(-1))

    def read(self, entry: str, parse: Callable[[ArrayReader], Result]) -> Result:
        """Call ``parse`` with an ArrayReader of the entry's content; return the result."""
        info = self._find_entry(entry)
        limit = min(info.file_size, info.compress_size * EXPANSION_MAX + EXPANSION_MAX)
        try:
            with self._file.open(info) as stream:
                return parse(ArrayReader(stream, limit))
        except NotImported:  # must not be caught below as a ValueError
            raise
        except (BadArray, MemoryError, *DAMAGE_ERRORS) as error:
            raise NoDl4jNetwork(self.path, f"{entry}: {error}") from None

    def _find_entry(self, entry: str) -> zipfile.ZipInfo:
        """Return the ZipInfo of an entry. Raise NoDl4jNetwork if it is missing."""
        if entry not in self._sizes:
            names = ", ".join(sorted(self._sizes)[:8]) or "nothing"
            raise NoDl4jNetwork(self.path, f"it contains no {entry}, only {names}")
        return self._sizes[entry]
