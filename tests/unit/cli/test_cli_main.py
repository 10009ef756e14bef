"""Tests of the command ``sparkstrom``: its subcommands, and errors as one message with code 2."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.base.version import __version__
from sparkstrom.cli import main as command


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    subparsers.add_parser("fly-kite").add_argument("--height", type=int, default=3)


def run(args: argparse.Namespace) -> int:
    if args.height > 100:
        raise SetupError(f"height {args.height}: the string is too short; take a longer one")
    return args.height


@pytest.fixture
def kite(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Make ``fly-kite`` the only subcommand; return its module."""
    module = ModuleType("fly_kite")
    module.add_parser, module.run = add_parser, run
    monkeypatch.setattr(command, "_load_commands", lambda: {"fly-kite": module})
    return module


@pytest.mark.usefixtures("kite")
def test_exit_code_is_that_of_subcommand() -> None:
    assert command.main(["fly-kite"]) == 3
    assert command.main(["fly-kite", "--height", "7"]) == 7


@pytest.mark.usefixtures("kite")
def test_setup_error_prints_one_message_and_exits_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A ``SetupError`` of a subcommand becomes one message and exit code 2."""
    assert command.main(["fly-kite", "--height", "101"]) == 2
    expected = "sparkstrom fly-kite: height 101: the string is too short; take a longer one\n"
    assert capsys.readouterr().err == expected


def test_help_names_the_sub_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Help lists all subcommands but ``simulate``, which is hidden."""
    with pytest.raises(SystemExit) as left:
        command.main(["--help"])
    assert left.value.code == 0
    listed = re.findall(r"^    ([a-z-]+)(?: |$)", capsys.readouterr().out, re.MULTILINE)
    assert listed == ["doctor", "fetch-aeron", "plan", "rehearse", "report", "scaling"]
    assert {*command._load_commands()} == {*listed, "simulate"}


def test_missing_subcommand_exits_with_2() -> None:
    """Without a subcommand, the exit code is 2."""
    with pytest.raises(SystemExit) as left:
        command.main([])
    assert left.value.code == 2


def test_version_flag_prints_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--version"])
    assert capsys.readouterr().out == f"sparkstrom {__version__}\n"


def test_closed_output_pipe_causes_no_traceback() -> None:
    """With ``| head``, for example, no traceback appears, not even from Python's last flush."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "sparkstrom.cli.main", "scaling", "--params", "1e6"]
    try:
        ended = subprocess.run(
            [*command, "--step", "1s"], stdout=writes, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writes)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_broken_pipe_of_other_file_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken pipe that is not our output, such as one to a JVM, raises its error."""

    def broken(args: argparse.Namespace) -> int:
        raise BrokenPipeError("elsewhere")

    module = ModuleType("fly_kite")
    module.add_parser, module.run = add_parser, broken  # type: ignore[attr-defined]
    monkeypatch.setattr(command, "_load_commands", lambda: {"fly-kite": module})
    with pytest.raises(BrokenPipeError, match="elsewhere"):
        command.main(["fly-kite"])


def test_ctrl_c_ends_a_command_without_a_traceback(
    kite: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code of an interrupted command is 130."""

    def interrupt(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    kite.run = interrupt  # type: ignore[attr-defined]
    assert command.main(["fly-kite"]) == 130
    assert capsys.readouterr().err == "sparkstrom fly-kite: interrupted\n"


def test_command_works_without_standard_output(
    kite: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, a command that was started with ``>&-`` ended with an AttributeError."""
    kite.run = lambda args: 0  # type: ignore[attr-defined]
    monkeypatch.setattr(sys, "stdout", None)
    assert command.main(["fly-kite"]) == 0
