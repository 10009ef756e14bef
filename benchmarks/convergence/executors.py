"""Fits of sparkstrom on Spark's executors by ``SparkNetwork.fit``.

Steps and messages take real time, so the settings ``latency`` and ``jitter`` have no effect.
"""

from __future__ import annotations

import atexit
import math
from contextlib import ExitStack
from typing import Any

from benchmarks.convergence.ours import make_model
from benchmarks.convergence.settings import Settings
from benchmarks.convergence.trial import Outcome, Trial, outcome
from benchmarks.sessions import local_cluster
from sparkstrom import SparkNetwork

_application = ExitStack()  # the open Spark application
_sessions: dict[int, Any] = {}  # its session, by number of workers


def get_session(workers: int) -> Any:
    """Return a session with a task slot for each worker; end one for another number of workers."""
    if workers not in _sessions:
        close()
        _sessions[workers] = _application.enter_context(local_cluster(workers))
    return _sessions[workers]


@atexit.register
def close() -> None:
    """End the open application, if there is one."""
    _sessions.clear()
    _application.close()


def train(trial: Trial, settings: Settings) -> Outcome:
    """Run one fit. Only the first fit of an application waits for imports."""
    features, labels = trial.task.split().train
    master, model = settings.master(trial.seed), make_model(trial, settings)
    session = get_session(trial.workers)
    pairs = list(zip(features, labels, strict=True))
    rows = session.sparkContext.parallelize(pairs, trial.workers)  # partitions of equal size
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
