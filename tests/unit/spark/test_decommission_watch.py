"""Tests of DecommissionMonitor, which moves tasks from executors that are being decommissioned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.codec.messages import Phase
from sparkstrom.runtime.master_control import Progress
from sparkstrom.spark import jobs as decommission_watch
from sparkstrom.spark.jobs import DecommissionMonitor, ExecutorState, RunningTask, SparkJob

TASKS = [RunningTask(70, 0, "1"), RunningTask(71, 1, "1"), RunningTask(72, 2, "2")]


def at(phase: Phase) -> Progress:
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
        self.job: Any = SimpleNamespace(context=context, running_tasks=lambda: TASKS)
        self.conf = {"spark.decommission.enabled": enabled}

    def watch(self) -> DecommissionMonitor:
        return DecommissionMonitor(self.job, self.said.append)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(decommission_watch, "DECOMMISSION_POLL_S", -1.0)  # every poll is due
    monkeypatch.setattr(decommission_watch, "live_conf", lambda context: made.conf)
    monkeypatch.setattr(decommission_watch, "list_executors", lambda context: made.known)
    return made


def test_a_task_of_a_repeated_stage_has_its_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks are identified by their partition; their index counts only a stage's retried tasks."""
    names = {"taskId": 70, "index": 0, "partitionId": 2, "executorId": "1", "status": "RUNNING"}
    task = SimpleNamespace(**{name: lambda value=value: value for name, value in names.items()})
    monkeypatch.setattr(SparkJob, "_stages", lambda job: [])
    monkeypatch.setattr(SparkJob, "_tasks", lambda job, stages: [task])
    assert SparkJob(None, "group", list).running_tasks() == [RunningTask(70, 2, "1")]


def test_each_moves_once_as_there_is_room_and_until_then_trains_on(cluster: Cluster) -> None:
    """A task is killed once, and only if another executor has a free slot for it."""
    watch = cluster.watch()
    cluster.known = [
        ExecutorState("1", "a", 0, is_leaving=False),
        ExecutorState("2", "b", 0, is_leaving=False),
    ]
    watch.on_progress(at(Phase.RUNNING))
    assert cluster.said == []
    cluster.known = [
        ExecutorState("1", "a", 2, is_leaving=True),
        ExecutorState("2", "b", 0, is_leaving=False),
    ]
    for _ in range(2):
        watch.on_progress(at(Phase.RUNNING))
    assert cluster.killed == []  # free slots of the leaving executor do not count
    (told,) = cluster.said
    assert told.startswith("executor 1 on a is being decommissioned, and no other one has")
    cluster.known[1] = ExecutorState("2", "b", 1, is_leaving=False)
    for _ in range(2):
        watch.on_progress(at(Phase.RUNNING))
    assert cluster.killed == [70, 71]
    assert "the worker of partition 1 stops there" in cluster.said[-1]


@pytest.mark.parametrize(("enabled", "phase"), [("false", Phase.RUNNING), ("true", Phase.AUDIT)])
def test_nobody_moves_at_the_end_nor_where_spark_says_nothing(
    enabled: str, phase: Phase, cluster: Cluster
) -> None:
    """No task is killed after training, or without spark.decommission.enabled."""
    cluster.conf["spark.decommission.enabled"] = enabled
    cluster.known = [
        ExecutorState("1", "a", 0, is_leaving=True),
        ExecutorState("2", "b", 2, is_leaving=False),
    ]
    cluster.watch().on_progress(at(phase))
    assert cluster.killed == []
