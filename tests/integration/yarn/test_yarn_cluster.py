"""Tests of scripts/yarn-cluster: it uses only pinned jars, and ends only processes it started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import mini_yarn
from scripts.mini_yarn import Cluster, Daemon, is_running, start
from scripts.yarn_cluster import how_to_use, main
from scripts.yarn_jars import PYSPARK, VARIABLE, classpath, digest, fetch, jar_directory
from sparkstrom.transport.aeron.driver_directories import identify_process
from tests.integration.yarn.conftest import JARS

ROOT = Path(__file__).parents[3]


def test_jar_is_fetched_once_and_must_match_pinned_hash(tmp_path) -> None:
    """A jar is fetched if it is missing or changed, and refused if it lacks the pinned hash."""
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


def test_reused_pid_is_not_taken_for_daemon() -> None:
    ours = identify_process(os.getpid())
    assert Daemon("rm", *ours).is_alive()
    assert not Daemon("rm", ours.pid, ours.start_time - 1).is_alive()


def test_relative_paths_begin_at_directory_of_caller(tmp_path, monkeypatch, capsys) -> None:
    """Relative paths begin at the caller's directory; the script changes to the checkout."""
    monkeypatch.setenv("SPARKSTROM_CALLED_IN", str(tmp_path))
    (tmp_path / "hadoop").mkdir()
    assert jar_directory({**os.environ, VARIABLE: "hadoop"}) == tmp_path / "hadoop"
    assert main(["stop", "--home", "mine"]) == 0
    assert capsys.readouterr().out == f"nothing ran in {tmp_path / 'mine'}\n"


def test_class_path_of_relative_jar_directory_is_absolute(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    version = next((PYSPARK / "jars").glob("hadoop-client-api-*.jar")).stem.rpartition("-")[2]
    missing = (f"hadoop-client-minicluster-{version}", "bcpkix-jdk18on-1", "bcutil-jdk18on-1")
    Path("hadoop").mkdir()
    for name in (*missing, "jaxb-api-2.3.1"):
        Path("hadoop", f"{name}.jar").touch()
    assert all(Path(jar).is_absolute() for jar in classpath(Path("hadoop")))


def test_a_home_with_a_space_is_refused(tmp_path) -> None:
    """A home with a space is refused, because Spark and YARN do not find directories in it."""
    with pytest.raises(RuntimeError, match=r"a home has no spaces.*--home"):
        start(tmp_path / "my home", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_spark_jars_path_is_url_encoded(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(mini_yarn, "PYSPARK", Path("/my checkout/pyspark"))
    for folder in ("conf", "spark-conf"):
        (tmp_path / folder).mkdir()
    mini_yarn._write_spark_defaults(tmp_path)
    written = (tmp_path / "spark-conf/spark-defaults.conf").read_text()
    assert "spark.yarn.jars local:/my%20checkout/pyspark/jars/*\n" in written


def test_printed_exports_are_quoted_for_shell(tmp_path) -> None:
    """The printed exports quote a path with a space for a shell."""
    home = tmp_path / "with a space"
    cluster = Cluster(home)
    exports = [each for each in how_to_use(cluster).splitlines() if each.startswith("export ")]
    shell = "\n".join([*exports, 'printf %s "$HADOOP_CONF_DIR"'])
    done = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True)
    assert done.stdout == str(home / "conf")


@pytest.mark.slow
@pytest.mark.skipif(not JARS, reason=f"no YARN here: set {VARIABLE}")
def test_start_prints_exports_and_stop_ends_all_processes(tmp_path) -> None:
    home = tmp_path / "home"

    def run(*what: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "scripts.yarn_cluster", *what, "--home", str(home)]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False
        )

    started = run("start", "--nodes", "1")
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
