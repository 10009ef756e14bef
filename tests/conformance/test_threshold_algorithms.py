"""Tests of threshold algorithms by DL4J's own sequences (``ThresholdAlgorithmTests``)."""

from __future__ import annotations

import pytest

from sparkstrom.encoding.thresholds import AdaptiveThreshold, TargetSparsityThreshold

DENSE = 1 / 16  # DL4J's sparsity ratio of a dense message


def test_adaptive_threshold_matches_dl4j_sequence() -> None:
    adaptive = AdaptiveThreshold(1e-3, 1e-3, 1e-2, 0.95)
    state = adaptive.next_tau({}, None)
    assert state["tau"] == 1e-3
    for sent_fraction, tau in ((DENSE, 1.0526316e-3), (0.1, 1.1080332e-3), (1e-4, 1.0526316e-3)):
        state = adaptive.next_tau(state, sent_fraction)
        assert state["tau"] == pytest.approx(tau, rel=1e-7)


def test_adaptive_threshold_continues_in_next_epoch() -> None:
    adaptive = AdaptiveThreshold(1e-3, 1e-3, 1e-2, 0.95)
    state = {"tau": 1.0526316e-3, "sent_fraction": 1e-4}
    assert adaptive.next_tau(state, None)["tau"] == pytest.approx(1e-3, rel=1e-7)


def test_sent_fraction_of_zero_lowers_tau_by_one_step() -> None:
    adaptive = AdaptiveThreshold(1e-3)
    assert adaptive.next_tau({"tau": 1e-3}, 0.0)["tau"] == pytest.approx(0.96593633e-3)


def test_tau_halves_in_twenty_messages() -> None:
    adaptive, state = AdaptiveThreshold(1e-3), {"tau": 1e-3}
    for _ in range(20):
        state = adaptive.next_tau(state, 0.0)
    assert state["tau"] == pytest.approx(5e-4)


@pytest.mark.parametrize(("sent_fraction", "factor"), [(9e-4, 0.5), (1e-3, 1.0), (1.1e-3, 2.0)])
def test_target_sparsity_steps_by_decay(sent_fraction: float, factor: float) -> None:
    target = TargetSparsityThreshold(1e-4, 1e-3, 0.5)
    assert target.next_tau({"tau": 1e-4}, sent_fraction)["tau"] == pytest.approx(1e-4 * factor)


def test_defaults_are_those_of_dl4j() -> None:
    adaptive, target = AdaptiveThreshold(), TargetSparsityThreshold()
    assert (adaptive.tau_initial, adaptive.sent_fraction_min) == (1e-4, 1e-4)
    assert adaptive.sent_fraction_max == 1e-2
    assert adaptive.decay == pytest.approx(0.96593633, rel=1e-7)
    assert (target.tau_initial, target.sent_fraction_target) == (1e-4, 1e-3)
    assert target.decay == adaptive.decay
