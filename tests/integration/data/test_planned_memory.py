"""What `sparkstrom plan` says is what processes of a real fit take, within a stated tolerance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ABOVE, BELOW = 1.15, 0.75  # of the plan: measured memory is between these


@pytest.mark.slow
def test_a_fit_of_five_million_parameters() -> None:
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
