"""Epoch watch: follows the epochs of a fit, ends it early, and keeps the best parameters.

Workers measure theta each at its own epoch's end, so an epoch's figure belongs to as many thetas as
there are partitions. The copy kept for it is the driver's replica, with the model's buffers, at the
first moment at which the driver knows that figure: one commit, whose number the summary tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparkstrom.base.errors import UsageError
from sparkstrom.codec.messages import Phase
from sparkstrom.models.base import FlatModel, LossBound, Measured
from sparkstrom.observe.epochs import Epoch
from sparkstrom.observe.stopping import LOSS, EarlyStopping, Judge
from sparkstrom.runtime.fit_state import Progress, Snapshot
from sparkstrom.runtime.master_control import MasterControl
from sparkstrom.spark.data.columns import LABEL, Names
from sparkstrom.spark.driver.fit_listeners import FitListener


@dataclass(frozen=True, slots=True)
class Best:
    """The best epoch of a fit, by the metric of its held-out rows."""

    epoch: int  # from 1 over all fits of a network
    metric: str
    value: float
    commit: int | None  # that the delivered parameters are as of; None: the last ones were wanted


class EpochWatch(FitListener):
    """With a rule it judges epochs, asks the master to stop, and holds the best parameters."""

    def __init__(self, master: MasterControl, rule: EarlyStopping | None) -> None:
        self._master, self._rule = master, rule
        self.needs_live = "early_stopping" if rule is not None else ""
        self._judge = Judge(rule or EarlyStopping())
        self._phase = Phase.GATHERING
        self._stopping, self._improved = False, False
        self.best: Best | None = None
        self.copy: Snapshot | None = None  # of the best epoch, where wanted

    def go_on(self, history: Sequence[Epoch], best: tuple[Best, Snapshot | None] | None) -> None:
        """Where the fit has epochs behind it: as if they had been seen here."""
        for epoch in history:
            self._judge.see(epoch.epoch, epoch.validation)
        if best is not None and self._rule is not None:
            self.best, self.copy = best

    def on_phase(self, phase: Phase) -> None:
        self._phase = phase

    def on_epoch(self, epoch: Epoch) -> None:
        if self._rule is None or self._stopping:
            return
        if not epoch.held_weight:
            raise UsageError(
                f"early_stopping={self._rule!r} has nothing to judge by: validation holds no rows "
                "out, or only rows of weight 0; give a larger fraction, or a column that is true "
                "for some rows"
            )
        self._improved |= self._judge.see(epoch.epoch, epoch.validation)
        reason = self._judge.enough(epoch.epoch)
        if reason is not None and self._phase is Phase.RUNNING:
            self._stopping = True
            self._master.request_stop(reason)

    def on_progress(self, progress: Progress) -> None:
        """Of several epochs that came at once, one copy is enough."""
        if self._improved and self._rule is not None:
            self._improved = False
            self._keep(self._rule)

    def _keep(self, rule: EarlyStopping) -> None:
        assert self._judge.epoch is not None, "an epoch was the best"
        self.copy = self._master.snapshot() if rule.keep_best else None
        commit = self.copy.commit if self.copy else None
        self.best = Best(self._judge.epoch, rule.metric, self._judge.value, commit)


def check_validation(
    model: FlatModel,
    validation: float | str | None,
    rule: EarlyStopping | None,
    label: Names | None = LABEL,
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
    if rule is not None and rule.metric != LOSS and label in (None, ()):
        raise UsageError(
            f"early_stopping={rule!r} with label={label!r}: {rule.metric} needs labels to compare "
            "with; name the label column, or take metric='loss'"
        )
    if not validation or (rule is not None and rule.metric != LOSS):
        return
    if isinstance(model, LossBound):
        model.need_loss()
    if not isinstance(model, Measured):
        raise UsageError(
            f"validation={validation!r}: a {type(model).__name__} has no loss(batch) -> (sum, "
            "weight) to measure held-out rows with; give it one (sparkstrom.models.base.Measured)"
        )
