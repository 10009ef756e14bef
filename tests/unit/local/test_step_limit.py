"""Tests of the time limit for steps: a watching thread ends a process whose step hangs."""

from __future__ import annotations

import os
from typing import Any

import pytest

from sparkstrom.local import worker_main
from sparkstrom.local.worker_main import EXIT_STUCK, AnswerChannel
from sparkstrom.local.worker_pool import HEARTBEAT_S, StepLimit, WorkerAnswer

LOOK_S = 0.25


class ProcessExit(BaseException):
    """An exception in place of the end of the process."""


class RecordingConnection(list[Any]):
    """A fake connection that records what is sent."""

    send = list.append


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> StepLimit:
    """Return the step limit of a process whose exit raises ``ProcessExit``."""

    def end(status: int) -> None:
        raise ProcessExit(status)

    made = StepLimit(HEARTBEAT_S)
    monkeypatch.setattr(worker_main, "step_limit", made)
    monkeypatch.setattr(os, "_exit", end)
    return made


def test_step_is_overdue_after_its_limit_of_checks() -> None:
    """A step is overdue once it was seen running for more checks than its limit has intervals."""
    limit = StepLimit(LOOK_S)
    limit.start_step(1.0)
    assert [limit.check_overdue() for _ in range(6)] == [False] * 5 + [True]
    limit.start_step(1.0)
    assert [limit.check_overdue() for _ in range(5)] == [False] * 5
    limit.end_step()
    assert not any(limit.check_overdue() for _ in range(9))
    assert limit.seconds == float("inf")


def test_process_with_overdue_step_reports_place_and_exits(limit: StepLimit) -> None:
    """A process whose step is overdue reports the place in the code and exits."""
    answers = AnswerChannel(sent := RecordingConnection())  # type: ignore[arg-type]
    limit.start_step(1.0)
    with pytest.raises(ProcessExit, match=str(EXIT_STUCK)):  # noqa: PT012
        for _ in range(2 + int(1.0 / HEARTBEAT_S)):
            assert sent == []
            answers.exit_if_step_timed_out()
    (answer,) = sent
    assert answer.failure.startswith("one training step took longer than 1 s: raise step_timeout")
    assert "test_process_with_overdue_step_reports_place_and_exits" in answer.trace


def test_step_that_ends_before_exit_is_not_overdue(limit: StepLimit) -> None:
    """A step that ends just before the watching thread acts is not overdue."""
    answers = AnswerChannel(sent := RecordingConnection())  # type: ignore[arg-type]
    limit.start_step(0.0)

    class JustThen:
        """A lock during whose acquisition the step ends."""

        def __enter__(self) -> None:
            limit.end_step()

        def __exit__(self, *exc: object) -> None:
            pass

    limit.check_overdue()
    answers._lock = JustThen()  # type: ignore[assignment]
    answers.exit_if_step_timed_out()
    answers.send(WorkerAnswer("done"))
    assert sent == [WorkerAnswer("done")]
