"""Tests of the totals of a fit: which counters are summed, and which count once per partition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkstrom.observe.telemetry import (
    FitTotals,
    LinkBytes,
    NodeCounters,
    TrainingCounters,
    WorkerCounters,
)


def make_totals(*training: TrainingCounters) -> FitTotals:
    """Return the totals of these training counters and of one worker without any."""
    silent = WorkerCounters(
        None, NodeCounters(rejected=1, ignored=2, links=LinkBytes({}, 3.0)), ("new",)
    )
    return FitTotals.from_counters([silent, *(WorkerCounters(one) for one in training)])


def test_counters_are_summed_over_workers() -> None:
    """Counters are summed over workers; the threshold is the mean of those that are known."""
    total = make_totals(
        TrainingCounters(0, hits=3, residual_square=9.0, tau=0.25, publications=1),
        TrainingCounters(1, hits=4, residual_square=16.0, tau=0.75, publications=1),
        TrainingCounters(2),
    )
    training = total.training
    assert (training.hits, training.residual_square, training.tau) == (7, 25.0, 0.5)
    assert (total.node.rejected, total.links, total.unknown) == (1, (LinkBytes({}, 3.0),), ("new",))
    assert total.node.ignored == 2


def test_threshold_is_none_without_workers() -> None:
    """Without workers, the threshold is None."""
    assert FitTotals.from_counters([]).training.tau is None


def test_rows_of_replaced_worker_count_once_per_partition() -> None:
    """Rows held out and bytes spilled count once per partition if a second attempt trained it."""
    training = make_totals(
        TrainingCounters(0, rows_held_out=5, spilled_bytes=7, examples=1),
        TrainingCounters(1, rows_held_out=6, spilled_bytes=8, examples=1),
        TrainingCounters(0, attempt=9, rows_held_out=5, spilled_bytes=9, examples=1),
    ).training
    assert (training.rows_held_out, training.spilled_bytes, training.examples) == (11, 17, 3)


def test_replacement_supersedes_last_loss_and_threshold_of_lost_worker() -> None:
    """Before, the loss of a lost worker's last epoch was part of the fit's loss to its end."""
    lost = TrainingCounters(0, 7, last_loss_sum=9.0, last_loss_weight=3.0, tau=0.5, publications=2)
    other = TrainingCounters(1, 8, last_loss_sum=1.0, last_loss_weight=2.0, tau=0.2, publications=2)
    joined = TrainingCounters(0, 9)  # it has not finished an epoch, nor published
    training = make_totals(lost, other, joined).training
    assert (training.last_loss_sum, training.last_loss_weight) == (10.0, 5.0)
    assert training.tau == pytest.approx(0.35)
    ended = replace(joined, last_loss_sum=0.5, last_loss_weight=1.0, tau=0.1, publications=1)
    training = make_totals(lost, other, ended).training
    assert (training.last_loss_sum, training.last_loss_weight) == (1.5, 3.0)
    assert training.tau == pytest.approx(0.15)


def compute_wait(workers: int, minibatches: int, **masses: Any) -> float:
    """Return the mean wait of changes in residuals, in minibatches of the whole fit."""
    return make_totals(TrainingCounters(**masses)).residual_wait_minibatches(workers, minibatches)


def test_residual_wait_is_in_minibatches_of_all_workers() -> None:
    """The wait in residuals is in minibatches of all workers, and at most the fit's minibatches."""
    assert compute_wait(4, 1000, mass_waited=60.0, mass_left=3.0) == 80.0
    assert compute_wait(4, 50, mass_waited=60.0, mass_left=3.0) == 50.0  # no longer than the fit
    assert compute_wait(4, 50, mass_waited=60.0, mass_left=0.0) == 50.0
    assert compute_wait(4, 50, mass_waited=0.0, mass_left=0.0) == 0.0
    assert compute_wait(4, 50) == 0.0
