"""Tests of the command ``doctor`` in a separate process, on healthy and on faulty machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.hosts import lacking
from sparkstrom.transport.aeron.driver_process import find_free_port

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "sparkstrom.cli.main", "doctor", "--json"]
CONF = {"spark.driver.host": "127.0.0.1", "spark.ui.enabled": "false"}


def run_doctor(
    master: str, *, before: str = "", env: dict[str, str] | None = None, **options: str
) -> tuple[int, dict[str, Any], str]:
    """Run the doctor; return its exit code, its JSON document and stderr.

    ``before`` are shell commands that run first, in the same separate mount namespace.
    """
    command = [*COMMAND, "--master", master, "--wait", "300"]
    conf = CONF | {f"spark.sparkstrom.{name}": value for name, value in options.items()}
    for key, value in conf.items():
        command += ["--conf", f"{key}={value}"]
    if before:
        command = ["unshare", "--mount", "sh", "-c", f'{before} && exec "$@"', "-", *command]
    done = subprocess.run(
        command,
        env=os.environ | (env or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=550,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


def levels(document: dict[str, Any], check: str) -> dict[str, str]:
    """Return the levels of a check's findings, by place."""
    return {f["where"]: f["level"] for f in document["findings"] if f["check"] == check}


def test_doctor_finds_no_failure_on_healthy_cluster() -> None:
    first = find_free_port("127.0.0.1", 0) % 60_000 + 1025
    code, document, said = run_doctor("local-cluster[2,1,1024]", port_range=f"{first}-{first + 40}")
    failed = [f for f in document["findings"] if f["level"] == "failure"]
    assert (code, failed) == (0, []), said
    assert document["ok"]
    (names,) = {tuple(document["matrix"])}
    assert len(names) == 3
    for sender in names:
        for receiver in set(names) - {sender}:
            way = document["matrix"][sender][receiver]
            assert way["heard"]
            assert way["whole"]
            assert way["round_trip_ms"] > 0
    for check in ("aeron library", "media driver", "shared memory", "kernel cache", "mtu"):
        assert set(levels(document, check)) == set(names), check
    ports = [f["found"] for f in document["findings"] if f["check"] == "media driver"]
    numbers = {int(text.partition(" (")[0].rpartition(":")[2]) for text in ports}
    assert all(first <= number <= first + 40 for number in numbers)
    assert {f["found"] for f in document["findings"] if f["check"] == "executors"} == {
        "2 registered"
    }
    assert "probing UDP between 3 processes" in said


def test_doctor_fails_if_mask_matches_no_interface() -> None:
    code, document, said = run_doctor("local[1]", network_mask="203.0.113.0/24")
    assert code == 1, said
    assert not document["ok"]
    assert set(levels(document, "media driver").values()) == {"failure"}
    (found,) = {f["found"] for f in document["findings"] if f["check"] == "media driver"}
    assert "203.0.113.0/24 matches no address" in found


def test_doctor_fails_without_aeron_library() -> None:
    code, document, said = run_doctor(
        "local[1]", env={"SPARKSTROM_AERON_LIBRARY": "/nowhere/libaeron.so"}
    )
    assert code == 1, said
    assert set(levels(document, "aeron library").values()) == {"failure"}
    (found,) = {f["found"] for f in document["findings"] if f["check"] == "aeron library"}
    assert "/nowhere/libaeron.so cannot be loaded" in found


@pytest.mark.skipif((reason := lacking()) is not None, reason=reason or "")
def test_doctor_warns_of_small_shared_memory() -> None:
    code, document, said = run_doctor(
        "local[1]", before="mount -t tmpfs -o size=1m tmpfs /dev/shm", network_mask="127.0.0.0/8"
    )
    assert code == 0, said  # the media drivers' logs are on the disk
    assert set(levels(document, "shared memory").values()) == {"warning"}
    remedies = {f["remedy"] for f in document["findings"] if f["check"] == "shared memory"}
    assert all("mount -o remount,size=" in remedy for remedy in remedies)
