"""Tests of the encoder: form, tau, clipping, scale, state, and the effect of each option."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.codec.payload import decode_update_untrusted
from sparkstrom.encoding.encoder import Encoded, Encoder
from sparkstrom.encoding.forms import Form, prefers_bitmap
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.thresholds import AdaptiveThreshold, FixedThreshold

F32 = NDArray[np.float32]
K = 3  # q = 1/8


def flat(*values: float) -> F32:
    return np.array(values, np.float32)


def hits_of(update: Encoded | None, n_params: int) -> dict[int, int]:
    """Return a message's quanta by parameter index."""
    assert update is not None
    indices, quanta = decode_update_untrusted(
        update.payload, update.form, update.count, update.tau_quanta, n_params
    )
    return dict(zip(indices.tolist(), quanta.tolist(), strict=True))


def test_few_hits_are_sent_as_gaps_and_remainder_stays_in_residual() -> None:
    encoder = Encoder(6, K, FixedThreshold(0.5))
    local, theta = flat(0.5, 0.375, -1.25, 0, 0, 0), np.zeros(6, np.float32)
    update = encoder.publish(local, theta)
    assert update is not None
    assert (update.form, update.tau_quanta, update.count) == (Form.GAPS, 4, 2)
    assert update.sent_fraction == pytest.approx(2 / 6)
    assert hits_of(update, 6) == {0: 4, 2: -4}
    assert theta.tolist() == [0.5, 0, -0.5, 0, 0, 0]
    assert local.tolist() == [0.5, 0.375, -1.25, 0, 0, 0]
    assert encoder.residual(local, theta).tolist() == [0, 0.375, -0.75, 0, 0, 0]


def test_replica_training_has_separate_residual() -> None:
    encoder = Encoder(4, K, FixedThreshold(0.5), train_on="replica")
    theta = np.zeros(4, np.float32)
    assert encoder.publish(flat(0.25, 0, 0, 0), theta) is None
    encoder.accumulate(flat(0, 0, 0.125, 0))
    assert hits_of(encoder.publish(flat(0.375, 0, 0, 0), theta), 4) == {0: 4}
    assert theta.tolist() == [0.5, 0, 0, 0]
    assert encoder.residual(theta, theta).tolist() == [0.125, 0, 0.125, 0]


def test_publish_without_hits_returns_none_and_lowers_tau() -> None:
    encoder = Encoder(4, 20, AdaptiveThreshold(0.5, decay=0.5))
    local, theta = np.zeros(4, np.float32), np.zeros(4, np.float32)
    assert math.isnan(encoder.tau)
    assert encoder.publish(local, theta) is None
    assert encoder.publish(local, theta) is None
    assert encoder.tau == 0.25
    assert (encoder.counters.publications, encoder.counters.hits) == (2, 0)


def test_tau_does_not_fall_below_two_quanta() -> None:
    """Tau does not fall below 2 quanta."""
    encoder = Encoder(2, K, AdaptiveThreshold(0.5, decay=0.5))
    local, theta = np.zeros(2, np.float32), np.zeros(2, np.float32)
    for _ in range(50):
        encoder.publish(local, theta)
    assert encoder.tau == 0.25


def test_bitmaps_alternate_sign_of_half_steps() -> None:
    """A bitmap sends half steps of one sign only, the next bitmap those of the other."""
    encoder = Encoder(5, K, FixedThreshold(0.5))
    theta = np.zeros(5, np.float32)
    local = flat(0.5, -0.5, 0.5, 0.25, -0.375)
    up = encoder.publish(local, theta)
    assert hits_of(up, 5) == {0: 4, 1: -4, 2: 4, 3: 2}
    local += flat(0.5, -0.5, 0.5, 0.25, 0)
    down = encoder.publish(local, theta)
    assert hits_of(down, 5) == {0: 4, 1: -4, 2: 4, 4: -2}
    assert [u.form for u in (up, down) if u] == [Form.BITMAP_UP, Form.BITMAP_DOWN]
    assert encoder.residual(local, theta).tolist() == [0, 0, 0, 0.25, -0.125]


@pytest.mark.parametrize(
    ("hits", "n_params", "bitmap"), [(1, 1, True), (1, 3, False), (2, 4, True)]
)
def test_bitmap_is_preferred_if_half_of_parameters_are_hits(
    hits: int, n_params: int, bitmap: bool
) -> None:
    """A bitmap is sent if at least half of the parameters are hits."""
    assert prefers_bitmap(hits, n_params) == bitmap


@pytest.mark.parametrize("train_on", ["local", "replica"])
@pytest.mark.parametrize(("aggregation", "step"), [("sum", 1.0), ("mean", 0.25), ("sqrt", 0.5)])
def test_aggregation_scales_move_of_theta_and_counts_the_rest(
    train_on: str, aggregation: str, step: float
) -> None:
    """A hit takes tau from the residual, moves theta by tau * scale, and the rest is counted."""
    encoder = Encoder(
        3, K, FixedThreshold(1.0), train_on=train_on, aggregation=aggregation, workers=4
    )
    theta = np.zeros(3, np.float32)
    learnt = flat(1.5, 0, 0)
    encoder.publish(learnt, theta)
    assert theta.tolist() == [step, 0, 0]
    assert encoder.residual(learnt, theta).tolist() == [0.5, 0, 0]
    assert encoder.counters.mass_sent == step
    assert encoder.counters.mass_scaled_away == 1 - step


def test_mean_aggregation_follows_changed_worker_count() -> None:
    encoder = Encoder(3, K, FixedThreshold(1.0), aggregation="mean", workers=4)
    encoder.set_workers(2)
    theta = np.zeros(3, np.float32)
    encoder.publish(flat(1, 0, 0), theta)
    assert theta[0] == 0.5


@pytest.mark.parametrize("train_on", ["local", "replica"])
def test_clipping_follows_encoding_and_is_counted(train_on: str) -> None:
    encoder = Encoder(5, K, FixedThreshold(0.5), ResidualClipping(2.0, 2), train_on=train_on)
    theta, learnt = np.zeros(5, np.float32), flat(4, -3, 0, 0, 0)
    encoder.publish(learnt, theta)
    assert encoder.counters.mass_clipped == 0
    encoder.publish(learnt if train_on == "local" else flat(0, 0, 0, 0, 0), theta)
    assert theta.tolist() == [1, -1, 0, 0, 0]
    assert encoder.residual(learnt, theta).tolist() == [1, -1, 0, 0, 0]
    assert encoder.counters.mass_clipped == 2 + 1


def test_clipping_is_skipped_without_sent_update() -> None:
    encoder = Encoder(2, K, FixedThreshold(1.0), ResidualClipping(1.0, 2))
    theta = np.zeros(2, np.float32)
    for _ in range(4):
        assert encoder.publish(flat(0.5, 0), theta) is None
    assert encoder.counters.mass_clipped == 0


def test_a_parameter_that_leaves_the_exact_range_is_counted() -> None:
    encoder = Encoder(3, 20, FixedThreshold(1.0))
    theta = flat(0, 16, 0)
    encoder.publish(flat(0, 17.5, 0), theta)
    assert (encoder.counters.overflows, encoder.counters.first_overflow) == (1, 1)


@pytest.mark.parametrize("train_on", ["local", "replica"])
def test_nan_names_index_layer_and_remedy(train_on: str) -> None:
    encoder = Encoder(
        3,
        20,
        FixedThreshold(1.0),
        train_on=train_on,
        layer_of=lambda index: f"layer {index} weights",
    )
    theta = np.zeros(3, np.float32)
    with pytest.raises(TrainingError, match=r"parameter 1 \(layer 1 weights\) became nan"):
        encoder.publish(flat(2, math.nan, math.inf), theta)
    assert not theta.any()


@pytest.mark.parametrize("train_on", ["local", "replica"])
def test_encoder_continues_from_state_of_another(train_on: str) -> None:
    """An encoder that loads another's state in mid-training gives the same result as one alone."""
    random = np.random.default_rng(3)
    steps = random.normal(0, 0.2, (12, 40)).astype(np.float32)
    whole = Encoder(40, 20, AdaptiveThreshold(0.1), ResidualClipping(1.0, 3), train_on=train_on)
    parts = Encoder(40, 20, AdaptiveThreshold(0.1), ResidualClipping(1.0, 3), train_on=train_on)
    thetas, locals_ = np.zeros((2, 40), np.float32), np.zeros((2, 40), np.float32)
    for number, step in enumerate(steps):
        if number == 7:
            state = parts.state()
            parts = Encoder(
                40, 20, AdaptiveThreshold(0.1), ResidualClipping(1.0, 3), train_on=train_on
            )
            parts.load_state(state)
        for encoder, theta, local in zip((whole, parts), thetas, locals_, strict=True):
            local += step
            encoder.publish(local if train_on == "local" else step.copy(), theta)
    np.testing.assert_array_equal(thetas[0], thetas[1])
    np.testing.assert_array_equal(locals_[0], locals_[1])
    assert whole.state().keys() == parts.state().keys()


@pytest.mark.parametrize("train_on", ["local", "replica"])
def test_residual_of_earlier_fit_is_added_to_residual_and_norms(train_on: str) -> None:
    """The residual of an earlier fit is added, and part of the norms."""
    encoder = Encoder(2, K, FixedThreshold(1.0), train_on=train_on)
    theta, local = flat(1, 1), flat(1.5, 1)
    encoder.add_residual(flat(0.25, -3), local)
    kept = [0.75, -3] if train_on == "local" else [0.25, -3]
    assert encoder.residual(local, theta).tolist() == kept
    mass, norm = encoder.residual_norms(local, theta)
    assert mass == sum(abs(value) for value in kept)
    assert norm == pytest.approx(math.hypot(*kept))
    with pytest.raises(UsageError, match="2 parameters"):
        encoder.add_residual(flat(1), local)


@pytest.mark.parametrize(
    ("option", "value"),
    [("train_on", "delta"), ("aggregation", "max"), ("workers", 0)],
)
def test_unknown_options_are_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{option}={value!r}"):
        Encoder(2, K, FixedThreshold(1.0), **{option: value})  # type: ignore[arg-type]
