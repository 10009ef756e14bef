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
def somewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
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
def test_it_follows_from_where_it_runs(
    asked: bool | str, where: dict[str, Any], kind: type, somewhere: Any
) -> None:
    """True and "auto" choose the display by the terminal and the IPython shell."""
    somewhere(**where)
    assert type(make_progress_display(asked)) is kind


def test_without_tqdm_a_terminal_gets_plain_lines(
    somewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without tqdm, a terminal gets the plain display; asking for the bar is an error."""
    somewhere(terminal=True)
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
def test_who_asks_for_one_gets_it_anywhere(
    asked: bool | str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A display that is asked for by name is used anywhere."""
    monkeypatch.setattr(progress_choice, "_is_installed", lambda package: True)
    check_progress(asked)
    assert type(make_progress_display(asked)) is kind


@pytest.mark.parametrize("asked", ["Bar", "", None, 1, "tqdm"])
def test_what_there_is_not_is_refused(asked: Any) -> None:
    """Any other value of the option raises ``UsageError``."""
    with pytest.raises(UsageError, match="must be True, False or one of 'auto', 'bar', 'plain'"):
        check_progress(asked)
