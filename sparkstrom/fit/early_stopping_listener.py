"""Stop a fit early and keep its best parameters.

Each worker evaluates the held-out rows at the end of its own epoch. Workers are not synchronous, so
an epoch's score combines evaluations of slightly different parameters. When an epoch's score is the
best so far, the driver program gets a copy of the controller's replica and the model's buffers;
these are the parameters that the fit delivers. The summary contains the commit number of that copy.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparkstrom.base.errors import SparkstromError, UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.codec.messages import Phase
from sparkstrom.data.column_selection import LABEL, ColumnNames
from sparkstrom.fit.events import FitListener
from sparkstrom.models.base import FlatModel, Measured, RequiresLoss
from sparkstrom.observe.early_stopping import (
    LOSS,
    EarlyStopper,
    EarlyStopping,
    TerminationCondition,
)
from sparkstrom.observe.epoch_history import Epoch
from sparkstrom.runtime.master_control import MasterControl, Progress, Snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Best:
    """The best epoch of a fit, by the metric of its held-out rows."""

    epoch: int  # counted from 1 over all fits of a network
    metric: str  # name of the metric, such as "loss"
    value: float  # value of the metric
    # Number of the newest commit (numbered update) in the delivered parameters; None: the fit
    # delivers its last parameters instead of those of this epoch.
    commit: int | None


class EarlyStoppingListener(FitListener):
    """Applies the rule of early stopping: stops the fit and keeps the best parameters.

    Args:
        master: The fit's controller, which numbers updates, stops the fit and makes snapshots.
        rule: The rule; None: never stop.
        clock: Returns the time in seconds.
        began_s: When the fit began, by this clock; None: now. If a controller was
            replaced, this is when the fit with the first one began.
    """

    def __init__(
        self,
        master: MasterControl,
        rule: EarlyStopping | None,
        clock: Callable[[], float] = time.monotonic,
        began_s: float | None = None,
    ) -> None:
        self._master, self._rule = master, rule
        self._clock, self._began_s = clock, clock() if began_s is None else began_s
        self._minibatches = MinibatchLosses()
        self.live_option = "early_stopping" if rule is not None else ""
        self._judge = EarlyStopper(rule or EarlyStopping())
        self._phase = Phase.GATHERING
        self._stopping = False  # a stop was requested
        self._is_copy_due = False  # the best epoch so far is not copied yet
        self.best: Best | None = None
        self.copy: Snapshot | None = None  # of the best epoch, if the rule keeps its parameters

    def resume(self, history: Sequence[Epoch], best: tuple[Best, Snapshot | None] | None) -> bool:
        """Continue after a checkpoint's epochs (``history``), with the best of them (``best``).

        Return False if one of them was the best so far, and its parameters, which the rule keeps,
        are not in the checkpoint: none of these epochs can be delivered as the best one.
        """
        for epoch in history:
            self._judge.record_score(epoch.epoch, epoch.validation)
        if self._rule is None:
            return True
        if best is not None and (best[1] is not None or not self._rule.keep_best):
            self.best, self.copy = best
            self._judge.set_best(self.best.epoch, self.best.value)
        elif self._rule.keep_best and self._judge.epoch is not None:
            self._judge.forget_best()
            return False
        return True

    def on_phase(self, phase: Phase) -> None:
        """Remember the phase, because only a training fit can be stopped."""
        self._phase = phase

    def on_epoch(self, epoch: Epoch) -> None:
        """Apply the rule to an epoch.

        Raise UsageError if the rule needs held-out rows and there are none.
        """
        if self._rule is None or self._stopping:
            return
        if not epoch.held_weight and self._rule.needs_held_out:
            raise UsageError(
                f"early_stopping={self._rule!r} has no held-out rows to measure: validation "
                "selects none, or only rows of weight 0; give a larger fraction, or a column that "
                "is true for some rows"
            )
        self._is_copy_due |= self._judge.record_score(epoch.epoch, epoch.validation)
        self._stop(self._judge.reason_to_stop(epoch.epoch))

    def _stop(self, reason: str | None) -> None:
        """Request a stop once, if a reason is given and the fit is training."""
        if reason is not None and self._phase is Phase.RUNNING and not self._stopping:
            self._stopping = True
            self._master.request_stop(reason)

    def on_progress(self, progress: Progress) -> None:
        """Copy the parameters if an epoch became the best one; check the rule's conditions.

        If several epochs ended since the last poll, only one copy is made. If the controller cannot
        make a copy now, such as while it replaces its media driver, the next poll tries again.
        """
        if self._is_copy_due and self._rule is not None:
            self._copy_best(self._rule)
        if self._rule is not None and self._rule.conditions and not self._stopping:
            self._check_conditions(self._rule.conditions, progress)

    def _check_conditions(
        self, conditions: Sequence[TerminationCondition], progress: Progress
    ) -> None:
        """Stop the fit if the elapsed time or a loss since the last poll meets a condition."""
        losses = self._minibatches.collect_new_losses(progress)
        seconds = self._clock() - self._began_s
        for condition in conditions:
            if condition.after_seconds(seconds):
                self._stop(f"early stopping: {condition} is met after {seconds:.0f} s")
            for node, loss in losses.items():
                if condition.after_minibatches(loss):
                    self._stop(
                        f"early stopping: {condition} is met on node {node}, loss {loss:.6g}"
                    )

    def _copy_best(self, rule: EarlyStopping) -> None:
        """Record the best epoch, and take a snapshot if the rule keeps its parameters.

        If the snapshot fails, log a warning and change nothing, so that the next poll tries again;
        but raise the error if the fit has failed.
        """
        assert self._judge.epoch is not None, "an epoch was the best"
        try:
            self.copy = self._master.snapshot() if rule.keep_best else None
        except SparkstromError as error:
            if self._master.failure is not None:
                raise
            log.warning(
                "the parameters of epoch %d, the best so far, could not be copied now (%s): the"
                " next poll tries again",
                self._judge.epoch,
                error,
            )
            return
        self._is_copy_due = False
        commit = self.copy.commit if self.copy else None
        self.best = Best(self._judge.epoch, rule.metric, self._judge.value, commit)


class MinibatchLosses:
    """Computes mean losses of the newest minibatches from the workers' cumulative counters."""

    def __init__(self) -> None:
        # Weight and weighted sum of losses, by partition and task attempt: a worker that returns
        # under a new id continues its counters.
        self._seen: dict[tuple[int, int], tuple[float, float]] = {}

    def collect_new_losses(self, progress: Progress) -> dict[int, float]:
        """Return each node's mean loss over the rows that it reported since the last call.

        Nodes that reported no new rows, or only rows that weigh 0, are left out.
        """
        losses: dict[int, float] = {}
        for node, counters in progress.stats.items():
            if (training := counters.training) is None:
                continue
            process = training.partition, training.attempt
            now = training.loss_weight, training.loss_sum
            before = self._seen.get(process, (0.0, 0.0))
            self._seen[process] = now
            if now[0] > before[0]:
                losses[node] = (now[1] - before[1]) / (now[0] - before[0])
        return losses


def check_validation(
    model: FlatModel,
    validation: float | str | None,
    rule: EarlyStopping | None,
    label: ColumnNames | None = LABEL,
) -> None:
    """Raise UsageError if ``rule`` is no EarlyStopping, or if it lacks held-out rows or labels.

    Raise it also if rows are held out and the model cannot compute their loss. ``validation`` is a
    fraction of the rows or the name of a boolean column; None or 0: no rows are held out.
    ``label`` names the columns with labels; None or (): there are none.
    """
    if rule is not None and not isinstance(rule, EarlyStopping):
        raise UsageError(
            f"early_stopping={shown(rule)}: must be None or a rule, such as"
            " EarlyStopping(patience=5), or a list of termination conditions"
        )
    if rule is not None and rule.needs_held_out and not validation:
        raise UsageError(
            f"early_stopping={shown(rule)} needs held-out rows: pass"
            " validation=0.1, or the name of a boolean column"
        )
    if rule is not None and rule.metric != LOSS and label in (None, ()):
        raise UsageError(
            f"early_stopping={shown(rule)} with label={label!r}: {rule.metric} needs labels to"
            " compare with; name the label column, or take metric='loss'"
        )
    if not validation or (rule is not None and rule.metric != LOSS):
        return
    if isinstance(model, RequiresLoss):
        model.need_loss()
    if not isinstance(model, Measured):
        raise UsageError(
            f"validation={shown(validation)}: a {type(model).__name__} lacks loss(batch) -> (sum,"
            " weight), or outputs, to measure held-out rows with; give it both"
            " (sparkstrom.models.base.Measured)"
        )
