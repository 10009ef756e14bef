"""Progress: one line about a fit, redrawn on a terminal, now and then in a log."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TextIO

BAR_CELLS = 20
LOG_EVERY_S = 3.0
DRAW_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Line:
    """What the line says."""

    phase: str
    workers: int
    partitions: int
    epoch: float  # mean over partitions
    epochs: int
    loss: float | None
    examples: int
    updates: int
    bytes_sent: int
    staleness: float  # the fit's minibatches on the way, and in residuals
    waiting: float
    sent_fraction: float | None = None  # entries per parameter and publication
    tau: float | None = None  # mean threshold


class ProgressLine:
    """Draws ``Line`` values; does nothing where it is switched off."""

    def __init__(self, stream: TextIO | None = None, *, enabled: bool = True) -> None:
        self._stream = stream or sys.stderr
        self._enabled = enabled
        self._terminal = self._stream.isatty()
        self._began_s = time.monotonic()
        self._due_s = 0.0
        self._last = (self._began_s, 0)
        self._rate = 0.0

    def show(self, line: Line, *, force: bool = False) -> None:
        """Draw if it is time."""
        now_s = time.monotonic()
        if not self._enabled or (now_s < self._due_s and not force):
            return
        self._due_s = now_s + (DRAW_EVERY_S if self._terminal else LOG_EVERY_S)
        self._measure(line.examples, now_s)
        text = self._text(line, now_s - self._began_s)
        end = "" if self._terminal and not force else "\n"
        self._stream.write(f"\r\x1b[K{text}{end}" if self._terminal else f"{text}\n")
        self._stream.flush()

    def say(self, text: str) -> None:
        """A plain line between two drawings."""
        if self._enabled:
            start = "\r\x1b[K" if self._terminal else ""
            self._stream.write(f"{start}{text}\n")
            self._stream.flush()

    def _measure(self, examples: int, now_s: float) -> None:
        before_s, before = self._last
        if examples > before and now_s > before_s:
            self._rate = (examples - before) / (now_s - before_s)
            self._last = (now_s, examples)

    def _text(self, line: Line, seconds: float) -> str:
        loss = "     -" if line.loss is None else f"{line.loss:.4f}"
        done = min(1.0, line.epoch / max(1, line.epochs))
        waiting = f"+{line.waiting:.0f}" if round(line.waiting) else ""
        bar = "#" * round(BAR_CELLS * done)
        drawn = f"[{bar:<{BAR_CELLS}}] " if self._terminal else ""
        return (
            f"sparkstrom {line.phase:<9} {drawn}epoch {line.epoch:.1f}/{line.epochs}  loss {loss}"
            f"  {self._rate:,.0f} examples/s  {line.updates:,} updates"
            f"  {line.bytes_sent / 1e6:.2f} MB  staleness {line.staleness:.0f}{waiting}"
            f"  {line.workers}/{line.partitions} workers"
            f"  {seconds:.0f} s"
        )
