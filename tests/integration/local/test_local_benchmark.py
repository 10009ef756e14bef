"""Tests that benchmarks of one machine run, and print the figures of each system as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


def run_benchmark(module: str, **options: object) -> dict[str, Any]:
    """Run a benchmark with these options; return the figures by system."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {figures["system"]: figures for figures in map(json.loads, done.stdout.splitlines())}


def test_rounds_benchmark_measures_each_phase() -> None:
    """``benchmarks.rounds`` measures each phase of an update's way, and Aeron by itself."""
    found = run_benchmark("rounds", systems="wrapper,aeron", sizes=1000, workers=2, steps=120)
    assert list(found) == ["wrapper", "aeron"]
    fit = found["wrapper"]
    assert fit["replicas_equal"]
    assert fit["updates"] > 0
    for phase in (fit["commit_ms"], fit["applied_ms"], fit["round_ms"], found["aeron"]["bell_ms"]):
        assert 0 < phase[0] <= phase[1]  # the median, and the 99th percentile
    assert fit["cpu_ms"]["origin"] > 0
    assert fit["cpu_ms"]["receiver"] > 0
    assert fit["cpu_ms"]["master"]["thread"] > fit["cpu_ms"]["master"]["protocol"] > 0


@pytest.mark.slow
def test_local_benchmark_reports_figures_of_each_system() -> None:
    given = {"systems": "ddp,tax", "epochs": 1, "steps": 4, "step_ms": 2, "repeats": 1}
    found = run_benchmark("local", **given, params=5000)
    assert list(found) == ["ddp", "tax"]
    assert found["ddp"]["examples_per_s"] > 0
    assert found["ddp"]["seconds_to"] is None  # after one epoch
    assert 0 < found["ddp"]["accuracy"] < 0.97
    assert found["tax"]["params"] == 5000
    assert found["tax"]["tax_cpu_ms"] > 0
