"""A driver program for a test that sends Ctrl-C to its process group, like a terminal.

Each argument is a fit: when to interrupt it ("start" or "training"), a colon, and its controller.
For each it prints READY when the fit should be interrupted, then its results as one JSON object.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from sparkstrom import SharedTrainingMaster, SparkNetwork, VoidConfiguration
from sparkstrom.listeners import TrainingListener
from sparkstrom.models import DenseNetwork, Sgd

ROWS, BATCH = 420, 10  # as many minibatches for two workers as for three


class Ready(TrainingListener):
    """A listener that prints READY when the fit begins, or after it has trained for a while."""

    def __init__(self, when: str) -> None:
        self._when, self._said = when, False

    def _say(self) -> None:
        if not self._said:
            self._said = True
            print("READY", flush=True)

    def on_fit_begin(self, event: object) -> None:
        if self._when == "start":
            threading.Timer(0.3, self._say).start()

    def on_iteration(self, event: object) -> None:
        if self._when == "training" and event.minibatches > 100:
            self._say()


def interrupted(spark: Any, data: Any, when: str, controller: str) -> dict[str, object]:
    """Run a fit that is interrupted, then another fit; return what the test checks of both."""
    void = VoidConfiguration(controller=controller)
    checkpoints = Path(f"checkpoints-{when}-{controller}")
    master = SharedTrainingMaster(
        void,
        debug_longer_iterations=10,
        batch_size_per_worker=BATCH,
        checkpoint_directory=str(checkpoints),
        checkpoint_every="1 h",
    )
    model = DenseNetwork([8, 4, 2], updater=Sgd(0.1), seed=1)
    network = SparkNetwork(spark, model, master, progress=False)
    before = network.parameters
    found: dict[str, object] = {}
    try:
        network.fit(data, epochs=10_000, listeners=[Ready(when)])
    except KeyboardInterrupt:
        interrupted_s = time.monotonic()
        tracker = spark.sparkContext.statusTracker()
        while tracker.getActiveJobsIds():
            time.sleep(0.05)
        found["jobs_gone_s"] = time.monotonic() - interrupted_s
        found["moved"] = float(np.abs(network.parameters - before).max())
        for saved in checkpoints.glob("*.npz"):
            with np.load(saved) as file:
                found["saved"] = bool((file["parameters"] == network.parameters).all())
    summary = network.fit(data, epochs=1)
    found["equal_afterwards"] = summary.replicas_equal
    found["minibatches"] = [summary.minibatches, summary.minibatches_expected]
    network.close()
    return found


def main(fits: list[str]) -> None:
    # py4j logs a traceback if the connection of an interrupted call is already closed.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    spark = (  # with a slot for the controller
        SparkSession.builder.master("local-cluster[1,3,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.python.daemon.module", "sparkstrom.spark.daemon")
        .getOrCreate()
    )
    random = np.random.default_rng(0)
    features = random.normal(size=(ROWS, 8)).astype(np.float32)
    rows = [(x, int(x[0] > 0)) for x in features]
    data = spark.sparkContext.parallelize(rows, 2)
    data.count()  # wait for the executor
    for fit in fits:
        print(json.dumps(interrupted(spark, data, *fit.split(":"))), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
