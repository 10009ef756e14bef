"""Fixtures with one Spark application for all tests of this folder; checks of its processes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.protocol.master.master import Master
from sparkstrom.runtime.master_thread import MasterThread

CLUSTER = "local-cluster[2,2,1024]"
SHARED_MEMORY = Path("/dev/shm")
OURS = re.compile(r"/sparkstrom-\d+-[0-9a-f]{16}-(driver|\d+-\d+)")  # a fit's media driver


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """A session on two executors with two slots each."""
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master(CLUSTER)
        .appName("sparkstrom tests")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        # Some tests kill workers or make tasks fail, and so start hundreds of Python workers.
        .config("spark.python.daemon.module", "sparkstrom.spark.daemon")
        .config("spark.executorEnv.SPARKSTROM_PRELOAD", "pyarrow,pandas,torch")
        # With equal environments, SQL and RDDs use the same Python workers.
        .config("spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .getOrCreate()
    )
    yield session
    session.stop()


@dataclass(frozen=True)
class Digits:
    """scikit-learn's digits, split into training rows and held-out rows."""

    features: np.ndarray
    labels: np.ndarray
    held_out: tuple[np.ndarray, np.ndarray]

    def rows(self) -> list[tuple[np.ndarray, int]]:
        return list(zip(self.features, map(int, self.labels), strict=True))


@pytest.fixture(scope="session")
def digits() -> Digits:
    from sklearn.datasets import load_digits

    data = load_digits()
    features, labels = (data.data / 16).astype(np.float32), data.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, rest = order[:1437], order[1437:]
    return Digits(features[train], labels[train], (features[rest], labels[rest]))


@pytest.fixture
def make_network(spark: Any) -> Callable[..., SparkNetwork]:
    """A function that makes a small SparkNetwork; keywords are SharedTrainingMaster's."""

    def make(model: Any = None, **options: Any) -> SparkNetwork:
        model = model or DenseNetwork([64, 32, 10], updater=Sgd(0.1), seed=1)
        return SparkNetwork(spark, model, SharedTrainingMaster(**options), progress=False)

    return make


# -- processes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """A line of the process table."""

    pid: int
    parent: int
    command: str


def processes() -> list[Process]:
    """Return all processes of this machine."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                command = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            parent = int(stat[stat.rindex(")") + 2 :].split()[1])
            table[int(entry.name)] = Process(int(entry.name), parent, command)
    return list(table.values())


def uses_aeron(pid: int) -> bool:
    """Return whether the process has mapped the memory of a fit's media driver."""
    try:
        return OURS.search((Path("/proc") / str(pid) / "maps").read_text()) is not None
    except OSError:
        return False


class Victims:
    """Finds processes of the cluster, and kills them."""

    def executors(self) -> list[int]:
        """Return the executors' JVMs of this process's session, not of a Spark Connect server."""
        table = processes()
        drivers = {p.pid for p in table if p.parent == os.getpid()}
        backend = "CoarseGrainedExecutorBackend"
        return sorted(p.pid for p in table if p.parent in drivers and backend in p.command)

    def media_drivers(self) -> list[int]:
        """Return the media drivers of executors and of the driver program."""
        return sorted(p.pid for p in processes() if OURS.search(p.command))

    def workers(self) -> list[int]:
        """Return the Python workers that have an Aeron client, which are those that train."""
        table = processes()
        executors = set(self.executors())
        daemons = {p.pid for p in table if p.parent in executors and "pyspark.worker" in p.command}
        return sorted(p.pid for p in table if p.parent in daemons and uses_aeron(p.pid))

    def media_driver_of_executor(self) -> int:
        """Return a media driver that an executor's worker started."""
        own = {p.pid for p in processes() if p.parent == os.getpid()}
        return next(pid for pid in self.media_drivers() if pid not in own)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def leftovers(self) -> list[str]:
        """Return the names of fits' media drivers and of their directories in shared memory."""
        drivers = [f"media driver {pid}" for pid in self.media_drivers()]
        return drivers + [str(p) for p in SHARED_MEMORY.iterdir() if OURS.search(str(p))]


GONE_WITHIN_S = 30  # a driver lingers for 4 s after its last client; machines are busy


class LeftoverMonitor:
    """Media drivers and directories that tests left, which must disappear within GONE_WITHIN_S.

    The next test may begin before.
    """

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, str]] = {}  # its deadline, and its test

    def look(self, test: str) -> None:
        """Attribute new leftovers to this test; fail if others should have disappeared."""
        now_s = time.monotonic()
        new = now_s + GONE_WITHIN_S, test
        self._left = {thing: self._left.get(thing, new) for thing in Victims().leftovers()}
        late = [
            f"{thing} of {by}" for thing, (until_s, by) in self._left.items() if until_s < now_s
        ]
        assert late == []

    def wait(self) -> None:
        """Wait until nothing is left."""
        self.look("somebody")
        while self._left:
            time.sleep(0.1)
            self.look("somebody")


@pytest.fixture(scope="session")
def leftover_monitor() -> Iterator[LeftoverMonitor]:
    leavings = LeftoverMonitor()
    yield leavings
    leavings.wait()


@pytest.fixture
def victims(leftover_monitor: LeftoverMonitor) -> Victims:
    """Finds and kills processes; those of previous tests have ended."""
    leftover_monitor.wait()
    return Victims()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """A function that polls a condition and fails if it stays false for some seconds."""

    def wait(condition: Callable[[], Any], seconds: float, what: str) -> None:
        until_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until_s, f"{what} did not happen within {seconds} s"
            time.sleep(0.05)

    return wait


@pytest.fixture
def running_master() -> Callable[[], Master | None]:
    """A function that returns the master of the fit in this process, or None."""

    def look() -> Master | None:
        masters = [thread for thread in threading.enumerate() if isinstance(thread, MasterThread)]
        return masters[0]._machine if masters else None

    return look


@pytest.fixture
def has_trained(running_master: Callable[[], Master | None]) -> Callable[..., bool]:
    """A function that returns whether all workers are placed and have trained ``minibatches``."""

    def look(minibatches: int, workers: int = 4) -> bool:
        master = running_master()
        if master is None or len(master.members.live) < workers or master.placement.moving:
            return False
        return master.partitions.minibatches >= minibatches

    return look


@pytest.fixture
def in_background() -> Iterator[Callable[..., Future[Any]]]:
    """A function that runs a fit in another thread and returns its Future."""
    from pyspark import InheritableThread  # closes its connection to the JVM

    threads = []

    def submit(work: Callable[..., Any], *args: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work(*args, **keywords))
            except BaseException as error:
                future.set_exception(error)

        threads.append(InheritableThread(target=run))
        threads[-1].start()
        return future

    yield submit
    for thread in threads:
        thread.join(60)


@pytest.fixture(autouse=True)
def check_no_leftovers(
    leftover_monitor: LeftoverMonitor, request: pytest.FixtureRequest
) -> Iterator[None]:
    """Check that no media driver, shared memory or thread of a test remains for long."""
    yield
    leftover_monitor.look(request.node.nodeid)
    assert not [t for t in threading.enumerate() if t.name.startswith("sparkstrom")]
