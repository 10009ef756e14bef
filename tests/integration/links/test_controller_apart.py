"""Test of a driver program that gets no UDP from its executors: the controller moves to one.

Two hosts are network namespaces with Spark's standalone daemons from pyspark's jars. A firewall on
the driver's host drops UDP, then the controller's TCP connection as well.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from benchmarks.hosts import Hosts, lacking

pytestmark = [
    pytest.mark.skipif((reason := lacking()) is not None, reason=reason or ""),
    pytest.mark.slow,
]

JOB = Path(__file__).with_name("apart_job.py")
ROOT = Path(__file__).parents[3]
LIMIT_S = 240.0
# Host 0 silently drops packets from host 1: UDP, or TCP to the fit's own ports.
NO_UDP = (
    "ip rule add pref 100 lookup local",
    "ip rule add pref 50 from 10.77.0.2 ipproto udp blackhole",
    "ip rule del pref 0",
)
NO_TCP = ("ip rule add pref 51 from 10.77.0.2 ipproto tcp dport 40123-40140 blackhole",)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Hosts]:
    """Master and driver program on host 0, a worker with three slots on host 1."""
    with Hosts(2) as hosts:
        spark_class = str(Path(pyspark.__path__[0]) / "bin/spark-class")
        here, there = hosts.address(0), hosts.address(1)
        with (tmp_path / "daemons").open("wb") as said:
            daemon = [spark_class, "org.apache.spark.deploy.master.Master"]
            hosts.run(
                0, [*daemon, "-h", here, "-p", "7077"], env=make_environment(hosts, 0), output=said
            )
            daemon = [spark_class, "org.apache.spark.deploy.worker.Worker", "-c", "3", "-m", "1g"]
            at = ["-h", there, "-d", str(tmp_path / "work"), f"spark://{here}:7077"]
            hosts.run(1, [*daemon, *at], env=make_environment(hosts, 1), output=said)
        yield hosts


def make_environment(hosts: Hosts, host: int) -> dict[str, str]:
    return {
        "SPARK_LOCAL_IP": hosts.address(host),
        "PYTHONPATH": str(ROOT),
        "PYSPARK_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "SPARK_HOME": str(Path(pyspark.__path__[0])),
        "PATH": os.environ["PATH"],
    }


class DriverProgram:
    """A driver program that runs one fit with each of the controllers, when ordered."""

    def __init__(self, hosts: Hosts, folder: Path, *controllers: str) -> None:
        master = f"spark://{hosts.address(0)}:7077"
        folder.mkdir()
        self._folder, self._numbers = folder, itertools.count()
        command = [sys.executable, str(JOB), hosts.address(0), master, str(folder), *controllers]
        program = hosts.run(0, command, env=make_environment(hosts, 0), output=subprocess.PIPE)
        assert program.stdout is not None
        self._program, self._lines = program, program.stdout

    def fit(self) -> tuple[dict[str, Any], str]:
        """Order the next fit; return its results and all that the program printed until its end."""
        (self._folder / str(next(self._numbers))).touch()
        said = ""
        while line := self._lines.readline().decode():
            said += line
            print(line, end="")
            if line.startswith("TOLD "):
                return json.loads(line.removeprefix("TOLD ")), said
        raise AssertionError(f"it has ended: {said}")

    def end(self) -> None:
        assert self._program.wait(LIMIT_S) == 0
        self._lines.close()


def check(told: dict[str, Any], replicas: int) -> None:
    assert told["equal"]
    assert told["replicas"] == replicas
    assert told["minibatches"][0] == told["minibatches"][1]


def test_controller_moves_to_executor_if_udp_is_blocked(cluster: Hosts, tmp_path: Path) -> None:
    """The controller stays in the driver program if executors reach it by UDP, and else moves."""
    there = f"{cluster.address(1)}:40135"
    program = DriverProgram(cluster, tmp_path / "fits", "auto", "auto", there, "executor")
    near, said = program.fit()
    check(near, 3 + 1)  # three slots, and the driver program
    assert "the controller moves to" not in said
    for command in NO_UDP:
        cluster._run_inside(0, command)
    moved, said = program.fit()
    check(moved, 2 + 1)
    assert moved["prepare_s"] < 40  # the UDP probe ends after 8 s; a slow host adds to it
    assert "host1 get no answer by UDP from this program at 10.77.0.1:401" in said
    assert "progress arrives from the controller over TCP" in said
    named, said = program.fit()
    check(named, 2 + 1)
    assert f"the controller is on executor 0 on 10.77.0.2, {there}" in said
    for command in NO_TCP:
        cluster._run_inside(0, command)
    silent, said = program.fit()
    program.end()
    check(silent, 2 + 1)
    assert "no TCP connection to this program (10.77.0.1:401" in said
