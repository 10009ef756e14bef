"""Test of a decommissioned executor: its worker moves in time, and each row counts once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.spark.decommissioned_job import EPOCHS

JOB = Path(__file__).parent / "decommissioned_job.py"
ROOT = Path(__file__).parents[3]
LIMIT_S = 300.0


@pytest.mark.slow
def test_worker_moves_before_executor_is_decommissioned(tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # also for executors
    done = subprocess.run(
        [sys.executable, str(JOB)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)
    assert told["trainings"] == [EPOCHS]
    assert told["equal"]
    assert told["minibatches"][0] == told["minibatches"][1]
    (moved,) = (text for text in told["warnings"] if "is being decommissioned" in text)
    assert "restarts on another executor" in moved
    assert any("another attempt" in text for text in told["departures"])  # not lost by its silence
