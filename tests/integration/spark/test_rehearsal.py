"""Tests of rehearsals on real executors, compared with the fits that they predict."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom import SparkNetwork

EPOCHS = 6


def test_executors_measure_the_model_that_is_rehearsed(
    spark: Any, digits: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Executors measure the steps of a torch model; on one host, links have default values."""
    torch = pytest.importorskip("torch")
    from sparkstrom.models.torch import TorchModel

    module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    model = TorchModel(module, torch.nn.CrossEntropyLoss(), partial(torch.optim.Adam, lr=1e-3))
    data = spark.sparkContext.parallelize(digits.rows(), 3)
    with SparkNetwork(spark, model, progress="plain") as network:
        found = network.rehearse(data, workers=2, rows=500, measure=True, jitter=0.25)
    assert "measured by 4 workers on 1 host: a step takes" in capsys.readouterr().err
    conditions = found.conditions
    assert 0 < conditions.times.step_s < 60
    assert conditions.times.jitter == 0.25
    assert (conditions.link_bits_s, conditions.latency_s) == (1e9, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2])
def test_a_fit_comes_to_the_loss_that_was_rehearsed(
    spark: Any, digits: Any, make_network: Any, per_node: int
) -> None:
    """The fit's loss differs from the losses of three rehearsals by at most their spread."""
    workers = 2 * per_node
    data = spark.sparkContext.parallelize(digits.rows(), 3)
    with make_network(workers_per_node=per_node) as network:
        before = network.parameters
        foretold = [
            network.rehearse(
                data, workers=workers, epochs=EPOCHS, validation=0.3, step="5ms", seed=seed
            )
            for seed in range(3)
        ]
        np.testing.assert_array_equal(network.parameters, before)
        summary = network.fit(data, epochs=EPOCHS, validation=0.3)
    losses = [result.runs[1].loss for result in foretold]
    spread = max(losses) - min(losses)
    assert all(result.runs[1].replicas_equal for result in foretold)
    assert foretold[0].rows == foretold[0].rows_total == len(digits.labels)
    loss = summary.history[-1].validation
    assert min(losses) - spread <= loss <= max(losses) + spread
    assert summary.minibatches == pytest.approx(foretold[0].runs[1].minibatches, rel=0.05)
