"""Failures: the exceptions that the driver program raises after a worker has aborted the fit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sparkstrom.base.errors import RowsRefused, TrainingError, UsageError
from sparkstrom.codec.messages import TrainingFailure
from sparkstrom.codec.wire import decode_untrusted, encode
from sparkstrom.local.fit_runner import ProcessJob
from sparkstrom.local.rounds import RoundsThread
from sparkstrom.local.worker_main import run_task
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.rounds.averaging import apply_accumulator
from sparkstrom.rounds.worker_round import RoundReport, raise_failure, reporting
from sparkstrom.runtime.master_control import READING_ROWS, error_from_abort
from sparkstrom.spark.jobs import SparkJob
from sparkstrom.worker import training_task
from sparkstrom.worker.training_task import TrainingSession

WHY = "row 3 of partition 1: column 'x' is null: fill or drop it"


@pytest.mark.parametrize("copied", [False, True])
def test_abort_while_reading_rows_raises_usage_error_naming_row(copied: bool) -> None:
    """An abort while reading rows becomes a RowsRefused, which pickles, with host and trace."""
    abort = ev.Abort(WHY, "trace", partition=1, host="here", phase=READING_ROWS)
    error = error_from_abort(abort)
    if copied:
        error = pickle.loads(pickle.dumps(error))
    assert isinstance(error, RowsRefused)
    assert isinstance(error, UsageError)
    assert isinstance(error, TrainingError)
    assert str(error) == f"{WHY} (found on here)", "one partition is named"
    assert (error.partition, error.host, error.trace) == (1, "here", "trace")


def test_abort_after_reading_rows_is_not_usage_error() -> None:
    """An abort in a later phase than reading rows is not a usage error."""
    error = error_from_abort(ev.Abort("NaN", "trace", partition=1, host="here", phase="training"))
    assert not isinstance(error, UsageError)


@pytest.mark.parametrize("kind", [ValueError, UsageError])
@pytest.mark.parametrize("count", [1, 20_000])
def test_error_text_with_lone_surrogates_reaches_master_escaped(
    kind: type[Exception], count: int
) -> None:
    """Lone surrogates in an error's text are escaped, however long the text is."""
    events: list[Any] = []
    session = SimpleNamespace(channel=SimpleNamespace(post=events.append))
    TrainingSession.report(cast(Any, session), kind("token " + "\ud83d\n" * count), "training")
    (failed,) = events
    message = TrainingFailure(node=1, reason=failed.reason, trace=failed.trace)
    received = cast(TrainingFailure, decode_untrusted(*encode(message)))
    assert received.reason.endswith("token \\ud83d")
    assert "\\ud83d" in received.trace


class UnprintableError(ValueError):
    """An exception of the user's code whose ``__str__`` raises."""

    def __str__(self) -> str:
        raise KeyError("text")


@pytest.mark.parametrize("error", [UnprintableError(), UsageError("")])
def test_exception_without_text_is_reported_as_no_reason(error: Exception) -> None:
    """An exception without text, or whose ``__str__`` raises, is reported with "no reason"."""
    events: list[Any] = []
    session = SimpleNamespace(channel=SimpleNamespace(post=events.append))
    TrainingSession.report(cast(Any, session), error, "training")
    assert events[0].reason.endswith("no reason")


class Panic(BaseException):
    """An exception not derived from ``Exception``, as libraries in Rust raise."""


def run_spark_task(fail: Callable[..., Any]) -> None:
    """Run a Spark task whose trainer fails; raise what the task reports to the controller."""
    reports = list[Any]()
    session: Any = SimpleNamespace(
        trainer=SimpleNamespace(run=fail),
        thread=SimpleNamespace(start=int, stop=int),
        channel=SimpleNamespace(describe_activity=lambda: "training"),
        wait_for_abort=int,
        report=lambda *report: reports.append(report),
    )
    job: Any = SimpleNamespace(model=None)
    output: Any = SimpleNamespace(take=None)
    batches: Any = SimpleNamespace(close=int)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("warm_up", "warm_up_transport", "freeze_garbage_collector"):
            patch.setattr(training_task, name, int)
        for name in ("remember_model", "place_model"):
            patch.setattr(training_task, name, lambda *given: None)
        patch.setattr(training_task, "load_batches", lambda *given: batches)
        patch.setattr(training_task, "TrainingSession", lambda *given: session)
        with pytest.raises(BaseException):  # noqa: B017, PT011
            training_task._run_captured(job, cast(Any, None), iter(()), output)
    for error, doing in reports:
        raise TrainingError(f"{type(error).__name__}: {error} ({doing})")


def train_one_round(fail: Callable[..., Any]) -> None:
    """Run one worker's round that fails; raise the failure in its report."""
    report = RoundReport(0)
    with reporting(report):
        fail()
    raise_failure([report])


def run_worker_process_task(fail: Callable[..., Any]) -> None:
    """Run a failing task as a worker process does; raise the error of its result."""
    raise run_task(cast(Any, SimpleNamespace(run=fail))).as_error(0)


def run_accumulator(fail: Callable[..., Any]) -> None:
    """Run an accumulator of averaging that fails."""
    apply_accumulator(fail, np.zeros(2, np.float32), np.zeros((1, 2), np.float32), [1])


def run_rounds(fail: Callable[..., Any]) -> None:
    """Run a failing fit on the thread of local rounds; raise the thread's error."""
    thread = RoundsThread(fail, abort=int)
    thread._run()
    assert thread.error is not None
    raise thread.error


def run_process_job(fail: Callable[..., Any]) -> None:
    """Run a job whose worker processes fail to start; raise the job's error."""
    workers = SimpleNamespace(begin=fail, drop=lambda partitions: None)
    job = ProcessJob(cast(Any, None), cast(Any, None), print)
    job._workers = cast(Any, workers)
    job._run()
    assert job.error is not None
    raise job.error


def run_spark_job(fail: Callable[..., Any]) -> None:
    """Run a Spark job that fails; raise its error as a TrainingError."""
    context = SimpleNamespace(setJobGroup=lambda *_, **__: None)
    job = SparkJob(context, "group", fail)
    job._run()
    assert job.error is not None
    if isinstance(job.error, ValueError):  # a job's own errors are explained elsewhere
        raise TrainingError(repr(job.error))
    raise job.error


@pytest.mark.parametrize("error", [SystemExit("no GPU"), Panic("no GPU"), ValueError("no GPU")])
@pytest.mark.parametrize(
    "train",
    [
        run_spark_task,
        train_one_round,
        run_worker_process_task,
        run_accumulator,
        run_rounds,
        run_process_job,
        run_spark_job,
    ],
)
def test_any_user_code_exception_becomes_training_error(
    train: Callable[[Callable[..., Any]], None], error: BaseException
) -> None:
    """Every place that runs user code turns any exception into a TrainingError that names it."""

    def fail(*_: Any) -> Any:
        raise error

    with pytest.raises(TrainingError, match=rf"{type(error).__name__}.*no GPU"):
        train(fail)
