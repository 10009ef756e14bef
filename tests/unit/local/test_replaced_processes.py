"""Tests of what a fit on one machine tells about worker processes that it replaces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from sparkstrom.local.fit_runner import ProcessJob
from sparkstrom.local.worker_pool import WorkerAnswer


def test_warning_has_reason_why_worker_process_was_replaced() -> None:
    """Before, the summary only had that "another attempt" has taken the partition over."""
    answers = iter([None, WorkerAnswer("{}")])  # None: the process died
    sent: list[Any] = []
    warned: list[str] = []
    workers = SimpleNamespace(
        begin=lambda: [0],
        attempts=[0],
        send=lambda partition, task: sent.append(task),
        answers=lambda missing: [(0, next(answers))],
        replace=lambda partition: "was killed by SIGKILL",
        drop=lambda partitions: None,
    )
    job = ProcessJob(cast(Any, None), lambda partition, attempt: cast(Any, "task"), warned.append)
    job._workers = cast(Any, workers)
    job._run()
    assert job.error is None
    assert job.reports == ["{}"]
    assert sent == ["task"] * 2
    assert warned == [
        "the process of partition 0 was killed by SIGKILL: another one has replaced it"
    ]
