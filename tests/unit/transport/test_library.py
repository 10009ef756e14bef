"""The Aeron library: where it is looked for, how it is fetched, and the errors."""

from __future__ import annotations

import ctypes.util
import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.transport.aeron import library
from sparkstrom.transport.aeron import library as fetching
from sparkstrom.transport.aeron import library as pinned


@pytest.fixture
def without_aeron_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Simulate a machine without the Aeron library."""
    monkeypatch.delenv(library.LIBRARY_VARIABLE, raising=False)
    monkeypatch.setattr(library, "WHEEL_PROJECT", "no_such_wheel")
    monkeypatch.setattr(library, "SYSTEM_LIBRARIES", ("libno_such_aeron.so",))
    monkeypatch.setattr(library, "fetched_library_path", lambda: tmp_path / "absent.so")
    library._find_and_load.cache_clear()


@pytest.mark.usefixtures("without_aeron_library")
def test_missing_library_error_lists_searched_places_and_command() -> None:
    """Without a library, the error names each place that was searched, and the fetch command."""
    with pytest.raises(SetupError) as caught:
        library.load_library()
    message = str(caught.value)
    for place in ("SPARKSTROM_AERON_LIBRARY", "no_such_wheel wheel", "libno_such_aeron.so"):
        assert place in message
    assert message.count("fetch-aeron") >= 2


@pytest.mark.usefixtures("without_aeron_library")
def test_missing_library_warning_names_fetch_command() -> None:
    """Without a library, a warning at the start of a program names the fetch command."""
    with pytest.warns(
        RuntimeWarning, match=r"(?s)gradient sharing cannot start.*fetch-aeron"
    ) as caught:
        library.warn_if_library_missing(1)
    assert caught[0].filename == __file__


@pytest.mark.usefixtures("without_aeron_library")
def test_missing_library_error_names_platform_without_wheel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a platform without a wheel, the error says that there is none."""
    monkeypatch.setattr(library.platform, "machine", lambda: "aarch64")
    with pytest.raises(SetupError, match="no no_such_wheel wheel for linux on aarch64"):
        library.load_library()


def test_missing_library_named_by_variable_raises_setup_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A missing library that the environment variable names is an error."""
    monkeypatch.setenv(library.LIBRARY_VARIABLE, "/nonexistent/libaeron.so")
    with pytest.raises(SetupError, match=r"/nonexistent/libaeron\.so cannot be loaded.*unset it"):
        library.load_library()


def test_library_without_aeron_functions_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library without Aeron's functions is rejected."""
    name = ctypes.util.find_library("m")
    assert name is not None
    monkeypatch.setenv(library.LIBRARY_VARIABLE, name)
    with pytest.raises(SetupError, match=r"not a complete Aeron client.*lacks aeron_"):
        library.load_library()


def write_wheel(path: Path, content: bytes = b"not a library") -> Path:
    """Write a wheel whose library is ``content``; return its path."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(pinned.WHEEL_LIBRARY_PATH, content)
    return path


def test_wheel_with_wrong_hash_is_rejected(tmp_path: Path) -> None:
    """A wheel with an unexpected hash is rejected, and nothing is installed."""
    with pytest.raises(SetupError, match=f"not {pinned.WHEEL_SHA256}"):
        fetching.fetch_library(write_wheel(tmp_path / "other.whl"), tmp_path / "target.so")
    assert not (tmp_path / "target.so").exists()


def test_missing_wheel_raises_setup_error(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="No such file"):
        fetching.fetch_library(tmp_path / "absent.whl", tmp_path / "target.so")


def test_unloadable_fetched_library_does_not_replace_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetched library that cannot be loaded does not replace the present one."""
    file = write_wheel(tmp_path / "broken.whl")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(pinned, "WHEEL_SHA256", digest)
    target = tmp_path / "lib" / "target.so"
    target.parent.mkdir()
    target.write_bytes(b"old")
    with pytest.raises(SetupError, match="cannot be loaded"):
        fetching.fetch_library(file, target)
    assert target.read_bytes() == b"old"
    assert list(target.parent.iterdir()) == [target]


def test_failed_download_error_has_manual_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a failed download has the command for a wheel that was fetched by hand."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SetupError, match=r"failed:\s+fetch.*fetch-aeron --wheel"):
        fetching.fetch_library()
