"""Tests of buffers of torch modules on real executors: workers and driver get one average."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from pyspark import cloudpickle

from sparkstrom import EarlyStopping
from sparkstrom.base.errors import SetupError, TrainingError, UsageError

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
from torch import nn  # noqa: E402

from sparkstrom.models.torch import TorchModel  # noqa: E402

WORKERS, ROWS, BATCH = 4, 1280, 32  # ten whole minibatches for each worker
STEPS = ROWS // WORKERS // BATCH


def make_model(**options: Any) -> TorchModel:
    """Return a model whose BatchNorm statistics are plain means over a worker's minibatches."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.BatchNorm1d(64, momentum=None), nn.Linear(64, 10))
    return TorchModel(module, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.05, **options))


def test_batch_norm_statistics_are_averaged_over_all_workers(spark, digits, make_network):
    """After each fit, BatchNorm's mean is that of all rows, and all replicas are equal."""
    network = make_network(make_model())
    data = spark.sparkContext.parallelize(digits.rows()[:ROWS], WORKERS)
    for fit in (1, 2):  # the second continues from the first one's average
        summary = network.fit(data, epochs=1)
        made = network.parameters.tobytes() + network.model.buffers_bytes()
        assert set(summary.hashes.values()) == {hashlib.sha256(made).hexdigest()}
        assert len(summary.hashes) == WORKERS + 1
        statistics = network.module[0]
        assert statistics.num_batches_tracked == fit * STEPS
        mean = digits.features[:ROWS].mean(0)
        np.testing.assert_allclose(statistics.running_mean, mean, atol=1e-5)
    network.close()


class Projected(nn.Linear):
    """A module with few parameters and a large buffer, a random projection."""

    def __init__(self) -> None:
        super().__init__(8, 10)
        self.register_buffer("projection", torch.randn(64, 40_000) / 8)

    def forward(self, x):
        return super().forward((x @ self.projection)[:, :8])


def test_missing_module_error_suggests_add_py_file(spark, digits, make_network):
    sgd = partial(torch.optim.SGD, lr=0.05)
    network = make_network(TorchModel(Projected(), nn.CrossEntropyLoss(), sgd))
    data = spark.sparkContext.parallelize(digits.rows()[:ROWS], WORKERS)
    with pytest.raises(
        (SetupError, TrainingError), match=r"ModuleNotFoundError: No module.*addPyFile"
    ):
        network.fit(data, epochs=1)
    network.close()


@pytest.fixture
def _by_value() -> Iterator[None]:
    """Pickle this module's classes by value, because executors cannot import it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.usefixtures("_by_value")
def test_buffers_may_be_larger_than_the_parameters(spark, digits, make_network):
    torch.manual_seed(0)
    sgd = partial(torch.optim.SGD, lr=0.05)
    network = make_network(TorchModel(Projected(), nn.CrossEntropyLoss(), sgd))
    wanted = network.module.projection.clone()
    data = spark.sparkContext.parallelize(digits.rows()[:ROWS], WORKERS)
    network.fit(data, epochs=1)
    assert torch.equal(network.module.projection, wanted), "the mean of equal ones"
    network.module.register_parameter("late", nn.Parameter(torch.ones(1)))
    with pytest.raises(UsageError, match="parameter late of Projected was replaced, added"):
        network.fit(data, epochs=1)
    network.close()


def test_early_stopping_restores_buffers_of_best_epoch(spark, digits, make_network):
    """Early stopping restores the buffers of the best epoch, not only its parameters."""
    network = make_network(make_model(maximize=True), debug_longer_iterations=20)
    rows = [(features.tolist(), label) for features, label in digits.rows()]
    data, held_out = (
        spark.createDataFrame(
            spark.sparkContext.parallelize(part, WORKERS), "features array<float>, label int"
        )
        for part in (rows[:ROWS], rows[ROWS:])
    )
    rule, columns = EarlyStopping(patience=6), {"features": "features", "label": "label"}
    summary = network.fit(data, epochs=100, validation=held_out, early_stopping=rule, **columns)
    assert summary.best.epoch == 1  # from there on the loss grows
    assert summary.best.commit < summary.updates
    seen = network.module[0].num_batches_tracked
    assert 0 < seen < (summary.history[-1].epoch - 1) * STEPS  # not the last ones
    network.close()
