"""Submitted by test_faults.py, in cluster mode and with dynamic allocation: one fit, which begins
when no executor is there, and to which they come one after the other; then one's JVM is killed -9
while the other's container takes too much memory, and later a NodeManager is killed -9.

Argument: the home of the cluster. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pyspark import TaskContext
from pyspark.sql import SparkSession

from sparkstrom import SharedTrainingMaster, SparkNetwork, VoidConfiguration
from sparkstrom.listeners import TrainingListener
from sparkstrom.models.base import Batch
from tests.integration.yarn.counted_rows import THRESHOLD, CountingModel, numbered_rows, trainings

ROWS, EPOCHS = 1280, 30
SLEEP_S = 0.4  # in each of the 10 steps of an epoch, until the last fault is over
IDLE_S = 60.0  # how long the driver waits for Spark to take the first executors away
GLUT_BYTES = 700 << 20  # the container has room for half of that


class FaultyModel(CountingModel):
    """Says in a folder which process trains its partition; takes GLUT_BYTES when asked there."""

    def __init__(self, rows: int, folder: str) -> None:
        super().__init__(rows)
        self._folder = Path(folder)
        self._partition: int | None = None
        self._glut: Any = None

    def step(self, batch: Batch) -> float:
        if self._partition is None:
            context = TaskContext.get()
            assert context is not None
            self._partition = context.partitionId()
            (self._folder / f"partition-{self._partition}").write_text(str(os.getpid()))
        if not (self._folder / "over").exists():
            time.sleep(SLEEP_S)
        if self._is_asked():
            self._glut = np.ones(GLUT_BYTES, np.uint8)
        return super().step(batch)

    def _is_asked(self) -> bool:
        """Once."""
        try:
            (self._folder / f"greed-{self._partition}").unlink()
        except FileNotFoundError:
            return False
        return True


class Faults(TrainingListener):
    """One fault after the other, each when all partitions have workers again that have trained."""

    def __init__(self, folder: str, *faults: Callable[[], set[int]]) -> None:
        self._folder, self._faults = Path(folder), list(faults)
        self._awaited: set[int] = set()  # partitions that are to get another worker
        self._calm = 0.0  # the epoch from which the next one may come
        self.training: list[int] = []  # workers, whenever their number changed

    def on_worker_change(self, event: Any) -> None:
        self._awaited -= event.joined
        self.training.append(len(event.training))

    def on_iteration(self, event: Any) -> None:
        if self._awaited or event.workers < event.workers_wanted:
            self._calm = event.epoch + 0.5
        elif event.epoch > self._calm:
            if not self._faults:
                (self._folder / "over").touch()
                return
            self._awaited = self._faults.pop(0)()
            assert self._awaited, "a fault that nobody feels"


def executors(application: str) -> dict[int, Path]:
    """Process ids of their JVMs, and the directories that these work in."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            said = (entry / "cmdline").read_bytes().decode().split("\0")
            works_in = Path(os.readlink(entry / "cwd"))
        except OSError:
            continue  # it has just ended, or is somebody else's
        backend = any(word.endswith("YarnCoarseGrainedExecutorBackend") for word in said)
        if said[0].endswith("/java") and backend and application in said:
            found[int(entry.name)] = works_in
    return found


def above(pid: int) -> list[int]:
    """Its parent, the parent's parent, and so on; empty where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    parent = int(stat.rpartition(")")[2].split()[1])
    return [parent, *above(parent)] if parent > 1 else [parent]


class Killer:
    """What dies of it."""

    def __init__(self, home: Path, application: str, folder: Path) -> None:
        self._home, self._application, self._folder = home, application, folder
        self.zombies: list[int] = []  # JVMs
        self.of_zombies: set[int] = set()  # partitions

    def kill_and_feed(self) -> set[int]:
        """One executor is killed -9, a worker of the other takes more than its container has."""
        fed, killed = self._executors()
        hungry = self._partitions_of([fed])
        (self._folder / f"greed-{min(hungry)}").touch()
        killed_too = self._partitions_of([killed])
        os.kill(killed, signal.SIGKILL)
        return hungry | killed_too

    def kill_a_node(self) -> set[int]:
        """Not this driver's. The executors there go on, and hear nothing from Spark any more."""
        where = {executor: self._node_of(path) for executor, path in self._executors().items()}
        name = next(node for node in where.values() if node != self._node_of(Path.cwd()))
        [pid] = [
            daemon["pid"]
            for daemon in json.loads((self._home / "daemons.json").read_text())
            if daemon["name"] == name
        ]
        os.kill(pid, signal.SIGKILL)
        self.zombies = [executor for executor, node in where.items() if node == name]
        for executor in self.zombies:
            os.kill(executor, signal.SIGSTOP)  # so that it cannot be told to end
        self.of_zombies = self._partitions_of(self.zombies)
        return set(self.of_zombies)

    def _executors(self) -> dict[int, Path]:
        return executors(self._application)

    def _node_of(self, path: Path) -> str:
        return path.relative_to(self._home).parts[0]

    def _partitions_of(self, jvms: list[int]) -> set[int]:
        """Those whose worker is a process below one of these."""
        owners = {
            int(path.name.partition("-")[2]): int(path.read_text())
            for path in self._folder.glob("partition-*")
        }
        return {index for index, pid in owners.items() if set(jvms) & set(above(pid))}


def wait_until_idle(context: Any) -> None:
    """Nothing has needed the first executors: Spark takes them away."""
    end_s = time.monotonic() + IDLE_S
    while context._jsc.sc().getExecutorMemoryStatus().size() > 1:  # the driver is one of them
        assert time.monotonic() < end_s, "executors are not taken away"
        time.sleep(0.2)


def main(home: str) -> None:
    spark = SparkSession.builder.appName("faults").getOrCreate()
    context = spark.sparkContext
    wait_until_idle(context)
    master = SharedTrainingMaster(
        VoidConfiguration(lease_s=3.0),
        start_timeout=1.0,  # begin with those who have come
        threshold=THRESHOLD,
        residual_post_processor=None,
        publish_every=1,  # so that nothing waits in a residual at the end
        horizon="worker",
    )
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(Path(home).resolve(), context.applicationId, Path(folder))
        faults = Faults(folder, killer.kill_and_feed, killer.kill_a_node)
        network = SparkNetwork(spark, FaultyModel(ROWS, folder), master, keep=False)
        data = numbered_rows(context, ROWS)
        try:
            summary = network.fit(data, EPOCHS, listeners=[faults])
        finally:
            for zombie in killer.zombies:
                os.kill(zombie, signal.SIGKILL)
    told = {
        "trainings": trainings(network.parameters),
        "minibatches": summary.minibatches,
        "expected": summary.minibatches_expected,
        "equal": summary.replicas_equal,
        "faults": [asdict(fault) for fault in summary.faults],
        "training": faults.training,
        "of_zombies": sorted(killer.of_zombies),
        "warnings": summary.warnings,
    }
    print(json.dumps(told), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
