"""Failures: what the driver raises where a machine has aborted the fit."""

from __future__ import annotations

import pickle

import pytest

from sparkstrom.base.errors import RowsRefused, TrainingError, UsageError
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.runtime.master_control import READING_ROWS, error_from_abort

WHY = "row 3 of partition 1: column 'x' is null: fill or drop it"


@pytest.mark.parametrize("copied", [False, True])
def test_a_row_that_a_worker_refuses_is_a_usage_error_as_on_one_machine(copied: bool) -> None:
    abort = ev.Abort(WHY, "trace", partition=1, host="here", phase=READING_ROWS)
    error = error_from_abort(abort)
    if copied:
        error = pickle.loads(pickle.dumps(error))
    assert isinstance(error, RowsRefused)
    assert isinstance(error, UsageError)
    assert isinstance(error, TrainingError)
    assert str(error) == f"{WHY} (found on here)", "one partition is named"
    assert (error.partition, error.host, error.trace) == (1, "here", "trace")


def test_what_fails_later_is_the_training_s() -> None:
    error = error_from_abort(ev.Abort("NaN", "trace", partition=1, host="here", phase="training"))
    assert not isinstance(error, UsageError)
