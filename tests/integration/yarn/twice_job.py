"""Submitted by test_attempts.py: its first attempt is killed -9 while it trains, by itself.

Arguments: what dies, "ApplicationMaster" (the JVM above this driver) or "driver" (this process),
and a checkpoint directory or "none". Prints one JSON object at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
from pyspark.sql import SparkSession

from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.listeners import TrainingListener
from sparkstrom.models import Adam, DenseNetwork

EPOCHS = 8
BATCH = 32
SLEEP_MS = 20  # in each step: time to be killed in
ROWS = 1797


class Deadly(TrainingListener):
    """Ends this attempt: at the first checkpoint, or, where there are none, as training begins."""

    def __init__(self, victim: int, saves: bool) -> None:
        self._victim, self._saves = victim, saves

    def on_checkpoint(self, event: object) -> None:
        self._kill()

    def on_iteration(self, event: object) -> None:
        if not self._saves:
            self._kill()

    def _kill(self) -> None:
        os.kill(self._victim, signal.SIGKILL)


def victim_of(name: str) -> int:
    if name == "driver":
        return os.getpid()
    above = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    assert b"org.apache.spark.deploy.yarn.ApplicationMaster" in above, above
    return os.getppid()


def main(victim: str, directory: str) -> None:
    spark = SparkSession.builder.appName("twice").getOrCreate()
    attempt = spark.sparkContext.getConf().get("spark.app.attempt.id")
    features = np.random.default_rng(0).random((ROWS, 64), np.float32)
    rows = [(x, int(x.argmax() % 10)) for x in features]
    saves = directory != "none"
    master = SharedTrainingMaster(
        batch_size_per_worker=BATCH,
        debug_longer_iterations=SLEEP_MS,
        checkpoint_directory=directory if saves else None,
        checkpoint_every="0.3 s",
        keep_last=10_000,
    )
    model = DenseNetwork([64, 32, 10], hidden="relu", loss="cross_entropy", updater=Adam(3e-3))
    network = SparkNetwork(spark, model, master, keep=False)
    listeners = [Deadly(victim_of(victim), saves)] if attempt == "1" else []
    summary = network.fit(spark.sparkContext.parallelize(rows), EPOCHS, listeners=listeners)
    told = {
        "attempt": attempt,
        "resumed_from": summary.resumed_from,
        "minibatches": summary.minibatches,
        "expected": summary.minibatches_expected,
        "resumed": summary.minibatches_resumed,
        "examples": summary.examples,
        "equal": summary.replicas_equal,
        "warnings": summary.warnings,
    }
    spark.stop()
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
