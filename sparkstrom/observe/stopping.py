"""Stopping: another epoch is worth nothing when the held-out rows have not gained for a while."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import (
    COUNT_MAX,
    check_options,
    flag,
    number,
    one_of,
    shown,
    whole,
)
from sparkstrom.observe.termination import (
    MaxEpochsTerminationCondition,
    Scores,
    TerminationCondition,
)

LOSS, ACCURACY = METRICS = ("loss", "accuracy")


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """End a fit when ``metric`` of the held-out rows has not improved for ``patience`` epochs.

    ``conditions`` are others that end it, too, by DL4J's names; with them ``patience`` may be
    None. Raises UsageError for a value that cannot work.
    """

    # epochs without an improvement; None: any number
    patience: int | None = field(
        default=5,
        metadata=whole(
            1,
            COUNT_MAX,
            unit="epochs",
            remedy=", or None with conditions=[...]",
            words=(None,),
        ),
    )
    # a smaller gain is none
    min_delta: float = field(default=0.0, metadata=number(least=0))
    # "loss", the smaller the better; "accuracy", the larger the better
    metric: str = field(default=LOSS, metadata=one_of(METRICS))
    # deliver the parameters of the best epoch; False: the last ones
    keep_best: bool = field(default=True, metadata=flag())
    conditions: Sequence[TerminationCondition] = ()  # kept as a tuple

    def __post_init__(self) -> None:
        self._check_conditions()
        check_options(self)
        if self.patience is None and not self.conditions:
            raise UsageError(
                "patience=None: must be a whole number of at least 1, or None with conditions=[...]"
            )

    def _check_conditions(self) -> None:
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
        """Does it judge by rows that nobody trains on?"""
        judged = self.patience is not None
        return judged or any(condition.needs_held_out for condition in self.conditions)


def rule_of(wanted: Any) -> Any:
    """A rule of a list of conditions alone; anything else as it is, to be checked."""
    if isinstance(wanted, TerminationCondition):
        wanted = (wanted,)
    if isinstance(wanted, list | tuple):
        try:
            return EarlyStopping(patience=None, conditions=tuple(wanted))
        except UsageError as error:
            raise UsageError(f"early_stopping={shown(wanted)}: {error}") from None
    return wanted


def epochs_of(
    rule: EarlyStopping | None, epochs: int
) -> tuple[int, MaxEpochsTerminationCondition | None]:
    """How many epochs are trained at most, and the condition that says so, if one does.

    A fit of short epochs is over before anybody has judged one; so these are not begun at all.
    """
    conditions = rule.conditions if rule is not None else ()
    found = [c for c in conditions if isinstance(c, MaxEpochsTerminationCondition)]
    least = min(found, key=lambda condition: condition.max_epochs, default=None)
    if least is None or least.max_epochs >= epochs:
        return epochs, None
    return least.max_epochs, least


class Judge:
    """Sees one figure per epoch, in order; says which is the best, and when it is enough."""

    def __init__(self, rule: EarlyStopping) -> None:
        self._rule = rule
        self.epoch: int | None = None  # the best one
        self.value = math.nan
        self._first: int | None = None
        self._values: list[float] = []

    def see(self, epoch: int, value: float) -> bool:
        """Is this epoch the best so far? One whose figure is no number never is."""
        self._first = epoch if self._first is None else self._first
        self._values.append(value)
        if not math.isfinite(value):
            return False
        gain = value - self.value if self._rule.metric == ACCURACY else self.value - value
        if self.epoch is not None and gain <= self._rule.min_delta:
            return False
        self.epoch, self.value = epoch, value
        return True

    def enough(self, epoch: int) -> str | None:
        """Why training should end with this epoch, if it should."""
        if self._first is None:
            return None
        scores = Scores(self._values, rises=self._rule.metric == ACCURACY)
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
