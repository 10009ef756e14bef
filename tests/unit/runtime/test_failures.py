"""Failures: what the driver raises where a machine has aborted the fit."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparkstrom.base.errors import RowsRefused, TrainingError, UsageError
from sparkstrom.codec.messages import TrainingFailure
from sparkstrom.codec.wire import decode_untrusted, encode
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.runtime.master_control import READING_ROWS, error_from_abort
from sparkstrom.worker.training_task import TrainingSession

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


@pytest.mark.parametrize("kind", [ValueError, UsageError])
@pytest.mark.parametrize("count", [1, 20_000])
def test_a_text_that_utf_8_cannot_encode_reaches_the_master(
    kind: type[Exception], count: int
) -> None:
    """A tokenizer may quote half of an emoji; however long, it is no reason to send nothing."""
    events: list[Any] = []
    session = SimpleNamespace(channel=SimpleNamespace(post=events.append))
    TrainingSession.report(cast(Any, session), kind("token " + "\ud83d\n" * count), "training")
    (failed,) = events
    message = TrainingFailure(node=1, reason=failed.reason, trace=failed.trace)
    received = cast(TrainingFailure, decode_untrusted(*encode(message)))
    assert received.reason.endswith("token \\ud83d")
    assert "\\ud83d" in received.trace


class Speechless(ValueError):
    """An exception of the user's with a fault of its own."""

    def __str__(self) -> str:
        raise KeyError("text")


@pytest.mark.parametrize("error", [Speechless(), UsageError("")])
def test_an_exception_without_text_reaches_the_master(error: Exception) -> None:
    events: list[Any] = []
    session = SimpleNamespace(channel=SimpleNamespace(post=events.append))
    TrainingSession.report(cast(Any, session), error, "training")
    assert events[0].reason.endswith("no reason")
