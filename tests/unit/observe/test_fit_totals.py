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


def told(*training: TrainingCounters) -> FitTotals:
    """Return the totals of these training counters and of one worker without any."""
    silent = WorkerCounters(
        None, NodeCounters(rejected=1, ignored=2, links=LinkBytes({}, 3.0)), ("new",)
    )
    return FitTotals.from_counters([silent, *(WorkerCounters(one) for one in training)])


def test_workers_are_added_up() -> None:
    """Counters are summed over workers; the threshold is the mean of those that are known."""
    total = told(
        TrainingCounters(0, hits=3, residual_square=9.0, tau=0.25, publications=1),
        TrainingCounters(1, hits=4, residual_square=16.0, tau=0.75, publications=1),
        TrainingCounters(2),
    )
    training = total.training
    assert (training.hits, training.residual_square, training.tau) == (7, 25.0, 0.5)
    assert (total.node.rejected, total.links, total.unknown) == (1, (LinkBytes({}, 3.0),), ("new",))
    assert total.node.ignored == 2


def test_of_nobody_there_is_no_threshold() -> None:
    """Without workers, the threshold is None."""
    assert FitTotals.from_counters([]).training.tau is None


def test_who_replaces_a_worker_reads_the_same_rows() -> None:
    """Rows held out and bytes spilled count once per partition if a second attempt trained it."""
    training = told(
        TrainingCounters(0, rows_held_out=5, spilled_bytes=7, examples=1),
        TrainingCounters(1, rows_held_out=6, spilled_bytes=8, examples=1),
        TrainingCounters(0, attempt=9, rows_held_out=5, spilled_bytes=9, examples=1),
    ).training
    assert (training.rows_held_out, training.spilled_bytes, training.examples) == (11, 17, 3)


def test_a_worker_that_was_replaced_does_not_count_in_the_last_loss_and_the_threshold() -> None:
    """Before, the loss of a lost worker's last epoch was part of the fit's loss to its end."""
    lost = TrainingCounters(0, 7, last_loss_sum=9.0, last_loss_weight=3.0, tau=0.5, publications=2)
    other = TrainingCounters(1, 8, last_loss_sum=1.0, last_loss_weight=2.0, tau=0.2, publications=2)
    joined = TrainingCounters(0, 9)  # it has not finished an epoch, nor published
    training = told(lost, other, joined).training
    assert (training.last_loss_sum, training.last_loss_weight) == (10.0, 5.0)
    assert training.tau == pytest.approx(0.35)
    ended = replace(joined, last_loss_sum=0.5, last_loss_weight=1.0, tau=0.1, publications=1)
    training = told(lost, other, ended).training
    assert (training.last_loss_sum, training.last_loss_weight) == (1.5, 3.0)
    assert training.tau == pytest.approx(0.15)


def waiting(workers: int, minibatches: int, **masses: Any) -> float:
    """Return the mean wait of changes in residuals, in minibatches of the whole fit."""
    return told(TrainingCounters(**masses)).residual_wait_minibatches(workers, minibatches)


def test_waiting_is_counted_in_minibatches_of_the_fit() -> None:
    """The wait in residuals is in minibatches of all workers, and at most the fit's minibatches."""
    assert waiting(4, 1000, mass_waited=60.0, mass_left=3.0) == 80.0
    assert waiting(4, 50, mass_waited=60.0, mass_left=3.0) == 50.0  # no longer than the fit
    assert waiting(4, 50, mass_waited=60.0, mass_left=0.0) == 50.0
    assert waiting(4, 50, mass_waited=0.0, mass_left=0.0) == 0.0
    assert waiting(4, 50) == 0.0
