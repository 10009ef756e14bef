"""The bytes that transports report as sent, compared with those of the network interface."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

NAMESPACE = ["unshare", "--net", "--", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
PROBE = [sys.executable, "-m", "tests.integration.aeron.wire_probe"]


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    """Skip without network namespaces, in which no other process uses ``lo``."""
    tried = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"makes no network namespace here (as root it would): {tried.stderr.strip()}")


@pytest.mark.parametrize("kind", ["control", "data"])
def test_reported_sent_bytes_match_interface_within_10_percent(kind: str) -> None:
    """The reported bytes differ from those of ``lo`` by less than 10%."""
    done = subprocess.run(
        [*NAMESPACE, *PROBE, kind], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert 0.9 < figures["told"] / figures["lo"] < 1.1, figures
