"""Tests of early stopping on real executors: the fit stops and returns the best parameters."""

from __future__ import annotations

import numpy as np
import pytest

from sparkstrom import EarlyStopping
from sparkstrom.models import DenseNetwork, Sgd


@pytest.fixture(scope="module")
def noisy(digits):
    """Rows of which a third has wrong labels, so that held-out rows soon get worse."""
    chance = np.random.default_rng(3)
    labels = digits.labels.copy()
    wrong = chance.random(len(labels)) < 0.33
    labels[wrong] = chance.integers(0, 10, int(wrong.sum()))
    return [(f, int(y)) for f, y in zip(digits.features, labels, strict=True)][:600]


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_early_stopping_ends_fit_and_selects_best_epoch(spark, make_network, noisy, metric):
    """A fit stops after epochs without progress; its summary has the best epoch and figure."""
    model = DenseNetwork([64, 64, 10], updater=Sgd(0.2), seed=1)
    network = make_network(model, debug_longer_iterations=50)  # epochs longer than a poll
    data = spark.sparkContext.parallelize(noisy, 4)
    rule = EarlyStopping(patience=4, metric=metric)
    summary = network.fit(data, epochs=300, validation=0.3, early_stopping=rule)
    assert summary.replicas_equal, summary.hashes
    assert summary.stopped.startswith(f"early stopping: {metric} of the held-out rows was best")
    assert summary.best.epoch < len(summary.history) < 300
    assert summary.minibatches < summary.minibatches_expected
    assert 0 < summary.best.commit < summary.updates
    figures = [one.validation for one in summary.history]
    assert np.isfinite(figures).all()
    assert figures[summary.best.epoch - 1] == summary.best.value
    assert [one.epoch for one in summary.history] == list(range(1, len(figures) + 1))
    assert summary.history[0].loss > summary.history[-1].loss
    assert summary.history[0].examples == summary.rows_trained
    second = network.fit(data, epochs=1)
    assert second.history[0].epoch == len(figures) + 1
    assert second.grants == 0  # kept residuals belong to later parameters
    network.close()


def test_validation_without_early_stopping_is_in_history(spark, make_network, noisy):
    network = make_network()
    summary = network.fit(spark.sparkContext.parallelize(noisy, 2), epochs=3, validation=0.5)
    assert summary.best is None
    assert [one.partitions for one in summary.history] == [4, 4, 4]
    assert summary.history[-1].validation < summary.history[0].validation
    network.close()
