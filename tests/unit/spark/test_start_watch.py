"""Tests of StartMonitor and SlotMonitor: what a fit waits for, and which errors end its start."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sparkstrom.base.errors import NetworkError, SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.messages import Phase
from sparkstrom.fit import supervisor as start_watch
from sparkstrom.fit.supervisor import setup_error_in
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.runtime.master_control import Progress
from sparkstrom.spark.jobs import (
    JOBS_MAX,
    NO_SLOT_HINT,
    SETUP_POLL_S,
    WAIT_MESSAGE_S,
    SlotMonitor,
    SparkJob,
    StartMonitor,
)

NETWORK = "sparkstrom.base.errors.NetworkError: "
SETUP = "sparkstrom.base.errors.SetupError: "
CONTROLLER = Endpoint("10.0.0.1", 40123)
GATHERING = Progress(Phase.GATHERING, 0, 3, 0, 0, 0, 0, 0.0, {})
FIXED = VoidConfiguration(unicast_port=40123)


class Job:
    """A fake Spark job with prepared errors of its tasks."""

    def __init__(self, *errors: str) -> None:
        self.errors, self.looked_at = list(errors), 0
        self.retried = list[str]()  # errors of second attempts

    def count_tasks(self) -> tuple[int, int]:
        return 1, len(self.errors)

    def task_errors(self, first_attempt: int = 0) -> list[str]:
        self.looked_at += 1
        return self.retried if first_attempt else self.errors

    def killed_for_memory(self) -> list[str]:
        return []


class MonitorHarness:
    """A StartMonitor with a fake job and a fake clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *errors: str, void: Any = FIXED) -> None:
        self.now_s, self.said = 0.0, list[str]()
        monkeypatch.setattr(start_watch.time, "monotonic", lambda: self.now_s)
        self.job = Job(*errors)
        self.watch = StartMonitor(self.job, self.said.append, CONTROLLER, void)  # type: ignore[arg-type]

    def look(self, at_s: float, **progress: Any) -> None:
        self.now_s = at_s
        self.watch.on_progress(replace(GATHERING, **progress))


def test_network_error_of_one_task_ends_fit_at_once(monkeypatch: Any) -> None:
    """A NetworkError of one task ends the fit at the next check."""
    watching = MonitorHarness(monkeypatch, "RuntimeError: x", f"{NETWORK}UDP of b is dropped")
    with pytest.raises(NetworkError) as found:
        watching.look(SETUP_POLL_S + 0.1)
    assert str(found.value) == "UDP of b is dropped; no worker has joined so far"


def test_network_error_rules_out_driver_host_if_workers_joined(monkeypatch: Any) -> None:
    """If some workers have joined, the error rules out the driver's host as the cause."""
    watching = MonitorHarness(monkeypatch, f"{NETWORK}of b", f"{NETWORK}of c")
    with pytest.raises(NetworkError) as found:
        watching.look(SETUP_POLL_S + 0.1, joined=1)
    said = "of b; 1 more report this; 1 of 3 workers have joined, so it is not the driver's host"
    assert str(found.value) == said


def test_setup_error_ends_fit_only_after_wait_message_time(monkeypatch: Any) -> None:
    """A SetupError ends the fit only after WAIT_MESSAGE_S, because Spark repeats the task."""
    watching = MonitorHarness(monkeypatch, f"{SETUP}no room")
    watching.look(SETUP_POLL_S + 0.1)
    watching.look(2 * SETUP_POLL_S + 0.2)
    assert watching.job.looked_at == 1  # no new errors, so they were not read again
    with pytest.raises(SetupError, match=r"^no room$"):
        watching.look(WAIT_MESSAGE_S + 0.1)


def test_task_failure_ends_fit_only_at_second_attempt(
    monkeypatch: Any,
) -> None:
    """A task's failure ends the fit only if its second attempt fails, too."""
    watching = MonitorHarness(monkeypatch, "OSError: reset by the store")
    watching.look(WAIT_MESSAGE_S + 0.1)
    assert watching.said == ["sparkstrom waits: 0 of 3 workers joined, 1 task has a slot"]
    watching.job.retried = ["OSError: reset by the store"]
    with pytest.raises(SetupError, match=r"1 tasks failed before any worker joined: OSError: rese"):
        watching.look(2 * WAIT_MESSAGE_S + 0.2)


class Status:
    """A fake of Spark's trackers; before the job's own stage 4, stage 3 makes the user's rows."""

    def __init__(self, **failed: str) -> None:
        self.failed = failed  # errors by stage and attempt, such as s3_0

    def stage(self, number: int) -> Any:
        failed = [key for key in self.failed if key.startswith(f"s{number}_")]
        counts = {"numActiveTasks": 1, "numFailedTasks": len(failed)}
        return SimpleNamespace(stageId=number, currentAttemptId=0, **counts)

    def tasks(self, stage: int, attempt: int, offset: int, limit: int, *how: Any) -> Any:
        tasks = [
            SimpleNamespace(
                attempt=lambda key=key: int(key[-1]),
                errorMessage=lambda error=error: SimpleNamespace(
                    isDefined=lambda: True, get=lambda: error
                ),
            )
            for key, error in self.failed.items()
            if key.startswith(f"s{stage}_")
        ]
        return SimpleNamespace(size=lambda: len(tasks), apply=lambda i: tasks[i])

    def job(self) -> SparkJob:
        tracker = SimpleNamespace(
            getJobIdsForGroup=lambda group: [7],
            getJobInfo=lambda job: SimpleNamespace(stageIds=[4, 3]),
            getStageInfo=self.stage,
        )
        scala = SimpleNamespace(statusStore=lambda: SimpleNamespace(taskList=self.tasks))
        context = SimpleNamespace(
            statusTracker=lambda: tracker, _jsc=SimpleNamespace(sc=lambda: scala), _jvm=Mock()
        )
        return SparkJob(context, "a fit's", list)


def test_failures_of_row_producing_stage_do_not_count() -> None:
    """Only failures in the job's own stage count, not those of the stage that makes the rows."""
    rows = Status(s3_0="OSError: reset").job()
    assert (rows.count_tasks(), rows.task_errors()) == ((2, 0), [])
    workers = Status(s4_0="OSError: first", s4_1="OSError: second").job()
    assert workers.count_tasks() == (2, 2)
    assert workers.task_errors() == ["OSError: first", "OSError: second"]
    assert workers.task_errors(first_attempt=1) == ["OSError: second"]


def test_task_errors_do_not_end_fit_that_is_training(monkeypatch: Any) -> None:
    """Errors of tasks do not end a fit that is already training."""
    watching = MonitorHarness(monkeypatch, f"{NETWORK}of b")
    watching.look(WAIT_MESSAGE_S + 1, phase=Phase.RUNNING)


@pytest.mark.parametrize(
    ("void", "ports"), [(FIXED, "ports 40123 to 40186"), (VoidConfiguration(), "port 555")]
)
def test_unresponsive_executor_is_named_with_ports_to_open(
    monkeypatch: Any, void: Any, ports: str
) -> None:
    """An executor that gets no answers from the driver is named, with the ports to open."""
    watching = MonitorHarness(monkeypatch, void=void)
    with pytest.raises(NetworkError) as found:
        watching.look(SETUP_POLL_S + 0.1, unresponsive_peers=(Endpoint("10.0.0.7", 555),))
    text = str(found.value)
    assert "the driver at 10.0.0.1:40123 hears the executor at 10.0.0.7:555" in text
    assert text.endswith(f"allow UDP from 10.0.0.1 to 10.0.0.7 {ports}")


def test_error_says_controller_if_not_on_driver(monkeypatch: Any) -> None:
    watching = MonitorHarness(monkeypatch, void=VoidConfiguration(controller="node7"))
    with pytest.raises(NetworkError, match=r"^the controller at 10\.0\.0\.1:40123 hears"):
        watching.look(SETUP_POLL_S + 0.1, unresponsive_peers=(Endpoint("10.0.0.7", 555),))


def test_only_setup_and_network_errors_are_recognized() -> None:
    """Only SetupError and NetworkError are recognized in the text of a task's error."""
    assert setup_error_in("ValueError: x") is None
    assert type(setup_error_in(f"{SETUP}x")) is SetupError
    assert type(setup_error_in(f"{NETWORK}x")) is NetworkError


class Rounds:
    """A SlotMonitor with a fake clock and a fake group of Spark jobs, the newest of which runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.said = 0.0, list[str]()
        self.running_tasks, self.newest, self.status = 0, 7, "RUNNING"
        self.older = list[int]()  # jobs that run besides the newest
        self.looked_at = list[int]()  # the jobs that were read
        monkeypatch.setattr(start_watch.time, "monotonic", lambda: self.now_s)
        tracker = SimpleNamespace(
            getJobIdsForGroup=lambda group: range(self.newest, 0, -1),
            getActiveJobsIds=lambda: [*self.older, self.newest],
            getJobInfo=self.job,
            getStageInfo=lambda stage: SimpleNamespace(
                numActiveTasks=self.running_tasks * (stage == min([*self.older, self.newest])),
                numFailedTasks=0,
            ),
        )
        context = SimpleNamespace(statusTracker=lambda: tracker)
        self.watch = SlotMonitor(SparkJob(context, "a fit's", list), self.said.append)

    def job(self, number: int) -> Any:
        self.looked_at.append(number)
        status = self.status if number == self.newest else "SUCCEEDED"
        return SimpleNamespace(stageIds=[number], status=status)

    def look(self, rounds: int = 0) -> None:
        """Let a check become due after this many rounds of the fit."""
        self.now_s += WAIT_MESSAGE_S + 0.1
        self.watch.on_progress(replace(GATHERING, phase=Phase.RUNNING, commits=rounds))


def test_a_fit_in_rounds_says_once_that_none_of_its_tasks_has_a_slot(monkeypatch: Any) -> None:
    rounds = Rounds(monkeypatch)
    rounds.look()
    assert rounds.said == []  # the first check may be between two stages
    for _ in range(3):
        rounds.look()
    assert rounds.said == [f"sparkstrom waits: no task of the fit has a slot{NO_SLOT_HINT}"]
    rounds.look(1)
    rounds.look(1)
    assert len(rounds.said) == 2


@pytest.mark.parametrize("change", [{"running_tasks": 1}, {"status": "SUCCEEDED"}])
def test_tasks_that_run_and_work_between_jobs_are_no_wait(monkeypatch: Any, change: Any) -> None:
    """The driver program may compute for long between two jobs, as in an accumulator."""
    rounds = Rounds(monkeypatch)
    rounds.look()
    vars(rounds).update(change)
    rounds.look()
    rounds.look()
    assert rounds.said == []


def test_rounds_that_end_between_two_checks_are_no_wait(monkeypatch: Any) -> None:
    rounds = Rounds(monkeypatch)
    for number in range(5):
        rounds.look(number)
    assert rounds.said == []


def test_of_hundreds_of_jobs_only_the_newest_are_read(monkeypatch: Any) -> None:
    """Each job is several calls into the JVM, and each check of a fit reads them again."""
    rounds = Rounds(monkeypatch)
    rounds.newest = 900
    assert rounds.watch._job.count_tasks() == (0, 0)
    assert set(rounds.looked_at) == set(range(900 - JOBS_MAX + 1, 901))


def test_an_old_job_that_still_runs_is_read_as_well(monkeypatch: Any) -> None:
    """A query with many shuffles starts a job for each, of which the oldest have the slots."""
    rounds = Rounds(monkeypatch)
    rounds.newest, rounds.older, rounds.running_tasks = 40, [3], 2
    assert rounds.watch._job.count_tasks() == (2, 0)
    assert set(rounds.looked_at) == {3, *range(40 - JOBS_MAX + 1, 41)}
    rounds.look()
    rounds.look()
    assert rounds.said == []
