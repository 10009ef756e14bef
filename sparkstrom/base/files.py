"""Files at paths that others may write to as well: what lies there need not be a file."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO, cast


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
