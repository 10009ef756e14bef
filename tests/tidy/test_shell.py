"""Tests that shellcheck finds nothing wrong in our shell files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCED = ROOT / "scripts/environment"  # sourced by the other scripts, so it has no shebang line


def is_shell(path: Path) -> bool:
    first = path.read_bytes().partition(b"\n")[0]
    return path == SOURCED or (first.startswith(b"#!") and first.endswith((b"/sh", b"/bash")))


FOLDERS = (".ci", "scripts", "conf/emr")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).iterdir()
    if path.is_file() and is_shell(path)
)


def run_shellcheck(path: Path, *options: str) -> str:
    """Return what shellcheck reports about a file."""
    beside = Path(sys.executable).parent / "shellcheck"
    tool = str(beside) if beside.exists() else shutil.which("shellcheck")
    if tool is None:
        pytest.skip("shellcheck is not here: the tests' extra has it")
    command = [tool, "--external-sources", "--source-path=SCRIPTDIR", *options, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_shell_file_passes_shellcheck(path: Path) -> None:
    assert run_shellcheck(path, *(["--shell=sh"] if path == SOURCED else [])) == ""


def test_shell_file_list_has_file_of_each_folder() -> None:
    """The list of shell files has one of each folder, so it is not empty by mistake."""
    names = {str(path.relative_to(ROOT)) for path in FILES}
    assert {".ci/run", "scripts/test", "scripts/environment", "conf/emr/bootstrap.sh"} <= names


def test_shellcheck_warning_is_reported(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("#!/bin/sh\nrm -r $1/*\n")
    assert "SC2086" in run_shellcheck(tmp_path / "bad")
