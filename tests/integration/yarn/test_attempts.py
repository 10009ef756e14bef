"""Test on a real YARN in cluster mode: application attempts after others that were killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.checkpoint.checkpoint_progress import read_checkpoint_progress
from tests.integration.yarn.attempts_job import BATCH, EPOCHS, ROWS

JOB = Path(__file__).parent / "attempts_job.py"
THRICE = {
    "spark.yarn.maxAppAttempts": "3",
    "spark.executor.instances": "1",  # of two cores
    "spark.python.daemon.module": "sparkstrom.spark.daemon",  # imports once for both workers
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_new_attempt_resumes_checkpoint_or_restarts_with_warning(cluster, tmp_path) -> None:
    done = cluster.submit(JOB, str(tmp_path / "run"), conf=THRICE, timeout_s=400)
    assert done.exit_code == 0, done.output + done.container_logs
    assert "Traceback" not in done.container_logs
    lines = done.container_logs.splitlines()
    answers = [json.loads(line) for line in lines if line.startswith('{"attempt"')]
    second, third = sorted(answers, key=lambda told: told["attempt"])
    for told, attempt in (second, "2"), (third, "3"):
        assert told["attempt"] == attempt
        assert told["minibatches"] == told["minibatches_expected"]
        assert told["replicas_equal"]
    check_resumed(second, done.container_logs)
    check_restarted(third, done.container_logs)


def check_resumed(told: dict, logs: str) -> None:
    """Check that the second attempt resumed the fit in which the first was killed."""
    saved = read_checkpoint_progress(told["resumed_from"], BATCH)
    assert 0 < saved.minibatches < told["minibatches_expected"]
    assert told["minibatches_resumed"] == saved.minibatches
    assert told["examples"] == EPOCHS * ROWS - saved.examples  # the remaining rows, each once
    assert f"sparkstrom resumes from {told['resumed_from']}" in logs
    assert not any("this is attempt" in warning for warning in told["warnings"])


def check_restarted(told: dict, logs: str) -> None:
    """Check that the third attempt restarted, with a warning, the fit without checkpoints."""
    assert told["resumed_from"] is None
    assert told["examples"] == EPOCHS * ROWS
    [said] = [warning for warning in told["warnings"] if "this is attempt" in warning]
    assert said.startswith("this is attempt 3 of application_")
    assert "checkpoint_directory=... on a file system that every node reaches" in said
    assert f"sparkstrom warns: {said}" in logs
