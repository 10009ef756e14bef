"""Spark's standalone daemons on hosts that are network namespaces, with a driver program."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.hosts import Hosts
from scripts.yarn_jars import PYSPARK
from tests.integration.links.networked_hosts import listen_at

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/standalone.md"
PROGRAM = Path(__file__).with_name("ordered_fits.py")
PORT = 7077
UP_S = 120.0
ANSWER_S = 240.0  # kernels may have to be compiled first
SECRET = "a secret of this test"
JVM = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
# A standalone cluster ignores the number of executors, and so must a fit.
DEFAULTS = f"""
spark.executor.instances 9
spark.ui.enabled false
spark.authenticate true
spark.authenticate.secret {SECRET}
spark.network.crypto.enabled true
spark.driver.memory 512m
spark.python.daemon.module sparkstrom.spark.daemon
spark.driver.extraJavaOptions {{java}}
spark.executor.extraJavaOptions {{java}}
"""
ON_THE_PAGE = {  # parts of the command of docs/standalone.md, and their replacements here
    "spark://master:7077": "spark://{master}:7077",
    "/opt/sparkstrom/bin/python": sys.executable,
    "spark.cores.max=16": "spark.cores.max={workers}",
    "spark.executor.cores=4": "spark.executor.cores=1",
    "spark.executor.memory=4g": "spark.executor.memory=512m",
    "spark.authenticate.secret=...": f"spark.authenticate.secret={SECRET}",
    "workers_per_node=4": "workers_per_node=1",
}


def read_documented_command(master: str, workers: int) -> list[str]:
    """Return the spark-submit command of docs/standalone.md, without its program."""
    (block,) = re.findall(r"```sh\n(spark-submit .*?)program\.py\n```", PAGE.read_text(), re.DOTALL)
    command = block.replace("\\\n", " ")
    words = shlex.split(command)
    for there, here in ON_THE_PAGE.items():
        assert there in command, f"{there} is not in the command of {PAGE}"
        here = here.format(master=master, workers=workers)
        words = [word.replace(there, here) for word in words]
    return [str(PYSPARK / "bin" / words[0]), *words[1:]]


class StandaloneCluster:
    """A Master and a driver program on host 0, and a Worker of one core on each other host."""

    def __init__(self, hosts: Hosts, java: str = "") -> None:
        self._hosts = hosts
        self.directory = hosts.directory
        java = f"{JVM} {java}"
        self._java = f"{os.environ.get('SPARK_DAEMON_JAVA_OPTS', '')} {java}"
        # Not SPARK_CONF_DIR: before Spark's jars in the class path, it prevents class archives.
        defaults = self.directory / "spark-defaults.conf"
        defaults.write_text(DEFAULTS.format(java=java))
        self._properties = ["--properties-file", str(defaults)]
        master = hosts.address(0)
        self._master = f"[{master}]" if ":" in master else master
        self._start("Master", 0, "master.Master", "--webui-port", "8080")
        self._await_master()
        place = self.directory / "driver"
        with listen_at(place, UP_S) as called:
            self._submit(str(place))
            try:
                self._driver = called()
            except TimeoutError:
                raise AssertionError(f"the driver program does not call:\n{self.log()}") from None

    def start_workers(self) -> None:
        """Start the Workers, whose executors register with the application some seconds later."""
        url = f"spark://{self._master}:{PORT}"
        for host in range(1, self._hosts.count):
            given = ["--cores", "1", "--memory", "1g", "--webui-port", "8081", "-d"]
            work = str(self.directory / f"work{host}")
            self._start(f"Worker{host}", host, "worker.Worker", *given, work, url)

    def _variables(self, host: int) -> Mapping[str, str]:
        address = self._hosts.address(host)
        scratch = self.directory / f"local{host}"
        scratch.mkdir(exist_ok=True)
        return {
            "SPARK_HOME": str(PYSPARK),
            "SPARK_LOCAL_IP": address,
            "SPARK_LOCAL_DIRS": str(scratch),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": self._java,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            **({"SPARK_PREFER_IPV6": "true"} if ":" in address and host == 0 else {}),
        }

    def _start(self, name: str, host: int, daemon: str, *given: str) -> None:
        port = str(PORT) if host == 0 else "0"
        address = self._hosts.address(host)
        address = f"[{address}]" if ":" in address else address
        command = [str(PYSPARK / "bin/spark-class"), f"org.apache.spark.deploy.{daemon}"]
        command += ["--host", address, "--port", port, *self._properties, *given]
        with (self.directory / f"{name}.log").open("wb") as log:
            self._hosts.run(host, command, env=self._variables(host), output=log)

    def _await_master(self) -> None:
        log, until_s = self.directory / "Master.log", time.monotonic() + UP_S
        while "New state: ALIVE" not in log.read_text():
            assert time.monotonic() < until_s, f"no Master:\n{log.read_text()}"
            time.sleep(0.05)

    def _submit(self, path: str) -> None:
        command = read_documented_command(self._master, self._hosts.count - 1)
        command += [*self._properties, str(PROGRAM), path]
        with (self.directory / "program.log").open("wb") as log:
            self._program = self._hosts.run(0, command, env=self._variables(0), output=log)

    def log(self) -> str:
        """Return what the driver program printed."""
        return (self.directory / "program.log").read_text()

    def fit(self, **options: Any) -> dict[str, Any]:
        """Have the driver program run a fit; return its results."""
        self.order(**options)
        return self.answer()

    def order(self, *, start_timeout: float = 60.0, **options: Any) -> None:
        """Order a fit from the driver program without waiting for its results.

        Options are workers_per_node, rehearsed (options of a rehearsal) and VoidConfiguration's.
        """
        self._driver.send((start_timeout, options))

    def answer(self) -> dict[str, Any]:
        """Return the results of the ordered fit."""
        if not self._driver.poll(ANSWER_S):
            raise AssertionError(f"no answer from the driver program:\n{self.log()}")
        answer: dict[str, Any] = self._driver.recv()
        return answer

    def close(self) -> None:
        """End the driver program, and with it the application."""
        self._driver.send(None)
        try:
            self._program.wait(UP_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the driver program does not end:\n{self.log()}") from None
