"""Fit files: what the processes of a fit share on disk; a disk that is full is told as such."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkstrom.base.errors import SetupError


def write_file(path: Path, content: bytes) -> None:
    """All of it. Raise SetupError where there is no room."""
    with _told_if_full(path, len(content)):
        path.write_bytes(content)


def allocate_file(path: Path, n_bytes: int) -> None:
    """Zeros that have their room on the disk.

    Whoever maps a file into memory that has no room for a page is killed (SIGBUS) when it writes
    there. Raise SetupError instead.
    """
    with _told_if_full(path, n_bytes), path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, n_bytes)


@contextmanager
def _told_if_full(path: Path, n_bytes: int) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:  # its directory is gone, which is another matter
        raise
    except OSError as error:
        raise SetupError(
            f"{path} does not take {n_bytes:,} bytes: {error.strerror}; set TMPDIR to a directory"
            " on a disk that has room"
        ) from error
