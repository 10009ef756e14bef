"""Submitted by test_faults.py, in cluster mode: one application, in which an executor's JVM is
killed, a container takes too much memory, and a NodeManager is killed, each while a fit trains.

Argument: the home of the cluster. Prints one JSON object for each fit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from sparkstrom import SharedTrainingMaster, SparkNetwork, TrainingError, VoidConfiguration
from sparkstrom.listeners import TrainingListener
from sparkstrom.models.base import Batch
from tests.integration.yarn.counted_rows import THRESHOLD, CountingModel, numbered_rows, trainings

ROWS = 1280
WORKERS = 4
SLEEP_MS = 30  # in each of the 10 steps of an epoch
EPOCHS, EPOCHS_OF_ZOMBIES = 30, 100
GLUT_BYTES = 700 << 20  # the container has room for half of that


class GreedyModel(CountingModel):
    """Takes GLUT_BYTES in a step, once or again and again; ``marker``: it was done."""

    def __init__(self, rows: int, marker: str, *, once: bool) -> None:
        super().__init__(rows)
        self._marker, self._once, self._steps = Path(marker), once, 0
        self._glut: Any = None

    def step(self, batch: Batch) -> float:
        self._steps += 1
        if self._steps == 10 and self._is_its_turn():
            self._glut = np.ones(GLUT_BYTES, np.uint8)
        return super().step(batch)

    def _is_its_turn(self) -> bool:
        try:
            self._marker.open("x").close()
        except FileExistsError:
            return not self._once
        return True


class When(TrainingListener):
    """Does something once, as soon as all workers have trained for a while."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act: Callable[[], None] | None = act

    def on_iteration(self, event: Any) -> None:
        act = self._act
        if act is not None and event.workers == WORKERS and event.epoch > 2:
            self._act = None
            act()


def executors(application: str) -> dict[int, Path]:
    """Process ids of their JVMs, and the directories that these work in."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            said = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue  # it has just ended
        backend = any(word.endswith("YarnCoarseGrainedExecutorBackend") for word in said)
        if said[0].endswith("/java") and backend and application in said:
            found[int(entry.name)] = Path(os.readlink(entry / "cwd"))
    return found


class Nodes:
    """The cluster's NodeManagers, one of which is killed."""

    def __init__(self, home: Path, application: str) -> None:
        self._home, self._application = home, application
        self.zombies: list[int] = []

    def kill_the_other(self) -> None:
        """The one that this driver is not on. Its executors go on, and hear nothing from Spark."""
        ours = Path.cwd().relative_to(self._home).parts[0]
        name = "nm2" if ours == "nm1" else "nm1"
        [pid] = [
            daemon["pid"]
            for daemon in json.loads((self._home / "daemons.json").read_text())
            if daemon["name"] == name
        ]
        os.kill(pid, signal.SIGKILL)
        for executor, place in executors(self._application).items():
            if place.is_relative_to(self._home / name):
                os.kill(executor, signal.SIGSTOP)  # so that it cannot be told to end
                self.zombies.append(executor)

    def end(self) -> None:
        for executor in self.zombies:
            os.kill(executor, signal.SIGKILL)


def main(home: str) -> None:
    spark = SparkSession.builder.appName("faults").getOrCreate()
    context = spark.sparkContext
    master = SharedTrainingMaster(
        VoidConfiguration(lease_s=3.0),
        threshold=THRESHOLD,
        residual_post_processor=None,
        horizon="worker",
        debug_longer_iterations=SLEEP_MS,
    )
    data = numbered_rows(context, ROWS)

    def fit(name: str, model: CountingModel, epochs: int, *listeners: TrainingListener) -> None:
        network = SparkNetwork(spark, model, master, keep=False)
        try:
            summary = network.fit(data, epochs, listeners=listeners)
        except TrainingError as error:
            print(json.dumps({"fit": name, "error": str(error)}), flush=True)
            return
        told = {
            "fit": name,
            "trainings": trainings(network.parameters),
            "minibatches": summary.minibatches,
            "expected": summary.minibatches_expected,
            "equal": summary.replicas_equal,
            "hashes": len(summary.hashes),
            "faults": [asdict(fault) for fault in summary.faults],
            "departures": summary.departures,
            "warnings": summary.warnings,
        }
        print(json.dumps(told), flush=True)

    def kill_one() -> None:
        os.kill(min(executors(context.applicationId)), signal.SIGKILL)

    fit("executor", CountingModel(ROWS), EPOCHS, When(kill_one))
    with tempfile.TemporaryDirectory() as folder:
        fit("memory", GreedyModel(ROWS, f"{folder}/glut", once=True), EPOCHS)
        fit("memory again", GreedyModel(ROWS, f"{folder}/glut", once=False), EPOCHS)
    nodes = Nodes(Path(home).resolve(), context.applicationId)
    fit("node", CountingModel(ROWS), EPOCHS_OF_ZOMBIES, When(nodes.kill_the_other))
    nodes.end()
    print(json.dumps({"fit": "zombies", "count": len(nodes.zombies)}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
