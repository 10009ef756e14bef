"""One Spark application for all tests of this folder: real executors, real media drivers."""

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
OURS = re.compile(r"/sparkstrom-\d+-[0-9a-f]{16}-(driver|\d+-\d+)")  # the home of a fit's driver


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
        # Python workers of SQL and of RDDs are the same ones: they have equal environments.
        .config("spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .getOrCreate()
    )
    yield session
    session.stop()


@dataclass(frozen=True)
class Digits:
    """scikit-learn's digits, split."""

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
    """A small network; keywords are the master's."""

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
    """Everything that runs below this test process, and orphans of ours."""
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
    """Does it have a media driver's memory mapped?"""
    try:
        return OURS.search((Path("/proc") / str(pid) / "maps").read_text()) is not None
    except OSError:
        return False


class Victims:
    """Finds processes of the cluster, and kills them."""

    def executors(self) -> list[int]:
        """JVMs that run tasks of this process's session, not of a Spark Connect server."""
        table = processes()
        drivers = {p.pid for p in table if p.parent == os.getpid()}
        backend = "CoarseGrainedExecutorBackend"
        return sorted(p.pid for p in table if p.parent in drivers and backend in p.command)

    def media_drivers(self) -> list[int]:
        """Of executors and of the driver program."""
        return sorted(p.pid for p in processes() if OURS.search(p.command))

    def workers(self) -> list[int]:
        """Python workers that have an Aeron client: those that train."""
        table = processes()
        executors = set(self.executors())
        daemons = {p.pid for p in table if p.parent in executors and "pyspark.worker" in p.command}
        return sorted(p.pid for p in table if p.parent in daemons and uses_aeron(p.pid))

    def media_driver_of_executor(self) -> int:
        """One that an executor's worker started, not the driver program's."""
        own = {p.pid for p in processes() if p.parent == os.getpid()}
        return next(pid for pid in self.media_drivers() if pid not in own)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def leftovers(self) -> list[str]:
        """Media drivers, and directories of ours in shared memory."""
        drivers = [f"media driver {pid}" for pid in self.media_drivers()]
        return drivers + [str(p) for p in SHARED_MEMORY.iterdir() if OURS.search(str(p))]


GONE_WITHIN_S = 30  # a driver lingers for 4 s after its last client; machines are busy


class Leavings:
    """What tests left and must soon be gone. Nobody waits for it: the next test may begin."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, str]] = {}  # when it must be gone, and whose it is

    def look(self, test: str) -> None:
        """What is new is this test's; fail on what ought to be gone."""
        now_s = time.monotonic()
        new = now_s + GONE_WITHIN_S, test
        self._left = {thing: self._left.get(thing, new) for thing in Victims().leftovers()}
        late = [
            f"{thing} of {by}" for thing, (until_s, by) in self._left.items() if until_s < now_s
        ]
        assert late == []

    def wait(self) -> None:
        """Until nothing is left."""
        self.look("somebody")
        while self._left:
            time.sleep(0.1)
            self.look("somebody")


@pytest.fixture(scope="session")
def leavings() -> Iterator[Leavings]:
    leavings = Leavings()
    yield leavings
    leavings.wait()


@pytest.fixture
def victims(leavings: Leavings) -> Victims:
    """For tests that look at processes: those of former tests are gone."""
    leavings.wait()
    return Victims()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Poll a condition: integration tests wait for real processes."""

    def wait(condition: Callable[[], Any], seconds: float, what: str) -> None:
        until_s = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until_s, f"{what} did not happen within {seconds} s"
            time.sleep(0.05)

    return wait


@pytest.fixture
def master_at_work() -> Callable[[], Master | None]:
    """The master of the fit in this process."""

    def look() -> Master | None:
        masters = [thread for thread in threading.enumerate() if isinstance(thread, MasterThread)]
        return masters[0]._machine if masters else None

    return look


@pytest.fixture
def has_trained(master_at_work: Callable[[], Master | None]) -> Callable[..., bool]:
    """Do all workers have a place, and have trained so many minibatches?"""

    def look(minibatches: int, workers: int = 4) -> bool:
        master = master_at_work()
        if master is None or len(master.members.live) < workers or master.placement.moving:
            return False
        return master.partitions.minibatches >= minibatches

    return look


@pytest.fixture
def in_background() -> Iterator[Callable[..., Future[Any]]]:
    """Run a fit while the test does things to it."""
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
def nothing_left(leavings: Leavings, request: pytest.FixtureRequest) -> Iterator[None]:
    """No media driver and no directory in shared memory outlives its test for long."""
    yield
    leavings.look(request.node.nodeid)
    assert not [t for t in threading.enumerate() if t.name.startswith("sparkstrom")]
