"""Open and create files at paths to which other users can write; check archives before reading.

Opening never waits for the other end of a named pipe.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO, cast

import numpy as np
from numpy.typing import NDArray

EXPANSION_MAX = 1040  # deflate's own limit is 1,032
READ_BYTES = 4 << 20  # size of the pieces in which arrays are read
# What ``read_npz`` and ``numpy.load`` raise for a file that is missing or damaged.
READ_ERRORS = (
    *(OSError, EOFError, TypeError, ValueError, KeyError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)


class NotAFileError(OSError):
    """The path names a directory, named pipe, socket or device instead of a regular file."""


def find_local_path(address: str) -> str | None:
    """Return the path that a local path or ``file:`` URL names, or None for another URL.

    ``~`` is expanded; the rest is taken literally.
    """
    if "://" in address and not address.startswith("file:"):
        return None
    return os.path.expanduser(address.removeprefix("file://").removeprefix("file:"))


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading. Raise NotAFileError for anything else, such as a named pipe.

    With ``follow=False``, a symbolic link raises OSError. A plain ``open`` of a pipe would block
    until a writer appears, which may never happen.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return cast(BinaryIO, open(descriptor, "rb"))


def open_to_append(path: str | os.PathLike[str]) -> TextIO:
    """Open a text file for appending and reading. Raise NotAFileError for a named pipe.

    Creates the file if it does not exist, and accepts devices such as /dev/null. A plain ``open``
    of a pipe would block until a reader appears.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
        os.close(descriptor)
        raise NotAFileError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    os.set_blocking(descriptor, True)
    return open(descriptor, "a", encoding="utf-8")


def create_beside(target: Path) -> tuple[BinaryIO, Path]:
    """Create a temporary file in the folder of ``target``; return (open file, its path).

    The caller renames the file to ``target`` when it is complete. The name is random, and an
    existing file or link is never written to.
    """
    path = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return cast(BinaryIO, open(os.open(path, flags, 0o666), "wb")), path


def check_members(archive: zipfile.ZipFile, size: int) -> None:
    """Raise ValueError if a zip of ``size`` bytes could be a decompression bomb.

    Only stored and deflated members are accepted, with deflate's maximal ratio: a few bytes of
    bzip2 or LZMA could expand to gigabytes.
    """
    for info in archive.infolist():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{info.filename} is compressed by a method other than deflate")
        if info.file_size > (info.compress_size + 1) * EXPANSION_MAX:
            raise ValueError(f"{info.filename} declares {info.file_size} bytes, more than it holds")
    if sum(info.compress_size for info in archive.infolist()) > size:
        raise ValueError("members overlap")


def check_npz(file: IO[bytes]) -> None:
    """Raise ValueError unless NumPy can load this npz file without exceeding its declared size.

    Each array's header must declare exactly as many bytes as its member holds. Raises zipfile's own
    errors for a broken archive. Rewinds the file to its beginning.
    """
    for _ in _checked_arrays(file):
        pass
    file.seek(0)


def read_npz(file: IO[bytes]) -> dict[str, NDArray[Any]]:
    """Return an npz file's arrays by name. Raises the same errors as ``check_npz``.

    Faster than ``check_npz`` and ``numpy.load`` together, because each header is parsed once.
    """
    arrays = {}
    for name, member, layout in _checked_arrays(file):
        array = np.ndarray(**layout)
        content = array.ravel(order="K").view(np.uint8)
        for start in range(0, content.size, READ_BYTES):
            size = min(READ_BYTES, content.size - start)
            piece = member.read(size)
            content[start : start + size] = np.frombuffer(piece, np.uint8, size)
        arrays[name.removesuffix(".npy")] = array
    return arrays


def _checked_arrays(file: IO[bytes]) -> Iterator[tuple[str, IO[bytes], dict[str, Any]]]:
    """Check each array of an npz file, and yield it without having read its elements.

    Yields (name, member positioned after its header, keyword arguments for numpy.ndarray). Raises
    ValueError as described for ``check_npz``.
    """
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        check_members(archive, size)
        for info in archive.infolist():
            with archive.open(info) as member:
                version = np.lib.format.read_magic(member)
                if version not in ((1, 0), (2, 0), (3, 0)):
                    raise ValueError(f"{info.filename} has the unknown format version {version}")
                if version == (1, 0):
                    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(member)
                else:
                    shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(member)
                declared = math.prod(shape) * dtype.itemsize
                is_long = declared == info.file_size - member.tell()
                if dtype.hasobject or min(shape, default=0) < 0 or not is_long:
                    raise ValueError(f"{info.filename} is not as long as {dtype}{list(shape)}")
                order = "F" if is_fortran else "C"
                yield info.filename, member, {"shape": shape, "dtype": dtype, "order": order}
