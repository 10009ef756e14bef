"""A program that fits on two executors with free slots, one of which is decommissioned.

SIGPWR to the executor's JVM imitates a node that is reclaimed. Prints the fit's results as JSON.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

from pyspark.sql import SparkSession

from sparkstrom import SharedTrainingMaster, SparkNetwork, VoidConfiguration
from sparkstrom.spark.jobs import list_executors
from tests.integration.spark.conftest import processes
from tests.integration.yarn.counted_rows import (
    THRESHOLD,
    CountingModel,
    numbered_rows,
    trainings,
)

ROWS, EPOCHS = 240, 20


class DecommissioningListener:
    """A listener that has one executor decommissioned after the first epoch."""

    def __init__(self) -> None:
        self.gone = 0

    def on_iteration(self, event: Any) -> None:
        if self.gone or event.epoch < 1:
            return
        jvms = [p for p in processes() if "CoarseGrainedExecutorBackend" in p.command]
        ours = {p.pid: p.parent for p in processes()}
        self.gone = min(p.pid for p in jvms if is_below(p.pid, ours))
        os.kill(self.gone, signal.SIGPWR)


def is_below(pid: int, parents: dict[int, int]) -> bool:
    """Return whether the process descends from this program."""
    return pid == os.getpid() or (pid in parents and is_below(parents[pid], parents))


def main() -> None:
    spark = (
        SparkSession.builder.master("local-cluster[2,2,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .config("spark.decommission.enabled", "true")
        .getOrCreate()
    )
    master = SharedTrainingMaster(
        # so long that the worker is not lost by its silence
        VoidConfiguration(lease_s=60.0),
        workers_per_node=1,
        threshold=THRESHOLD,
        residual_post_processor=None,
        publish_every=1,
        horizon="worker",
        batch_size_per_worker=8,
        debug_longer_iterations=40,  # the fit lasts until Spark has removed the executor
    )
    network = SparkNetwork(spark, CountingModel(ROWS), master, progress=False, keep=False)
    notice = DecommissioningListener()
    data = numbered_rows(spark.sparkContext, ROWS)
    summary = network.fit(data, EPOCHS, listeners=[notice], run_log="")
    told = {
        "trainings": trainings(network.parameters),
        "minibatches": [summary.minibatches, summary.minibatches_expected],
        "equal": summary.replicas_equal,
        "warnings": summary.warnings,
        "departures": summary.departures,
        "gone": not os.path.exists(f"/proc/{notice.gone}"),
        "left": [each.is_leaving for each in list_executors(spark.sparkContext)],
    }
    print(json.dumps(told), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
