"""On a real YARN in cluster mode the first attempt is killed -9 while it trains: what YARN's second
attempt makes of it, with checkpoints and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.checkpoint.contained import contained
from tests.integration.yarn.twice_job import BATCH, EPOCHS, ROWS

JOB = Path(__file__).parent / "twice_job.py"
TWICE = {
    "spark.yarn.maxAppAttempts": "2",
    "spark.executor.instances": "1",  # of two cores
    "spark.python.daemon.module": "sparkstrom.spark.daemon",  # imports once for both workers
}

pytestmark = pytest.mark.slow


def found_by_the_second(done) -> dict[str, object]:
    """What it printed. The first one ended without a word."""
    assert done.exit_code == 0, done.output + done.container_logs
    assert "Traceback" not in done.container_logs
    lines = done.container_logs.splitlines()
    [told] = [json.loads(line) for line in lines if line.startswith('{"attempt"')]
    assert told["attempt"] == "2"
    assert told["minibatches"] == told["expected"]
    assert told["equal"]
    return told


def test_the_second_attempt_goes_on_from_the_newest_checkpoint(cluster, tmp_path) -> None:
    done = cluster.submit(JOB, "ApplicationMaster", str(tmp_path / "run"), conf=TWICE)
    told = found_by_the_second(done)
    saved = contained(told["resumed_from"], BATCH)
    assert 0 < saved.minibatches < told["expected"]
    assert told["resumed"] == saved.minibatches
    assert told["examples"] == EPOCHS * ROWS - saved.examples  # the rest, each once
    assert f"sparkstrom resumes from {told['resumed_from']}" in done.container_logs
    assert not any("this is attempt" in warning for warning in told["warnings"])


def test_without_checkpoints_the_second_attempt_begins_anew_and_says_so(cluster) -> None:
    done = cluster.submit(JOB, "driver", "none", conf=TWICE)
    told = found_by_the_second(done)
    assert told["resumed_from"] is None
    assert told["examples"] == EPOCHS * ROWS
    [said] = [warning for warning in told["warnings"] if "this is attempt" in warning]
    assert said.startswith("this is attempt 2 of application_")
    assert "checkpoint_directory=... on a file system that every node reaches" in said
    assert f"sparkstrom warns: {said}" in done.container_logs
