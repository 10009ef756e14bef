"""Ours on Spark's executors, by ``SparkNetwork.fit``, as a user writes it.

A ``local-cluster`` with one executor per two workers, as in ``benchmarks.digits``; steps take what
they take, and messages too, so a variant's ``latency`` and ``jitter`` say nothing here.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
from typing import Any

from benchmarks.convergence.settings import Settings
from benchmarks.convergence.tasks import BATCH_ROWS
from benchmarks.convergence.trial import Outcome, Trial, outcome
from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.models.torch import TorchModel

_open: dict[int, Any] = {}  # the one application that is open, by its workers


def session_for(workers: int) -> Any:
    """The application with a task slot for each worker; the one for another number ends."""
    from pyspark.sql import SparkSession

    if workers in _open:
        return _open[workers]
    close()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    executors, cores = (1, workers) if workers < 3 else (-(-workers // 2), 2)
    _open[workers] = (
        SparkSession.builder.master(f"local-cluster[{executors},{cores},1024]")
        .appName("sparkstrom convergence")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    return _open[workers]


@atexit.register
def close() -> None:
    """End the application that is open, if any."""
    while _open:
        _open.popitem()[1].stop()


def train(trial: Trial, settings: Settings) -> Outcome:
    """One fit. Only the first of an application waits for imports, before it trains."""
    features, labels = trial.task.split().train
    master = SharedTrainingMaster(
        batch_size_per_worker=BATCH_ROWS,
        rng_seed=trial.seed,
        threshold=settings.threshold(),
        residual_post_processor=settings.clipping(),
        warm_up=settings.warm_up(),
        aggregation=settings.aggregation,
        train_on=settings.train_on,
        publish_every=settings.publish_every,
        max_lead=settings.max_lead,
        max_staleness=settings.max_staleness,
        horizon=settings.horizon,
    )
    model = TorchModel(
        trial.task.module(trial.seed),
        trial.task.loss(),
        trial.optimizer_of(settings.beta2_power(trial.workers)),
        scheduler=trial.task.scheduler(),
        clip_norm=settings.clip_norm,
    )
    session = session_for(trial.workers)
    pairs = list(zip(features, labels, strict=True))
    rows = session.sparkContext.parallelize(pairs, trial.workers)  # as many from each to each
    network = SparkNetwork(session, model, master, progress=False, keep=False)
    summary = network.fit(rows, epochs=trial.epoch_count)
    trained = network.module
    network.close()
    figures = {
        "staleness_mean": summary.staleness_mean,
        "staleness_rounds": summary.staleness_minibatches / trial.workers,
        "sent_fraction": summary.sent_fraction,
        "residual_norm": summary.residual_norm / math.sqrt(trial.workers),
        "publications": float(summary.updates),
        "minibatches": float(summary.minibatches),
        "seconds_training": summary.phase_seconds["train"],
        "replicas_equal": float(bool(summary.replicas_equal)),
    }
    return outcome(
        trial,
        trained,
        bytes_sent=summary.bytes_sent,
        bytes_dense=summary.bytes_dense,
        figures=figures,
    )
