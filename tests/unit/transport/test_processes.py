"""Processes: finding the executor's JVM, and distinguishing processes that reuse a pid."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sparkstrom.transport.aeron.driver_directories import (
    ProcessIdentity,
    find_executor_process,
    identify_process,
    is_process_alive,
)


def write_process_stat(
    proc: Path, pid: int, name: str, parent: int, state: str = "S", start: int = 0
) -> None:
    """Write /proc/<pid>/stat of a process that started at tick ``start`` (0: at its pid)."""
    rest = [state, str(parent), *["0"] * 17, str(start or pid), "0"]
    (proc / str(pid)).mkdir(parents=True, exist_ok=True)
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) {' '.join(rest)}\n")


def test_executor_is_nearest_java_ancestor(tmp_path: Path) -> None:
    """The executor is the nearest ancestor named java, not one further up."""
    write_process_stat(tmp_path, 1, "init", 0)
    write_process_stat(tmp_path, 10, "java", 1)  # a node manager
    write_process_stat(tmp_path, 20, "java", 10)
    write_process_stat(tmp_path, 30, "python (daemon)", 20)
    write_process_stat(tmp_path, 40, "python", 30)
    assert find_executor_process(40, tmp_path) == ProcessIdentity(20, 20)


def test_process_without_java_ancestor_is_its_own_executor(tmp_path: Path) -> None:
    """Without an ancestor named java, the process itself is returned."""
    write_process_stat(tmp_path, 1, "init", 0)
    write_process_stat(tmp_path, 10, "bash", 1)
    write_process_stat(tmp_path, 40, "python", 10)
    assert find_executor_process(40, tmp_path) == ProcessIdentity(40, 40)


def test_reused_pid_is_another_process(tmp_path: Path) -> None:
    """A process with the same pid but another start time is another process."""
    write_process_stat(tmp_path, 40, "java", 1, start=7)
    process = identify_process(40, tmp_path)
    assert is_process_alive(process, tmp_path)
    write_process_stat(tmp_path, 40, "bash", 1, start=8)
    assert not is_process_alive(process, tmp_path)


def test_zombie_process_is_not_alive(tmp_path: Path) -> None:
    """A zombie does not count as alive."""
    write_process_stat(tmp_path, 40, "java", 1, state="Z")
    assert not is_process_alive(ProcessIdentity(40, 40), tmp_path)


def test_child_process_is_alive_until_killed() -> None:
    """With the real /proc, a child is alive until it is killed."""
    assert is_process_alive(identify_process(os.getpid()))
    with subprocess.Popen(["sleep", "60"]) as child:
        process = identify_process(child.pid)
        assert is_process_alive(process)
        child.kill()
        child.wait()
    assert not is_process_alive(process)
    with pytest.raises(ProcessLookupError):
        identify_process(child.pid)
