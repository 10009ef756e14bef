"""Submitted by test_attempts.py: a fit with checkpoints, then one without; two attempts are killed.

The first attempt kills its ApplicationMaster, the JVM above this driver, in the first fit. The
second one resumes that fit, and kills itself in the second fit; the third one runs the second fit
from the beginning. Argument: a checkpoint directory. The last two print a JSON object for the fit
that they finish.
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
SLEEP_MS = 20  # in each step, so that the fit lasts until a process is killed
ROWS = 1797


class KillingListener(TrainingListener):
    """A listener that kills a process at a checkpoint, or in a fit without them at an iteration."""

    def __init__(self, victim: int, saves: bool) -> None:
        self._victim, self._saves = victim, saves

    def on_checkpoint(self, event: object) -> None:
        self._kill()

    def on_iteration(self, event: object) -> None:
        if not self._saves:
            self._kill()

    def _kill(self) -> None:
        os.kill(self._victim, signal.SIGKILL)


def application_master() -> int:
    """Return the process id of YARN's ApplicationMaster, which is this driver's parent."""
    above = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    assert b"org.apache.spark.deploy.yarn.ApplicationMaster" in above, above
    return os.getppid()


def train(spark: SparkSession, directory: str | None, victim: int | None) -> None:
    """Run a fit, which kills process ``victim`` unless it is None, and print its summary."""
    features = np.random.default_rng(0).random((ROWS, 64), np.float32)
    rows = [(x, int(x.argmax() % 10)) for x in features]
    master = SharedTrainingMaster(
        batch_size_per_worker=BATCH,
        debug_longer_iterations=SLEEP_MS,
        checkpoint_directory=directory,
        checkpoint_every="0.3 s",
        keep_last=10_000,
    )
    model = DenseNetwork([64, 32, 10], hidden="relu", loss="cross_entropy", updater=Adam(3e-3))
    network = SparkNetwork(spark, model, master, keep=False)
    listeners = [] if victim is None else [KillingListener(victim, directory is not None)]
    summary = network.fit(spark.sparkContext.parallelize(rows), EPOCHS, listeners=listeners)
    attempt = spark.sparkContext.getConf().get("spark.app.attempt.id")
    print(json.dumps({"attempt": attempt} | summary.to_dict()), flush=True)


def main(directory: str) -> None:
    spark = SparkSession.builder.appName("attempts").getOrCreate()
    attempt = spark.sparkContext.getConf().get("spark.app.attempt.id")
    if attempt == "1":
        train(spark, directory, application_master())
    elif attempt == "2":
        train(spark, directory, None)
        train(spark, None, os.getpid())
    else:
        train(spark, None, None)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
