"""A driver program for spark-submit: in one session, it runs a fit or rehearsal for each order."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from multiprocessing.connection import Client
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from sparkstrom import SharedTrainingMaster, SparkNetwork, SparkstromError, VoidConfiguration
from sparkstrom.models import DenseNetwork, Sgd

ROWS, EPOCHS = 400, 6


def fit(spark: Any, data: Any, start_timeout: float, options: dict[str, Any]) -> dict[str, Any]:
    """Run a fit or a rehearsal; return its results, or the name and text of its error."""
    model = DenseNetwork([64, 256, 10], updater=Sgd(0.1), seed=1)
    # By default, a busy machine, on which encoding is slow, would send fewer updates.
    own = {"start_timeout": start_timeout, "batch_size_per_worker": 10, "publish_every": 1}
    if "workers_per_node" in options:
        own["workers_per_node"] = options.pop("workers_per_node")
    rehearsed = options.pop("rehearsed", None)
    master = SharedTrainingMaster(VoidConfiguration(**options), **own)
    said, began_s = io.StringIO(), time.monotonic()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            network = SparkNetwork(spark, model, master, progress="plain", keep=False)
            if rehearsed is not None:
                found = network.rehearse(data, epochs=EPOCHS, **rehearsed).to_dict()
            else:
                found = describe(network.fit(data, epochs=EPOCHS))
    except SparkstromError as error:
        found = {"error": type(error).__name__, "text": str(error)}
    return found | {"seconds": time.monotonic() - began_s, "said": said.getvalue()}


def describe(summary: Any) -> dict[str, Any]:
    """Return the parts of a summary that tests check."""
    return {
        "equal": summary.replicas_equal,
        "hashes": summary.hashes,
        "minibatches": (summary.minibatches, summary.minibatches_expected),
        "bytes_sent": summary.bytes_sent,
        "warnings": summary.warnings,
    }


def await_idle(spark: Any) -> None:
    """Wait for the end of tasks of a failed fit, which occupy the only slot of their executors."""
    tracker = spark._jsc.sc().statusTracker()
    while any(executor.numRunningTasks() for executor in tracker.getExecutorInfos()):
        time.sleep(0.05)


if __name__ == "__main__":
    with Client(sys.argv[1]) as test:
        session = SparkSession.builder.getOrCreate()
        features = np.random.default_rng(0).normal(size=(ROWS, 64)).astype(np.float32)
        rows = session.sparkContext.parallelize([(x, int(x[0] > 0)) for x in features], 2)
        while (order := test.recv()) is not None:
            await_idle(session)
            test.send(fit(session, rows, *order))
        session.stop()
