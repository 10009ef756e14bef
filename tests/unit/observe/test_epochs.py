"""Tests of the epoch history: live counters and final reports of partitions are merged."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from sparkstrom.observe.epoch_history import (
    RECENT_EPOCHS_MAX,
    RECENT_EPOCHS_MIN,
    RECENT_S,
    EpochHistory,
    EpochLog,
    PartitionEpoch,
)
from sparkstrom.observe.telemetry import TrainingCounters, WorkerCounters


def make_log(partition: int, epochs: range, attempt: int = 0, held: float = 1.0) -> EpochLog:
    """Return a log of these epochs with known losses; ``held`` scales the held-out loss."""
    log = EpochLog(partition, attempt)
    for epoch in epochs:
        log.add(PartitionEpoch(epoch, 8.0 - epoch, 4, held * (10 - epoch), 2.0))
    return log


def counters(log: EpochLog) -> WorkerCounters:
    """Return the counters that a worker with this log sends."""
    report = log.report()
    newest = report["epochs"][-1]
    training = TrainingCounters(
        partition=report["partition"],
        attempt=report["attempt"],
        last_loss_sum=newest["loss_sum"],
        last_loss_weight=newest["examples"],
        epochs=log.recent_figures(),
    )
    return WorkerCounters(training)


def test_epoch_is_complete_when_all_partitions_reported() -> None:
    """An epoch is complete when all given partitions have reported it."""
    book = EpochHistory()
    book.add_counters([counters(make_log(0, range(3))), counters(make_log(1, range(2), held=3.0))])
    assert book.epochs_reported_by({0, 1}) == [0, 1]
    assert book.epochs_reported_by({0}) == [0, 1, 2]
    assert book.epochs_reported_by({0, 1, 2}) == book.epochs_reported_by(()) == []
    assert book.epoch(1).validation == (9 + 27) / 4
    assert book.epoch(1).held_weight == 4.0


def test_worker_without_completed_epoch_adds_no_history() -> None:
    """Workers without a completed epoch add no epoch to the history."""
    book = EpochHistory()
    silent, joined = (
        WorkerCounters(),
        TrainingCounters(3, 5, epochs=EpochLog(3, 5).recent_figures()),
    )
    book.add_counters([silent, WorkerCounters(joined)])
    assert book.history() == []


def test_final_reports_fill_epochs_missing_in_counters() -> None:
    """Final reports fill in the epochs that live counters no longer contained."""
    log = make_log(0, range(80))
    book = EpochHistory(first_epoch=10)
    book.add_counters([counters(log)])
    assert [one.epoch for one in book.history()] == list(range(91 - RECENT_EPOCHS_MAX, 91))
    book.add_reports([json.loads(json.dumps(log.report()))])
    history = book.history()
    assert [one.epoch for one in history] == list(range(11, 91))
    assert (history[3].loss, history[3].examples) == (5.0 / 4, 4)
    assert history[3].validation == 3.5


def test_later_attempt_overrides_figures_of_earlier_attempt() -> None:
    """For epochs that two attempts of a partition trained, the later attempt's figures count."""
    book = EpochHistory()
    book.add_counters(
        [counters(make_log(0, range(2))), counters(make_log(0, range(1, 3), 7, held=5.0))]
    )
    assert [one.validation for one in book.history()] == [5.0, 22.5, 20.0]
    assert book.epochs_reported_by({0}) == [0, 1, 2]


def test_epoch_sums_do_not_depend_on_report_order() -> None:
    """Sums over partitions are exact, so they do not depend on the order of the reports."""
    logs = [make_log(p, range(1), held=h) for p, h in enumerate((1e16, 1.0, -1e16))]
    for order in (logs, logs[::-1]):
        book = EpochHistory()
        book.add_counters(map(counters, order))
        assert book.epoch(0).validation == 10 / 6


def test_validation_is_nan_without_held_out_rows() -> None:
    """Without held-out rows, the validation loss is NaN and the weight 0."""
    log = EpochLog()
    log.add(PartitionEpoch(0, 1.0, 2))
    book = EpochHistory()
    book.add_reports([log.report()])
    assert math.isnan(book.epoch(0).validation)
    assert book.epoch(0).held_weight == 0.0
    assert book.history()[0].loss == 0.5


def test_rows_of_weight_0_do_not_count_in_epoch_loss() -> None:
    """Rows that weigh 0 do not count in an epoch's loss, live or in the final reports."""
    logs = [EpochLog(partition) for partition in range(3)]
    logs[0].add(PartitionEpoch(0, 6.0, 10, loss_weight=2.0))
    logs[1].add(PartitionEpoch(0, 4.0, 10, loss_weight=8.0))
    logs[2].add(PartitionEpoch(0, 0.0, 10, loss_weight=0.0))
    live, final = EpochHistory(), EpochHistory()
    live.add_counters(map(counters, logs))
    final.add_reports([log.report() for log in logs])
    for book in (live, final):
        assert (book.epoch(0).loss, book.epoch(0).examples) == (1.0, 30)
    nothing = EpochHistory()
    nothing.add_reports([logs[2].report()])
    assert math.isnan(nothing.epoch(0).loss)
    again = EpochHistory()
    again.restore(json.loads(json.dumps(live.report({0: 1, 1: 1, 2: 0}))))
    assert again.epoch(0).loss == 1.0


def test_old_checkpoint_without_loss_weight_is_weighted_by_rows() -> None:
    """Checkpoints that lack ``loss_weight`` still load."""
    book = EpochHistory()
    old = {"epoch": 0, "loss_sum": 8.0, "examples": 4, "held_sum": 0.0, "held_weight": 0.0}
    book.restore({"whole": [], "parts": [[0, old]]})
    assert book.epoch(0).loss == 2.0


def test_epochs_reported_together_keep_their_own_figures() -> None:
    """Epochs that arrive together each have their own loss and all partitions' examples."""
    book = EpochHistory()
    book.add_counters([counters(make_log(0, range(20))), counters(make_log(1, range(18)))])
    told = [book.epoch(epoch) for epoch in book.epochs_reported_by({0, 1})]
    assert [one.examples for one in told] == 18 * [8]
    assert [one.loss for one in told] == [(8.0 - epoch) / 4 for epoch in range(18)]


def test_counters_drop_old_epochs_down_to_minimum() -> None:
    """Counters contain only epochs that ended recently, and at least a minimum number."""
    now_s = [0.0]
    log = EpochLog(0, 0, lambda: now_s[0])
    for epoch in range(40):
        log.add(PartitionEpoch(epoch, 1.0, 4))
    now_s[0] = RECENT_S + 1
    figures = log.recent_figures()
    assert figures is not None
    assert list(figures.loss_sums) == list(range(40 - RECENT_EPOCHS_MIN, 40))


def test_counters_contain_limited_number_of_newest_epochs() -> None:
    """Counters contain at most a maximum number of epochs, the newest ones."""
    figures = make_log(0, range(100)).recent_figures()
    assert figures is not None
    assert len(figures.held_sums) == RECENT_EPOCHS_MAX
    assert figures.held_sums[99] == pytest.approx(-89.0)


def test_resumed_fit_keeps_earlier_epochs_and_reports_new_ones() -> None:
    """A resumed fit has the figures of the epochs before it, but reports only new epochs."""
    book = EpochHistory(first_epoch=10)
    book.add_reports([make_log(0, range(4)).report(), make_log(1, range(2), held=3.0).report()])
    told = json.loads(json.dumps(book.report({0: 4, 1: 2})))
    later = EpochHistory(first_epoch=10)
    later.restore(told)
    assert later.epochs_resumed_from == 2
    assert later.history()[:2] == book.history()[:2]
    assert later.epochs_reported_by({0, 1}) == []
    later.add_reports(
        [make_log(1, range(2, 5), 9, held=3.0).report()]
    )  # partition 0 still trains epoch 5
    assert later.epochs_reported_by({0, 1}) == [2, 3]
    assert later.epoch(3) == EpochHistory(10, book._attempts | later._attempts).epoch(3)
    assert [one.epoch for one in later.history()] == [11, 12, 13, 14, 15]


def test_silent_partition_with_later_position_does_not_block_epoch() -> None:
    """An epoch counts as reported if a silent partition's position in the checkpoint is later."""
    book = EpochHistory()
    book.add_counters([counters(make_log(0, range(2)))])
    told = json.loads(json.dumps(book.report({0: 3, 1: 1})))
    later = EpochHistory()
    later.restore(told)
    later.add_reports([make_log(1, range(1, 3), 9).report()])
    assert later.epochs_resumed_from == 1
    assert later.epochs_reported_by({0, 1}) == [1, 2]
    assert later.epoch(2).examples == 4  # of partition 1, which reported
    assert math.isnan(later.epoch(2).validation)  # so early stopping does not judge by it
    later.add_reports([make_log(0, range(2, 3), 9).report()])
    assert later.epoch(2).validation == 4.0


def test_held_out_weight_is_nan_if_partition_figures_are_missing() -> None:
    """The held-out weight is NaN, not 0, if a partition's figures of the epoch are missing."""
    book = EpochHistory()
    book.restore(json.loads(json.dumps(EpochHistory().report({0: 1, 1: 0}))))
    book.add_reports(
        [{"partition": 1, "attempt": 9, "epochs": [asdict(PartitionEpoch(0, 1.0, 2))]}]
    )
    assert book.epochs_reported_by({0, 1}) == [0]
    assert math.isnan(book.epoch(0).held_weight)
    assert math.isnan(book.epoch(0).validation)


def test_checkpoint_validation_is_nan_if_partitions_are_missing() -> None:
    """In a checkpoint, an epoch's validation loss is NaN if only some partitions reported it."""
    book = EpochHistory()
    book.add_counters([counters(make_log(0, range(2))), counters(make_log(1, range(1), held=3.0))])
    later = EpochHistory()
    later.restore(json.loads(json.dumps(book.report({0: 2, 1: 2}))))
    first, second = later.history()
    assert first == book.epoch(0)
    assert math.isnan(second.validation)
    assert (second.examples, second.partitions) == (4, 1)
    again = EpochHistory()
    again.restore(later.report({0: 2, 1: 2}))  # a second restore makes no more figures unknown
    assert again.history()[0] == first
