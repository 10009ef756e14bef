"""Select the progress display of a fit by the option ``progress``; define the one for notebooks.

The notebook bar is a single cell output, updated in place by ``IPython.display``. It uses no
widgets, so it works in every front end and in a saved notebook.
"""

from __future__ import annotations

import html
import importlib.util
import os
import sys
from functools import partial
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import is_boolean, shown
from sparkstrom.observe.progress import (
    DisplayedFigures,
    PlainTextDisplay,
    ProgressDisplay,
    ProgressRate,
    format_progress_line,
    is_terminal,
)

DRAW_EVERY_S = 0.4
BAR_HTML = (
    '<div style="max-width:60em;font-size:13px;font-variant-numeric:tabular-nums">'
    "<div><b>{phase}</b> {percent}</div>"
    '<div role="progressbar" aria-valuenow="{now}" aria-valuemin="0" aria-valuemax="100" '
    'style="height:8px;margin:4px 0;border-radius:4px;background:rgba(128,128,128,0.25)">'
    '<div style="height:8px;width:{now}%;border-radius:4px;background:{color}"></div></div>'
    "<div>{figures}</div></div>"
)
RUNNING_COLOR, DONE_COLOR, BROKEN_COLOR = "#2b7de9", "#2e9e5b", "#c0392b"


class NotebookBar(ProgressDisplay):
    """A progress bar in the output of a notebook cell; lines of text are printed below it."""

    every_s = DRAW_EVERY_S

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None
        self._newest: tuple[DisplayedFigures, float] | None = None
        self._ended = False

    def close(self) -> None:
        """End the display; if the final state was not drawn, show that the fit ended early."""
        with self._lock:
            if self._newest is not None and not self._ended:
                self._ended = True
                self._guarded(partial(self._update, BROKEN_COLOR))
        self._log_error()

    def _draw(self, figures: DisplayedFigures, seconds: float, *, last: bool) -> None:
        """Update the bar in the cell's output."""
        self._newest, self._ended = (figures, seconds), last
        self._update(DONE_COLOR if last else RUNNING_COLOR)

    def _update(self, color: str) -> None:
        """Show the latest progress with a bar of this colour."""
        from IPython.display import display

        assert self._newest is not None
        line, seconds = self._newest
        drawn = {
            "text/plain": format_progress_line(line, self._rate, seconds),
            "text/html": progress_html(line, self._rate, seconds, color),
        }
        if self._handle is None:
            self._handle = display(drawn, raw=True, display_id=True)
        else:
            self._handle.update(drawn, raw=True)

    def _write(self, text: str) -> None:
        """Print one line of text below the bar."""
        sys.stdout.write(f"{text}\n")


def progress_html(figures: DisplayedFigures, rate: ProgressRate, seconds: float, color: str) -> str:
    """Return the bar and its texts as HTML, ``seconds`` after the fit's start; escape the texts."""
    texts = [] if figures.is_starting else figures.to_texts(rate)
    shown = [*texts, f"{seconds:.0f} s"]
    phase = figures.phase if color != BROKEN_COLOR else f"ended while {figures.phase}"
    return BAR_HTML.format(
        phase=html.escape(phase),
        percent="" if figures.is_starting else f"{figures.fraction_done:.0%}",
        now=f"{100 * figures.fraction_done:.1f}",
        color=color,
        figures=" &nbsp;·&nbsp; ".join(map(html.escape, shown)),
    )


PROGRESS_MODES = ("auto", "bar", "plain", "notebook")
REQUIRED_PACKAGES = {"bar": "tqdm", "notebook": "IPython"}


def check_progress(progress: bool | str) -> None:
    """Raise UsageError if the value of ``progress=`` is unknown or needs a missing package."""
    if is_boolean(progress):
        return
    if not isinstance(progress, str) or progress not in PROGRESS_MODES:
        known = ", ".join(map(repr, PROGRESS_MODES))
        raise UsageError(f"progress={shown(progress)}: must be True, False or one of {known}")
    package = REQUIRED_PACKAGES.get(progress)
    if package is not None and not _is_installed(package):
        raise UsageError(
            f"progress={progress!r} needs the package {package} on the driver: "
            f"pip install {package.lower()}, or progress='plain'"
        )


def make_progress_display(progress: bool | str) -> ProgressDisplay:
    """Create the display for a value of ``progress=`` that passed ``check_progress``."""
    if is_boolean(progress) and not progress:
        return ProgressDisplay()
    mode = progress if isinstance(progress, str) else "auto"
    if mode == "auto":
        mode = _default_mode()
    if mode == "bar":
        from sparkstrom.observe.progress_bar import TerminalBar

        return TerminalBar()
    if mode == "notebook":
        return NotebookBar()
    return PlainTextDisplay()


def _default_mode() -> str:
    """Return "notebook", "bar" (for a terminal that can move its cursor) or "plain"."""
    if is_in_notebook():
        return "notebook"
    can_draw = is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
    return "bar" if can_draw and _is_installed(REQUIRED_PACKAGES["bar"]) else "plain"


def captures_descriptors(stream: object) -> bool:
    """Return whether a notebook stream also shows the output of subprocesses."""
    return getattr(stream, "watch_fd_thread", None) is not None  # ipykernel's OutStream has it


def is_in_notebook() -> bool:
    """Return whether this code runs in a notebook kernel; False for IPython in a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


def _is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    return importlib.util.find_spec(package) is not None
