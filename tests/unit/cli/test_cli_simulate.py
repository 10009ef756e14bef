"""Tests of ``python -m sparkstrom.simulation``: output, exit codes, and commands to repeat runs."""

from __future__ import annotations

import json
import math
import re

import pytest

from sparkstrom.cli.main import main
from sparkstrom.protocol.master.members import ResidualCheckpoints
from sparkstrom.simulation import fuzzing
from sparkstrom.simulation.__main__ import main as simulate
from sparkstrom.simulation.links import DeliveryChecker

REPEAT = "to repeat: python -m sparkstrom.simulation "
REPEAT_SHRUNK = "to repeat the shrunk one: python -m sparkstrom.simulation "
CALM = ["--calm", "--nodes", "2", "--jobs", "1"]


def test_json_output_has_one_line_per_seed(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json, each seed is one line with the same keys."""
    assert simulate(["--seeds", "3:6", "--mode", "plain", "--json", *CALM]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["seed"] for line in lines] == [3, 4, 5]
    assert all(set(line) == {"seed", "violations", "updates", "faults"} for line in lines)
    assert all(line["violations"] == [] and line["updates"] > 0 for line in lines)


def test_single_seed_prints_result_and_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(["--seeds", "7", *CALM]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("seed 7: ok (")
    assert out[1] == "1 seeds, 0 with violations"


def test_output_of_several_processes_is_in_seed_order(capsys: pytest.CaptureFixture[str]) -> None:
    """The output is in the order of the seeds, also with several processes."""
    given = ["--seeds", "0:20", "--nodes", "2", "--json"]
    assert simulate([*given, "--jobs", "2"]) == 0
    on_two = capsys.readouterr().out
    assert simulate([*given, "--jobs", "1"]) == 0
    assert capsys.readouterr().out == on_two


def test_violation_exits_with_1_and_prints_repeat_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A violation exits with code 1 and prints a command that reproduces it."""
    monkeypatch.setattr(ResidualCheckpoints, "record", lambda self, executor, owner, kept: None)
    monkeypatch.setattr(fuzzing, "SHRINK_S", math.inf)
    given = ["--seeds", "0:2", "--epochs", "1", "--json", *CALM]
    assert simulate(given) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert json.loads(out.splitlines()[0])["violations"]
    repeat = next(line for line in err.splitlines() if line.startswith(REPEAT))
    assert "--nodes 2 --seeds 0 --mode plain --calm --epochs 1 --transcript" in repeat
    assert simulate(repeat.removeprefix(REPEAT).split()) == 1


def test_an_exception_inside_a_run_is_a_violation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ResidualCheckpoints, "record", lambda self: None)
    assert simulate(["--seeds", "0", "--json", *CALM]) == 1
    assert "TypeError" in json.loads(capsys.readouterr().out)["violations"][0]


def test_transcript_flag_prints_events_of_run(capsys: pytest.CaptureFixture[str]) -> None:
    """--transcript prints the run's events."""
    assert simulate(["--seeds", "1", "--crashes", "2", "--transcript", *CALM]) == 0
    err = capsys.readouterr().err
    assert "crash p" in err
    assert "complete" in err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--seeds", "7:7"], "need A:B with A < B"),
        (["--seeds", "x"], "need A:B with A < B"),
        (["--nodes", "0"], "--nodes 0: need 1 to"),
        (["--mode", "ring"], "--mode 'ring': there is only plain"),
        (["--through", "air"], "--through 'air': there is only objects, codec, endpoint"),
        (["--replicas", "9"], "--replicas '9': there is only numbers, real"),
        (["--mode", "links", "--through", "codec"], "messages have a length and no bytes"),
        (["--jobs", "0"], "--jobs 0: need at least 1"),
        (["--loss", "2"], "--loss 2.0: a share is at most 1"),
        (["--crashes", "-1"], "--crashes -1: need at least 0"),
        (["--max-lead", "0"], "--max-lead 0: need at least 1"),
    ],
)
def test_invalid_argument_exits_with_2(
    given: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid argument exits with code 2 and a message."""
    assert simulate([*given]) == 2
    assert words in capsys.readouterr().err


def test_shrunk_run_of_failing_seed_is_reproducible(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shrunk run lacks what does not matter for the bug; its command reproduces it."""
    monkeypatch.setattr(fuzzing, "SHRINK_S", math.inf)  # it ends without this limit, too
    monkeypatch.setattr(ResidualCheckpoints, "record", lambda self, executor, owner, kept: None)
    given = ["--seeds", "0", "--mode", "mesh", "--nodes", "4", "--jobs", "1"]
    assert simulate([*given, "--loss", "0.1", "--stop", "0", "--failure", "0"]) == 1
    err = capsys.readouterr().err.splitlines()
    repeat = next(line for line in err if line.startswith(REPEAT_SHRUNK))
    assert "--nodes 1 " in repeat
    assert "--loss" not in repeat
    assert "crash" not in repeat
    assert any("training begins" in line for line in err)
    command = repeat.removeprefix(REPEAT_SHRUNK).split()
    assert simulate([*command, "--no-shrink"]) == 1
    shrunk = next(line for line in err if line.startswith("seed 0, shrunk: "))
    assert shrunk.replace(", shrunk", "") in capsys.readouterr().err.splitlines()


def test_json_run_is_shrunk_only_with_shrink_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --json, a failing seed is shrunk only if --shrink is given."""
    monkeypatch.setattr(ResidualCheckpoints, "record", lambda self, executor, owner, kept: None)
    monkeypatch.setattr(fuzzing, "SHRINK_S", math.inf)
    assert simulate(["--seeds", "0", "--json", *CALM]) == 1
    assert "shrunk" not in capsys.readouterr().err
    assert simulate(["--seeds", "0", "--json", "--shrink", *CALM]) == 1
    assert "shrunk" in capsys.readouterr().err


def test_through_and_replicas_are_part_of_repeat_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--through and --replicas have an effect, and are part of the command to repeat."""
    chosen = ["--through", "endpoint", "--replicas", "real"]
    given = ["--seeds", "0", "--json", *chosen, *CALM]
    assert simulate([*given, "--repeat", "0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["faults"].keys() >= {"repeated", "recordings"}
    monkeypatch.setattr(
        DeliveryChecker, "check_at_end", lambda self, ends, recordings: self.violation("I7: x")
    )
    assert simulate(given) == 1
    assert " --through endpoint --replicas real" in capsys.readouterr().err


def test_old_simulate_subcommand_works_but_is_not_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``sparkstrom simulate`` still works but is not listed in the help."""
    assert main(["simulate", "--seeds", "7", *CALM]) == 0
    assert capsys.readouterr().out.startswith("seed 7: ok (")
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^ {4}(\S+)", capsys.readouterr().out, re.MULTILINE)
    assert "rehearse" in commands
    assert "simulate" not in commands
