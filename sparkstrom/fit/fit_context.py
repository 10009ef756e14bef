"""Values shared by the modules that run a fit: its arguments, reporting and task slots.

``FitRequest`` contains the checked arguments of ``fit``. ``FitReporting`` contains the progress
display, the warnings, and data for the summary. ``TaskSlots`` is the number of tasks that can run
at the same time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.fit.checkpoints import FitKey, ResumePoint
from sparkstrom.fit.summary import FitRecord
from sparkstrom.observe.early_stopping import LOSS, EarlyStopping, MaxEpochsTerminationCondition
from sparkstrom.observe.progress import ProgressDisplay


@dataclass(frozen=True, slots=True)
class FitRequest:
    """The checked arguments of ``fit`` without the data, and the checkpoint to resume from."""

    epochs: int  # to train, including those in the checkpoint to resume from
    columns: ColumnSpec  # columns of the data, and which rows are held out
    early_stopping: EarlyStopping | None  # rule for ending the fit early
    listeners: tuple[Any, ...]  # the user's
    run_log: str | os.PathLike[str] | None  # file; "": none; None: a new one in the usual directory
    key: FitKey  # identifies the fit within its program
    resume_from: ResumePoint | None = None  # the checkpoint; None: a new fit
    epoch_limit: MaxEpochsTerminationCondition | None = None  # set if it reduced ``epochs``

    @property
    def validation_metric(self) -> str | None:
        """The metric to compute on held-out rows after each epoch; None if no rows are held out."""
        if not self.columns.validation:
            return None
        return self.early_stopping.metric if self.early_stopping else LOSS


@dataclass(frozen=True, slots=True)
class FitReporting:
    """The means by which a fit reports to the user: display, warnings, and data for the summary."""

    progress: ProgressDisplay  # also shows lines of text
    record: FitRecord  # times and result of the fit
    slots: TaskSlots  # number of tasks that can run at the same time
    warnings: list[str]  # warnings shown so far, which the summary repeats
    shows_worker_output: bool = True  # False if the terminal shows workers' lines anyway

    def warn(self, text: str) -> None:
        """Show a warning now and keep it for the summary."""
        self.warnings.append(text)
        self.progress.say(f"sparkstrom warns: {text}")


@dataclass(frozen=True, slots=True)
class TaskSlots:
    """The number of tasks that an application can run at the same time, from its executors."""

    executors: int  # number of executors
    per_executor: int  # slots of one executor
    is_dynamic: bool = False  # Spark adds and removes executors
    is_estimate: bool = False  # the number of executors is a default, not the user's choice

    @property
    def total(self) -> int:
        """Number of slots on all executors."""
        return self.executors * self.per_executor
