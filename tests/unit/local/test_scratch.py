"""Tests of scratch directories: those of killed programs are removed, and no others."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from sparkstrom.local import data as scratch
from sparkstrom.local.data import PREFIX, ScratchDirectory, remove_abandoned_directories


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make ``tmp_path`` the temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed() -> Path:
    """Return a scratch directory whose lock is released without its removal, as by SIGKILL."""
    made = ScratchDirectory()
    (made.path / "rows-0").write_bytes(b"rows")
    os.close(made._descriptor)
    return made.path


def test_what_a_killed_program_left_is_removed_and_what_is_used_stays(here: Path) -> None:
    """The directory of a killed program is removed; one in use or without a lock file stays."""
    used, left, other = ScratchDirectory(), killed(), here / f"{PREFIX}of-somebody"
    other.mkdir()
    remove_abandoned_directories()
    assert used.path.exists()
    assert not left.exists()
    assert other.exists()
    used.remove()
    assert list(here.iterdir()) == [other]


def test_another_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scratch directory of another user is not removed."""
    left = killed()
    monkeypatch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
    remove_abandoned_directories()
    assert left.exists()


def test_one_that_is_removed_while_it_is_made_is_made_again(
    here: Path, monkeypatch: pytest.MonkeyPatch
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
    assert seen[1:] == [made.path] == list(here.iterdir())
    made.remove()


def test_where_there_are_no_locks_nothing_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without locks, no scratch directory is removed."""

    def refused(descriptor: int) -> bool:
        raise OSError("no locks on this file system")

    monkeypatch.setattr(scratch, "try_lock", refused)
    monkeypatch.setattr("sparkstrom.transport.aeron.driver_directories.try_lock", refused)
    made = ScratchDirectory()
    remove_abandoned_directories()
    assert made.path.exists()
    made.remove()
