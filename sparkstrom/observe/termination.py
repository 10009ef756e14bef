"""DL4J's termination conditions, by its names: when training should end.

Epoch conditions see the score of the held-out rows after each epoch, iteration conditions the
minibatches' own losses as workers tell them, several times a second, and the clock.
``EarlyStopping(patience=None, conditions=[...])`` takes them; the first that is met ends the fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from sparkstrom.base.errors import UsageError

SECONDS = {
    "milliseconds": 1e-3,
    "seconds": 1.0,
    "minutes": 60.0,
    "hours": 3600.0,
    "days": 86400.0,
}


@dataclass(frozen=True, slots=True)
class Scores:
    """What an epoch condition sees: the held-out rows' figures of this fit's epochs, in order.

    NaN is an epoch without one. ``rises``: a larger one is better, as accuracy is.
    """

    values: Sequence[float]
    rises: bool = False


class TerminationCondition:
    """Base of all; a subclass overrides what it judges by."""

    __slots__ = ()
    needs_held_out = False  # rows that nobody trains on

    def after_epoch(self, scores: Scores) -> bool:
        """Is it enough after this epoch?"""
        return False

    def after_minibatches(self, loss: float) -> bool:
        """Is it enough, as a worker's newest minibatches had this mean loss?"""
        return False

    def after_seconds(self, seconds: float) -> bool:
        """Is it enough, so long after the fit's beginning?"""
        return False


@dataclass(frozen=True, slots=True)
class MaxEpochsTerminationCondition(TerminationCondition):
    """End after so many epochs of this fit. Raises UsageError for less than 1."""

    max_epochs: int

    def __post_init__(self) -> None:
        _need_whole("MaxEpochsTerminationCondition", "max_epochs", self.max_epochs)

    def after_epoch(self, scores: Scores) -> bool:
        """Is it the last one?"""
        return len(scores.values) >= self.max_epochs


@dataclass(frozen=True, slots=True)
class ScoreImprovementEpochTerminationCondition(TerminationCondition):
    """End when the score has not improved by more than ``min_improvement`` for so many epochs."""

    max_epochs_with_no_improvement: int
    min_improvement: float = 0.0
    needs_held_out = True

    def __post_init__(self) -> None:
        name = "ScoreImprovementEpochTerminationCondition"
        most = self.max_epochs_with_no_improvement
        _need_whole(name, "max_epochs_with_no_improvement", most)
        _need_number(name, "min_improvement", self.min_improvement)

    def after_epoch(self, scores: Scores) -> bool:
        """Was the best one long ago?"""
        best, at = math.nan, 0
        for i, value in enumerate(scores.values):
            gain = value - best if scores.rises else best - value
            if i == 0 or gain > self.min_improvement or not math.isfinite(best):
                best, at = value, i
        last = len(scores.values) - 1
        return last > at and last >= at + self.max_epochs_with_no_improvement


@dataclass(frozen=True, slots=True)
class BestScoreEpochTerminationCondition(TerminationCondition):
    """End when the score is better than the best that is hoped for."""

    best_expected_score: float
    needs_held_out = True

    def __post_init__(self) -> None:
        name = "BestScoreEpochTerminationCondition"
        _need_number(name, "best_expected_score", self.best_expected_score)

    def after_epoch(self, scores: Scores) -> bool:
        """Is it?"""
        value = scores.values[-1]
        if scores.rises:
            return value > self.best_expected_score
        return value < self.best_expected_score


@dataclass(frozen=True, slots=True)
class MaxTimeIterationTerminationCondition(TerminationCondition):
    """End so long after the fit's beginning; ``unit`` as in Java's TimeUnit, in lower case."""

    max_time: float
    unit: str = "seconds"

    def __post_init__(self) -> None:
        name = "MaxTimeIterationTerminationCondition"
        _need_number(name, "max_time", self.max_time)
        if self.max_time <= 0:
            raise UsageError(f"{name}: max_time={self.max_time!r} must be above 0")
        if str(self.unit).lower() not in SECONDS:
            raise UsageError(f"{name}: unit={self.unit!r} must be one of {', '.join(SECONDS)}")

    def after_seconds(self, seconds: float) -> bool:
        """Is the time over?"""
        return seconds >= self.max_time * SECONDS[str(self.unit).lower()]


@dataclass(frozen=True, slots=True)
class MaxScoreIterationTerminationCondition(TerminationCondition):
    """End when minibatches' loss is above this, or no number: the learning rate is too high."""

    max_score: float

    def __post_init__(self) -> None:
        _need_number("MaxScoreIterationTerminationCondition", "max_score", self.max_score)

    def after_minibatches(self, loss: float) -> bool:
        """Is it?"""
        return loss > self.max_score or math.isnan(loss)


@dataclass(frozen=True, slots=True)
class InvalidScoreIterationTerminationCondition(TerminationCondition):
    """End when minibatches' loss is infinite or no number."""

    def after_minibatches(self, loss: float) -> bool:
        """Is it?"""
        return not math.isfinite(loss)


CONDITIONS = (
    BestScoreEpochTerminationCondition,
    InvalidScoreIterationTerminationCondition,
    MaxEpochsTerminationCondition,
    MaxScoreIterationTerminationCondition,
    MaxTimeIterationTerminationCondition,
    ScoreImprovementEpochTerminationCondition,
)


def _need_whole(owner: str, name: str, value: object) -> None:
    if not (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        raise UsageError(f"{owner}: {name}={value!r} must be a whole number of at least 1")


def is_number(value: object) -> bool:
    """Is it one that can be compared, NumPy's too? True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _need_number(owner: str, name: str, value: Any) -> None:
    if not (is_number(value) and math.isfinite(value)):
        raise UsageError(f"{owner}: {name}={value!r} must be a finite number")
