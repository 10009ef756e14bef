"""Ours on Spark's executors, by ``SparkNetwork.fit``, as a user writes it.

Steps take what they take, and messages too, so a variant's ``latency`` and ``jitter`` say nothing
here.
"""

from __future__ import annotations

from benchmarks.convergence.settings import Settings
from benchmarks.convergence.tasks import BATCH_ROWS
from benchmarks.convergence.trial import Outcome, Trial, outcome
from benchmarks.sessions import local_cluster
from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.models.torch import TorchModel


def train(trial: Trial, settings: Settings) -> Outcome:
    """One fit in an application of its own."""
    features, labels = trial.task.split().train
    master = SharedTrainingMaster(
        batch_size_per_worker=BATCH_ROWS,
        rng_seed=trial.seed,
        threshold=settings.threshold(),
        residual_post_processor=settings.clipping(),
        warm_up=settings.warm_up(),
        aggregation=settings.aggregation,
        train_on=settings.train_on,
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
    with local_cluster(trial.workers) as session:
        rows = session.sparkContext.parallelize(list(zip(features, labels, strict=True)))
        network = SparkNetwork(session, model, master, progress=False, keep=False)
        summary = network.fit(rows.repartition(trial.workers), epochs=trial.epoch_count)
        trained = network.module
        network.close()
    figures = {
        "staleness_mean": summary.staleness_mean,
        "sent_fraction": summary.sent_fraction,
        "publications": float(summary.updates),
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
