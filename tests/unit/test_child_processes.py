"""How many processes a machine or a container has room for."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkstrom.base import child_processes
from sparkstrom.base.child_processes import count_cores


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
def test_cores_that_a_container_may_not_use_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cores: int
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(child_processes, "CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert count_cores() == cores
