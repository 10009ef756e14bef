"""Decide when a fit ends early: by a patience rule, or by DL4J's termination conditions.

Epoch conditions judge the score on the held-out rows after each epoch. Iteration conditions judge
the minibatch losses that workers report several times a second, and the elapsed time. Users pass
conditions as ``EarlyStopping(patience=None, conditions=[...])``; the first condition that is met
ends the fit. ``EarlyStopper`` applies an ``EarlyStopping`` rule during a fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import (
    COUNT_MAX,
    Refused,
    check_options,
    custom,
    flag,
    number,
    one_of,
    shown,
    whole,
)

SECONDS_PER_UNIT = {
    "milliseconds": 1e-3,
    "seconds": 1.0,
    "minutes": 60.0,
    "hours": 3600.0,
    "days": 86400.0,
}

_UNITS = f"must be one of {', '.join(SECONDS_PER_UNIT)}"


def _check_unit(value: object) -> str:
    """Return a unit of time unchanged; raise Refused for an unknown one."""
    if not (isinstance(value, str) and value.lower() in SECONDS_PER_UNIT):
        raise Refused(_UNITS)
    return str(value)


@dataclass(frozen=True, slots=True)
class EpochScores:
    """The scores on the held-out rows that epoch conditions judge, one for each epoch so far."""

    values: Sequence[float]  # one per epoch, in order; NaN: not measured
    higher_is_better: bool = False  # True for accuracy, False for loss


class TerminationCondition:
    """Base class of all conditions; subclasses override the methods for the values they judge.

    All methods return False unless they are overridden.
    """

    __slots__ = ()
    needs_held_out = False  # whether the condition judges the score on the held-out rows

    def __post_init__(self) -> None:
        """Raise UsageError if an option is out of range."""
        check_options(self, type(self).__name__)

    def after_epoch(self, scores: EpochScores) -> bool:
        """Return whether to end the fit after the latest epoch; False unless overridden."""
        return False

    def after_minibatches(self, loss: float) -> bool:
        """Return whether to end the fit, given the mean loss of a worker's latest minibatches."""
        return False

    def after_seconds(self, seconds: float) -> bool:
        """Return whether to end the fit ``seconds`` after its start; False unless overridden."""
        return False


@dataclass(frozen=True, slots=True)
class MaxEpochsTerminationCondition(TerminationCondition):
    """End the fit after ``max_epochs`` epochs. Raises UsageError for less than 1."""

    max_epochs: int = field(metadata=whole(1, COUNT_MAX, unit="epochs"))

    def after_epoch(self, scores: EpochScores) -> bool:
        """Return whether ``max_epochs`` epochs are complete."""
        return len(scores.values) >= self.max_epochs


@dataclass(frozen=True, slots=True)
class ScoreImprovementEpochTerminationCondition(TerminationCondition):
    """End the fit after ``max_epochs_with_no_improvement`` epochs without a sufficient improvement.

    A score must be better than the best so far by more than ``min_improvement``.
    """

    max_epochs_with_no_improvement: int = field(metadata=whole(1, COUNT_MAX, unit="epochs"))
    min_improvement: float = field(default=0.0, metadata=number())
    needs_held_out = True

    def after_epoch(self, scores: EpochScores) -> bool:
        """Return whether the last improvement is ``max_epochs_with_no_improvement`` epochs ago."""
        best, at = math.nan, 0
        for i, value in enumerate(scores.values):
            gain = value - best if scores.higher_is_better else best - value
            if i == 0 or gain > self.min_improvement or not math.isfinite(best):
                best, at = value, i
        last = len(scores.values) - 1
        return last > at and last >= at + self.max_epochs_with_no_improvement


@dataclass(frozen=True, slots=True)
class BestScoreEpochTerminationCondition(TerminationCondition):
    """End the fit when the score is better than ``best_expected_score``."""

    best_expected_score: float = field(metadata=number())
    needs_held_out = True

    def after_epoch(self, scores: EpochScores) -> bool:
        """Return whether the latest score is better than ``best_expected_score``."""
        value = scores.values[-1]
        if scores.higher_is_better:
            return value > self.best_expected_score
        return value < self.best_expected_score


@dataclass(frozen=True, slots=True)
class MaxTimeIterationTerminationCondition(TerminationCondition):
    """End the fit after ``max_time``; ``unit``, as in Java's TimeUnit, is in SECONDS_PER_UNIT."""

    max_time: float = field(metadata=number(above=0))
    unit: str = field(default="seconds", metadata=custom(_check_unit, _UNITS))

    def after_seconds(self, seconds: float) -> bool:
        """Return whether ``max_time`` has passed."""
        return seconds >= self.max_time * SECONDS_PER_UNIT[self.unit.lower()]


@dataclass(frozen=True, slots=True)
class MaxScoreIterationTerminationCondition(TerminationCondition):
    """End the fit when training diverges: a minibatch loss exceeds ``max_score`` or is NaN."""

    max_score: float = field(metadata=number())

    def after_minibatches(self, loss: float) -> bool:
        """Return whether ``loss``, the mean of some minibatches, is too high or NaN."""
        return loss > self.max_score or math.isnan(loss)


@dataclass(frozen=True, slots=True)
class InvalidScoreIterationTerminationCondition(TerminationCondition):
    """End the fit when a minibatch loss is infinite or NaN."""

    def after_minibatches(self, loss: float) -> bool:
        """Return whether ``loss``, the mean of some minibatches, is infinite or NaN."""
        return not math.isfinite(loss)


TERMINATION_CONDITIONS = (
    BestScoreEpochTerminationCondition,
    InvalidScoreIterationTerminationCondition,
    MaxEpochsTerminationCondition,
    MaxScoreIterationTerminationCondition,
    MaxTimeIterationTerminationCondition,
    ScoreImprovementEpochTerminationCondition,
)


LOSS, ACCURACY = METRICS = ("loss", "accuracy")


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """End a fit when ``metric`` on the held-out rows has not improved for ``patience`` epochs.

    Args:
        patience: epochs without improvement until the fit ends; None to use only ``conditions``.
        min_delta: an improvement must be larger than this to count.
        metric: "loss" (lower is better) or "accuracy" (higher is better).
        keep_best: return the parameters of the best epoch instead of the last ones.
        conditions: DL4J's termination conditions; each of them can also end the fit.

    Raises:
        UsageError: a value is out of range, or there are neither patience nor conditions.
    """

    patience: int | None = field(
        default=5,
        metadata=whole(
            1, COUNT_MAX, unit="epochs", remedy=", or None with conditions=[...]", words=(None,)
        ),
    )
    min_delta: float = field(default=0.0, metadata=number(least=0))
    metric: str = field(default=LOSS, metadata=one_of(METRICS))
    keep_best: bool = field(default=True, metadata=flag())
    conditions: Sequence[TerminationCondition] = ()  # stored as a tuple

    def __post_init__(self) -> None:
        self._check_conditions()
        check_options(self)
        if self.patience is None and not self.conditions:
            raise UsageError(
                "patience=None: must be a whole number of at least 1, or None with conditions=[...]"
            )

    def _check_conditions(self) -> None:
        """Store conditions as a tuple; raise UsageError if one is not a TerminationCondition."""
        if isinstance(self.conditions, list):
            object.__setattr__(self, "conditions", tuple(self.conditions))
        conditions: object = self.conditions
        known = isinstance(conditions, tuple)
        if not (known and all(isinstance(c, TerminationCondition) for c in self.conditions)):
            raise UsageError(
                f"conditions={shown(self.conditions)}: give a list of DL4J's termination"
                " conditions, such as sparkstrom.MaxEpochsTerminationCondition(20)"
            )

    @property
    def needs_held_out(self) -> bool:
        """Whether the rule needs scores on held-out rows."""
        judged = self.patience is not None
        return judged or any(condition.needs_held_out for condition in self.conditions)


def parse_early_stopping(value: Any) -> Any:
    """Convert one condition, or a list of them, to an EarlyStopping; return other values unchanged.

    Raise UsageError for a list with something other than conditions.
    """
    if isinstance(value, TerminationCondition):
        value = (value,)
    if isinstance(value, list | tuple):
        try:
            return EarlyStopping(patience=None, conditions=tuple(value))
        except UsageError as error:
            raise UsageError(f"early_stopping={shown(value)}: {error}") from None
    return value


def limit_epochs(
    rule: EarlyStopping | None, epochs: int
) -> tuple[int, MaxEpochsTerminationCondition | None]:
    """Return (number of epochs to train, the MaxEpochs condition that reduces it, or None).

    A MaxEpochsTerminationCondition must be applied before the fit starts: workers could train
    further short epochs before the driver has judged the epoch that should be the last.
    """
    conditions = rule.conditions if rule is not None else ()
    limits = [c for c in conditions if isinstance(c, MaxEpochsTerminationCondition)]
    shortest = min(limits, key=lambda condition: condition.max_epochs, default=None)
    if shortest is None or shortest.max_epochs >= epochs:
        return epochs, None
    return shortest.max_epochs, shortest


class EarlyStopper:
    """Applies an EarlyStopping rule: finds the best epoch by its score, and the reason to stop.

    Epochs are numbered by the caller, in ascending order.
    """

    def __init__(self, rule: EarlyStopping) -> None:
        self._rule = rule
        self.epoch: int | None = None  # the best epoch so far; None: no finite score yet
        self.value = math.nan  # the best epoch's score
        self._first: int | None = None
        self._values: list[float] = []

    def record_score(self, epoch: int, value: float) -> bool:
        """Record an epoch's score; return whether it is finite and the best so far."""
        self._first = epoch if self._first is None else self._first
        self._values.append(value)
        if not math.isfinite(value):
            return False
        gain = value - self.value if self._rule.metric == ACCURACY else self.value - value
        if self.epoch is not None and gain <= self._rule.min_delta:
            return False
        self.epoch, self.value = epoch, value
        return True

    def set_best(self, epoch: int, value: float) -> None:
        """Take ``epoch`` with this score as the best one of those observed so far."""
        self.epoch, self.value = epoch, value

    def forget_best(self) -> None:
        """Exclude the epochs observed so far from being the best; patience starts again."""
        self.epoch, self.value, self._first = None, math.nan, None
        self._values.clear()

    def reason_to_stop(self, epoch: int) -> str | None:
        """Return why training should end after ``epoch``, the latest one; None to continue."""
        if self._first is None:
            return None
        scores = EpochScores(self._values, higher_is_better=self._rule.metric == ACCURACY)
        for condition in self._rule.conditions:
            if condition.after_epoch(scores):
                return f"early stopping: {condition} is met in epoch {epoch}"
        if self._rule.patience is None:
            return None
        since = self.epoch if self.epoch is not None else self._first - 1
        if epoch - since < self._rule.patience:
            return None
        if self.epoch is None:
            return f"early stopping: no finite {self._rule.metric} in {epoch - since} epochs"
        return (
            f"early stopping: {self._rule.metric} of the held-out rows was best in epoch "
            f"{self.epoch} ({self.value:.6g}), {epoch - self.epoch} epochs ago"
        )
