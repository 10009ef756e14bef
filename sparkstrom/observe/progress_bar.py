"""Progress bar: one line at the foot of a terminal, by tqdm; what others write stands above it.

The line begins and ends with a carriage return, as that of Spark's own bar does: each covers the
other until it is drawn again, and a log line of the JVM begins where ours began.
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

from sparkstrom.observe.progress import Line, ProgressLine, figures_in_words, is_terminal

DRAW_EVERY_S = 0.2
BAR_CELLS_MIN = 10
ERASE = "\r\x1b[J"  # and what a narrower terminal has folded below


class Meter(tqdm):  # type: ignore[misc]
    """tqdm's bar, with the cursor left at its first column."""

    monitor_interval = 0  # no thread

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """What draws."""

        def draw(text: str) -> None:
            file.write(f"{ERASE}{text}\r")
            file.flush()

        return draw


class TerminalBar(ProgressLine):
    """While it is there, what this process prints and logs to the terminal goes above it."""

    every_s = DRAW_EVERY_S

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._meter: Meter | None = None
        self._others: list[Callable[[], None]] = []  # which undo that they write beside the bar
        self._line_is_open = False  # somebody has begun one and not ended it

    def close(self) -> None:
        """What was drawn last stays."""
        with self._lock:
            if self._meter is not None:
                self._guarded(self._meter.close)
                self._meter.disable = True  # tqdm closes what is collected as garbage, too
                self._meter = None
            while self._others:
                self._others.pop()()

    def _draw(self, line: Line, seconds: float, *, last: bool) -> None:
        columns = columns_of(self._stream) - 1
        if self._meter is None:
            self._meter = Meter(
                total=1.0, file=self._stream, bar_format="{desc}", ncols=columns, leave=True
            )
            self._let_others_write()
        meter = self._meter
        meter.n, meter.ncols = line.done, columns
        if line.is_starting:
            meter.bar_format = f"sparkstrom: {line.phase}  {seconds:.0f} s"
        else:
            head = f"{line.phase} {{percentage:3.0f}}%|"
            room = columns - len(line.phase) - len(" 100%|") - BAR_CELLS_MIN - len("| ")
            figures = fitting(figures_in_words(line, self._pace), room)
            meter.bar_format = f"{head}{{bar}}| {figures}"
        if not self._line_is_open:
            meter.refresh()

    def _write(self, text: str) -> None:
        self.write_above(self._stream, f"{text}\n")

    def write_above(self, stream: TextIO, text: str) -> None:
        """What somebody else writes to the terminal; the bar comes again after a whole line."""
        if not text:
            return
        with self._lock:
            if self._meter is not None and not self._line_is_open:
                self._guarded(self._erase)
            stream.write(text)
            stream.flush()
            self._line_is_open = not text.endswith("\n")
            if self._meter is not None and not self._line_is_open:
                self._guarded(self._meter.refresh)

    def _erase(self) -> None:
        self._stream.write(ERASE)
        self._stream.flush()

    def _let_others_write(self) -> None:
        """Python's standard streams, and log handlers that have them, where they are terminals."""
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if not is_terminal(stream):
                continue
            above: Any = Above(stream, self)
            setattr(sys, name, above)
            self._others.append(partial(setattr, sys, name, stream))
            for handler in (*logging.root.handlers, *logging.getLogger("sparkstrom").handlers):
                if isinstance(handler, logging.StreamHandler) and handler.stream is stream:
                    handler.setStream(above)
                    self._others.append(partial(handler.setStream, stream))


class Above:
    """A stream whose text goes above the bar."""

    def __init__(self, stream: TextIO, bar: TerminalBar) -> None:
        self._stream, self._bar = stream, bar

    def write(self, text: str) -> int:
        """As the stream does."""
        self._bar.write_above(self._stream, text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def columns_of(stream: TextIO) -> int:
    """How wide its terminal is now."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # it is none, is closed, or does not say
        return shutil.get_terminal_size().columns


def fitting(figures: list[str], room: int) -> str:
    """As many of them, from the first on, as there is room for."""
    text = ""
    for figure in figures:
        longer = f"{text}  {figure}" if text else figure
        if len(longer) > room:
            break
        text = longer
    return text
