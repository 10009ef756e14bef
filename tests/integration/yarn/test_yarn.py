"""On a real YARN in cluster mode: equal replicas and exit code 0; a failure is exit code 1."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

pytestmark = pytest.mark.slow


def test_digits_in_cluster_mode_end_with_equal_replicas(cluster) -> None:
    done = cluster.submit(ROOT / "examples/digits.py")
    assert done.exit_code == 0, done.output + done.container_logs
    hashes = dict(re.findall(r"^hash (\S+) +([0-9a-f]{16})$", done.container_logs, re.MULTILINE))
    assert len(hashes) == 5, done.container_logs  # four workers and the driver
    assert len(set(hashes.values())) == 1


def test_an_exception_in_training_fails_the_application_with_its_cause_in_the_log(cluster) -> None:
    done = cluster.submit(HERE / "burning_job.py")
    assert done.exit_code == 1, done.output
    assert "RuntimeError: the reactor is on fire" in done.container_logs
    assert "step" in done.container_logs
