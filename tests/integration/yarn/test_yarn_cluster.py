"""scripts/yarn-cluster: its jars are those that are pinned, and it ends what it started, alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.mini_yarn import Daemon, began, is_running
from scripts.yarn_jars import VARIABLE, digest, fetch
from tests.integration.yarn.conftest import JARS

ROOT = Path(__file__).parents[3]


def test_a_jar_is_fetched_once_and_only_as_it_is_pinned(tmp_path) -> None:
    repository, target = tmp_path / "maven", tmp_path / "jars"
    (repository / "org").mkdir(parents=True)
    (repository / "org/a-1.jar").write_bytes(b"right")
    pinned = {"org/a-1.jar": digest(b"right")}
    fetch(pinned, target, repository.as_uri())
    assert (target / "a-1.jar").read_bytes() == b"right"
    fetch(pinned, target, "file:///nowhere")  # it is there
    (target / "a-1.jar").write_bytes(b"changed on the disk")
    fetch(pinned, target, repository.as_uri())
    assert (target / "a-1.jar").read_bytes() == b"right"
    (target / "a-1.jar").unlink()
    (repository / "org/a-1.jar").write_bytes(b"wrong")
    with pytest.raises(RuntimeError, match=f"has sha256 {digest(b'wrong')}, not"):
        fetch(pinned, target, repository.as_uri())
    assert not (target / "a-1.jar").exists()
    with pytest.raises(RuntimeError, match=f"cannot be fetched .* name that in {VARIABLE}"):
        fetch(pinned, target, "file:///nowhere")


def test_a_pid_that_came_back_is_not_taken_for_the_daemon() -> None:
    ours = began(os.getpid())
    assert Daemon("rm", os.getpid(), ours).is_alive()
    assert not Daemon("rm", os.getpid(), str(int(ours) - 1)).is_alive()


@pytest.mark.slow
@pytest.mark.skipif(not JARS, reason=f"no YARN here: set {VARIABLE}")
def test_start_shows_what_to_export_and_stop_ends_all_of_it(tmp_path) -> None:
    home = tmp_path / "home"

    def run(what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "scripts.yarn_cluster", what, "--home", str(home)]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
        )

    started = run("start")
    try:
        assert started.returncode == 0, started.stderr
        assert is_running(home)
        assert run("show").stdout == started.stdout
        again = run("start")
        assert again.returncode == 1
        assert "stop it first" in again.stderr
        exports = [line for line in started.stdout.splitlines() if line.startswith("export ")]
        assert f"export HADOOP_CONF_DIR={home}/conf" in exports
        assert (home / "conf/yarn-site.xml").exists()
        assert (home / "spark-conf/spark-defaults.conf").exists()
    finally:
        assert run("stop").returncode == 0
    assert not is_running(home)
    inside = [link for link in Path("/proc").glob("[0-9]*/cwd") if str(home) in _read(link)]
    assert inside == []
    assert run("show").returncode == 1


def _read(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
