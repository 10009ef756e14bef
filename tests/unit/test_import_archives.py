"""Archives on the import path: an unchanged one is not read again, a changed one is seen."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zipfile
import zipimport
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkstrom.base import import_archives
from sparkstrom.base.import_archives import ImportArchive, keep_unchanged_archives, stamp_of


def write(archive: Path, **modules: str) -> None:
    """An archive with these modules and their content."""
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in modules.items():
            file.writestr(f"{name}.py", content)


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """On the import path, with ``first_module`` found in it; it counts as old at once."""
    if not import_archives.IS_EAGER:
        pytest.skip("this Python reads archives when something is imported")
    path = tmp_path / "sent.zip"
    write(path, first_module="value = 1")
    before = dict(sys.path_importer_cache)
    monkeypatch.syspath_prepend(str(path))
    monkeypatch.setattr(import_archives, "SETTLED_S", 0.0)
    assert importlib.util.find_spec("first_module") is not None
    yield path
    sys.path_importer_cache.clear()
    sys.path_importer_cache.update(before)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The archives whose directories are read."""
    read: list[str] = []
    original = zipimport._read_directory  # type: ignore[attr-defined]

    def counted(path: str) -> object:
        read.append(path)
        return original(path)

    monkeypatch.setattr(zipimport, "_read_directory", counted)
    return read


def test_an_unchanged_archive_is_read_no_more(archive: Path, readings: list[str]) -> None:
    importlib.invalidate_caches()
    assert str(archive) in readings, "this is what it costs without us"
    keep_unchanged_archives()
    readings.clear()
    importlib.invalidate_caches()
    assert readings == []
    assert importlib.util.find_spec("first_module") is not None


def test_a_changed_archive_is_seen(archive: Path, readings: list[str]) -> None:
    keep_unchanged_archives()
    write(archive, first_module="value = 1", second_module="value = 2")
    assert importlib.util.find_spec("second_module") is None
    importlib.invalidate_caches()
    assert importlib.util.find_spec("second_module") is not None
    readings.clear()
    importlib.invalidate_caches()
    assert readings == [], "changed once, read once"


def test_one_of_the_same_size_in_its_place_is_seen(archive: Path) -> None:
    keep_unchanged_archives()
    facts = archive.stat()
    other = archive.with_name("other.zip")
    write(other, other_module="value = 1")
    assert other.stat().st_size == facts.st_size
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    other.replace(archive)
    importlib.invalidate_caches()
    assert importlib.util.find_spec("first_module") is None
    assert importlib.util.find_spec("other_module") is not None


def test_a_removed_archive_is_seen_and_so_is_its_return(archive: Path) -> None:
    keep_unchanged_archives()
    archive.unlink()
    importlib.invalidate_caches()
    assert importlib.util.find_spec("first_module") is None
    write(archive, first_module="value = 3")
    importlib.invalidate_caches()
    assert importlib.util.find_spec("first_module") is not None


def test_one_written_just_now_is_left_to_python(
    archive: Path, readings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be written once more at the same tick of the clock."""
    monkeypatch.setattr(import_archives, "SETTLED_S", 60.0)
    assert stamp_of(str(archive)) is None
    keep_unchanged_archives()
    assert not isinstance(sys.path_importer_cache[str(archive)], ImportArchive)
    importlib.invalidate_caches()
    assert str(archive) in readings


def test_modules_are_still_imported_from_it(archive: Path) -> None:
    """In a process of its own: what is imported stays."""
    program = (
        "import importlib, sys\n"
        "from sparkstrom.base import import_archives\n"
        "import first_module\n"
        "import_archives.SETTLED_S = 0\n"
        "import_archives.keep_unchanged_archives()\n"
        "importlib.invalidate_caches()\n"
        "del sys.modules['first_module']\n"
        "import first_module\n"
        "print(first_module.value, type(first_module.__loader__).__name__)\n"
    )
    path = os.pathsep.join([str(archive), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == ["1", "ImportArchive"]
