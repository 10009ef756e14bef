"""Tests of thresholds per layer: found by name, sent as multiples, known to the decoder."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError, WireError
from sparkstrom.codec.payload import decode_update_untrusted
from sparkstrom.encoding import backends
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.forms import Form
from sparkstrom.encoding.grid import EXACT_QUANTA
from sparkstrom.encoding.layers import Layers, layers_of
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.resolution import resolve

F32 = NDArray[np.float32]
K = 3  # q = 1/8
THREE = Layers((2, 5, 6), (1, 3, 2))


def flat(*values: float) -> F32:
    return np.array(values, np.float32)


def hits_of(encoder: Encoder, learnt: F32, theta: F32) -> dict[int, int]:
    """Publish; return the message's quanta by parameter index."""
    made = encoder.publish(learnt, theta)
    assert made is not None
    indices, quanta = decode_update_untrusted(
        made.payload, made.form, made.count, made.tau_quanta, theta.size, encoder.layers
    )
    return dict(zip(indices.tolist(), quanta.tolist(), strict=True))


@pytest.mark.parametrize("backend", backends.BACKENDS)
@pytest.mark.parametrize("train_on", ["local", "replica"])
def test_each_layer_has_its_own_threshold(train_on: str, backend: str) -> None:
    encoder = Encoder(
        6,
        K,
        FixedThreshold(0.5),
        train_on=train_on,
        backend=backends.backend(backend),
        layers=THREE,
    )
    theta, learnt = np.zeros(6, np.float32), flat(0.5, -0.75, 1.375, -1.5, 1.75, 1.125)
    assert hits_of(encoder, learnt, theta) == {0: 4, 1: -4, 3: -12, 4: 12, 5: 8}
    assert theta.tolist() == [0.5, -0.5, 0, -1.5, 1.5, 1]
    assert encoder.residual(learnt, theta).tolist() == [0, -0.25, 1.375, 0, 0.25, 0.125]
    assert encoder.counters.mass_sent == 0.5 + 0.5 + 1.5 + 1.5 + 1


@pytest.mark.parametrize("train_on", ["local", "replica"])
def test_clipping_and_scaling_use_layer_multipliers(train_on: str) -> None:
    encoder = Encoder(
        6,
        K,
        FixedThreshold(0.5),
        ResidualClipping(1.0, 1),
        train_on=train_on,
        aggregation="mean",
        workers=2,
        layers=THREE,
    )
    theta, learnt = np.zeros(6, np.float32), flat(2, 0, 0, -9, 0, 0)
    assert hits_of(encoder, learnt, theta) == {0: 2, 3: -6}
    assert encoder.residual(learnt, theta).tolist() == [0.5, 0, 0, -1.5, 0, 0]
    assert encoder.counters.mass_scaled_away == 0.25 + 0.75
    assert encoder.counters.mass_clipped == 1 + 6


def test_dense_message_with_layers_is_gaps_of_bitmap_size() -> None:
    encoder = Encoder(400, K, FixedThreshold(0.5), layers=Layers((100, 400), (2, 1)))
    made = encoder.publish(np.full(400, 1.0, np.float32), np.zeros(400, np.float32))
    assert made is not None
    assert (made.form, made.count) == (Form.GAPS, 400)
    assert len(made.payload) <= 1 + 400 / 4


def test_layer_multiple_of_tau_stays_in_exact_range() -> None:
    encoder = Encoder(2, K, FixedThreshold(1e9), layers=Layers((1, 2), (1, 7)))
    learnt = np.full(2, 2.0**21, np.float32)
    assert max(hits_of(encoder, learnt, np.zeros(2, np.float32)).values()) <= EXACT_QUANTA
    with pytest.raises(WireError, match="must be even, within 2"):
        decode_update_untrusted(b"\0\1", Form.GAPS, 1, EXACT_QUANTA, 2, encoder.layers)


def test_warm_up_fraction_uses_layer_multipliers() -> None:
    """A warm-up's fraction counts residuals in multiples of their layer's tau."""
    encoder = Encoder(
        100, K, FixedThreshold(9.0), warm_up=WarmUp(3, 0.2), layers=Layers((50, 100), (1, 4))
    )
    learnt = np.repeat(flat(1, 4), 50) * np.tile(np.arange(1, 51, dtype=np.float32), 2)
    made = encoder.publish(learnt, np.zeros(100, np.float32))
    assert made is not None
    assert made.count == 20
    assert made.tau_quanta == 41 * 2**K


NETWORK = DenseNetwork([4, 3, 2], seed=1)


def test_layer_multipliers_are_matched_by_layer_name() -> None:
    found = layers_of(NETWORK.n_params, NETWORK.layer_of, {"layer 1": 4, "layer 1 biases": 2})
    assert found == Layers((12, 15, 21, 23), (4, 2, 1, 1))
    assert layers_of(NETWORK.n_params, NETWORK.layer_of, {}) is None
    assert pickle.loads(pickle.dumps(found)) == found


def test_layer_1_does_not_match_layer_10() -> None:
    """The name "layer 1" does not match "layer 10"."""
    names = ["layer 1", "layer 10"]
    found = layers_of(8, lambda index: names[index // 4], {"layer 1": 3})
    assert found == Layers((4, 8), (3, 1))


def test_unknown_layer_name_error_lists_valid_names() -> None:
    """A name of no layer is refused, and the error lists the names."""
    with pytest.raises(
        UsageError, match=r"'layer 3', .*: layer 1 weights, layer 1 biases, layer 2"
    ):
        layers_of(NETWORK.n_params, NETWORK.layer_of, {"layer 1": 2, "layer 3": 2})


@pytest.mark.flips("SharedTrainingMaster.layer_multipliers")
def test_layer_multipliers_option_reaches_encoder() -> None:
    conf = {"spark.sparkstrom.layer_multipliers": "{'layer 2': 4}"}
    sent = []
    for master in (SharedTrainingMaster(), resolve(SharedTrainingMaster(), conf, {})):
        layers = layers_of(NETWORK.n_params, NETWORK.layer_of, master.layer_multipliers or {})
        encoder = Encoder(NETWORK.n_params, K, FixedThreshold(0.5), layers=layers)
        made = encoder.publish(np.ones(23, np.float32), np.zeros(23, np.float32))
        sent.append(made and made.count)
    assert sent == [23, 15]
    assert pickle.loads(pickle.dumps(master)) == master
    assert hash(master)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (4, "dictionary by layer"),
        ({1: 4}, "dictionary by layer"),
        ({"layer 1": 0}, "at least 1"),
        ({"layer 1": 1.5}, "whole number"),
        ({"layer 1": 1025}, "at most 1024"),
    ],
)
def test_invalid_layer_multipliers_are_refused(value: object, words: str) -> None:
    with pytest.raises(UsageError, match=f"layer_multipliers.*{words}"):
        SharedTrainingMaster(layer_multipliers=value)  # type: ignore[arg-type]


def test_layer_multipliers_text_that_is_no_dictionary_is_refused() -> None:
    with pytest.raises(UsageError, match=r"layer_multipliers='layer 1: 2'"):
        resolve(SharedTrainingMaster(), {"spark.sparkstrom.layer_multipliers": "layer 1: 2"}, {})
