"""Tests of warm-up and shake-ups: what they send, when, and the feedback to the threshold."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.encoding.encoder import Encoded, Encoder
from sparkstrom.encoding.layers import SAMPLE_PARAMS, tau_reached_by
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import AdaptiveThreshold, FixedThreshold
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.resolution import resolve

F32 = NDArray[np.float32]
K = 20


def publish(encoder: Encoder, step: F32, theta: F32, local: F32) -> Encoded | None:
    """Take a step and publish."""
    if encoder.train_on == "replica":
        return encoder.publish(step.copy(), theta)
    local += step
    return encoder.publish(local, theta)


def run(encoder: Encoder, steps: F32) -> list[Encoded | None]:
    """Publish after each step; return the messages."""
    theta, local = np.zeros((2, encoder.n_params), np.float32)
    return [publish(encoder, step, theta, local) for step in steps]


def taus(messages: list[Encoded | None]) -> list[float]:
    """Return the tau of each message, 0 for none."""
    return [message.tau_quanta * 2.0**-K if message else 0.0 for message in messages]


def noise(count: int, n_params: int) -> F32:
    return np.random.default_rng(5).normal(0, 0.01, (count, n_params)).astype(np.float32)


def test_warm_up_fraction_falls_exponentially() -> None:
    """The sent fraction falls exponentially, as in Deep Gradient Compression."""
    ramp = [WarmUp(4).sent_fraction(number) for number in (1, 2, 3, 4, 5)]
    assert ramp == pytest.approx([0.25, 0.0629, 0.0158, 0.00398, 0.001], rel=1e-2)
    assert [WarmUp(4).covers(number) for number in (1, 4, 5)] == [True, True, False]


@pytest.mark.flips("SharedTrainingMaster.warm_up")
@pytest.mark.flips("WarmUp.publications")
@pytest.mark.parametrize("train_on", ["local", "replica"])
def test_adaptive_threshold_continues_with_last_tau_of_warm_up(train_on: str) -> None:
    """A warm-up sends its fractions, and AdaptiveThreshold continues with the last tau."""
    encoder = Encoder(
        100_000, K, AdaptiveThreshold(1e-6), train_on=train_on, warm_up=WarmUp(4, 0.2, 0.002)
    )
    messages = run(encoder, noise(6, 100_000))
    sent = [message.sent_fraction if message else 0.0 for message in messages]
    assert sent[:4] == pytest.approx([0.2, 0.0632, 0.02, 0.00632], rel=0.15)
    assert taus(messages)[4] == pytest.approx(taus(messages)[3], rel=0.05)
    assert taus(messages)[0] < taus(messages)[3]


def test_fixed_threshold_has_own_tau_after_warm_up() -> None:
    encoder = Encoder(1000, K, FixedThreshold(0.0078125), warm_up=WarmUp(2))
    messages = run(encoder, noise(4, 1000))
    assert taus(messages)[2:] == [0.0078125] * 2
    assert taus(messages)[0] != 0.0078125


@pytest.mark.flips("WarmUp.sent_fraction_first")
def test_first_fraction_sets_size_of_first_warm_up_message() -> None:
    """A warm-up's first message has the first fraction of the parameters."""
    step = np.arange(1, 101, dtype=np.float32)[None]
    for fraction, hits in ((0.1, 10), (0.25, 25)):
        (message,) = run(Encoder(100, 10, FixedThreshold(1.0), warm_up=WarmUp(3, fraction)), step)
        assert message is not None
        assert message.count == hits


@pytest.mark.flips("WarmUp.sent_fraction_last")
def test_smaller_last_fraction_makes_warm_up_steeper() -> None:
    """The smaller the last fraction, the faster the fractions fall."""
    steep, flat = (WarmUp(10, 0.25, last).sent_fraction(5) for last in (1e-3, 0.25))
    assert steep < flat == 0.25


def test_warm_up_sends_only_changed_parameters_if_they_are_few() -> None:
    """If fewer parameters changed than the fraction wants, exactly those are sent."""
    step = np.zeros((1, 100), np.float32)
    step[0, [3, 50]] = 0.5, -0.25
    (message,) = run(Encoder(100, K, FixedThreshold(9.0), warm_up=WarmUp(3)), step)
    assert message is not None
    assert (message.count, message.tau_quanta) == (2, 2**18)


def test_warm_up_without_changes_sends_nothing() -> None:
    """If all residuals are 0, a warm-up sends nothing and tau starts at its initial value."""
    encoder = Encoder(4, K, AdaptiveThreshold(0.5), warm_up=WarmUp(2))
    assert run(encoder, np.zeros((3, 4), np.float32)) == [None] * 3
    assert encoder.tau == pytest.approx(0.5 * AdaptiveThreshold().decay)


@pytest.mark.parametrize("train_on", ["local", "replica"])
def test_nan_in_warm_up_is_found_before_theta_changes(train_on: str) -> None:
    encoder = Encoder(3, K, FixedThreshold(1.0), train_on=train_on, warm_up=WarmUp(2))
    theta, learnt = np.zeros(3, np.float32), np.array([1, np.nan, np.inf], np.float32)
    with pytest.raises(TrainingError, match="parameter 1 became nan"):
        encoder.publish(learnt, theta)
    assert not theta.any()


def test_sample_covers_every_column_of_matrix() -> None:
    """Residuals in one column of a matrix are found by the sample."""
    moved = np.zeros((4 * SAMPLE_PARAMS // 64, 64), np.float32)
    moved[:, 5] = 0.5
    tau = tau_reached_by(0.01, 1, moved.reshape(-1), np.zeros(moved.size, np.float32), -1)
    assert tau == 0.5


@pytest.mark.flips("SharedTrainingMaster.shake_frequency")
@pytest.mark.parametrize("train_on", ["local", "replica"])
def test_shake_up_lowers_tau_to_a_third(train_on: str) -> None:
    tau = 3 * 2.0**-8
    encoder = Encoder(500, K, FixedThreshold(tau), train_on=train_on, shake_frequency=3)
    messages = run(encoder, noise(7, 500))
    assert taus(messages) == [tau, tau, tau / 3, tau, tau, tau / 3, tau]
    plain = run(Encoder(500, K, FixedThreshold(tau), train_on=train_on), noise(7, 500))
    assert messages[:2] == plain[:2]
    assert messages[2] != plain[2]


def test_adaptive_threshold_ignores_sent_fraction_of_shake_up() -> None:
    adaptive = AdaptiveThreshold(0.01, 1e-4, 2e-4, 0.5)  # each message is too dense for it
    encoder = Encoder(200, K, adaptive, shake_frequency=2)
    step = np.full((4, 200), 0.5, np.float32)
    assert taus(run(encoder, step)) == pytest.approx([0.01, 0.02 / 3, 0.02, 0.04 / 3], rel=1e-3)


def test_clipping_after_shake_up_uses_undivided_tau() -> None:
    """Clipping after a shake-up uses tau, not the third of tau that was sent."""
    encoder = Encoder(5, K, FixedThreshold(0.75), ResidualClipping(2.0, 1), shake_frequency=1)
    theta, local = np.zeros(5, np.float32), np.array([4, 0, 0, 0, 0], np.float32)
    encoder.publish(local, theta)
    assert theta[0] == 0.25
    assert encoder.residual(local, theta)[0] == 1.5


def test_warm_up_has_no_shake_ups() -> None:
    with_both = Encoder(300, K, FixedThreshold(0.01), warm_up=WarmUp(4), shake_frequency=2)
    warm = Encoder(300, K, FixedThreshold(0.01), warm_up=WarmUp(4))
    ours, theirs = run(with_both, noise(6, 300)), run(warm, noise(6, 300))
    assert ours[:5] == theirs[:5]
    assert taus(ours)[5] == pytest.approx(0.01 / 3, rel=1e-3)


@pytest.mark.parametrize("train_on", ["local", "replica"])
@pytest.mark.parametrize("cut", [1, 3, 6])
def test_warm_up_and_shake_ups_continue_from_loaded_state(train_on: str, cut: int) -> None:
    def fresh() -> Encoder:
        return Encoder(
            80,
            K,
            AdaptiveThreshold(),
            train_on=train_on,
            warm_up=WarmUp(2, 0.5, 0.1),
            shake_frequency=3,
        )

    steps = noise(9, 80)
    whole = run(fresh(), steps)
    first, second = fresh(), fresh()
    theta, local = np.zeros((2, 80), np.float32)
    parts = [publish(first, step, theta, local) for step in steps[:cut]]
    second.load_state(first.state())
    parts += [publish(second, step, theta, local) for step in steps[cut:]]
    assert parts == whole


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ((0,), "None in place of WarmUp"),
        ((1.5,), "whole number"),
        ((True,), "whole number"),
        ((10, 0.0), "0 < last <= first < 1"),
        ((10, 1.0), "0 < last <= first < 1"),
        ((10, 0.1, 0.2), "0 < last <= first < 1"),
        ((10, float("nan")), "0 < last <= first < 1"),
    ],
)
def test_invalid_warm_up_is_refused(values: tuple[float, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        WarmUp(*values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("warm_up", 100, r"such as WarmUp\(100\)"),
        ("shake_frequency", -1, "at least 0"),
        ("shake_frequency", 2.5, "whole number"),
    ],
)
def test_master_refuses_invalid_warm_up_and_frequency_by_name(
    option: str, value: object, words: str
) -> None:
    with pytest.raises(UsageError, match=f"{option}={value!r}.*{words}"):
        SharedTrainingMaster(**{option: value})  # type: ignore[arg-type]


def test_warm_up_and_shake_frequency_are_configurable() -> None:
    conf = {
        "spark.sparkstrom.warm_up": "WarmUp(100, 0.3)",
        "spark.sparkstrom.shake_frequency": "50",
    }
    master = resolve(SharedTrainingMaster(), conf, {})
    assert (master.warm_up, master.shake_frequency) == (WarmUp(100, 0.3), 50)
    assert pickle.loads(pickle.dumps(master)) == master
