"""Tests of threshold options: refused values, and edge cases of the state."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.thresholds import (
    AdaptiveThreshold,
    FixedThreshold,
    TargetSparsityThreshold,
    ThresholdAlgorithm,
)

ALL: list[ThresholdAlgorithm] = [
    FixedThreshold(1e-3),
    AdaptiveThreshold(1e-3),
    TargetSparsityThreshold(1e-3),
]


@pytest.mark.parametrize("algorithm", ALL)
def test_first_tau_is_the_initial_one(algorithm: ThresholdAlgorithm) -> None:
    assert algorithm.next_tau({}, None)["tau"] == 1e-3


@pytest.mark.parametrize("algorithm", ALL)
def test_next_tau_does_not_change_its_argument(algorithm: ThresholdAlgorithm) -> None:
    state = {"tau": 1e-3, "sent_fraction": 0.5}
    algorithm.next_tau(state, 0.5)
    assert state == {"tau": 1e-3, "sent_fraction": 0.5}


def test_fixed_threshold_ignores_state_and_sent_fraction() -> None:
    fixed = FixedThreshold(0.25)
    assert fixed.next_tau({"tau": 1.0}, 0.9) == {"tau": 0.25}


def test_adaptive_tau_stays_within_bounds_or_if_fraction_is_unknown() -> None:
    """Tau stays if the sent fraction is within its bounds or unknown."""
    adaptive = AdaptiveThreshold(1e-3)
    assert adaptive.next_tau({"tau": 2e-3}, 1e-3)["tau"] == 2e-3
    assert adaptive.next_tau({"tau": 2e-3}, None) == {"tau": 2e-3}


@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan, math.inf])
def test_a_threshold_must_be_positive_and_finite(tau: float) -> None:
    for make in (FixedThreshold, AdaptiveThreshold, TargetSparsityThreshold):
        with pytest.raises(UsageError, match="positive"):
            make(tau)


@pytest.mark.parametrize(
    ("make", "option", "value"),
    [
        (AdaptiveThreshold, "decay", 1.0),
        (AdaptiveThreshold, "decay", 0.4),
        (TargetSparsityThreshold, "decay", 1.0),
        (AdaptiveThreshold, "sent_fraction_min", 0.5),
        (AdaptiveThreshold, "sent_fraction_max", 1.0),
        (TargetSparsityThreshold, "sent_fraction_target", 1 / 16),
        (TargetSparsityThreshold, "sent_fraction_target", 0.0),
        (ResidualClipping, "multiple", 0.5),
        (ResidualClipping, "multiple", math.nan),
        (ResidualClipping, "frequency", 0),
    ],
)
def test_threshold_option_out_of_range_is_refused_by_name(
    make: Any, option: str, value: float
) -> None:
    with pytest.raises(UsageError, match=f"{option}={value}"):
        make(**{option: value})


def test_clipping_is_due_at_every_multiple_of_its_frequency() -> None:
    clipping = ResidualClipping(frequency=3)
    assert [n for n in range(1, 10) if clipping.is_due(n)] == [3, 6, 9]
