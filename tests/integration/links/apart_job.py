"""A driver program whose executors are on another host: runs fits, prints a JSON line for each.

Arguments: the address of this host, the address of Spark's master, a folder, and a controller for
each fit. A fit begins as soon as the folder has a file whose name is the fit's number, from 0.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from pyspark.sql import SparkSession

from sparkstrom import SharedTrainingMaster, SparkNetwork, VoidConfiguration
from sparkstrom.models import DenseNetwork, Sgd

PORTS = (40123, 40140)


def begin(here: str, master: str) -> SparkSession:
    """Stop the current Spark application, if any; return the session of a new one."""
    if before := SparkSession.getActiveSession():
        before.stop()
    return (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", here)
        .config("spark.executor.instances", "1")
        .config("spark.executor.cores", "3")
        .config("spark.python.daemon.module", "sparkstrom.spark.daemon")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )


def main(here: str, master: str, folder: str, controllers: list[str]) -> None:
    random = np.random.default_rng(0)
    features = random.normal(size=(400, 8)).astype(np.float32)
    rows = [(x, int(x[0] > 0)) for x in features]
    for number, controller in enumerate(controllers):
        while not (Path(folder) / str(number)).exists():
            time.sleep(0.05)
        if controller == "auto":  # its meaning is determined once per application
            spark = begin(here, master)
            data = spark.sparkContext.parallelize(rows, 2)
            data.count()  # wait for the executor
        began_s = time.monotonic()
        void = VoidConfiguration(controller=controller, port_range=PORTS)
        network = SparkNetwork(
            spark,
            DenseNetwork([8, 4, 2], updater=Sgd(0.1), seed=1),
            SharedTrainingMaster(void=void, debug_longer_iterations=5),
            progress="plain",
        )
        summary = network.fit(data, epochs=4, run_log="")
        told = {
            "controller": controller,
            "equal": summary.replicas_equal,
            "replicas": len(summary.hashes),
            "minibatches": [summary.minibatches, summary.minibatches_expected],
            "warnings": summary.warnings,
            "prepare_s": summary.phase_seconds["prepare"],
            "seconds": time.monotonic() - began_s,
        }
        print("TOLD " + json.dumps(told), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:4], sys.argv[4:])
