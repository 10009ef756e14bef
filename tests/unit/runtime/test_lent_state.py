"""Lent state: what of a worker another one, or a checkpoint, goes on with."""

from __future__ import annotations

import numpy as np
import pytest

from sparkstrom.base.errors import WireError
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.grid import round_to_grid
from sparkstrom.encoding.thresholds import AdaptiveThreshold
from sparkstrom.models import Adam, DenseNetwork
from sparkstrom.models.base import Batch
from sparkstrom.runtime.optimizer_states import (
    decode_optimizer_state,
    decode_partition,
    encode_worker_state,
    load_optimizer_state,
    load_worker_state,
    remove_encoder_state,
)
from sparkstrom.runtime.theta import Replica, Theta

K = 20


def replica(local: bool = False) -> Replica:
    model = DenseNetwork([4, 3, 2], updater=Adam(0.01), seed=1)
    theta = Theta(model.n_params, K)
    theta.load(round_to_grid(model.initial(), K))
    train_on = "local" if local else "replica"
    encoder = Encoder(model.n_params, K, AdaptiveThreshold(1e-3), None, train_on=train_on)
    return Replica(model, theta, encoder, local=local)


def trained(local: bool = False) -> Replica:
    made = replica(local)
    rows = np.eye(4, dtype=np.float32)
    for _ in range(3):
        made.step(Batch(rows, np.array([0, 1, 0, 1])))
        made.publish()
    return made


@pytest.mark.parametrize("local", [True, False])
def test_another_one_goes_on_with_updater_and_thresholds_and_no_residual(local: bool) -> None:
    lender, taker = trained(local), replica(local)
    load_worker_state(taker, encode_worker_state(lender, 3))
    assert taker.encoder.tau == lender.encoder.tau
    assert taker.encoder.state()["publications"] == 3
    for name, value in lender.model.updater_state().items():
        np.testing.assert_array_equal(taker.model.updater_state()[name], value)
    assert not taker.residual().any()
    assert lender.residual().any()


def test_who_joins_late_keeps_its_own_thresholds() -> None:
    lender, taker = trained(), replica()
    load_optimizer_state(taker, encode_worker_state(lender, 3))
    assert taker.encoder.state()["publications"] == 0
    assert taker.model.updater_state()["steps"] == lender.model.updater_state()["steps"]


def test_for_another_algorithm_the_updater_alone_is_left() -> None:
    lender, taker = trained(), replica()
    content = remove_encoder_state(encode_worker_state(lender, 3))
    load_worker_state(taker, content)
    assert taker.encoder.state()["publications"] == 0
    assert decode_optimizer_state(content).keys() == lender.model.updater_state().keys()


def test_it_says_whose_it_is() -> None:
    content = encode_worker_state(trained(), 3)
    assert decode_partition(content) == 3
    assert decode_partition(remove_encoder_state(content)) is None  # for workers alone


def test_bytes_that_are_none_are_refused() -> None:
    with pytest.raises(WireError):
        decode_optimizer_state(b"no state")
