"""Stopping: another epoch is worth nothing when the held-out rows have not gained for a while."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparkstrom.base.errors import UsageError

LOSS, ACCURACY = METRICS = ("loss", "accuracy")


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """End a fit when ``metric`` of the held-out rows has not improved for ``patience`` epochs.

    Raises UsageError for a value that cannot work.
    """

    patience: int = 5  # epochs without an improvement, at least 1
    min_delta: float = 0.0  # a smaller gain is none
    metric: str = LOSS  # "loss", the smaller the better; "accuracy", the larger the better
    keep_best: bool = True  # deliver the parameters of the best epoch; False: the last ones

    def __post_init__(self) -> None:
        whole = isinstance(self.patience, int) and not isinstance(self.patience, bool)
        if not (whole and self.patience >= 1):
            raise UsageError(f"patience={self.patience!r}: must be a whole number of at least 1")
        if not 0 <= self.min_delta < math.inf:
            raise UsageError(f"min_delta={self.min_delta!r}: must be 0 or above")
        if self.metric not in METRICS:
            raise UsageError(f"metric={self.metric!r}: must be one of {', '.join(METRICS)}")
        if not isinstance(self.keep_best, bool):
            raise UsageError(f"keep_best={self.keep_best!r}: must be True or False")


class Judge:
    """Sees one figure per epoch, in order; says which is the best, and when it is enough."""

    def __init__(self, rule: EarlyStopping) -> None:
        self._rule = rule
        self.epoch: int | None = None  # the best one
        self.value = math.nan
        self._first: int | None = None

    def see(self, epoch: int, value: float) -> bool:
        """Is this epoch the best so far? One whose figure is no number never is."""
        self._first = epoch if self._first is None else self._first
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
        since = self.epoch if self.epoch is not None else self._first - 1
        if epoch - since < self._rule.patience:
            return None
        if self.epoch is None:
            return f"early stopping: no finite {self._rule.metric} in {epoch - since} epochs"
        return (
            f"early stopping: {self._rule.metric} of the held-out rows was best in epoch "
            f"{self.epoch} ({self.value:.6g}), {epoch - self.epoch} epochs ago"
        )
