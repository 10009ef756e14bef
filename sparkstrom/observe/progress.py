"""Progress: what people see of a fit while it runs, as figures in words; and as plain lines."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TextIO

log = logging.getLogger(__name__)

LOG_EVERY_S, LOG_EVERY_S_MAX = 3.0, 60.0  # between two plain lines: a twentieth of the fit so far
LOG_SHARE = 20
PACE_S, PACE_S_MIN = 15.0, 1.0  # rates and remaining times are of so long, and at least so long


@dataclass(frozen=True, slots=True)
class Line:
    """Where a fit stands."""

    phase: str  # in words
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
    slow_links: int = 0  # to workers that live
    held_out: float | None = None  # loss or accuracy of the held-out rows, of the newest epoch

    @property
    def is_starting(self) -> bool:
        """Nothing has been trained yet."""
        return self.epoch == 0

    @property
    def done(self) -> float:
        """Of 1."""
        return min(1.0, self.epoch / max(1, self.epochs))


@dataclass(slots=True)
class Pace:
    """How fast it goes: over the last seconds, so that a stall is seen."""

    examples_per_s: float | None = None
    left_s: float | None = None  # to the end
    _looks: deque[tuple[float, int, float]] = field(default_factory=deque)

    def look(self, line: Line, now_s: float) -> None:
        """Take in what the fit has done up to now."""
        if line.is_starting:
            return
        looks = self._looks
        looks.append((now_s, line.examples, line.epoch))
        while now_s - looks[0][0] > PACE_S and len(looks) > 2:
            looks.popleft()
        first_s, examples, epoch = looks[0]
        if now_s - first_s < PACE_S_MIN:
            return
        self.examples_per_s = (line.examples - examples) / (now_s - first_s)
        epochs_per_s = (line.epoch - epoch) / (now_s - first_s)
        left = max(0.0, line.epochs - line.epoch)
        self.left_s = left / epochs_per_s if epochs_per_s > 0 else None


def figures_in_words(line: Line, pace: Pace) -> list[str]:
    """The most important first: who has no room leaves out the last."""
    rate, waiting = pace.examples_per_s, round(line.waiting)
    found = [
        f"epoch {line.epoch:.1f}/{line.epochs}",
        f"loss {line.loss:.4f}" if line.loss is not None else "",
        f"held-out {line.held_out:.4f}" if line.held_out is not None else "",
        f"{rate:,.0f} examples/s" if rate is not None else "",
        f"{clock_time(pace.left_s)} left" if pace.left_s is not None and line.done < 1 else "",
        f"{line.workers}/{line.partitions} workers",
        f"{line.slow_links} slow link{'s' * (line.slow_links > 1)}" if line.slow_links else "",
        f"sent {line.sent_fraction:.2%}" if line.sent_fraction is not None else "",
        f"tau {line.tau:.2g}" if line.tau is not None else "",
        f"staleness {line.staleness:.0f}" + (f"+{waiting}" if waiting else ""),
        f"{line.updates:,} updates",
        f"{line.bytes_sent / 1e6:.2f} MB",
    ]
    return [each for each in found if each]


def clock_time(seconds: float) -> str:
    """As 1:05 or 2:03:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressLine:
    """Where a fit shows itself; this one shows nothing. From any thread; closed at the fit's end.

    Others draw and write: ``_draw`` when it is time or the phase is another, ``_write`` a line.
    The first failure to do so (nobody reads the stream, it is closed, its disk is full) ends the
    display and nothing else.
    """

    every_s = 0.0  # between two drawings, at least

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._began_s = time.monotonic()
        self._due_s = 0.0
        self._phase = ""
        self._pace = Pace()
        self._is_mute = False

    def show(self, line: Line, *, force: bool = False) -> None:
        """Draw if it is time; ``force``: in any case, and for the last time."""
        now_s = time.monotonic()
        with self._lock:
            if now_s < self._due_s and not force and line.phase == self._phase:
                return
            seconds = now_s - self._began_s
            self._phase, self._due_s = line.phase, now_s + self._pause_s(seconds)
            self._pace.look(line, now_s)
            self._guarded(partial(self._draw, line, seconds, last=force))

    def say(self, text: str) -> None:
        """A line of its own; it stays."""
        with self._lock:
            self._guarded(partial(self._write, text))

    def _guarded(self, output: Callable[[], object]) -> None:
        """Call ``output``, unless an earlier one has failed."""
        if self._is_mute:
            return
        try:
            output()
        except Exception as error:  # streams, terminals and notebooks raise errors of many kinds
            self._is_mute = True
            log.warning("nothing more is shown of this fit: %r", error)

    def close(self) -> None:
        """No more is shown; idempotent."""

    def _pause_s(self, seconds: float) -> float:
        return self.every_s

    def _draw(self, line: Line, seconds: float, *, last: bool) -> None:
        """Nothing."""

    def _write(self, text: str) -> None:
        """Nothing."""


class PlainLines(ProgressLine):
    """A line at each phase and now and then, for files, logs and CI."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream: TextIO | None = stream or sys.stderr  # None: the program has none

    def _pause_s(self, seconds: float) -> float:
        return min(LOG_EVERY_S_MAX, max(LOG_EVERY_S, seconds / LOG_SHARE))

    def _draw(self, line: Line, seconds: float, *, last: bool) -> None:
        self._write(plain_text(line, self._pace, seconds))

    def _write(self, text: str) -> None:
        if self._stream is not None:
            write_text(self._stream, f"{text}\n")


def write_text(stream: TextIO, text: str) -> None:
    """Write and flush; escape characters that the stream's encoding does not have."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        stream.write(text.encode("ascii", "backslashreplace").decode())
    stream.flush()


def is_terminal(stream: TextIO | None) -> bool:
    """Return False also for a stream that is missing or closed."""
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


def plain_text(line: Line, pace: Pace, seconds: float) -> str:
    """All figures in one line."""
    if line.is_starting:
        return f"sparkstrom: {line.phase}  {seconds:.0f} s"
    figures = "  ".join(figures_in_words(line, pace))
    return f"sparkstrom: {line.phase} {line.done:.0%}  {figures}  {seconds:.0f} s"
