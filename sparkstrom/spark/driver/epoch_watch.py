"""Epoch watch: follows the epochs of a fit, ends it early, and keeps the best parameters.

Workers measure theta each at its own epoch's end, so an epoch's figure belongs to as many thetas as
there are partitions. The copy kept for it is the driver's replica, with the model's buffers, at the
first moment at which the driver knows that figure: one commit, whose number the summary tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.codec.messages import Phase
from sparkstrom.models.base import FlatModel, LossBound, Measured
from sparkstrom.observe.epochs import Epoch
from sparkstrom.observe.stopping import LOSS, EarlyStopping, Judge
from sparkstrom.observe.termination import TerminationCondition
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


class MinibatchLosses:
    """What workers tell of their minibatches' losses, from look to look."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, float]] = {}

    def new(self, progress: Progress) -> dict[int, float]:
        """By node: the mean loss of the examples that it has told of since the last time."""
        found: dict[int, float] = {}
        for node, counters in progress.stats.items():
            if counters.training is None:
                continue
            told = counters.training.examples, counters.training.loss_sum
            before = self._seen.get(node, (0, 0.0))
            self._seen[node] = told
            if told[0] > before[0]:
                found[node] = (told[1] - before[1]) / (told[0] - before[0])
        return found


class EpochWatch(FitListener):
    """With a rule it judges epochs, asks the master to stop, and holds the best parameters."""

    def __init__(
        self,
        master: MasterControl,
        rule: EarlyStopping | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._master, self._rule = master, rule
        self._clock, self._began = clock, clock()
        self._minibatches = MinibatchLosses()
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
        if not epoch.held_weight and self._rule.needs_held_out:
            raise UsageError(
                f"early_stopping={self._rule!r} has nothing to judge by: validation holds no rows "
                "out, or only rows of weight 0; give a larger fraction, or a column that is true "
                "for some rows"
            )
        self._improved |= self._judge.see(epoch.epoch, epoch.validation)
        self._end(self._judge.enough(epoch.epoch))

    def _end(self, reason: str | None) -> None:
        if reason is not None and self._phase is Phase.RUNNING and not self._stopping:
            self._stopping = True
            self._master.request_stop(reason)

    def on_progress(self, progress: Progress) -> None:
        """Of several epochs that came at once, one copy is enough."""
        if self._improved and self._rule is not None:
            self._improved = False
            self._keep(self._rule)
        if self._rule is not None and self._rule.conditions and not self._stopping:
            self._look(self._rule.conditions, progress)

    def _look(self, conditions: Sequence[TerminationCondition], progress: Progress) -> None:
        """At the clock, and at the minibatches since the last look."""
        losses, seconds = self._minibatches.new(progress), self._clock() - self._began
        for condition in conditions:
            if condition.after_seconds(seconds):
                self._end(f"early stopping: {condition} is met after {seconds:.0f} s")
            for node, loss in losses.items():
                if condition.after_minibatches(loss):
                    self._end(f"early stopping: {condition} is met on node {node}, loss {loss:.6g}")

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
            f"early_stopping={shown(rule)}: must be None or a rule, such as"
            " EarlyStopping(patience=5), or a list of termination conditions"
        )
    if rule is not None and rule.needs_held_out and not validation:
        raise UsageError(
            f"early_stopping={shown(rule)} needs rows that nobody trains on: give"
            " validation=0.1, or the name of a boolean column"
        )
    if rule is not None and rule.metric != LOSS and label in (None, ()):
        raise UsageError(
            f"early_stopping={shown(rule)} with label={label!r}: {rule.metric} needs labels to"
            " compare with; name the label column, or take metric='loss'"
        )
    if not validation or (rule is not None and rule.metric != LOSS):
        return
    if isinstance(model, LossBound):
        model.need_loss()
    if not isinstance(model, Measured):
        raise UsageError(
            f"validation={shown(validation)}: a {type(model).__name__} has no loss(batch) -> (sum, "
            "weight) to measure held-out rows with; give it one (sparkstrom.models.base.Measured)"
        )
