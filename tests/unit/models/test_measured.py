"""Tests of measured models: the loss without a step, and the kind of outputs."""

from __future__ import annotations

import numpy as np
import pytest

from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Batch, Measured


@pytest.mark.parametrize("loss", ["cross_entropy", "squared_error"])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_is_measured_without_changing_parameters(loss: str, weighted: bool) -> None:
    network = DenseNetwork([3, 5, 2], loss=loss, l2=0.5, seed=2)
    params = network.initial()
    network.bind(params)
    features = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
    labels = np.array([0, 1, 1, 0]) if loss == "cross_entropy" else features[:, :2]
    weights = np.array([1, 2, 0, 1], np.float32) if weighted else None
    batch = Batch(features, labels, weights)
    before = params.copy()
    total, weight = network.loss(batch)
    assert (params == before).all()
    assert weight == 4.0
    assert total / weight == network.step(batch)  # step() returns the loss before the step


def test_output_kind_follows_from_loss() -> None:
    network = DenseNetwork([3, 2])
    assert isinstance(network, Measured)
    assert network.outputs == "probabilities"
    assert DenseNetwork([3, 2], loss="squared_error").outputs == "values"
