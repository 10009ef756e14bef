"""Tests of the choice of a progress display from the option and from where the program runs."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.observe import progress_display as progress_choice
from sparkstrom.observe.progress import PlainTextDisplay, ProgressDisplay
from sparkstrom.observe.progress_bar import TerminalBar
from sparkstrom.observe.progress_display import NotebookBar, check_progress, make_progress_display


class Stream:
    def __init__(self, terminal: bool) -> None:
        self.isatty = lambda: terminal


@pytest.fixture
def simulate_environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that simulates a terminal, an IPython shell or neither."""

    def put(*, terminal: bool = False, shell: Any = None, term: str = "xterm") -> None:
        monkeypatch.setattr(sys, "stderr", Stream(terminal))
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
        monkeypatch.setenv("TERM", term)

    return put


@pytest.mark.parametrize("asked", [True, "auto"])
@pytest.mark.parametrize(
    ("where", "kind"),
    [
        ({}, PlainTextDisplay),
        ({"terminal": True}, TerminalBar),
        ({"terminal": True, "term": "dumb"}, PlainTextDisplay),
        ({"shell": SimpleNamespace(kernel=None)}, PlainTextDisplay),
        ({"terminal": True, "shell": SimpleNamespace()}, TerminalBar),  # IPython at a terminal
        ({"shell": SimpleNamespace(kernel=object())}, NotebookBar),
    ],
)
def test_display_is_chosen_by_terminal_and_shell(
    asked: bool | str, where: dict[str, Any], kind: type, simulate_environment: Any
) -> None:
    """True and "auto" choose the display by the terminal and the IPython shell."""
    simulate_environment(**where)
    assert type(make_progress_display(asked)) is kind


def test_terminal_without_tqdm_gets_plain_display(
    simulate_environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tqdm, a terminal gets the plain display; asking for the bar is an error."""
    simulate_environment(terminal=True)
    monkeypatch.setattr(progress_choice, "_is_installed", lambda package: package != "tqdm")
    assert type(make_progress_display(True)) is PlainTextDisplay
    with pytest.raises(UsageError, match="needs the package tqdm on the driver: pip install tqdm"):
        check_progress("bar")


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (False, ProgressDisplay),
        ("bar", TerminalBar),
        ("plain", PlainTextDisplay),
        ("notebook", NotebookBar),
    ],
)
def test_display_requested_by_name_is_used_anywhere(
    asked: bool | str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A display that is asked for by name is used anywhere."""
    monkeypatch.setattr(progress_choice, "_is_installed", lambda package: True)
    check_progress(asked)
    assert type(make_progress_display(asked)) is kind


@pytest.mark.parametrize("asked", ["Bar", "", None, 1, "tqdm"])
def test_rejects_unknown_progress_option(asked: Any) -> None:
    """Any other value of the option raises ``UsageError``."""
    with pytest.raises(UsageError, match="must be True, False or one of 'auto', 'bar', 'plain'"):
        check_progress(asked)
