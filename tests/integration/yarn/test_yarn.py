"""Tests on a real YARN: an example in client mode, and a failure in cluster mode."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[2] / "examples/torch_digits.py"

pytestmark = pytest.mark.slow


def test_an_example_ends_with_equal_replicas_in_client_mode(cluster, udp_range) -> None:
    """All replicas are equal; for cluster mode see test_packed_environment.py."""
    conf = {"spark.executor.cores": "1", **udp_range.conf()}
    with udp_range.watched():
        done = cluster.submit(EXAMPLE, conf=conf, mode="client")
    assert done.exit_code == 0, done.output + done.container_logs
    hashes = dict(re.findall(r"^hash (\S+) +([0-9a-f]{16})$", done.output, re.MULTILINE))
    assert len(hashes) == 3, done.output  # two workers and the driver
    assert len(set(hashes.values())) == 1
    assert len(udp_range.seen) >= 3  # more if a media driver restarts


def test_training_exception_fails_application_with_cause_in_log(cluster) -> None:
    done = cluster.submit(HERE / "burning_job.py", conf={"spark.executor.instances": "1"})
    assert done.exit_code == 1, done.output
    assert "RuntimeError: the reactor is on fire" in done.container_logs
    assert "step" in done.container_logs
