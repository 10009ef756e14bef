"""Kernels have a writable, private place, and Numba knows it from the start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparkstrom.base.kernel_cache import VARIABLE, use_writable_cache


def test_a_writable_package_keeps_its_own(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    use_writable_cache(environ, tmp_path)
    assert environ == {}


def test_a_read_only_package_gets_a_private_directory(tmp_path: Path) -> None:
    environ = {"SPARK_LOCAL_DIRS": f"{tmp_path},/elsewhere"}
    use_writable_cache(environ, tmp_path / "missing")
    cache = Path(environ[VARIABLE])
    assert cache.parent == tmp_path
    assert cache.stat().st_mode & 0o777 == 0o700


def test_what_the_user_names_stays(tmp_path: Path) -> None:
    environ = {VARIABLE: "/theirs"}
    use_writable_cache(environ, tmp_path / "missing")
    assert environ == {VARIABLE: "/theirs"}


@pytest.mark.parametrize("taken", ["open to all", "a link", "a file"])
def test_a_directory_that_others_may_write_is_not_used(tmp_path: Path, taken: str) -> None:
    first = {"SPARK_LOCAL_DIRS": str(tmp_path)}
    use_writable_cache(first, tmp_path / "missing")
    usual = Path(first[VARIABLE])
    if taken == "open to all":
        usual.chmod(0o777)
    else:
        usual.rmdir()
        usual.symlink_to(tmp_path) if taken == "a link" else usual.touch()
    environ = {"SPARK_LOCAL_DIRS": str(tmp_path)}
    use_writable_cache(environ, tmp_path / "missing")
    other = Path(environ[VARIABLE])
    assert other != usual
    assert other.stat().st_mode & 0o777 == 0o700
    other.rmdir()


@pytest.mark.parametrize("module", ["encoding.cpu.compiled", "transport.aeron.kernels"])
def test_numba_knows_it_when_it_is_imported(tmp_path: Path, module: str) -> None:
    program = (
        "import os; real = os.access\n"
        "os.access = lambda path, mode: 'sparkstrom' not in str(path) and real(path, mode)\n"
        f"import sparkstrom.{module}\n"
        "from numba.core import config; print(config.CACHE_DIR)"
    )
    environ = {"SPARK_LOCAL_DIRS": str(tmp_path), "PATH": "/usr/bin", "HOME": "/nonexistent"}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().startswith(str(tmp_path))
