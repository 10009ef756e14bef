"""Tests of a rehearsal's runs in other processes: equal results, and none lost."""

from __future__ import annotations

import logging
import os
import sys
from types import ModuleType
from typing import Any

import pytest

from sparkstrom.base import child_processes
from sparkstrom.base.child_processes import THREAD_LIMIT_VARIABLES
from sparkstrom.observe.progress import ProgressDisplay
from sparkstrom.rehearsal import run_process, runs
from sparkstrom.rehearsal.data import SampledData
from sparkstrom.rehearsal.fit import SimulatedFit
from sparkstrom.rehearsal.result import ALL_REDUCE, ONE_PROCESS, SPARKSTROM
from sparkstrom.rehearsal.run_process import RunProcess, free_memory_bytes
from sparkstrom.rehearsal.runs import Run, RunScheduler, RunSimulator, plan_runs
from tests.unit.rehearsal.recipes import (
    make_conditions,
    make_momentum_network,
    make_recipe,
    make_sample,
)

RUNS = plan_runs((1, 4), ("sequential", "ddp"), None)


class StartedProcesses(list[RunProcess]):
    """The list of started processes."""


@pytest.fixture
def started_processes(monkeypatch: pytest.MonkeyPatch) -> StartedProcesses:
    """Count the started processes; each run counts as long, and there are three cores."""
    made = StartedProcesses()

    def start(simulator: bytes) -> RunProcess:
        made.append(RunProcess(simulator))
        return made[-1]

    monkeypatch.setattr(runs, "RunProcess", start)
    monkeypatch.setattr(runs, "FIRST_POLL_S", 0.0)
    monkeypatch.setattr(runs, "LONG_S", 0.0)
    monkeypatch.setattr(runs, "POLL_S", 0.0)
    monkeypatch.setattr(runs, "count_cores", lambda: 3)
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    return made


def simulate_runs(plan: list[Run] = RUNS) -> list[SimulatedFit]:
    made = make_recipe(make_momentum_network(), epochs=1)
    simulator = RunSimulator(
        made, SampledData(made, make_sample()), make_conditions(), compares_rules=True
    )
    return RunScheduler(simulator, plan, made.model.n_params, ProgressDisplay()).simulate_all()


@pytest.fixture(scope="module")
def results_in_one_process() -> list[SimulatedFit]:
    """Return the results of runs in this process alone."""
    return simulate_runs()


def comparable_results(results: list[SimulatedFit]) -> list[Any]:
    return [(fit.digest, fit.points, fit.seconds, fit.link_bytes) for fit in results]


def test_plan_has_all_worker_counts_between_baselines() -> None:
    """A rehearsal has one process, each number of workers per scaling rule, and all-reduce."""
    assert [
        Run(ONE_PROCESS, 1),
        Run(SPARKSTROM, 1, "sequential"),
        Run(SPARKSTROM, 4, "sequential"),
        Run(SPARKSTROM, 4, "ddp"),
        Run(ALL_REDUCE, 4),
    ] == RUNS
    assert plan_runs((2,), (), "limited")[1] == Run(SPARKSTROM, 2, "limited")


def test_runs_in_other_processes_give_same_results(
    results_in_one_process: list[SimulatedFit], started_processes: StartedProcesses
) -> None:
    """Runs in two more processes give the same results as in one."""
    beside = simulate_runs()
    assert len(started_processes) == 2
    assert all(process.run in RUNS[2:] for process in started_processes)
    assert comparable_results(beside) == comparable_results(results_in_one_process)


def test_run_of_dead_process_is_simulated_in_this_process(
    results_in_one_process: list[SimulatedFit],
    started_processes: StartedProcesses,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A run whose process dies is simulated in this process, with a warning."""
    begin = RunProcess.begin

    def begin_and_die(self: RunProcess, run: Run) -> None:
        self._process.kill()
        begin(self, run)

    monkeypatch.setattr(RunProcess, "begin", begin_and_die)
    with caplog.at_level(logging.WARNING):
        beside = simulate_runs()
    assert "a process that simulated a run died" in caplog.text
    assert comparable_results(beside) == comparable_results(results_in_one_process)


def raise_type_error(simulator: RunSimulator) -> bytes:
    raise TypeError("cannot pickle '_thread.lock' object")


def test_no_simulation_process_starts_without_benefit(
    started_processes: StartedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With JAX loaded, one core, little memory or an unpicklable model, no process starts."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jax", ModuleType("jax"))
        simulate_runs(RUNS[:2])
    with monkeypatch.context() as patch:
        patch.setattr(runs, "count_cores", lambda: 1)
        simulate_runs(RUNS[:2])
    with monkeypatch.context() as patch:
        patch.setattr(runs, "free_memory_bytes", lambda: 500e6)
        simulate_runs(RUNS[:2])
    with monkeypatch.context() as patch:
        patch.setattr(runs, "pickle_by_value", raise_type_error)
        simulate_runs(RUNS[:2])
    assert started_processes == []
    simulate_runs(RUNS[:2])
    assert len(started_processes) == 1


def test_simulating_process_uses_one_thread_despite_omp_num_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A simulating process uses one thread, whatever OMP_NUM_THREADS is."""
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    made: dict[str, Any] = {}

    def note(command: list[str], **given: Any) -> None:
        made.update(given["env"])
        raise OSError("no process is needed")

    monkeypatch.setattr(run_process.subprocess, "Popen", note)
    with pytest.raises(OSError, match="no process"):
        RunProcess(b"")
    assert {made[name] for name in THREAD_LIMIT_VARIABLES} == {"1"}
    assert child_processes.make_child_environment(2)["OMP_NUM_THREADS"] == "6"
    assert all(os.path.isabs(path) for path in made["PYTHONPATH"].split(os.pathsep))


def test_free_memory_is_minimum_of_host_and_container(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Free memory is the minimum of the host's and the container's."""
    monkeypatch.setattr(run_process, "CGROUP", tmp_path)
    host = free_memory_bytes()
    assert host > 50e6
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory_bytes() > 50e6
    (tmp_path / "memory.max").write_text("41000\n")
    assert free_memory_bytes() == 40_000
