"""Tests of scratch directories: those of killed programs are removed, and no others."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from sparkstrom.local import data as scratch
from sparkstrom.local.data import PREFIX, ScratchDirectory, remove_abandoned_directories


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make ``tmp_path`` the temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def make_abandoned_directory() -> Path:
    """Return a scratch directory whose lock is released without its removal, as by SIGKILL."""
    made = ScratchDirectory()
    (made.path / "rows-0").write_bytes(b"rows")
    os.close(made._descriptor)
    return made.path


def test_scratch_directory_of_killed_program_is_removed(temporary_directory: Path) -> None:
    """The directory of a killed program is removed; one in use or without a lock file stays."""
    used, left, other = (
        ScratchDirectory(),
        make_abandoned_directory(),
        temporary_directory / f"{PREFIX}of-somebody",
    )
    other.mkdir()
    remove_abandoned_directories()
    assert used.path.exists()
    assert not left.exists()
    assert other.exists()
    used.remove()
    assert list(temporary_directory.iterdir()) == [other]


def test_scratch_directory_of_another_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scratch directory of another user is not removed."""
    left = make_abandoned_directory()
    monkeypatch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
    remove_abandoned_directories()
    assert left.exists()


def test_scratch_directory_removed_during_creation_is_recreated(
    temporary_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another wrapper removes the directory before its lock is held, a new one is created."""
    open_lock, seen = scratch.open_lock, list[Path]()

    def then_looked_at(path: Path) -> int:
        descriptor = open_lock(path)
        seen.append(path.parent)
        if len(seen) == 1:
            remove_abandoned_directories()
        return descriptor

    monkeypatch.setattr(scratch, "open_lock", then_looked_at)
    made = ScratchDirectory()
    assert not seen[0].exists()
    assert seen[1:] == [made.path] == list(temporary_directory.iterdir())
    made.remove()


def test_no_scratch_directory_is_removed_without_file_locks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a file system without locks, no scratch directory is removed."""

    def refused(descriptor: int) -> bool:
        raise OSError("no locks on this file system")

    monkeypatch.setattr(scratch, "try_lock", refused)
    monkeypatch.setattr("sparkstrom.transport.aeron.driver_directories.try_lock", refused)
    made = ScratchDirectory()
    remove_abandoned_directories()
    assert made.path.exists()
    made.remove()
