"""A fit whose progress display is tested, on rows of two classes.

As a program its argument is the number of epochs; a notebook calls ``fit``.
"""

from __future__ import annotations

import sys

import numpy as np
from pyspark.sql import SparkSession

from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.models import DenseNetwork, Sgd


def fit(epochs: int) -> None:
    """Run a fit with two workers, while Spark's own progress bar is on."""
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "true")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.python.daemon.module", "sparkstrom.spark.daemon")
        .getOrCreate()
    )
    features = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
    data = spark.sparkContext.parallelize([(x, int(x[0] > 0)) for x in features], 2)
    master = SharedTrainingMaster(debug_longer_iterations=10, batch_size_per_worker=10)
    model = DenseNetwork([8, 4, 2], updater=Sgd(0.1), seed=1)
    network = SparkNetwork(spark, model, master)
    network.fit(data, epochs=epochs)
    network.close()
    spark.stop()


if __name__ == "__main__":
    fit(int(sys.argv[1]))
    print("all done")
