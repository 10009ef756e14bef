"""Tests of warnings of fits on real executors: none if the fit is healthy, and else the cause."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from sparkstrom import AutoThreshold, FixedThreshold
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.models.torch import TorchModel
from sparkstrom.models.updaters import Nesterov


def dense():
    return DenseNetwork([64, 64, 10], updater=Sgd(0.1), seed=1)


def with_torch():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    sgd = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
    return TorchModel(module, nn.CrossEntropyLoss(), sgd)


# Each step publishes as much on a busy machine as on an idle one.
STEADY = {"publish_every": 1, "threshold": AutoThreshold(1e-2, 1e-2)}


@pytest.mark.parametrize("model", [dense, with_torch])
def test_healthy_fit_has_no_warnings(spark, make_network, digits, model):
    network = make_network(model(), **STEADY)
    summary = network.fit(spark.sparkContext.parallelize(digits.rows(), 4), epochs=15)
    network.close()
    assert summary.warnings == []
    assert 1 < summary.staleness_minibatches < 30
    assert summary.staleness_minibatches_max >= summary.staleness_minibatches
    assert 0 < summary.residual_minibatches < summary.minibatches / 2
    assert f"{summary.staleness_minibatches:.1f} minibatches of others" in summary.table()


def test_fit_warns_of_per_worker_momentum_and_small_tau(spark, make_network, digits, caplog):
    """A fit warns of momentum over each worker's own steps, and of a tau that is too small."""
    model = DenseNetwork([64, 64, 10], updater=Nesterov(0.01, 0.9), seed=1)
    network = make_network(model, horizon="worker", threshold=FixedThreshold(1e-5))
    summary = network.fit(spark.sparkContext.parallelize(digits.rows(), 4), epochs=4)
    network.close()
    momentum, clipping = summary.warnings
    assert "on 4 workers it acts like 0.974 on one machine" in momentum
    assert "of what was learned: tau (1e-05 at the end)" in clipping
    assert [text for text in caplog.messages if text in summary.warnings] == summary.warnings


def test_fit_warns_of_too_few_updates(spark, make_network, digits):
    """A fit warns if its workers send too few updates."""
    network = make_network(dense(), **STEADY)
    (text,) = network.fit(spark.sparkContext.parallelize(digits.rows(), 4), epochs=2).warnings
    network.close()
    assert "each sent 24 updates" in text
    assert "use fewer workers, or reduce batch_size_per_worker" in text
