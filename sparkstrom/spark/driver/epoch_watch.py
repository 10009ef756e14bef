"""Epoch watch: follows the epochs of a fit, ends it early, and keeps the best parameters.

Workers measure theta each at its own epoch's end, so an epoch's figure belongs to as many thetas as
there are partitions. The copy kept for it is the driver's replica, with the model's buffers, at the
first moment at which the driver knows that figure: one commit, whose number the summary tells.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from sparkstrom.base.errors import UsageError
from sparkstrom.codec.messages import Phase
from sparkstrom.models.base import FlatModel, Measured
from sparkstrom.observe.epochs import Epoch, EpochBook
from sparkstrom.observe.stopping import LOSS, EarlyStopping, Judge
from sparkstrom.runtime.master_thread import MasterThread, Progress, Snapshot


@dataclass(frozen=True, slots=True)
class Best:
    """The best epoch of a fit, by the metric of its held-out rows."""

    epoch: int  # from 1 over all fits of a network
    metric: str
    value: float
    commit: int | None  # that the delivered parameters are as of; None: the last ones were wanted


class EpochWatch:
    """Follows; with a rule it also judges, and asks the master to stop."""

    def __init__(self, master: MasterThread, rule: EarlyStopping | None, first_epoch: int) -> None:
        self._master, self._rule = master, rule
        self._judge = Judge(rule or EarlyStopping())
        self._book = EpochBook(first_epoch)
        self._judged = -1
        self._training: frozenset[int] = frozenset()
        self._stopping = False
        self.best: Best | None = None
        self.copy: Snapshot | None = None  # of the best epoch, where wanted

    def look(self, progress: Progress) -> None:
        """Take note of what workers have reported; decide on epochs that are complete."""
        self._book.follow(progress.stats.values())
        self._training = progress.training or self._training  # nobody is left at the end
        if self._rule is None or self._stopping:
            return
        improved = False
        for epoch in self._book.judged_by(self._training):
            if epoch > self._judged and not self._stopping:
                self._judged = epoch
                improved |= self._see(epoch, running=progress.phase is Phase.RUNNING)
        if improved:
            self._keep(self._rule)

    def _see(self, epoch: int, *, running: bool) -> bool:
        if not self._book.held_weight(epoch):
            raise UsageError(
                f"early_stopping={self._rule!r} has nothing to judge by: validation holds no rows "
                "out, or only rows of weight 0; give a larger fraction, or a column that is true "
                "for some rows"
            )
        number = self._book.first_epoch + epoch + 1
        is_best = self._judge.see(number, self._book.validation(epoch))
        reason = self._judge.enough(number)
        if reason is not None and running:
            self._stopping = True
            self._master.request_stop(reason)
        return is_best

    def _keep(self, rule: EarlyStopping) -> None:
        assert self._judge.epoch is not None, "an epoch was the best"
        self.copy = self._master.snapshot() if rule.keep_best else None
        commit = self.copy.commit if self.copy else None
        self.best = Best(self._judge.epoch, rule.metric, self._judge.value, commit)

    def close(self, reports: Iterable[str]) -> None:
        """The tasks' last words, as JSON: the history has no gaps any more."""
        self._book.close([json.loads(report)["epochs"] for report in reports])

    @property
    def finished(self) -> int:
        """Epochs of this fit that some partition has come to the end of."""
        history = self.history()
        return history[-1].epoch - self._book.first_epoch if history else 0

    def history(self) -> list[Epoch]:
        """All epochs of this fit."""
        return self._book.history()


def check_validation(
    model: FlatModel, validation: float | str | None, rule: EarlyStopping | None
) -> None:
    """Raise UsageError where held-out rows are missing, or the model cannot be measured on them."""
    if rule is not None and not isinstance(rule, EarlyStopping):
        raise UsageError(
            f"early_stopping={rule!r}: must be None or a rule, such as EarlyStopping(patience=5)"
        )
    if rule is not None and not validation:
        raise UsageError(
            f"early_stopping={rule!r} needs rows that nobody trains on: give validation=0.1, or "
            "the name of a boolean column"
        )
    if validation and (rule is None or rule.metric == LOSS) and not isinstance(model, Measured):
        raise UsageError(
            f"validation={validation!r}: a {type(model).__name__} has no loss(batch) -> (sum, "
            "weight) to measure held-out rows with; give it one (sparkstrom.models.base.Measured)"
        )
