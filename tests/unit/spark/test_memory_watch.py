"""Tests of OutOfMemoryMonitor: each message about a killed container is shown once, at once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.base.errors import TrainingError
from sparkstrom.fit.supervisor import STAGE_ATTEMPTS_HINT, FitSupervisor
from sparkstrom.spark import jobs as memory_watch
from sparkstrom.spark.jobs import OutOfMemoryMonitor, SparkJob

ANYTHING: Any = None
TOO_OFTEN = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collect.
: org.apache.spark.SparkException: Job aborted due to stage failure: ResultStage 5 (collect at \
job.py:3) has failed the maximum allowable number of times: 4. Most recent failure reason:
org.apache.spark.shuffle.MetadataFetchFailedException: Missing an output location for shuffle 2
"""


class FakeJob:
    """A fake job with stages, their failed tasks, and messages about killed containers."""

    def __init__(self) -> None:
        self.stages = [(0, 0, 0), (1, 0, 0)]
        self.killed: list[str] = []
        self.died: list[str] = []
        self.asked = 0
        self.error: Exception | None = None

    def stage_attempts(self) -> list[tuple[int, int, int]]:
        return list(self.stages)

    def killed_for_memory(self) -> list[str]:
        self.asked += 1
        return list(self.killed)

    def dead_python_workers(self) -> list[str]:
        return list(self.died)


@pytest.fixture
def memory_monitor(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(memory_watch, "MEMORY_POLL_S", -1.0)  # every poll is due
    job, warnings = FakeJob(), []
    watch = OutOfMemoryMonitor(job, warnings.append)  # type: ignore[arg-type]
    return SimpleNamespace(job=job, watch=watch, warnings=warnings)


def test_task_errors_are_read_only_after_new_task_failures(memory_monitor: Any) -> None:
    """Task errors are read only if tasks have failed since the previous poll."""
    for _ in range(3):
        memory_monitor.watch.on_progress(ANYTHING)
    assert memory_monitor.job.asked == 0
    memory_monitor.job.stages[1] = (1, 0, 2)
    for _ in range(3):
        memory_monitor.watch.on_progress(ANYTHING)
    assert memory_monitor.job.asked == 1
    assert memory_monitor.warnings == []  # no container was killed


def test_killed_container_message_is_shown_once(memory_monitor: Any) -> None:
    """Each message is shown once, also one that appears at the end of the fit."""
    memory_monitor.job.stages[1], memory_monitor.job.killed = (1, 0, 2), ["give it 1 GB"]
    memory_monitor.watch.on_progress(ANYTHING)
    memory_monitor.job.stages[1] = (1, 1, 0)  # a second attempt of the stage; no new message
    memory_monitor.watch.on_progress(ANYTHING)
    assert memory_monitor.warnings == ["give it 1 GB"]
    memory_monitor.job.stages[1] = (1, 1, 1)
    memory_monitor.job.killed.append("give it 2 GB")
    memory_monitor.watch.on_fit_end(ANYTHING)
    assert memory_monitor.warnings == ["give it 1 GB", "give it 2 GB"]


def test_python_process_death_is_reported_once(memory_monitor: Any) -> None:
    """Before, the summary only had that another attempt has taken the partition over."""
    memory_monitor.job.stages[1], memory_monitor.job.died = (1, 0, 1), ["it died"]
    memory_monitor.watch.on_progress(ANYTHING)
    memory_monitor.watch.on_fit_end(ANYTHING)
    assert memory_monitor.warnings == ["it died"]


class FailedJob(SparkJob):
    """A job of two tasks that failed, one of them because its Python process died."""

    def stage_attempts(self) -> list[tuple[int, int, int]]:
        return [(7, 0, 2)]

    def _attempt_tasks(self, *_: Any) -> Any:
        errors = (
            "ValueError: a row of the user's data",
            "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed). Cons",
        )
        for partition, error in enumerate(errors):
            text = SimpleNamespace(isDefined=lambda: True, get=lambda error=error: error)
            yield SimpleNamespace(
                partitionId=lambda partition=partition: partition,
                host=lambda: "host7",
                attempt=lambda: 0,
                errorMessage=lambda text=text: text,
            )


def test_dead_python_worker_message_names_partition_and_host() -> None:
    """Messages name the partition, the host and the attempt; other errors have none."""
    (text,) = FailedJob(None, "group", list).dead_python_workers()
    assert text.startswith("the Python process of partition 1 on host7 died in attempt 0")


@pytest.mark.parametrize(
    ("killed", "remedy"),
    [
        (["give it 1 GB", "give it 2 GB"], "Give it 2 GB"),
        ([], STAGE_ATTEMPTS_HINT),
    ],
)
def test_job_failure_names_newest_killed_container_message(killed: list[str], remedy: str) -> None:
    """A failed job's error has the newest message about a killed container, or a general hint."""
    job = FakeJob()
    job.killed, job.error = killed, Exception(TOO_OFTEN)
    master = SimpleNamespace(finished=SimpleNamespace(wait=lambda seconds: False))
    with pytest.raises(TrainingError) as raised:
        FitSupervisor(master, job, ANYTHING)._handle_early_end()  # type: ignore[arg-type]
    assert str(raised.value) == (
        "the Spark job failed: Job aborted due to stage failure: ResultStage 5 (collect at "
        f"job.py:3) has failed the maximum allowable number of times: 4. {remedy}"
    )
