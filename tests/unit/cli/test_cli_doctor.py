"""Tests of ``sparkstrom doctor``: wrong calls, exit codes, and a machine without Java."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparkstrom.cli.main import main
from sparkstrom.spark.doctor import examination as examining
from sparkstrom.spark.doctor.checks import Report, create_failure, create_ok, create_warning


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--conf", "spark.sparkstrom.lease_s"), "--conf 'spark.sparkstrom.lease_s': write a key"),
        (("--conf", "lease_s=3"), "--conf 'lease_s=3'"),
        (("--conf", "spark.sparkstrom.leases=3"), "did you mean lease_s?"),
        (("--conf", "spark.sparkstrom.network_mask=10.0.0.1"), "write the network, such as"),
        (("--wait", "0"), "--wait 0.0"),
    ],
)
def test_wrong_flag_exits_with_2_before_anything_starts(
    capsys: pytest.CaptureFixture[str], flags: Any, words: str
) -> None:
    """A wrong flag exits with code 2 before anything starts."""
    assert main(["doctor", *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sparkstrom doctor: ")
    assert words in said


@pytest.mark.parametrize(
    ("finding", "code"),
    [
        (create_ok("java", "driver", "17"), 0),
        (create_warning("java", "driver", "11", "install 17"), 0),
        (create_failure("java", "driver", "none", "install 17"), 1),
    ],
)
def test_exit_code_is_1_only_with_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, finding: Any, code: int
) -> None:
    """The exit code is 1 if there is a failure, and 0 if there are only warnings."""
    monkeypatch.setattr(examining, "examine", lambda call, say: Report([finding]))
    assert main(["doctor", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == (code == 0)
    assert document["findings"][0]["remedy"] == finding.remedy
    assert document["matrix"] == {}


def test_missing_java_is_only_finding(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Java, the only finding is a failure that mentions JAVA_HOME and a remedy."""
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    assert main(["doctor", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["check"], found["level"]) == ("java", "failure")
    assert "/nowhere/bin/java (JAVA_HOME)" in found["found"]
    assert "openjdk-17" in found["remedy"]
