"""Test of `sparkstrom plan`: processes of a real fit take the planned memory, within limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ABOVE, BELOW = 1.15, 0.75  # limits of measured memory / planned memory


@pytest.mark.slow
def test_fit_memory_is_close_to_plan() -> None:
    """Worker and driver of a fit use between 0.75 and 1.15 of the planned memory."""
    command = [sys.executable, "-m", "benchmarks.memory", "--model", "dense", "--json"]
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[3],
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["minibatches"] > 0
    for process in ("worker", "driver"):
        taken, planned = found[f"{process}_bytes"], found[f"{process}_planned_bytes"]
        assert BELOW * planned < taken < ABOVE * planned, process
