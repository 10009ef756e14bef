"""Tests of the notebook's progress bar: one output, updated in place, with notes below it."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.observe import progress
from sparkstrom.observe import progress_display as progress_notebook
from sparkstrom.observe.progress import ProgressRate
from sparkstrom.observe.progress_display import (
    BROKEN_COLOR,
    DONE_COLOR,
    RUNNING_COLOR,
    NotebookBar,
    progress_html,
)
from tests.unit.observe.test_progress import line

IPython = pytest.importorskip("IPython.display")


class Cell:
    """A fake of IPython's display that records the current content of each output."""

    def __init__(self) -> None:
        self.displayed: list[dict[str, str]] = []
        self.drawings = 0

    def display(self, data: dict[str, str], **_: Any) -> Any:
        self.displayed.append(data)
        self.drawings += 1
        return self

    def update(self, data: dict[str, str], **_: Any) -> None:
        self.displayed[-1] = data
        self.drawings += 1


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    made = Cell()
    monkeypatch.setattr(IPython, "display", made.display)
    return made


def test_notebook_bar_updates_one_output_until_done(
    cell: Cell, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fit updates one output in place; notes go to standard output."""
    with closing(NotebookBar()) as bar:
        bar.show(line(phase="starting 4 Python workers", epoch=0.0), force=False)
        for epoch in (1.0, 2.0, 3.0):
            bar.show(line(epoch=epoch, phase=f"training {epoch}"))
        bar.say("partition 1 on host7 (training) says: hello")
        bar.show(line(phase="done", epoch=3.0), force=True)
    (shown,) = cell.displayed
    assert cell.drawings == 5
    assert "width:100.0%" in shown["text/html"]
    assert DONE_COLOR in shown["text/html"]
    assert shown["text/plain"].startswith("sparkstrom: done 100%  epoch 3.0/3")
    assert capsys.readouterr() == ("partition 1 on host7 (training) says: hello\n", "")


def test_notebook_bar_closed_early_shows_ended_fit(cell: Cell) -> None:
    """A bar that is closed before the fit is done shows it as ended early, in another colour."""
    bar = NotebookBar()
    bar.show(line(epoch=1.5))
    bar.close()
    (shown,) = cell.displayed
    assert "<b>ended while training</b> 50%" in shown["text/html"]
    assert BROKEN_COLOR in shown["text/html"]


def test_closing_unused_notebook_bar_displays_nothing(cell: Cell) -> None:
    """Closing a bar that has shown nothing displays nothing."""
    NotebookBar().close()
    assert cell.displayed == []


def test_notebook_bar_draws_quick_updates_once(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates in quick succession are drawn once, and again after DRAW_EVERY_S."""
    now_s = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now_s))
    bar = NotebookBar()
    for _ in range(100):
        bar.show(line())
    assert cell.drawings == 1
    now_s = progress_notebook.DRAW_EVERY_S
    bar.show(line())
    assert cell.drawings == 2


def test_progress_html_escapes_texts() -> None:
    """Texts are escaped in the HTML."""
    drawn = progress_html(line(phase="<script>"), ProgressRate(), 1.0, RUNNING_COLOR)
    assert "<script>" not in drawn
    assert "&lt;script&gt;" in drawn
