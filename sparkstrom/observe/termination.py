"""DL4J's termination conditions, by its names: when training should end.

Epoch conditions see the score of the held-out rows after each epoch, iteration conditions the
minibatches' own losses as workers tell them, several times a second, and the clock.
``EarlyStopping(patience=None, conditions=[...])`` takes them; the first that is met ends the fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from sparkstrom.base.option_types import (
    COUNT_MAX,
    Refused,
    check_options,
    custom,
    number,
    whole,
)

SECONDS = {
    "milliseconds": 1e-3,
    "seconds": 1.0,
    "minutes": 60.0,
    "hours": 3600.0,
    "days": 86400.0,
}

_UNITS = f"must be one of {', '.join(SECONDS)}"


def _unit(value: object) -> str:
    if not (isinstance(value, str) and value.lower() in SECONDS):
        raise Refused(_UNITS)
    return str(value)


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

    max_epochs: int = field(metadata=whole(1, COUNT_MAX, unit="epochs"))

    def __post_init__(self) -> None:
        check_options(self, type(self).__name__)

    def after_epoch(self, scores: Scores) -> bool:
        """Is it the last one?"""
        return len(scores.values) >= self.max_epochs


@dataclass(frozen=True, slots=True)
class ScoreImprovementEpochTerminationCondition(TerminationCondition):
    """End when the score has not improved by more than ``min_improvement`` for so many epochs."""

    max_epochs_with_no_improvement: int = field(metadata=whole(1, COUNT_MAX, unit="epochs"))
    min_improvement: float = field(default=0.0, metadata=number())
    needs_held_out = True

    def __post_init__(self) -> None:
        check_options(self, type(self).__name__)

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

    best_expected_score: float = field(metadata=number())
    needs_held_out = True

    def __post_init__(self) -> None:
        check_options(self, type(self).__name__)

    def after_epoch(self, scores: Scores) -> bool:
        """Is it?"""
        value = scores.values[-1]
        if scores.rises:
            return value > self.best_expected_score
        return value < self.best_expected_score


@dataclass(frozen=True, slots=True)
class MaxTimeIterationTerminationCondition(TerminationCondition):
    """End so long after the fit's beginning; ``unit`` as in Java's TimeUnit, in lower case."""

    max_time: float = field(metadata=number(above=0))
    unit: str = field(default="seconds", metadata=custom(_unit, _UNITS))

    def __post_init__(self) -> None:
        check_options(self, type(self).__name__)

    def after_seconds(self, seconds: float) -> bool:
        """Is the time over?"""
        return seconds >= self.max_time * SECONDS[self.unit.lower()]


@dataclass(frozen=True, slots=True)
class MaxScoreIterationTerminationCondition(TerminationCondition):
    """End when minibatches' loss is above this, or no number: the learning rate is too high."""

    max_score: float = field(metadata=number())

    def __post_init__(self) -> None:
        check_options(self, type(self).__name__)

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
