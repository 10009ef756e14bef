"""A driver program for a test that sends Ctrl-C to its process group, like a terminal.

Each argument is a fit: when to interrupt it ("start" or "training"), a colon, and its controller.
For each it prints READY when the fit should be interrupted, then its results as one JSON object.
At the end, it trains once more, stops Spark, and prints what the test checks of that.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from sparkstrom import SharedTrainingMaster, SparkNetwork, UsageError, VoidConfiguration
from sparkstrom.listeners import TrainingListener
from sparkstrom.models import DenseNetwork, Sgd

ROWS, BATCH = 420, 10  # as many minibatches for two workers as for three
OURS = re.compile(rb"/sparkstrom-\d+-[0-9a-f]{16}-(driver|\d+-\d+)")


class ReadyListener(TrainingListener):
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


def run_interrupted_fit(spark: Any, data: Any, when: str, controller: str) -> dict[str, object]:
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
        network.fit(data, epochs=10_000, listeners=[ReadyListener(when)])
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


def media_drivers() -> list[str]:
    """Return the roles ("driver" or a number) of the media drivers of this program.

    They stay in the POSIX session of the process that started them.
    """
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.getsid(int(entry.name)) == os.getsid(0):
                match = OURS.search((entry / "cmdline").read_bytes())
                found += [match[1].decode().split("-")[0]] if match else []
        except OSError:
            continue
    return sorted(found)


class MediaDriverRecorder(TrainingListener):
    """A listener that records the largest list of media drivers during the fit."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_iteration(self, event: object) -> None:
        self.seen = max(self.seen, media_drivers(), key=len)


def fit_and_stop_spark(spark: Any, data: Any) -> dict[str, object]:
    """Run a fit and stop Spark; return which media drivers ran, and what is refused then."""
    model = DenseNetwork([8, 16, 2], updater=Sgd(0.1), seed=1)
    network, looking = SparkNetwork(spark, model, progress=False), MediaDriverRecorder()
    network.fit(data, 20, listeners=[looking], run_log="")
    after_fit = media_drivers()
    spark.stop()
    began_s = time.monotonic()  # stop() does not wait until the executors have ended
    while (after_stop := media_drivers()) and time.monotonic() - began_s < 30:
        time.sleep(0.01)
    refused = []
    for call in (
        lambda: network.fit(data, run_log=""),
        lambda: network.predict(data),
        lambda: network.evaluate(data),
        lambda: SparkNetwork(spark, model),
    ):
        try:
            call()
        except UsageError as error:
            refused.append(str(error))
    with network:  # close() succeeds, although files for a next fit went with the executors
        assert network._may_have_files
    assert not network._may_have_files
    assert network.predict(np.zeros((256, 8), np.float32)).shape == (256, 2)
    found = {"seen": looking.seen, "after_fit": after_fit, "after_stop": after_stop}
    return {**found, "refused": refused}


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
        print(json.dumps(run_interrupted_fit(spark, data, *fit.split(":"))), flush=True)
    print(json.dumps(fit_and_stop_spark(spark, data)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
