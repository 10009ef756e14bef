"""Progress in a notebook: one output of its cell, changed in place, by IPython's own display.

It needs no widgets, so that it is there in every front end, and in the saved notebook.
"""

from __future__ import annotations

import html
import sys
from functools import partial
from typing import Any

from sparkstrom.observe.progress import Line, Pace, ProgressLine, figures_in_words, plain_text

DRAW_EVERY_S = 0.4
BAR = (
    '<div style="max-width:60em;font-size:13px;font-variant-numeric:tabular-nums">'
    "<div><b>{phase}</b> {percent}</div>"
    '<div role="progressbar" aria-valuenow="{now}" aria-valuemin="0" aria-valuemax="100" '
    'style="height:8px;margin:4px 0;border-radius:4px;background:rgba(128,128,128,0.25)">'
    '<div style="height:8px;width:{now}%;border-radius:4px;background:{color}"></div></div>'
    "<div>{figures}</div></div>"
)
RUNNING, DONE, BROKEN = "#2b7de9", "#2e9e5b", "#c0392b"


class NotebookBar(ProgressLine):
    """Drawn when there is something to draw; said lines are printed below."""

    every_s = DRAW_EVERY_S

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None
        self._newest: tuple[Line, float] | None = None
        self._ended = False

    def close(self) -> None:
        """A fit that did not come to its end is shown so."""
        with self._lock:
            if self._newest is not None and not self._ended:
                self._ended = True
                self._guarded(partial(self._update, BROKEN))

    def _draw(self, line: Line, seconds: float, *, last: bool) -> None:
        self._newest, self._ended = (line, seconds), last
        self._update(DONE if last else RUNNING)

    def _update(self, color: str) -> None:
        from IPython.display import display

        assert self._newest is not None
        line, seconds = self._newest
        drawn = {
            "text/plain": plain_text(line, self._pace, seconds),
            "text/html": as_html(line, self._pace, seconds, color),
        }
        if self._handle is None:
            self._handle = display(drawn, raw=True, display_id=True)
        else:
            self._handle.update(drawn, raw=True)

    def _write(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")


def as_html(line: Line, pace: Pace, seconds: float, color: str) -> str:
    """The bar; its words are escaped."""
    figures = [] if line.is_starting else figures_in_words(line, pace)
    told = [*figures, f"{seconds:.0f} s"]
    phase = line.phase if color != BROKEN else f"ended while {line.phase}"
    return BAR.format(
        phase=html.escape(phase),
        percent="" if line.is_starting else f"{line.done:.0%}",
        now=f"{100 * line.done:.1f}",
        color=color,
        figures=" &nbsp;·&nbsp; ".join(map(html.escape, told)),
    )
