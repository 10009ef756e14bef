"""Submitted by test_yarn.py: a training job whose model raises in its third step."""

from __future__ import annotations

import numpy as np
from pyspark.sql import SparkSession

from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.models.base import Batch

STEPS_BEFORE_FIRE = 2


class BurningNetwork(DenseNetwork):
    """A network that trains twice, then raises."""

    steps = 0

    def step(self, batch: Batch) -> float:
        if self.steps == STEPS_BEFORE_FIRE:
            raise RuntimeError("the reactor is on fire")
        self.steps += 1
        return super().step(batch)


if __name__ == "__main__":
    spark = SparkSession.builder.appName("burning").getOrCreate()
    features = np.random.default_rng(0).normal(size=(400, 4)).astype(np.float32)
    rows = [(row, int(row.sum() > 0)) for row in features]
    model = BurningNetwork([4, 8, 2], hidden="relu", loss="cross_entropy", updater=Sgd(0.1), seed=1)
    SparkNetwork(spark, model, SharedTrainingMaster()).fit(
        spark.sparkContext.parallelize(rows, 4), epochs=5
    )
