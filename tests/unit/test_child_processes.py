"""Tests of child processes: the number of usable cores, and inherited descriptors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparkstrom.base import child_processes
from sparkstrom.base.child_processes import count_cores

CLOSED = 'exec "$@" <&- >&- 2>&-'
PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from sparkstrom.base.child_processes import start_module

folder = Path(sys.argv[1])
ours, theirs = os.pipe()
assert theirs in (1, 2)
environment = os.environ | {"PYTHONPATH": str(folder)}
with start_module("answer", [theirs], output=subprocess.DEVNULL, env=environment) as child:
    os.close(theirs)
    (folder / "answer").write_bytes(os.read(ours, 100))
"""


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({}, 8),
    ],
)
def test_core_count_is_limited_by_container_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    """The number of cores is limited by a container's quota (cgroup v1 or v2)."""
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(child_processes, "CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert count_cores() == cores


def test_descriptors_are_passed_without_standard_streams(tmp_path: Path) -> None:
    """The descriptors have the numbers of standard streams, which the child must not replace."""
    (tmp_path / "answer.py").write_text("import os, sys; os.write(int(sys.argv[1]), b'ready')")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    subprocess.run(["sh", "-c", CLOSED, "sh", *command], check=True)
    assert (tmp_path / "answer").read_bytes() == b"ready"


def test_child_imports_modules_of_old_and_new_directory(tmp_path: Path) -> None:
    """A child imports the modules of both directories, which a notebook finds by the entry ""."""
    program = (
        "import os, subprocess, sys; from sparkstrom.base.child_processes import *;"
        "os.chdir('data'); environment = make_child_environment(1);"
        "subprocess.run([sys.executable, '-P', '-c', 'import first, second'], env=environment,"
        " check=True)"
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "first.py").touch()
    (tmp_path / "data" / "second.py").touch()
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
