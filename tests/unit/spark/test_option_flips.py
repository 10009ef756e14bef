"""Tests of options whose effect shows without a cluster: each is changed, and results differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.thresholds import (
    AdaptiveThreshold,
    FixedThreshold,
    TargetSparsityThreshold,
    ThresholdAlgorithm,
)
from sparkstrom.options.gradient_sharing import SharedTrainingMaster


def taus(algorithm: ThresholdAlgorithm) -> list[float]:
    """Return tau for five messages: the first, and those after ever larger sent fractions."""
    state: dict[str, float] = {}
    seen = []
    for sent_fraction in (None, 5e-5, 5e-4, 5e-3, 5e-2):
        state = algorithm.next_tau(state, sent_fraction)
        seen.append(state["tau"])
    return seen


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            {"tau_initial": 1e-2}, marks=pytest.mark.flips("AdaptiveThreshold.tau_initial")
        ),
        pytest.param(
            {"sent_fraction_min": 1e-3},
            marks=pytest.mark.flips("AdaptiveThreshold.sent_fraction_min"),
        ),
        pytest.param(
            {"sent_fraction_max": 1e-3},
            marks=pytest.mark.flips("AdaptiveThreshold.sent_fraction_max"),
        ),
        pytest.param({"decay": 0.5}, marks=pytest.mark.flips("AdaptiveThreshold.decay")),
    ],
)
def test_adaptive_threshold_options_change_tau(change: dict[str, float]) -> None:
    assert taus(replace(AdaptiveThreshold(), **change)) != taus(AdaptiveThreshold())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            {"tau_initial": 1e-2}, marks=pytest.mark.flips("TargetSparsityThreshold.tau_initial")
        ),
        pytest.param(
            {"sent_fraction_target": 1e-2},
            marks=pytest.mark.flips("TargetSparsityThreshold.sent_fraction_target"),
        ),
        pytest.param({"decay": 0.5}, marks=pytest.mark.flips("TargetSparsityThreshold.decay")),
    ],
)
def test_target_sparsity_threshold_options_change_tau(change: dict[str, float]) -> None:
    assert taus(replace(TargetSparsityThreshold(), **change)) != taus(TargetSparsityThreshold())


@pytest.mark.flips("FixedThreshold.tau")
def test_fixed_threshold_keeps_tau_constant() -> None:
    assert taus(FixedThreshold(1e-2)) == [1e-2] * 5
    assert taus(FixedThreshold(1e-3)) == [1e-3] * 5


@pytest.mark.flips("ResidualClipping.frequency")
def test_residual_clipping_is_due_at_its_frequency() -> None:
    due = [[n for n in range(1, 11) if ResidualClipping(5.0, every).is_due(n)] for every in (5, 3)]
    assert due == [[5, 10], [3, 6, 9]]


def test_export_directory_requires_export_approach() -> None:
    with pytest.raises(UsageError, match="nothing is exported unless"):
        SharedTrainingMaster(export_directory="/tmp/rows")
    exporting = SharedTrainingMaster(rdd_training_approach="export", export_directory="/tmp/rows")
    assert exporting.export_directory == "/tmp/rows"
    with pytest.raises(UsageError, match="must be one of direct, export"):
        SharedTrainingMaster(rdd_training_approach="Export")
