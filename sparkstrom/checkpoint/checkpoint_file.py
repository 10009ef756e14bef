"""A checkpoint file: an npz that plain NumPy opens, and a SHA-256 over every byte of it.

    NAME.npy          an array each, uncompressed
    description.json  {"format": 1, "sparkstrom": "0.1.0", "description": {...}}
    zip comment       "sparkstrom checkpoint, SHA-256 of all bytes before these digits: " and them

The comment is the end of the file, so that a file that was cut anywhere has none.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import math
import os
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import CheckpointDamaged, UsageError
from sparkstrom.base.version import __version__

FORMAT = 1
DESCRIPTION = "description.json"
SEALED = b"sparkstrom checkpoint, SHA-256 of all bytes before these digits: "
DIGITS = 2 * hashlib.sha256().digest_size
CHUNK_BYTES = 1 << 20
MADE = (1980, 1, 1, 0, 0, 0)  # zip's first date: equal checkpoints are equal files
NPY_VERSION = (1, 0)
KINDS = "biufcSU"  # numbers and text: what NumPy's files say in full


class Sink(Protocol):
    """What a checkpoint is written to, from the beginning to the end."""

    def write(self, data: Any, /) -> int: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was learnt: arrays by name, and what they are, as JSON has it."""

    description: dict[str, Any]
    arrays: dict[str, NDArray[Any]]

    def __post_init__(self) -> None:
        for name, array in self.arrays.items():
            assert name, "an array without a name"
            assert array.dtype.kind in KINDS, f"array {name} is of {array.dtype}"


def pack_checkpoint(checkpoint: Checkpoint, sink: Sink) -> None:
    """Write the file, from front to back, with a copy of one chunk at a time in memory.

    What the sink raises comes through; then the file is not whole, and reading it says so.
    """
    sealing = _Sealing(sink)
    about = {
        "format": FORMAT,
        "sparkstrom": __version__,
        "description": checkpoint.description,
    }
    content = json.dumps(about, indent=1).encode()
    with zipfile.ZipFile(sealing, "w") as npz:  # type: ignore[call-overload]
        for name, array in checkpoint.arrays.items():
            with npz.open(_member(f"{name}.npy"), "w", force_zip64=True) as member:
                _write_array(member, array)
        with npz.open(_member(DESCRIPTION), "w") as member:
            member.write(content)
        npz.comment = SEALED + b"0" * DIGITS
    sealing.finish()


def read_checkpoint_untrusted(file: IO[bytes], path: str) -> Checkpoint:
    """Read a file that can seek. ``path`` is what errors call it.

    Raise CheckpointDamaged where it is cut, changed, or no checkpoint; UsageError where it is
    whole and of a newer format; and OSError where it cannot be read.
    """
    check_whole(file, path)
    try:
        with zipfile.ZipFile(file) as npz:
            if any(info.compress_type != zipfile.ZIP_STORED for info in npz.infolist()):
                raise ValueError("a member is compressed")
            about = json.loads(npz.read(DESCRIPTION))
            written_by, number = str(about["sparkstrom"]), int(about["format"])
            if number > FORMAT:
                raise UsageError(
                    f"{path} has checkpoint format {number}, written by sparkstrom {written_by}: "
                    f"this is sparkstrom {__version__}, which reads format {FORMAT}. Install "
                    f"sparkstrom {written_by} or newer, or use another checkpoint_directory"
                )
            arrays = {
                info.filename.removesuffix(".npy"): _read_array(npz, info)
                for info in npz.infolist()
                if info.filename != DESCRIPTION
            }
            return Checkpoint(dict(about["description"]), arrays)
    except (UsageError, CheckpointDamaged):
        raise
    except Exception as error:  # whole by its digest: made by somebody else, or by a bug
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that is a false offset
            raise
        raise CheckpointDamaged(path, f"it is no checkpoint ({error!r})") from None


def check_whole(file: IO[bytes], path: str) -> None:
    """Read all of the file, and raise CheckpointDamaged unless it is as it was written."""
    size = file.seek(0, os.SEEK_END)
    tail_bytes = len(SEALED) + DIGITS
    file.seek(max(0, size - tail_bytes))
    tail = _read_exactly(file, min(size, tail_bytes), path)
    if len(tail) < tail_bytes or not tail.startswith(SEALED):
        raise CheckpointDamaged(path, f"its end is missing or changed, after {size:,} bytes")
    digest, left = hashlib.sha256(), size - DIGITS
    file.seek(0)
    buffer = memoryview(bytearray(min(CHUNK_BYTES, left)))
    while left:
        part = buffer[: min(left, len(buffer))]
        _fill(file, part, path)
        digest.update(part)
        left -= len(part)
    if digest.hexdigest().encode() != tail[len(SEALED) :]:
        raise CheckpointDamaged(path, f"its {size:,} bytes are not those that were written")


class _Sealing:
    """Passes bytes on and hashes them; the last ones, where the digest goes, wait for it."""

    def __init__(self, sink: Sink) -> None:
        self._sink, self._digest, self._held, self._passed = sink, hashlib.sha256(), b"", 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= DIGITS:
            self._pass(self._held)
            self._pass(view[:-DIGITS])
            self._held = bytes(view[-DIGITS:])
        else:
            held = self._held + bytes(view)
            self._pass(held[:-DIGITS])
            self._held = held[-DIGITS:]
        return len(view)

    def flush(self) -> None:
        """zipfile asks for it after each member; nobody reads before the end."""

    def tell(self) -> int:
        return self._passed + len(self._held)

    def finish(self) -> None:
        assert self._held == b"0" * DIGITS, "the end of a checkpoint is no place for its digest"
        self._sink.write(self._digest.hexdigest().encode())

    def _pass(self, data: bytes | memoryview) -> None:
        if data:
            self._digest.update(data)
            self._sink.write(data)
            self._passed += len(data)


def _member(name: str) -> zipfile.ZipInfo:
    return zipfile.ZipInfo(name, MADE)


def _write_array(member: IO[bytes], array: NDArray[Any]) -> None:
    header = np.lib.format.header_data_from_array_1_0(array)
    np.lib.format.write_array_header_1_0(member, header)
    lying = array.T if header["fortran_order"] else array
    if lying.flags.c_contiguous:
        content = lying.reshape(-1).view(np.uint8).data
        for first in range(0, len(content), CHUNK_BYTES):
            member.write(content[first : first + CHUNK_BYTES])
        return
    count = max(1, CHUNK_BYTES // array.itemsize)
    flags: list[Any] = ["external_loop", "buffered", "zerosize_ok"]
    parts: Iterable[Any] = np.nditer(array, flags, buffersize=count, order="C")
    for part in parts:
        member.write(part.tobytes())


def _read_array(npz: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    with npz.open(info) as member:
        if np.lib.format.read_magic(member) != NPY_VERSION:
            raise ValueError(f"{info.filename} is of an npy version that is not written here")
        shape, by_columns, dtype = np.lib.format.read_array_header_1_0(member)
        n_bytes = math.prod(shape) * dtype.itemsize
        if dtype.kind not in KINDS or n_bytes != info.file_size - member.tell():
            raise ValueError(f"{info.filename} is not as long as {dtype}{list(shape)}")
        array = np.empty(shape, dtype, order="F" if by_columns else "C")
        into = array.reshape(-1, order="A").view(np.uint8).data
        at = 0
        while at < n_bytes:
            count = member.readinto(into[at : at + CHUNK_BYTES])  # type: ignore[attr-defined]
            if not count:
                raise ValueError(f"{info.filename} ends early")
            at += count
        return array


def _read_exactly(file: IO[bytes], count: int, path: str) -> bytes:
    buffer = bytearray(count)
    _fill(file, memoryview(buffer), path)
    return bytes(buffer)


def _fill(file: IO[bytes], into: memoryview, path: str) -> None:
    """Fill the buffer from where the file stands."""
    reader: io.BufferedIOBase = file  # type: ignore[assignment]
    while into:
        count = reader.readinto(into)
        if not count:
            raise CheckpointDamaged(path, "it became shorter while it was read")
        into = into[count:]
