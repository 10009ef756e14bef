"""Draw a tqdm progress bar in the bottom line of a terminal, with other output above it.

After drawing, the cursor returns to the bar's first column, as with Spark's own bar. Output that
this process does not control, such as Spark's bar and the JVM's log lines, then overwrites the bar
instead of being appended to it.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from tqdm import tqdm

from sparkstrom.observe.progress import DisplayedFigures, ProgressDisplay, is_terminal

DRAW_EVERY_S = 0.2
BAR_CELLS_MIN = 10
ROWS = 20  # any number above 1: tqdm hides bars in a terminal that does not know its height
ERASE = "\r\x1b[J"  # erases this line and those below, onto which a narrow terminal wraps


class TqdmBar(tqdm):  # type: ignore[misc]
    """A tqdm bar that leaves the cursor in its first column."""

    monitor_interval = 0  # start no monitor thread

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """Return a function that draws the bar's text and moves the cursor to column 0."""

        def draw(text: str) -> None:
            file.write(f"{ERASE}{text}\r")
            file.flush()

        return draw

    def refresh(self, *_: Any, **__: Any) -> None:
        """Draw the bar; unlike tqdm's method, release tqdm's lock if the terminal fails."""
        with self._lock:
            super().refresh(nolock=True)


# The order of locks: a logging handler's lock first, then tqdm's. A thread that logs holds the
# handler's lock when it writes above the bar, and ``tqdm.write`` and other bars hold tqdm's lock
# when they do so. Therefore the bar has no lock of its own but uses tqdm's, and nothing here takes
# a handler's lock under it: handlers' streams are replaced without ``setStream``, and the exception
# that ends the display is logged by ``show``, ``say`` or ``close`` after releasing the lock, not by
# ``write_above``, whose caller may hold tqdm's lock.
class TerminalBar(ProgressDisplay):
    """A progress bar in a terminal's bottom line; other output of this process appears above it."""

    every_s = DRAW_EVERY_S

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._lock = tqdm.get_lock()
        self._stream = stream or sys.stderr
        self._tqdm_bar: TqdmBar | None = None
        self._undo_redirects: list[Callable[[], None]] = []  # each restores a redirected stream
        self._is_mid_line = False  # other output has begun a line and not ended it

    def close(self) -> None:
        """End the display and restore the redirected streams; the last drawing remains visible."""
        with self._lock:
            if self._tqdm_bar is not None:
                self._guarded(self._tqdm_bar.close)
                self._tqdm_bar.disable = True  # or its finalizer would draw once more
                self._tqdm_bar = None
            while self._undo_redirects:
                self._undo_redirects.pop()()
        self._log_error()

    def _draw(self, figures: DisplayedFigures, seconds: float, *, last: bool) -> None:
        """Draw the bar with as many values as fit into the terminal's width."""
        columns = terminal_columns(self._stream) - 1
        if self._tqdm_bar is None:
            self._tqdm_bar = TqdmBar(
                total=1.0,
                file=self._stream,
                bar_format="{desc}",
                ncols=columns,
                nrows=ROWS,
                leave=True,
            )
            self._redirect_streams()
        meter = self._tqdm_bar
        meter.n, meter.ncols = figures.fraction_done, columns
        if figures.is_starting:
            meter.bar_format = f"sparkstrom: {figures.phase}  {seconds:.0f} s"
        else:
            head = f"{figures.phase} {{percentage:3.0f}}%|"
            width = columns - len(figures.phase) - len(" 100%|") - BAR_CELLS_MIN - len("| ")
            shown = join_within_width(figures.to_texts(self._rate), width)
            meter.bar_format = f"{head}{{bar}}| {shown}"
        if not self._is_mid_line:
            meter.refresh()

    def _write(self, text: str) -> None:
        """Write one line of text above the bar."""
        self.write_above(self._stream, f"{text}\n")

    def write_above(self, stream: TextIO, text: str) -> None:
        """Write other output to ``stream``, above the bar; redraw the bar after a complete line."""
        if not text:
            return
        with self._lock:
            if self._tqdm_bar is not None and not self._is_mid_line:
                self._guarded(self._erase)
            stream.write(text)
            stream.flush()
            self._is_mid_line = not text.endswith("\n")
            if self._tqdm_bar is not None and not self._is_mid_line:
                self._guarded(self._tqdm_bar.refresh)

    def _erase(self) -> None:
        """Erase the bar from the terminal."""
        self._stream.write(ERASE)
        self._stream.flush()

    def _redirect_streams(self) -> None:
        """Redirect Python's standard streams, and log handlers on them, if they are terminals."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if not is_terminal(stream):
                continue
            redirected: Any = StreamAboveBar(stream, self)
            setattr(sys, name, redirected)
            self._undo_redirects.append(partial(setattr, sys, name, stream))
            for handler in (*logging.root.handlers, *logging.getLogger("sparkstrom").handlers):
                if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                    handler.stream = redirected  # both write to the same terminal
                    self._undo_redirects.append(partial(setattr, handler, "stream", stream))


class StreamAboveBar:
    """A text stream whose output is written above the progress bar."""

    def __init__(self, stream: TextIO, bar: TerminalBar) -> None:
        self._stream, self._bar = stream, bar

    def write(self, text: str) -> int:
        """Write text above the bar; return the number of characters."""
        self._bar.write_above(self._stream, text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def terminal_columns(stream: TextIO) -> int:
    """Return the current width of a stream's terminal in characters, or a default."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # no terminal, or closed
        columns = 0
    return columns or shutil.get_terminal_size().columns  # 0: it does not know its size


def join_within_width(figures: list[str], width: int) -> str:
    """Join as many leading texts as fit into ``width`` characters."""
    text = ""
    for figure in figures:
        longer = f"{text}  {figure}" if text else figure
        if len(longer) > width:
            break
        text = longer
    return text
