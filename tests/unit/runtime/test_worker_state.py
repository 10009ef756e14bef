"""Worker state that another worker or a checkpoint continues with: optimizer and encoder."""

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
    """Return a new replica."""
    model = DenseNetwork([4, 3, 2], updater=Adam(0.01), seed=1)
    theta = Theta(model.n_params, K)
    theta.load(round_to_grid(model.initial(), K))
    train_on = "local" if local else "replica"
    encoder = Encoder(model.n_params, K, AdaptiveThreshold(1e-3), None, train_on=train_on)
    return Replica(model, theta, encoder, local=local)


def make_trained_replica(local: bool = False) -> Replica:
    """Return a replica after three steps, each published."""
    made = replica(local)
    rows = np.eye(4, dtype=np.float32)
    for _ in range(3):
        made.step(Batch(rows, np.array([0, 1, 0, 1])))
        made.publish()
    return made


@pytest.mark.parametrize("local", [True, False])
def test_loaded_worker_state_has_optimizer_and_thresholds_only(local: bool) -> None:
    """A loaded worker state has the optimizer and the thresholds, but not the residual."""
    lender, taker = make_trained_replica(local), replica(local)
    load_worker_state(taker, encode_worker_state(lender, 3))
    assert taker.encoder.tau == lender.encoder.tau
    assert taker.encoder.state()["publications"] == 3
    for name, value in lender.model.updater_state().items():
        np.testing.assert_array_equal(taker.model.updater_state()[name], value)
    assert not taker.residual().any()
    assert lender.residual().any()


def test_load_optimizer_state_keeps_own_thresholds() -> None:
    """``load_optimizer_state`` loads the optimizer's part alone."""
    lender, taker = make_trained_replica(), replica()
    load_optimizer_state(taker, encode_worker_state(lender, 3))
    assert taker.encoder.state()["publications"] == 0
    assert taker.model.updater_state()["steps"] == lender.model.updater_state()["steps"]


def test_remove_encoder_state_leaves_only_optimizer_state() -> None:
    """``remove_encoder_state`` leaves the optimizer's part alone."""
    lender, taker = make_trained_replica(), replica()
    content = remove_encoder_state(encode_worker_state(lender, 3))
    load_worker_state(taker, content)
    assert taker.encoder.state()["publications"] == 0
    assert decode_optimizer_state(content).keys() == lender.model.updater_state().keys()


def test_worker_state_has_partition_only_with_encoder_state() -> None:
    """An encoded worker state has its partition; without the encoder's part it has none."""
    content = encode_worker_state(make_trained_replica(), 3)
    assert decode_partition(content) == 3
    assert decode_partition(remove_encoder_state(content)) is None  # needed by workers only


def test_invalid_optimizer_state_bytes_raise_wire_error() -> None:
    """Invalid bytes raise WireError."""
    with pytest.raises(WireError):
        decode_optimizer_state(b"no state")
