"""Tests of files shared by a fit's processes: a full disk raises an error and kills no process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.local.data import allocate_file, write_file
from sparkstrom.local.fit_runner import FileHandle

BLOCK_BYTES = 512  # as st_blocks counts, whatever the disk
MIB = 1 << 20


def test_mapped_file_has_blocks_allocated_beforehand(tmp_path: Path) -> None:
    """A file that will be mapped has its blocks allocated beforehand."""
    allocate_file(tmp_path / "file", MIB)
    status = (tmp_path / "file").stat()
    assert status.st_size == MIB
    assert status.st_blocks * BLOCK_BYTES >= MIB


@pytest.mark.parametrize(
    "make",
    [
        lambda path: write_file(path, b"seven"),
        lambda path: allocate_file(path, 5),
        lambda path: FileHandle.write(0, path),
    ],
)
def test_full_disk_error_names_file_size_and_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    """On a full disk, ``SetupError`` names the file, its size and TMPDIR."""

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    why = "file does not take 5 bytes: No space left on device; set TMPDIR to a directory"
    with pytest.raises(SetupError, match=why):
        make(tmp_path / "file")


def test_missing_directory_raises_file_not_found_error(tmp_path: Path) -> None:
    """A missing directory raises ``FileNotFoundError``, not the error of a full disk."""
    with pytest.raises(FileNotFoundError):
        allocate_file(tmp_path / "gone" / "file", 5)
