"""A rehearsal against the fit that it foretells, on real executors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

EPOCHS = 6


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2])
def test_a_fit_comes_to_the_loss_that_was_rehearsed(
    spark: Any, digits: Any, make_network: Any, per_node: int
) -> None:
    """Within the spread of three seeds, and of as much again on either side."""
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
