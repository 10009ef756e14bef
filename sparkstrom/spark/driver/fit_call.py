"""Fit call: what a user asked one fit to do, and where it shows itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sparkstrom.observe.progress import ProgressLine
from sparkstrom.observe.stopping import LOSS, EarlyStopping
from sparkstrom.observe.termination import MaxEpochsTerminationCondition
from sparkstrom.spark.data.columns import Chosen
from sparkstrom.spark.driver.checkpoint_content import FitKey, Resumption
from sparkstrom.spark.driver.cluster import Slots
from sparkstrom.spark.driver.fit_record import FitRecord


@dataclass(frozen=True, slots=True)
class FitCall:
    """The arguments of ``fit``, but the data; all checked."""

    epochs: int
    chosen: Chosen
    early_stopping: EarlyStopping | None
    listeners: tuple[Any, ...]
    run_log: str | os.PathLike[str] | None
    key: FitKey
    goes_on: Resumption | None = None
    ends_with: MaxEpochsTerminationCondition | None = None  # where more epochs were asked for

    @property
    def metric_measured(self) -> str | None:
        """On held-out rows, after each epoch; None where none are held out."""
        if not self.chosen.validation:
            return None
        return self.early_stopping.metric if self.early_stopping else LOSS


@dataclass(frozen=True, slots=True)
class Showing:
    """Who says something while it runs, and what is kept for its summary."""

    progress: ProgressLine
    record: FitRecord
    slots: Slots
    warnings: list[str]
    worker_lines: bool = True  # show what workers print; False if the terminal shows it anyway

    def warn(self, text: str) -> None:
        """Now, and in the summary."""
        self.warnings.append(text)
        self.progress.say(f"sparkstrom warns: {text}")
