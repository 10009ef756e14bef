"""Call checks: what of a call of ``fit`` can be refused before any work starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sparkstrom.base.option_types import COUNT_MAX, KEY, whole
from sparkstrom.models.base import FlatModel
from sparkstrom.observe.stopping import EarlyStopping, rule_of
from sparkstrom.observe.termination import TerminationCondition
from sparkstrom.spark.data.columns import Chosen, need_validation
from sparkstrom.spark.driver.epoch_watch import check_validation
from sparkstrom.spark.driver.listener_thread import check_listeners
from sparkstrom.spark.driver.run_log import check_run_log

EPOCHS = whole(1, COUNT_MAX, unit="epochs")


def epochs_given(epochs: object) -> int:
    """Return the number of epochs as an int. Raise UsageError for what is none."""
    return int(EPOCHS[KEY].read("epochs", epochs))


def check_call(
    model: FlatModel,
    epochs: int,
    chosen: Chosen,
    early_stopping: EarlyStopping | Sequence[TerminationCondition] | None,
    listeners: Sequence[Any],
    run_log: str | os.PathLike[str] | None,
) -> EarlyStopping | None:
    """The rule to stop by. Raise UsageError for arguments that cannot be meant."""
    epochs_given(epochs)
    need_validation(chosen.validation)
    rule: EarlyStopping | None = rule_of(early_stopping)
    check_validation(model, chosen.validation, rule, chosen.label)
    check_listeners(listeners)
    check_run_log(run_log)
    return rule
