"""Tests of early stopping: which epoch is the best, and when the fit ends."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.observe.early_stopping import EarlyStopper, EarlyStopping


def apply_rule(rule: EarlyStopping, *values: float) -> tuple[list[int], int | None]:
    """Return the epochs that were the best so far, and the epoch that ended the fit or None."""
    judge, best = EarlyStopper(rule), []
    for epoch, value in enumerate(values, 1):
        if judge.record_score(epoch, value):
            best.append(epoch)
        if judge.reason_to_stop(epoch):
            return best, epoch
    return best, None


def test_fit_ends_after_patience_epochs_without_improvement() -> None:
    """The fit ends after ``patience`` epochs without an improvement."""
    assert apply_rule(EarlyStopping(patience=2), 3.0, 2.0, 2.5, 2.0, 1.0) == ([1, 2], 4)
    assert apply_rule(EarlyStopping(patience=3), 3.0, 2.0, 2.5, 2.0, 1.0) == ([1, 2, 5], None)


def test_gain_below_min_delta_is_no_improvement() -> None:
    """An improvement of less than ``min_delta`` does not count."""
    assert apply_rule(EarlyStopping(patience=2, min_delta=0.5), 3.0, 2.6, 2.5, 2.4) == ([1], 3)


def test_larger_accuracy_is_improvement() -> None:
    """With the accuracy as metric, larger is better."""
    rule = EarlyStopping(patience=2, metric="accuracy")
    assert apply_rule(rule, 0.5, 0.4, 0.6, 0.6, 0.6) == ([1, 3], 5)


def test_nan_and_infinity_are_no_improvement() -> None:
    """NaN and infinity are not improvements."""
    assert apply_rule(EarlyStopping(patience=2), math.nan, math.inf) == ([], 2)
    judge = EarlyStopper(EarlyStopping(patience=1))
    judge.record_score(1, math.nan)
    assert judge.reason_to_stop(1) == "early stopping: no finite loss in 1 epochs"


def test_stop_reason_names_best_epoch() -> None:
    judge = EarlyStopper(EarlyStopping(patience=2))
    judge.record_score(3, 0.25)
    assert judge.reason_to_stop(4) is None
    assert judge.reason_to_stop(5) == (
        "early stopping: loss of the held-out rows was best in epoch 3 (0.25), 2 epochs ago"
    )


@pytest.mark.parametrize(
    "option",
    [
        *({"patience": 0}, {"patience": 1.5}, {"metric": "f7"}, {"keep_best": 1}),
        *({"min_delta": wrong} for wrong in (-1, "x", None, True, math.nan)),
    ],
)
def test_rejects_invalid_early_stopping_option(option: dict[str, Any]) -> None:
    """An invalid option raises ``UsageError`` with its name."""
    with pytest.raises(UsageError, match=next(iter(option))):
        EarlyStopping(**option)
