"""Tests of checkpoints on file systems that are really full or read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.checkpoint.directory import CheckpointDirectory
from sparkstrom.checkpoint.files import Checkpoint
from sparkstrom.checkpoint.writer import CheckpointWriter
from tests.unit.checkpoint.writer_bench import wait_for_writer

Mounted = Callable[[str], Path]


def make_sized_checkpoint(number: int, kib: int) -> Checkpoint:
    return Checkpoint({"number": number}, {"theta": np.full(kib << 7, number, np.int64)})


def test_full_disk_skips_checkpoints_with_one_warning(mount_tmpfs: Mounted) -> None:
    """Checkpoints too large for a full disk are skipped with one warning; others are written."""
    path = mount_tmpfs("size=1m")
    said: list[str] = []
    directory = CheckpointDirectory(path, 3)
    directory.check()
    writer = CheckpointWriter(directory, said.append)
    for number, kib in enumerate((400, 800, 700, 1, 2000)):  # of 1024 KiB in all
        writer.offer(
            lambda number=number, kib=kib: make_sized_checkpoint(number, kib), f"update {number}"
        )
        wait_for_writer(writer)
    writer.close(make_sized_checkpoint(9, 900))
    assert [one.description["number"] for one in writer.written] == [0, 3]
    assert sorted(file.name for file in path.iterdir()) == [
        "checkpoint-000001.npz",
        "checkpoint-000002.npz",
    ]
    assert len(writer.warnings) == 1
    assert "update 1 not written" in said[0]
    assert "(No space left on device): training continues" in said[0]
    assert writer.unsaved_reason == (
        f"what was learned after {path}/checkpoint-000002.npz is not saved: "
        "the end of the fit could not be written (No space left on device)"
    )
    newest = CheckpointDirectory(path).read_newest(said.append)
    assert newest is not None
    assert newest[1].description == {"number": 3}


def test_checkpoints_resume_after_read_only_period(mount_tmpfs: Mounted) -> None:
    """While the file system is read-only, checkpoints fail with one warning; later ones succeed."""
    path = mount_tmpfs("size=1m")
    said: list[str] = []
    writer = CheckpointWriter(CheckpointDirectory(path, 1), said.append)
    for number, mode in enumerate(("rw", "ro", "ro", "rw")):
        subprocess.run(["mount", "-o", f"remount,{mode}", str(path)], check=True)
        writer.offer(lambda number=number: make_sized_checkpoint(number, 1), f"update {number}")
        wait_for_writer(writer)
    writer.close(None)
    assert [one.description["number"] for one in writer.written] == [0, 3]
    assert len(said) == 2
    assert "update 1 not written" in said[0]
    assert "(Read-only file system)" in said[0]
    assert "written again, after 2 that failed" in said[1]
    assert writer.unsaved_reason == ""


def test_check_rejects_read_only_directory(mount_tmpfs: Mounted) -> None:
    path = mount_tmpfs("ro")
    for directory in (path, path / "new"):
        with pytest.raises(SetupError, match=r"cannot be written \(Read-only file system\)"):
            CheckpointDirectory(directory).check()
    assert CheckpointDirectory(path).read_newest(print) is None
