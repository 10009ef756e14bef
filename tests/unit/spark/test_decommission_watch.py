"""Tests of DecommissionMonitor, which moves tasks from executors that are being decommissioned."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sparkstrom.codec.messages import Phase
from sparkstrom.runtime.master_control import Progress
from sparkstrom.spark import jobs as decommission_watch
from sparkstrom.spark.jobs import DecommissionMonitor, ExecutorState, RunningTask, SparkJob

TASKS = [RunningTask(70, 0, "1"), RunningTask(71, 1, "1"), RunningTask(72, 2, "2")]


def make_progress(phase: Phase) -> Progress:
    """Return a progress report of this phase."""
    return Progress(phase, 3, 3, 3, 0, 60, 0, 0.0, {})


class Cluster:
    """A fake cluster with executors, killed tasks and messages."""

    def __init__(self, enabled: str = "true") -> None:
        self.known: list[ExecutorState] = []
        self.killed: list[int] = []
        self.said: list[str] = []
        scala = SimpleNamespace(killTaskAttempt=lambda task, now, why: self.killed.append(task))
        context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala))
        self.job: Any = SimpleNamespace(context=context, running_tasks=self.tasks_on)
        self.conf = {"spark.decommission.enabled": enabled}

    def tasks_on(self, executors: Collection[str]) -> list[RunningTask]:
        return [task for task in TASKS if task.executor in executors]

    def watch(self) -> DecommissionMonitor:
        return DecommissionMonitor(self.job, self.said.append)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(decommission_watch, "DECOMMISSION_POLL_S", -1.0)  # every poll is due
    monkeypatch.setattr(decommission_watch, "live_conf", lambda context: made.conf)
    monkeypatch.setattr(decommission_watch, "list_executors", lambda context: made.known)
    return made


class Store:
    """A fake of Spark's status store with the tasks of one stage."""

    def __init__(self, tasks: list[Any]) -> None:
        self.tasks = tasks
        status = SimpleNamespace(TaskStatus=SimpleNamespace(valueOf=str), TaskSorting=Mock())
        apache = SimpleNamespace(spark=SimpleNamespace(status=SimpleNamespace(api=Mock(v1=status))))
        java = SimpleNamespace(util=SimpleNamespace(List=SimpleNamespace(of=lambda one: [one])))
        self._jvm = SimpleNamespace(org=SimpleNamespace(apache=apache), java=java)
        self._jsc = SimpleNamespace(sc=lambda: SimpleNamespace(statusStore=lambda: self))

    def taskList(
        self, stage: int, attempt: int, offset: int, limit: int, order: Any, statuses: list[str]
    ) -> Any:
        found = [task for task in self.tasks if task.status() in statuses][offset:][:limit]
        return SimpleNamespace(size=lambda: len(found), apply=lambda i: found[i])


def record(number: int, partition: int, executor: str, status: str = "RUNNING") -> Any:
    """Return the store's record of a task, whose index differs from its partition."""
    values = {"taskId": number, "index": 0, "partitionId": partition, "executorId": executor}
    error = SimpleNamespace(isDefined=lambda: status == "FAILED", get=lambda: f"Error: {number}")
    values |= {"status": status, "attempt": 0, "errorMessage": error}
    return SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})


def make_job(monkeypatch: pytest.MonkeyPatch, *tasks: Any) -> SparkJob:
    """Return a job of one stage with these tasks."""
    stage = SimpleNamespace(stageId=4, currentAttemptId=0)
    monkeypatch.setattr(SparkJob, "_stages", lambda job, **which: [stage])
    return SparkJob(Store(list(tasks)), "group", list)


def test_task_is_identified_by_partition_not_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks are identified by their partition; their index counts only a stage's retried tasks."""
    job = make_job(monkeypatch, record(70, 2, "1"), record(71, 3, "2"))
    assert job.running_tasks({"1"}) == [RunningTask(70, 2, "1")]


def test_all_running_tasks_of_a_large_fit_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of workers beyond the first 1,000, or after as many tasks that have ended."""
    ended = [record(n, n, "1", "SUCCESS") for n in range(1500)]
    running = [record(n, n, "2") for n in range(1500, 3000)]
    job = make_job(monkeypatch, *ended, *running, record(3000, 0, "3"))
    assert job.running_tasks({"3"}) == [RunningTask(3000, 0, "3")]
    assert job.executors() == {"2", "3"}


def test_the_error_of_a_task_of_a_large_fit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed task's error is found among 1,500 that run; errors of killed tasks do not count."""
    running = [record(n, n, "2") for n in range(1500)]
    job = make_job(monkeypatch, *running, record(1500, 0, "3", "FAILED"))
    assert job.task_errors() == ["Error: 1500"]


def test_task_moves_once_when_another_executor_has_free_slot(cluster: Cluster) -> None:
    """A task is killed once, and only if another executor has a free slot for it."""
    watch = cluster.watch()
    cluster.known = [
        ExecutorState("1", "a", 0, is_leaving=False),
        ExecutorState("2", "b", 0, is_leaving=False),
    ]
    watch.on_progress(make_progress(Phase.RUNNING))
    assert cluster.said == []
    cluster.known = [
        ExecutorState("1", "a", 2, is_leaving=True),
        ExecutorState("2", "b", 0, is_leaving=False),
    ]
    for _ in range(2):
        watch.on_progress(make_progress(Phase.RUNNING))
    assert cluster.killed == []  # free slots of the leaving executor do not count
    (told,) = cluster.said
    assert told.startswith("executor 1 on a is being decommissioned, and no other one has")
    cluster.known[1] = ExecutorState("2", "b", 1, is_leaving=False)
    for _ in range(2):
        watch.on_progress(make_progress(Phase.RUNNING))
    assert cluster.killed == [70, 71]
    assert "the worker of partition 1 stops there" in cluster.said[-1]


@pytest.mark.parametrize(("enabled", "phase"), [("false", Phase.RUNNING), ("true", Phase.AUDIT)])
def test_no_task_moves_after_training_or_without_decommissioning(
    enabled: str, phase: Phase, cluster: Cluster
) -> None:
    """No task is killed after training, or without spark.decommission.enabled."""
    cluster.conf["spark.decommission.enabled"] = enabled
    cluster.known = [
        ExecutorState("1", "a", 0, is_leaving=True),
        ExecutorState("2", "b", 2, is_leaving=False),
    ]
    cluster.watch().on_progress(make_progress(phase))
    assert cluster.killed == []
