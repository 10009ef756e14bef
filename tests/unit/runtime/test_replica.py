"""One worker's memory in both ways to train: what a step, an update, a snapshot do to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import TrainingError
from sparkstrom.codec.messages import Committed
from sparkstrom.encoding.encoder import Encoded, Encoder
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.models.base import Batch, Flat
from sparkstrom.protocol.events import Install
from sparkstrom.runtime.inbox import Merged
from sparkstrom.runtime.replica import Replica
from sparkstrom.runtime.theta import Theta

K, N, TAU = 10, 300, 0.125
BATCH = Batch(np.zeros((1, 1), np.float32), np.zeros(1, np.int64))

WAYS = pytest.mark.parametrize("train_on", ["local", "replica"])
MakeCommit = Callable[..., Committed]


@pytest.fixture
def make(pushing: Callable[..., Any]) -> Callable[..., Replica]:
    """A replica whose model adds ``push`` to every parameter in each step."""

    def build(train_on: str, push: float = TAU / 2) -> Replica:
        encoder = Encoder(N, K, FixedThreshold(TAU), train_on=train_on)
        return Replica(pushing(N, push), Theta(N, K), encoder, local=train_on == "local")

    return build


def all_at(value: float) -> Flat:
    return np.full(N, value, np.float32)


@WAYS
def test_what_is_learnt_stays_residual_until_it_reaches_tau(
    make: Callable[..., Replica], train_on: str
) -> None:
    replica = make(train_on)
    assert replica.step(BATCH) == 1.0
    assert replica.publish() is None
    np.testing.assert_array_equal(replica.theta.values, all_at(0))
    np.testing.assert_array_equal(replica.residual(), all_at(TAU / 2))
    replica.step(BATCH)
    encoded = replica.publish()
    assert isinstance(encoded, Encoded)
    assert encoded.count == N
    np.testing.assert_array_equal(replica.theta.values, all_at(TAU))
    np.testing.assert_array_equal(replica.residual(), all_at(0))
    assert replica.residual_norm() == 0.0


def test_a_local_model_goes_on_from_its_own_steps(make: Callable[..., Replica]) -> None:
    replica = make("local")
    replica.step(BATCH)
    replica.step(BATCH)
    assert replica.local is not None
    np.testing.assert_array_equal(replica.local, all_at(TAU))


def test_the_replica_rule_takes_every_gradient_at_theta(make: Callable[..., Replica]) -> None:
    replica = make("replica")
    for _ in range(2):
        replica.step(BATCH)
        replica.hold_back()
    assert replica.local is None
    np.testing.assert_array_equal(replica.model.params, all_at(TAU / 2))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(replica.residual(), all_at(TAU))


@WAYS
def test_holding_back_loses_nothing(make: Callable[..., Replica], train_on: str) -> None:
    often, seldom = make(train_on), make(train_on)
    for _ in range(4):
        often.step(BATCH)
        often.publish()
        seldom.step(BATCH)
        seldom.hold_back()
    seldom.model.push = 0.0  # type: ignore[attr-defined]
    for _ in range(2):
        seldom.step(BATCH)
        seldom.publish()
    np.testing.assert_array_equal(often.theta.values, all_at(2 * TAU))
    np.testing.assert_array_equal(seldom.theta.values, often.theta.values)


@WAYS
def test_updates_of_others_move_theta_and_leave_the_residual(
    make: Callable[..., Replica], make_commit: MakeCommit, train_on: str
) -> None:
    replica = make(train_on)
    replica.step(BATCH)
    replica.publish()
    replica.apply(replica.theta.decode(make_commit(1, 3)), 1)
    replica.apply_merged(Merged(np.full(N, 1024, np.int32), 5, 1024))
    assert replica.theta.commit == 5
    assert replica.theta.values[[2, 3]].tolist() == [1 + TAU, 1]
    np.testing.assert_array_equal(replica.residual(), all_at(TAU / 2))
    replica.step(BATCH)
    model = replica.model.params  # type: ignore[attr-defined]
    expected = 1 + (TAU if train_on == "local" else TAU / 2)
    assert model[3] == expected


@WAYS
def test_another_theta_leaves_the_residual(
    make: Callable[..., Replica], make_commit: MakeCommit, train_on: str
) -> None:
    server = Theta(N, K)
    server.values[:] = all_at(2)
    server.commit = 8
    replica = make(train_on)
    replica.step(BATCH)
    replica.publish()
    replica.install(Install((server.chunk(0),), (make_commit(9, 1),), (), 9))
    assert replica.theta.commit == 9
    assert replica.theta.values[[0, 1]].tolist() == [2 + TAU, 2]
    np.testing.assert_array_equal(replica.residual(), all_at(TAU / 2))


@WAYS
def test_residuals_add(make: Callable[..., Replica], train_on: str) -> None:
    replica = make(train_on)
    replica.step(BATCH)
    replica.publish()
    replica.add_residual(all_at(TAU))
    np.testing.assert_array_equal(replica.residual(), all_at(1.5 * TAU))
    assert replica.residual_norm() == pytest.approx(1.5 * TAU * N**0.5)


@WAYS
@pytest.mark.parametrize("loss", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_no_number_ends_training(
    make: Callable[..., Replica], train_on: str, loss: float
) -> None:
    replica = make(train_on)
    replica.model.losses = {2: loss}  # type: ignore[attr-defined]
    replica.step(BATCH)
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf|-inf): training diverges"):
        replica.step(BATCH)


@WAYS
def test_a_parameter_that_is_no_number_ends_training_before_theta_moves(
    make: Callable[..., Replica], train_on: str
) -> None:
    replica = make(train_on, push=float("inf"))
    replica.step(BATCH)
    with pytest.raises(TrainingError, match=r"parameter 0 became inf"):
        replica.publish()
    np.testing.assert_array_equal(replica.theta.values, all_at(0))
