"""Submitted by test_faults.py in cluster mode with dynamic allocation: a fit with several faults.

When the fit begins, there is no executor; two start one after the other. Then SIGKILL ends the JVM
of one while the other's container exceeds its memory; later SIGKILL ends a NodeManager.

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
IDLE_S = 60.0  # how long the driver waits for Spark to remove the first executors
GLUT_BYTES = 700 << 20  # the container has room for half of that


class FaultyModel(CountingModel):
    """Writes its process id to its partition's file; allocates GLUT_BYTES if a file asks for it."""

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
        """Remove the partition's request for memory; return whether there was one."""
        try:
            (self._folder / f"greed-{self._partition}").unlink()
        except FileNotFoundError:
            return False
        return True


class FaultInjector(TrainingListener):
    """Causes one fault after the other, each after all partitions had workers for half an epoch."""

    def __init__(self, folder: str, *faults: Callable[[], set[int]]) -> None:
        self._folder, self._faults = Path(folder), list(faults)
        self._awaited: set[int] = set()  # partitions that have not got another worker yet
        self._calm = 0.0  # the epoch after which the next fault may follow
        self.training: list[int] = []  # the number of workers after each change

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
    """Return the working directories of an application's executors by the process ids of JVMs."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            said = (entry / "cmdline").read_bytes().decode().split("\0")
            works_in = Path(os.readlink(entry / "cwd"))
        except OSError:
            continue  # the process has just ended, or belongs to another user
        backend = any(word.endswith("YarnCoarseGrainedExecutorBackend") for word in said)
        if said[0].endswith("/java") and backend and application in said:
            found[int(entry.name)] = works_in
    return found


def list_ancestors(pid: int) -> list[int]:
    """Return the process's ancestors, its parent first; nothing if the process has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    parent = int(stat.rpartition(")")[2].split()[1])
    return [parent, *list_ancestors(parent)] if parent > 1 else [parent]


class Killer:
    """Causes the faults; each fault's method returns the partitions that lose their workers."""

    def __init__(self, home: Path, application: str, folder: Path) -> None:
        self._home, self._application, self._folder = home, application, folder
        self.zombies: list[int] = []  # process ids of stopped JVMs
        self.of_zombies: set[int] = set()  # their workers' partitions

    def kill_and_feed(self) -> set[int]:
        """Kill one executor by SIGKILL; let a worker of the other exceed its container's memory."""
        fed, killed = self._executors()
        hungry = self._partitions_of([fed])
        (self._folder / f"greed-{min(hungry)}").touch()
        killed_too = self._partitions_of([killed])
        os.kill(killed, signal.SIGKILL)
        return hungry | killed_too

    def kill_a_node(self) -> set[int]:
        """Kill the NodeManager of a node without the driver; stop the JVMs of its executors.

        Their Python workers still train.
        """
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
            os.kill(executor, signal.SIGSTOP)  # so that Spark cannot make it exit
        self.of_zombies = self._partitions_of(self.zombies)
        return set(self.of_zombies)

    def _executors(self) -> dict[int, Path]:
        return executors(self._application)

    def _node_of(self, path: Path) -> str:
        return path.relative_to(self._home).parts[0]

    def _partitions_of(self, jvms: list[int]) -> set[int]:
        """Return the partitions whose worker descends from one of these JVMs."""
        owners = {
            int(path.name.partition("-")[2]): int(path.read_text())
            for path in self._folder.glob("partition-*")
        }
        return {index for index, pid in owners.items() if set(jvms) & set(list_ancestors(pid))}


def wait_until_idle(context: Any) -> None:
    """Wait until Spark has removed the first executors, which had no tasks."""
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
        start_timeout=1.0,  # begin with the workers that have started
        threshold=THRESHOLD,
        residual_post_processor=None,
        publish_every=1,  # so that nothing waits in a residual at the end
        horizon="worker",
    )
    with tempfile.TemporaryDirectory() as folder:
        killer = Killer(Path(home).resolve(), context.applicationId, Path(folder))
        faults = FaultInjector(folder, killer.kill_and_feed, killer.kill_a_node)
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
