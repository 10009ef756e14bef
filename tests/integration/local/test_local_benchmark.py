"""Test of benchmarks.local: it prints the figures of each system as JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow
def test_each_system_says_its_figures() -> None:
    given = {"systems": "ddp,tax", "epochs": 1, "steps": 4, "step-ms": 2, "repeats": 1}
    options = [f"--{name}={value}" for name, value in given.items()]
    command = ["-m", "benchmarks.local", *options, "--params=5000", "--json"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True)
    found = {told["system"]: told for told in map(json.loads, done.stdout.splitlines())}
    print(found)
    assert list(found) == ["ddp", "tax"]
    assert found["ddp"]["examples_per_s"] > 0
    assert found["ddp"]["seconds_to"] is None  # after one epoch
    assert 0 < found["ddp"]["accuracy"] < 0.97
    assert found["tax"]["params"] == 5000
    assert found["tax"]["tax_cpu_ms"] > 0
