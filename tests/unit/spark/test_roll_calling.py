"""Tests, with a fake clock, of the job with which a Spark Connect client counts executors."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.base.errors import SetupError, TrainingError
from sparkstrom.fit.fit_context import TaskSlots
from sparkstrom.spark.connect import application as connect_application
from sparkstrom.spark.connect import application as roll_calling
from sparkstrom.spark.connect import jobs
from sparkstrom.spark.connect.application import ConnectApplication, discover_executors
from sparkstrom.spark.executor_slots import compute_slots


class Job:
    """A fake job that takes ``takes_s``, and a fake clock that advances in ``wait``."""

    now_s = 100.0

    def __init__(self, takes_s: float, error: Exception | None = None) -> None:
        self._until_s, self.error = self.now_s + takes_s, error
        self.reports = ["1", "1", "2"]
        self.cancelled = 0

    def monotonic(self) -> float:
        return self.now_s

    def start(self) -> None:
        assert self.now_s == 100.0

    def wait(self, seconds: float) -> bool:
        if not self.cancelled:
            self.now_s = min(self.now_s + seconds, max(self._until_s, self.now_s))
        return self.cancelled > 0 or self.now_s >= self._until_s

    def cancel(self) -> None:
        self.cancelled += 1


@pytest.fixture
def count_executors(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[Any], list[str]]]:
    """Return a function that counts executors with a job and returns them, and all messages."""

    def call(job: Job, seconds: float = 60.0) -> tuple[list[Any], list[str]]:
        monkeypatch.setattr(roll_calling, "time", job)
        said: list[str] = []
        return discover_executors(job, "gateway:15002", seconds, said.append), said  # type: ignore[arg-type]

    return call


def test_short_count_shows_no_message(count_executors: Any) -> None:
    """A short count shows no message."""
    assert count_executors(Job(0.5)) == (["1", "1", "2"], [])


def test_long_count_shows_message_repeatedly(count_executors: Any) -> None:
    """A count that takes longer shows a message, repeatedly."""
    _, said = count_executors(Job(7.5))
    assert said == ["sparkstrom waits: for executors of gateway:15002, which a job counts"] * 2


def test_count_beyond_start_timeout_is_cancelled(count_executors: Any) -> None:
    """If the job takes longer than start_timeout, it is cancelled and SetupError is raised."""
    job = Job(1e9)
    with pytest.raises(SetupError, match=r"of gateway:15002 has run a task within 20 s \(start_t"):
        count_executors(job, 20.0)
    assert job.now_s == pytest.approx(120, abs=0.3)
    assert job.cancelled == 1


def test_ctrl_c_cancels_counting_job(count_executors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C cancels the job on the server."""
    job = Job(1e9)
    waits = job.wait

    def interrupted(seconds: float) -> bool:
        if job.now_s > 103 and not job.cancelled:
            raise KeyboardInterrupt
        return waits(seconds)

    monkeypatch.setattr(job, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        count_executors(job)
    assert job.cancelled == 1


def test_error_of_counting_job_is_raised(count_executors: Any) -> None:
    """If the job fails, its error is raised."""
    with pytest.raises(TrainingError, match="counting executors failed"):
        count_executors(Job(2.0, TrainingError("counting executors failed: no")))


GPUS = {"spark.executor.resource.gpu.amount": "3", "spark.task.resource.gpu.amount": "1"}


@pytest.mark.parametrize(("gpus", "slots"), [({}, 4), (GPUS, 3)])
def test_one_job_counts_executors_and_cores(
    monkeypatch: pytest.MonkeyPatch, gpus: dict[str, str], slots: int
) -> None:
    """One job counts both executors and cores; GPUs may limit the slots of an executor."""
    calls: list[Any] = []

    def roll(job: Any, server: str, seconds: float, say: Any) -> list[tuple[str, int]]:
        calls.append((server, seconds, say))
        return [("1", 4), ("1", 4), ("2", 4), ("2", 4), ("1", 4)]  # one per task

    monkeypatch.setattr(connect_application, "discover_executors", roll)
    conf = SimpleNamespace(getAll={"spark.master": "spark://h:7077"} | gpus)
    session = SimpleNamespace(conf=conf, client=SimpleNamespace(host="gateway"))
    monkeypatch.setattr(
        connect_application, "read_session_conf", lambda session: session.conf.getAll
    )
    assert ConnectApplication(session).await_slots(33.0, print) == TaskSlots(2, slots)
    assert calls == [("the Spark Connect server gateway", 33.0, print)]


@pytest.mark.parametrize(
    ("setting", "slots"),
    [
        ({}, 5),  # one task per core of the JVM
        ({"spark.default.parallelism": "5"}, 2),  # the cores of the server's process
        ({"spark.task.cpus": "2"}, 2),
    ],
)
def test_local_mode_slots_follow_number_of_tasks(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, str], slots: int
) -> None:
    """In local mode the number of tasks is that of cores, unless default.parallelism sets it."""
    conf = {"spark.master": "local[*]"} | setting
    monkeypatch.setattr(connect_application, "discover_executors", lambda *_: [("1", 2)] * 5)
    monkeypatch.setattr(connect_application, "read_session_conf", lambda session: conf)
    session: Any = SimpleNamespace(client=SimpleNamespace(host="gateway"))
    assert ConnectApplication(session).await_slots(33.0, print) == TaskSlots(1, slots)


@pytest.mark.parametrize(("number", "cores"), [("driver", 6), ("1", 2)])
def test_local_mode_task_reports_cores_of_its_process(
    monkeypatch: pytest.MonkeyPatch, number: str, cores: int
) -> None:
    """In local mode a task reports the cores of its process, otherwise those of its executor."""
    place, executor = SimpleNamespace(host="h", jvm="7"), SimpleNamespace(id=number, cores=2)
    monkeypatch.setattr(jobs, "count_cores", lambda: 6)
    monkeypatch.setattr(jobs, "get_task_context", lambda: place)
    monkeypatch.setattr(jobs, "read_executor_info", lambda: executor)
    assert list(jobs.identify_executor(())) == [("h/7", cores)]


@pytest.mark.parametrize(
    ("master", "said"),
    [("yarn", "executor.instances"), ("spark://h:7077", "dynamicAllocation.initialExecutors")],
)
def test_configured_executors_need_no_counting_job(master: str, said: str) -> None:
    """No job counts executors if the configuration has their number and their cores."""
    dynamic = {"spark.dynamicAllocation.enabled": str("dynamic" in said)}
    conf = {**dynamic, f"spark.{said}": "3", "spark.executor.cores": "2"}

    def count() -> int:
        raise AssertionError("a job would wait for slots")

    slots = compute_slots(conf, master, (), count, count)
    assert (slots.executors, slots.per_executor) == (3, 2)
