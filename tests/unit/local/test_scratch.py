"""Scratch directories: whose program was killed leaves one that the next removes, and no other."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from sparkstrom.local import data as scratch
from sparkstrom.local.data import PREFIX, ScratchDirectory, remove_abandoned_directories


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed() -> Path:
    """What a program leaves whose end was no choice of its own."""
    made = ScratchDirectory()
    (made.path / "rows-0").write_bytes(b"rows")
    os.close(made._descriptor)
    return made.path


def test_what_a_killed_program_left_is_removed_and_what_is_used_stays(here: Path) -> None:
    used, left, other = ScratchDirectory(), killed(), here / f"{PREFIX}of-somebody"
    other.mkdir()
    remove_abandoned_directories()
    assert used.path.exists()
    assert not left.exists()
    assert other.exists()
    used.remove()
    assert list(here.iterdir()) == [other]


def test_another_users_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    left = killed()
    monkeypatch.setattr(os, "getuid", lambda: left.stat().st_uid + 1)
    remove_abandoned_directories()
    assert left.exists()


def test_one_that_is_removed_while_it_is_made_is_made_again(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock file is there, and not held yet, when another wrapper looks."""
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
    def refused(descriptor: int) -> bool:
        raise OSError("no locks on this file system")

    monkeypatch.setattr(scratch, "try_lock", refused)
    monkeypatch.setattr("sparkstrom.transport.aeron.driver_directories.try_lock", refused)
    made = ScratchDirectory()
    remove_abandoned_directories()
    assert made.path.exists()
    made.remove()
