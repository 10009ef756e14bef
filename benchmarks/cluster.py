"""A standalone Spark cluster on ``benchmarks.hosts``: pyspark's own master and workers.

Spark's master and the driver program run on host 0. Each of the first ``workers`` hosts, host 0
included, runs a Spark worker with one core, which starts one executor with one task slot.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from benchmarks.hosts import Hosts

PORT = 7077
EXECUTOR_MEMORY = "1g"
EXECUTOR_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # a JVM only moves rows for some seconds
WORKER_MEMORY = "2g"  # that a Spark worker may give to executors
DAEMON_MEMORY = "256m"  # heap of a Spark master or worker, which have little to do
START_S = 90.0  # limit for the start of five JVMs on a busy machine with two cores

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Cluster:
    """A context manager that runs Spark's master and workers, at most until the hosts end.

    Raises OSError, with the end of a daemon's log, if the daemon does not start.
    """

    def __init__(self, hosts: Hosts, workers: int) -> None:
        self._hosts, self.workers = hosts, workers
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.url = f"spark://{hosts.address(0)}:{PORT}"

    def __enter__(self) -> Cluster:
        host = self._hosts.address(0)
        self._start(0, "master", ["Master", "--host", host, "--port", str(PORT)])
        self._await("master", "I have been elected leader")
        for worker in range(self.workers):
            options = ["--cores", "1", "--memory", WORKER_MEMORY, "--work-dir"]
            options.append(str(self._hosts.directory / f"worker{worker}"))
            command = ["Worker", self.url, "--host", self._hosts.address(worker), *options]
            self._start(worker, f"worker{worker}", command)
        for worker in range(self.workers):
            self._await(f"worker{worker}", "Successfully registered with master")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(START_S)

    def _start(self, host: int, name: str, command: Sequence[str]) -> None:
        import pyspark

        launcher = Path(pyspark.__file__).parent / "bin" / "spark-class"
        class_name = f"org.apache.spark.deploy.{command[0].lower()}.{command[0]}"
        with self._log(name).open("wb") as log:
            daemon = self._hosts.run(
                host,
                [str(launcher), class_name, *command[1:], "--webui-port", "0"],
                env=self.environment(host) | {"SPARK_DAEMON_MEMORY": DAEMON_MEMORY},
                output=log,
            )
        self._daemons.append(daemon)

    def _log(self, name: str) -> Path:
        return self._hosts.directory / f"{name}.log"

    def _await(self, name: str, words: str) -> None:
        until_s = time.monotonic() + START_S
        while words not in (said := self._log(name).read_text(errors="replace")):
            ended = next((d for d in self._daemons if d.poll() is not None), None)
            if ended is not None or time.monotonic() > until_s:
                raise OSError(f"Spark's {name} did not come up; it said:\n{said[-2000:]}")
            time.sleep(0.1)

    def environment(self, host: int) -> dict[str, str]:
        """Return a host's variables: its address, this Python, this checkout, one thread."""
        root = str(Path(__file__).parents[1])
        return ONE_THREAD | {
            "SPARK_LOCAL_IP": self._hosts.address(host),
            "SPARK_LOCAL_DIRS": str(self._hosts.directory / f"scratch{host}"),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        }

    def session_conf(self) -> dict[str, str]:
        """Return the configuration of the driver's session, which runs on host 0."""
        address = self._hosts.address(0)
        return {
            "spark.master": self.url,
            "spark.driver.host": address,
            "spark.driver.bindAddress": address,
            "spark.executor.memory": EXECUTOR_MEMORY,
            "spark.executor.extraJavaOptions": EXECUTOR_JVM,
            "spark.executor.cores": "1",
            "spark.executor.instances": str(self.workers),
            "spark.cores.max": str(self.workers),
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # wait for all executors
            "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{START_S:.0f}s",
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.log.level": "ERROR",
        }
