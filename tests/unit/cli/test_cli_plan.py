"""Tests of ``sparkstrom plan``: each flag has an effect, and wrong calls exit with code 2."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparkstrom.cli.main import main

ASKED = ["plan", "--params", "1000000", "--workers", "8"]


def run_plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    """Return the JSON plan of a command with these flags."""
    assert main([*ASKED, *flags, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    "flags",
    [
        ("--workers-per-node", "2"),
        ("--executors-per-host", "2"),
        ("--optimizer", "sgd"),
        ("--library", "dense"),
        ("--buffers", "10m"),
        ("--batch-memory", "64m"),
        ("--log", "100m"),
        ("--window", "4m"),
        ("--train-on", "replica"),
        ("--mesh", "mesh"),
        ("--mesh", "mesh", "--fan-out", "4"),
        ("--port", "5000"),
    ],
)
def test_every_flag_changes_the_plan(capsys: pytest.CaptureFixture[str], flags: Any) -> None:
    assert run_plan(capsys, *flags) != run_plan(capsys)


AVERAGED = ("--averaging", "averaged")


@pytest.mark.parametrize(
    "flags",
    [
        ("--averaging", "own"),
        ("--averaging", "new"),
        (*AVERAGED, "--outer"),
        (*AVERAGED, "--checkpoints", "one"),
        ("--averaging", "own", "--checkpoints", "all"),
        (*AVERAGED, "--batch-memory", "64m"),
        (*AVERAGED, "--workers-per-node", "2"),
        (*AVERAGED, "--buffers", "10m"),
        (*AVERAGED, "--library", "dense"),
    ],
)
def test_every_averaging_flag_changes_plan(capsys: pytest.CaptureFixture[str], flags: Any) -> None:
    """With --averaging, each flag changes the plan."""
    assert run_plan(capsys, *flags) != run_plan(capsys, *AVERAGED)


def test_averaging_plan_text_omits_gradient_sharing(capsys: pytest.CaptureFixture[str]) -> None:
    """The readable plan of averaging does not mention gradient sharing's resources."""
    assert main([*ASKED, *AVERAGED]) == 0
    text = capsys.readouterr().out
    assert "beside an executor's heap" in text
    for of_others in ("UDP", "log_bytes", "media driver", "/dev/shm", "unicast_port"):
        assert of_others not in text


def test_averaging_plan_is_within_10_percent_of_measured_memory(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The measured peaks are in docs/averaging.md: 100 million parameters, SGD, two workers."""
    flags = ("--params", "100018567", "--workers", "2", "--optimizer", "sgd", "--library", "dense")
    made = run_plan(capsys, *AVERAGED, *flags, "--batch-memory", "16m")
    worker, driver = made["worker"]["total"] / 2**20, made["driver"]["total"] / 2**20
    assert 1273 < worker < 1.1 * 1273
    assert 1699 < driver < 1.1 * 1699


@pytest.mark.parametrize("text", ["1e6", "1000000", "1_000_000"])
def test_params_flag_accepts_each_number_notation(
    capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """The number of parameters may be written in each of these forms."""
    assert main([*ASKED, "--json"]) == 0
    wanted = capsys.readouterr().out
    assert main(["plan", "--params", text, "--workers", "8", "--json"]) == 0
    assert capsys.readouterr().out == wanted


def test_plan_is_readable_text_without_json_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json, the plan is readable text."""
    assert main(ASKED) == 0
    assert "beside an executor's heap" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--params", "-1"), "params=-1: must be a whole number of at least 1"),
        (("--params", "many"), "--params 'many'"),
        (("--workers", "0"), "workers=0"),
        (("--optimizer", "adamant"), "optimizer='adamant': must be one of"),
        (("--log", "lots"), "--log 'lots': write a size such as 512m"),
        (("--log", "9" * 400), "write a size such as 512m"),
        (("--log", "1m"), "log_bytes"),
        (("--batch-memory", "1"), "batch_memory_bytes=1"),
        (("--mesh", "star"), "mesh_build_mode='star'"),
        (("--mesh", "mesh", "--fan-out", "0"), "mesh_fan_out=0"),
        (("--port", "0"), "unicast_port=0"),
        (("--outer",), "--outer is a step of rounds: add --averaging"),
        ((*AVERAGED, "--port", "5000"), "--port: rounds are Spark jobs, without UDP"),
        ((*AVERAGED, "--fan-out", "2"), "--fan-out: rounds are Spark jobs"),
        (
            (*AVERAGED, "--checkpoints", "all"),
            "--checkpoints all: with --averaging averaged, checkpoints contain one optimizer state",
        ),
        (("--averaging", "new", "--checkpoints", "all"), "write --checkpoints one"),
        (
            ("--averaging", "own", "--checkpoints", "one"),
            "checkpoints contain all workers' optimizer states: write --checkpoints all",
        ),
    ],
)
def test_wrong_flag_exits_with_2_and_names_flag(
    capsys: pytest.CaptureFixture[str], flags: Any, words: str
) -> None:
    """A wrong flag or combination exits with code 2 and a message that names it."""
    assert main([*ASKED, *flags]) == 2
    said = capsys.readouterr().err
    assert said.startswith("sparkstrom plan: ")
    assert words in said
