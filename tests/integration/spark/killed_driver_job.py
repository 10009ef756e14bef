"""A driver program for a test that kills it: two fits of digits with checkpoints.

Arguments: the checkpoint directory, and a file with features and labels. Prints BEGIN as each fit
begins, TRAINING as it trains, and at the end one JSON object.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from pyspark.sql import SparkSession

from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.listeners import TrainingListener
from sparkstrom.models import Adam, DenseNetwork

EPOCHS = (12, 3)  # of the two fits
BATCH = 32
SLEEP_MS = 5  # in each step, so that the fit lasts until it is killed


class ProgressPrinter(TrainingListener):
    """A listener that prints BEGIN as a fit begins, and TRAINING as its training begins."""

    def __init__(self) -> None:
        self._trains = False

    def on_fit_begin(self, event: object) -> None:
        print("BEGIN", flush=True)

    def on_iteration(self, event: object) -> None:
        if not self._trains:
            self._trains = True
            print("TRAINING", flush=True)


def main(directory: str, table: str) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.python.daemon.module", "sparkstrom.spark.daemon")
        .getOrCreate()
    )
    with np.load(table) as file:
        features, labels = file["features"], file["labels"]
    rows = [(x, int(y)) for x, y in zip(features, labels, strict=True)]
    data = spark.sparkContext.parallelize(rows, 2)
    master = SharedTrainingMaster(
        batch_size_per_worker=BATCH,
        debug_longer_iterations=SLEEP_MS,
        checkpoint_directory=directory,
        checkpoint_every="0.2 s",
        keep_last=10_000,
    )
    model = DenseNetwork([64, 32, 10], hidden="relu", loss="cross_entropy", updater=Adam(3e-3))
    network = SparkNetwork(spark, model, master, keep=False)
    fits = [
        network.fit(data, epochs=each, listeners=[ProgressPrinter()]).to_dict() for each in EPOCHS
    ]
    hits = network.predict(features).argmax(axis=1) == labels
    accuracy = float(hits.mean())
    network.close()
    spark.stop()
    print(json.dumps({"fits": fits, "accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
