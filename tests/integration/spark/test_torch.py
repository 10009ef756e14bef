"""Real modules of PyTorch on real executors."""

from __future__ import annotations

import ast
import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import AdaptiveThreshold, SharedTrainingMaster, SparkNetwork
from sparkstrom.base.errors import UsageError
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Batch

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from sparkstrom.models.torch import TorchModel  # noqa: E402


@pytest.fixture
def train(spark: Any) -> Any:
    """Fit on four workers; keywords are the master's."""

    def run(model: TorchModel, rows: list[Any], epochs: int, **options: Any) -> SparkNetwork:
        master = SharedTrainingMaster(**{"threshold": AdaptiveThreshold(1e-3), **options})
        network = SparkNetwork(spark, model, master, progress=False)
        summary = network.fit(spark.sparkContext.parallelize(rows, 4), epochs=epochs)
        assert summary.replicas_equal, summary.hashes
        assert summary.minibatches == summary.minibatches_expected
        assert summary.examples == epochs * len(rows)
        network.close()
        return network

    return run


def alone(model: TorchModel, features: Any, labels: Any, epochs: int, rows: int) -> TorchModel:
    """The same model in this process."""
    model.bind(model.initial())
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(len(labels))
        for start in range(0, len(order), rows):
            index = order[start : start + rows]
            model.step(Batch(features[index], labels[index]))
    return model


def accuracy(model: Any, features: Any, labels: Any) -> float:
    return float((model.predict(features).argmax(1) == labels).mean())


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=1e-3)


def test_a_perceptron_learns_and_comes_back_with_its_keys(train, digits, spark, tmp_path):
    module = mlp()
    network = train(TorchModel(module, nn.CrossEntropyLoss(), SGD), digits.rows(), 12)
    features, labels = digits.held_out
    assert accuracy(network, features, labels) > 0.9
    assert network.module is module
    assert list(network.module.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    network.save(tmp_path / "digits.npz")
    again = mlp()
    again.load_state_dict(torch.load(tmp_path / "digits.npz.pt", weights_only=True))
    with torch.no_grad():
        outputs = again(torch.from_numpy(features)).numpy()
    np.testing.assert_array_equal(outputs, network.model.predict(features))
    with pytest.raises(UsageError, match="saved without its code"):
        SparkNetwork.load(tmp_path / "digits.npz", spark)
    model = TorchModel(mlp(), nn.CrossEntropyLoss(), SGD)
    loaded = SparkNetwork.load(tmp_path / "digits.npz", spark, model=model)
    np.testing.assert_array_equal(loaded.parameters, network.parameters)
    other = TorchModel(nn.Linear(64, 10), nn.CrossEntropyLoss(), SGD)
    with pytest.raises(UsageError, match=r"has parameter \['0.weight'"):
        SparkNetwork.load(tmp_path / "digits.npz", spark, model=other)


def test_other_models_have_no_module(make_network):
    with pytest.raises(UsageError, match=r"DenseNetwork has no module.*network\.parameters"):
        _ = make_network(DenseNetwork([2, 2])).module
