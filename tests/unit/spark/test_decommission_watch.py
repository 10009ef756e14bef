"""Who is to go moves only where there is room, each task once, and people are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.codec.messages import Phase
from sparkstrom.runtime.fit_state import Progress
from sparkstrom.spark.driver import decommission_watch
from sparkstrom.spark.driver.decommission_watch import DecommissionWatch, Executor
from sparkstrom.spark.driver.spark_job import RunningTask

TASKS = [RunningTask(70, 0, "1"), RunningTask(71, 1, "1"), RunningTask(72, 2, "2")]


def at(phase: Phase) -> Progress:
    return Progress(phase, 3, 3, 3, 0, 60, 0, 0.0, {})


class Cluster:
    """Executors as Spark knows them; what is killed there, and what is said."""

    def __init__(self, enabled: str = "true") -> None:
        self.known: list[Executor] = []
        self.killed: list[int] = []
        self.said: list[str] = []
        scala = SimpleNamespace(killTaskAttempt=lambda task, now, why: self.killed.append(task))
        context = SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala))
        self.job: Any = SimpleNamespace(context=context, running_tasks=lambda: TASKS)
        self.conf = {"spark.decommission.enabled": enabled}

    def watch(self) -> DecommissionWatch:
        return DecommissionWatch(self.job, self.said.append)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(decommission_watch, "LOOK_S", -1.0)  # every look is due
    monkeypatch.setattr(decommission_watch, "live_conf", lambda context: made.conf)
    monkeypatch.setattr(decommission_watch, "executors_of", lambda context: made.known)
    return made


def test_each_moves_once_as_there_is_room_and_until_then_trains_on(cluster: Cluster) -> None:
    watch = cluster.watch()
    cluster.known = [Executor("1", "a", 0, leaves=False), Executor("2", "b", 0, leaves=False)]
    watch.on_progress(at(Phase.RUNNING))
    assert cluster.said == []
    cluster.known = [Executor("1", "a", 2, leaves=True), Executor("2", "b", 0, leaves=False)]
    for _ in range(2):
        watch.on_progress(at(Phase.RUNNING))
    assert cluster.killed == []  # its own slots are no room
    (told,) = cluster.said
    assert told.startswith("executor 1 on a is being decommissioned, and no other one has")
    cluster.known[1] = Executor("2", "b", 1, leaves=False)
    for _ in range(2):
        watch.on_progress(at(Phase.RUNNING))
    assert cluster.killed == [70, 71]
    assert "the worker of partition 1 is ended there" in cluster.said[-1]


@pytest.mark.parametrize(("enabled", "phase"), [("false", Phase.RUNNING), ("true", Phase.AUDIT)])
def test_nobody_moves_at_the_end_nor_where_spark_says_nothing(
    enabled: str, phase: Phase, cluster: Cluster
) -> None:
    cluster.conf["spark.decommission.enabled"] = enabled
    cluster.known = [Executor("1", "a", 0, leaves=True), Executor("2", "b", 2, leaves=False)]
    cluster.watch().on_progress(at(phase))
    assert cluster.killed == []
