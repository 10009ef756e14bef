"""Measuring: held-out rows are evaluated with theta, and then ``local`` is restored."""

from __future__ import annotations

import numpy as np
import pytest

from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.models.base import Batch
from sparkstrom.runtime.theta import Replica
from tests.unit.runtime.memories import BackendDenseNetwork, as_host_array, backend, make_theta

K = 20
random = np.random.default_rng(0)
FEATURES = random.normal(size=(60, 4)).astype(np.float32)
LABELS = (FEATURES[:, 0] > 0).astype(np.int64)
WEIGHTS = random.integers(0, 3, 60).astype(np.float32)


@pytest.fixture(params=["local", "replica"])
def replica(request: pytest.FixtureRequest) -> Replica:
    """A replica after one step, whose residual makes ``local`` differ from theta."""
    model = BackendDenseNetwork([4, 3, 2], updater=Sgd(0.5), seed=1)
    theta = make_theta(model.n_params, K)
    theta.load(np.round(model.initial() * 2**10) / 2**10)
    encoder = Encoder(
        model.n_params, K, FixedThreshold(0.5), train_on=request.param, backend=backend()
    )
    made = Replica(model, theta, encoder, local=request.param == "local")
    made.step(Batch(FEATURES, LABELS))
    return made


def split_rows(weighted: bool) -> list[Batch]:
    """Return all rows as two batches."""
    weights = WEIGHTS if weighted else None
    cuts = [slice(0, 32), slice(32, 60)]
    return [Batch(FEATURES[c], LABELS[c], None if weights is None else weights[c]) for c in cuts]


@pytest.mark.parametrize("weighted", [False, True])
def test_measure_evaluates_theta_and_keeps_local_bits(replica: Replica, weighted: bool) -> None:
    """The loss is that of theta and not of ``local``, which has the same bits afterwards."""
    local = as_host_array(replica._working).copy()
    found = replica.measure(split_rows(weighted), "loss")
    assert as_host_array(replica._working).tobytes() == local.tobytes()
    alone = DenseNetwork([4, 3, 2])
    alone.bind(replica.theta.to_host())
    weights = WEIGHTS if weighted else None
    assert found == pytest.approx(alone.loss(Batch(FEATURES, LABELS, weights)), rel=1e-6)
    alone.bind(local)
    assert found != pytest.approx(alone.loss(Batch(FEATURES, LABELS, weights)), rel=1e-6)


def test_accuracy_sums_weights_of_correct_rows(replica: Replica) -> None:
    alone = DenseNetwork([4, 3, 2])
    alone.bind(replica.theta.to_host())
    hits = alone.predict(FEATURES).argmax(1) == LABELS
    assert replica.measure(split_rows(False), "accuracy") == (hits.sum(), 60)
    assert replica.measure(split_rows(True), "accuracy") == (WEIGHTS[hits].sum(), WEIGHTS.sum())


def test_measure_without_batches_returns_zero_sum_and_weight(replica: Replica) -> None:
    """Without batches, the metric's sum and the weight are 0."""
    assert replica.measure([], "loss") == (0.0, 0.0)


def test_local_is_restored_after_evaluation_error(replica: Replica) -> None:
    """``local`` is restored if the evaluation raises."""
    local = as_host_array(replica._working).copy()
    with pytest.raises(IndexError):
        replica.measure([Batch(FEATURES, LABELS + 7)], "loss")
    assert as_host_array(replica._working).tobytes() == local.tobytes()
