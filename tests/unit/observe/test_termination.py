"""Tests of DL4J's termination conditions: when each ends a fit, and which arguments are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

import sparkstrom
from sparkstrom.base.errors import UsageError
from sparkstrom.observe.early_stopping import (
    TERMINATION_CONDITIONS,
    BestScoreEpochTerminationCondition,
    EarlyStopper,
    EarlyStopping,
    InvalidScoreIterationTerminationCondition,
    MaxEpochsTerminationCondition,
    MaxScoreIterationTerminationCondition,
    MaxTimeIterationTerminationCondition,
    ScoreImprovementEpochTerminationCondition,
    TerminationCondition,
    limit_epochs,
    parse_early_stopping,
)


def find_end_epoch(
    condition: TerminationCondition, *values: float, metric: str = "loss"
) -> int | None:
    """Return the epoch, from 1, at which the condition ends a fit with these scores, or None."""
    judge = EarlyStopper(EarlyStopping(patience=None, conditions=[condition], metric=metric))
    for epoch, value in enumerate(values, 1):
        judge.record_score(epoch, value)
        if reason := judge.reason_to_stop(epoch):
            assert type(condition).__name__ in reason
            return epoch
    return None


def test_max_epochs_condition_ends_fit_after_that_many_epochs() -> None:
    """``MaxEpochsTerminationCondition`` ends a fit after that many epochs, whatever the scores."""
    assert find_end_epoch(MaxEpochsTerminationCondition(2), 1, math.nan, 3) == 2
    assert find_end_epoch(MaxEpochsTerminationCondition(3), 1, 2) is None


def test_score_improvement_condition_restarts_count_on_improvement() -> None:
    """The count of epochs restarts when a score improves on the best by more than the minimum."""
    two = ScoreImprovementEpochTerminationCondition(2)
    assert find_end_epoch(two, 3, 2, 2.5, 2) == 4
    assert find_end_epoch(two, 3, 2, 2.5, 1, 2) is None
    assert find_end_epoch(ScoreImprovementEpochTerminationCondition(2, 0.5), 3, 2.6, 2.5) == 3
    assert find_end_epoch(two, 0.1, 0.2, 0.2, 0.2, metric="accuracy") == 4
    assert find_end_epoch(ScoreImprovementEpochTerminationCondition(1), math.nan, 2.0, 3.0) == 3


def test_best_score_condition_ends_fit_at_better_score() -> None:
    """The condition ends a fit when the score is better than the expected best one."""
    assert find_end_epoch(BestScoreEpochTerminationCondition(0.5), 0.6, 0.5, 0.4) == 3
    assert (
        find_end_epoch(BestScoreEpochTerminationCondition(0.9), 0.8, 0.95, metric="accuracy") == 2
    )


def test_time_and_score_conditions_judge_seconds_and_scores() -> None:
    """Time conditions judge elapsed seconds; score conditions judge each minibatch's score."""
    time = MaxTimeIterationTerminationCondition(2, "MINUTES")
    assert [time.after_seconds(s) for s in (119, 120)] == [False, True]
    high = MaxScoreIterationTerminationCondition(10)
    assert [high.after_minibatches(x) for x in (10, 10.1, math.nan)] == [False, True, True]
    invalid = InvalidScoreIterationTerminationCondition()
    assert [invalid.after_minibatches(x) for x in (1e30, math.inf)] == [False, True]
    assert not time.after_minibatches(math.nan)
    assert not high.after_seconds(1e9)


def test_conditions_are_parsed_as_early_stopping_rule() -> None:
    """A condition or a list becomes a rule; it needs held-out rows if it reads their score."""
    conditions = [MaxEpochsTerminationCondition(2)]
    rule = parse_early_stopping(conditions)
    assert rule == EarlyStopping(patience=None, conditions=conditions)
    assert parse_early_stopping(conditions[0]) == rule
    assert not rule.needs_held_out
    assert parse_early_stopping(None) is None
    assert EarlyStopping(patience=3).needs_held_out
    assert parse_early_stopping([BestScoreEpochTerminationCondition(1)]).needs_held_out


@pytest.mark.parametrize("made", TERMINATION_CONDITIONS)
def test_conditions_are_importable_from_package(made: type[Any]) -> None:
    """Each termination condition can be imported from ``sparkstrom``."""
    assert getattr(sparkstrom, made.__name__) is made


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MaxEpochsTerminationCondition(0), "max_epochs=0"),
        (lambda: ScoreImprovementEpochTerminationCondition(1.5), "max_epochs_with_no_improvement"),
        (lambda: BestScoreEpochTerminationCondition(math.nan), "best_expected_score=nan"),
        (lambda: MaxScoreIterationTerminationCondition(True), "max_score=True"),
        (lambda: MaxTimeIterationTerminationCondition(1, "weeks"), "unit='weeks'"),
        (lambda: MaxTimeIterationTerminationCondition(-1), "max_time=-1: must be a finite"),
        (lambda: EarlyStopping(conditions=["MaxEpochs"]), "conditions"),
        (lambda: EarlyStopping(patience=None), "patience=None"),
        (lambda: parse_early_stopping([]), "patience=None"),
    ],
)
def test_rejects_invalid_condition_or_rule(make: Any, said: str) -> None:
    """An invalid condition or rule raises ``UsageError`` with the argument's name."""
    with pytest.raises(UsageError, match=said):
        make()


def test_smallest_max_epochs_condition_limits_epochs() -> None:
    """The smallest epoch condition limits the epochs of a fit before it starts."""
    two = MaxEpochsTerminationCondition(2)
    rule = EarlyStopping(patience=None, conditions=[MaxEpochsTerminationCondition(3), two])
    assert limit_epochs(rule, 400) == (2, two)
    assert limit_epochs(rule, 2) == (2, None)
    assert limit_epochs(EarlyStopping(), 400) == limit_epochs(None, 400) == (400, None)


def test_forgotten_best_epoch_restarts_conditions_and_patience() -> None:
    """After a resume without the best epoch's parameters, conditions and patience start again."""
    condition = ScoreImprovementEpochTerminationCondition(2)
    judge = EarlyStopper(EarlyStopping(patience=3, conditions=[condition]))
    for epoch, score in enumerate([0.5, 0.3, 0.6], 1):
        judge.record_score(epoch, score)
    judge.forget_best()
    assert judge.record_score(4, 0.55)
    assert judge.reason_to_stop(4) is None
    assert judge.epoch == 4
