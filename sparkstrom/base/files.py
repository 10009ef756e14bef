"""Files at paths that others may write to as well: what lies there need not be a file."""

from __future__ import annotations

import errno
import math
import os
import secrets
import stat
import zipfile
from pathlib import Path
from typing import IO, BinaryIO, cast

import numpy as np

EXPANSION_MAX = 1040  # deflate's own limit is 1,032


class NotAFileError(OSError):
    """A directory, a named pipe, a socket or a device, where a file is wanted."""


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> BinaryIO:
    """Open a file to read it. Raise NotAFileError for anything else, such as a named pipe.

    To open a pipe the usual way waits for its writer, and nobody may ever be one.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return cast(BinaryIO, open(descriptor, "rb"))


def create_beside(target: Path) -> tuple[BinaryIO, Path]:
    """A new file in the target's directory, to be renamed, and its path.

    Nobody can know its name before, and a file or a link that has it is never written to.
    """
    path = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return cast(BinaryIO, open(os.open(path, flags, 0o666), "wb")), path


def check_members(archive: zipfile.ZipFile, size: int) -> None:
    """Raise ValueError for a zip of ``size`` bytes that could expand to more than deflate allows.

    Members may be stored or deflated: a few bytes of bzip2 or LZMA expand to gigabytes.
    """
    for info in archive.infolist():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"{info.filename} is compressed by a method other than deflate")
        if info.file_size > (info.compress_size + 1) * EXPANSION_MAX:
            raise ValueError(f"{info.filename} declares {info.file_size} bytes, more than it holds")
    if sum(info.compress_size for info in archive.infolist()) > size:
        raise ValueError("members overlap")


def check_npz(file: IO[bytes]) -> None:
    """Raise ValueError, or what zipfile raises, unless NumPy can read this within its size.

    Each array's header must declare as many bytes as its member has. The file is at its beginning
    afterwards.
    """
    size = file.seek(0, os.SEEK_END)
    with zipfile.ZipFile(file) as archive:
        check_members(archive, size)
        for info in archive.infolist():
            with archive.open(info) as member:
                version = np.lib.format.read_magic(member)
                if version == (1, 0):
                    shape, _, dtype = np.lib.format.read_array_header_1_0(member)
                else:
                    shape, _, dtype = np.lib.format.read_array_header_2_0(member)
                declared = math.prod(shape) * dtype.itemsize
                if dtype.hasobject or declared != info.file_size - member.tell():
                    raise ValueError(f"{info.filename} is not as long as {dtype}{list(shape)}")
    file.seek(0)
