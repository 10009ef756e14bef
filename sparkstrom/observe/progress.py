"""Format training progress as text, and define the base class and plain-text version of a display.

Other modules define progress bars, and ``progress_display`` selects a display. This module also
escapes and rate-limits the text that workers print before it is shown.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TextIO

LINE_CHARS_MAX = 300
TAB_COLUMNS = 4


def to_printable_line(text: str, chars_max: int = LINE_CHARS_MAX) -> str:
    """Return text that is safe for a terminal: control characters are escaped, such as ``\\x1b``.

    Text longer than ``chars_max`` is truncated and ends with an ellipsis.
    """
    shown = text[: chars_max + 1].expandtabs(TAB_COLUMNS)
    shown = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown
    )
    return shown if len(shown) <= chars_max else shown[: chars_max - 1] + "…"


@dataclass(slots=True)
class RateLimiter:
    """Limits lines of text: ``burst`` at once, then one per ``every_s``, and ``total`` in all."""

    burst: int  # lines allowed at once
    every_s: float  # seconds until one more line is allowed
    total: int  # lines allowed altogether
    _left: float = field(init=False)  # lines allowed now; a token bucket
    _granted: int = field(init=False, default=0)  # lines allowed so far
    _updated_s: float | None = field(init=False, default=None)  # time of the last refill

    def __post_init__(self) -> None:
        self._left = float(self.burst)

    def allows(self, now_s: float) -> bool:
        """Return whether one more line may be shown now, and count it if so."""
        if self._granted >= self.total:
            return False
        if self._updated_s is not None:
            gained = (now_s - self._updated_s) / self.every_s
            self._left = min(float(self.burst), self._left + gained)
        self._updated_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        self._granted += 1
        return True


log = logging.getLogger(__name__)

# Plain lines are a twentieth of the elapsed time apart, within these two bounds in seconds.
LOG_EVERY_S, LOG_EVERY_S_MAX = 3.0, 60.0
LOG_INTERVAL_DIVISOR = 20
# Rates are averaged over the last 15 seconds, and known after 1 second.
RATE_WINDOW_S, RATE_WINDOW_MIN_S = 15.0, 1.0


@dataclass(frozen=True, slots=True)
class ProgressFigures:
    """The progress of a running fit at one moment, as shown to users."""

    phase: str  # what the fit is doing, as text for users
    workers: int  # live workers
    partitions: int  # requested number of workers, one per partition
    epoch: float  # position in this fit in epochs, averaged over partitions
    epochs: int  # epochs of this fit
    loss: float | None  # None: no step yet
    examples: int  # rows trained so far
    updates: int  # updates committed (numbered by the controller) so far
    bytes_sent: int  # size of the updates, each counted once, where it originates
    staleness: float  # mean number of the fit's minibatches that an update had not seen
    waiting: float  # mean number of the fit's minibatches before a learned change is sent
    sent_fraction: float | None = None  # mean fraction of the parameters that one update contains
    tau: float | None = None  # mean threshold that a learned change must reach to be sent
    slow_links: int = 0  # slow links to live workers
    held_out: float | None = None  # loss or accuracy on the held-out rows after the latest epoch

    @property
    def is_starting(self) -> bool:
        """Whether nothing has been trained yet."""
        return self.epoch == 0

    @property
    def fraction_done(self) -> float:
        """The completed fraction of the fit, from 0 to 1."""
        return min(1.0, self.epoch / max(1, self.epochs))

    def to_texts(self, rate: ProgressRate) -> list[str]:
        """Return the known values as strings, the most important first.

        A caller with limited space drops strings from the end.
        """
        per_s, waiting = rate.examples_per_s, round(self.waiting)
        texts = [
            f"epoch {self.epoch:.1f}/{self.epochs}",
            f"loss {self.loss:.4f}" if self.loss is not None else "",
            f"held-out {self.held_out:.4f}" if self.held_out is not None else "",
            f"{per_s:,.0f} examples/s" if per_s is not None else "",
            *rate.format_remaining(self.fraction_done),
            f"{self.workers}/{self.partitions} workers",
            f"{self.slow_links} slow link{'s' * (self.slow_links > 1)}" if self.slow_links else "",
            f"sent {self.sent_fraction:.2%}" if self.sent_fraction is not None else "",
            f"tau {self.tau:.2g}" if self.tau is not None else "",
            f"staleness {self.staleness:.0f}" + (f"+{waiting}" if waiting else ""),
            f"{self.updates:,} updates",
            f"{self.bytes_sent / 1e6:.2f} MB",
        ]
        return [text for text in texts if text]


@dataclass(frozen=True, slots=True)
class RehearsalFigures:
    """The progress of a rehearsal, which simulates several fits one after the other."""

    phase: str  # the fit that is being simulated, as text for users
    fraction_done: float  # completed fraction of all fits, from 0 to 1, weighted by their durations
    examples: int = 0  # not counted; present because ``ProgressRate`` reads it

    @property
    def is_starting(self) -> bool:
        """Whether nothing has been simulated yet."""
        return self.fraction_done == 0

    def to_texts(self, rate: ProgressRate) -> list[str]:
        """Return a list with the time left, as text; empty until it is known."""
        return rate.format_remaining(self.fraction_done)


DisplayedFigures = ProgressFigures | RehearsalFigures


@dataclass(slots=True)
class ProgressRate:
    """Throughput and remaining time, measured over the last seconds so that a stall is visible."""

    examples_per_s: float | None = None  # None: not known yet
    remaining_s: float | None = None  # None: not known, or no progress
    # The latest (time in seconds, rows trained, fraction done).
    _samples: deque[tuple[float, int, float]] = field(default_factory=deque)

    def update(self, figures: DisplayedFigures, now_s: float) -> None:
        """Add the current progress, at ``now_s`` on any clock, and recompute the rates."""
        if figures.is_starting:
            return
        samples = self._samples
        is_idle = isinstance(figures, ProgressFigures) and not figures.examples  # workers start
        if samples and (is_idle or figures.examples < samples[-1][1]):  # or a controller was lost
            samples.clear()
            self.examples_per_s = self.remaining_s = None
        samples.append((now_s, figures.examples, figures.fraction_done))
        while now_s - samples[0][0] > RATE_WINDOW_S and len(samples) > 2:
            samples.popleft()
        first_s, examples, fraction = samples[0]
        if now_s - first_s < RATE_WINDOW_MIN_S:
            return
        self.examples_per_s = (figures.examples - examples) / (now_s - first_s)
        per_s = (figures.fraction_done - fraction) / (now_s - first_s)
        self.remaining_s = (1 - figures.fraction_done) / per_s if per_s > 0 else None

    def format_remaining(self, fraction_done: float) -> list[str]:
        """Return the remaining time as ["1:05 left"]; [] if it is not known or nothing remains."""
        if self.remaining_s is None or fraction_done >= 1:
            return []
        return [f"{format_clock_time(self.remaining_s)} left"]


def format_clock_time(seconds: float) -> str:
    """Format a duration as 1:05 or 2:03:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ProgressDisplay:
    """Displays the progress of a running fit; this base class shows nothing. Thread-safe.

    Subclasses override ``_draw``, called when the interval has passed or the phase has changed, and
    ``_write``, called with a line of text. The first exception in either of them (a closed stream,
    a full disk) ends the display but not the fit.
    """

    every_s = 0.0  # minimum seconds between two drawings

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._began_s = time.monotonic()
        self._due_s = 0.0
        self._phase = ""
        self._rate = ProgressRate()
        self._has_failed = False
        self._unlogged_error: Exception | None = None  # it ended the display

    def show(self, figures: DisplayedFigures, *, force: bool = False) -> None:
        """Draw the progress if the interval has passed or the phase has changed.

        ``force``: draw now, as the final state.
        """
        now_s = time.monotonic()
        with self._lock:
            if now_s < self._due_s and not force and figures.phase == self._phase:
                return
            seconds = now_s - self._began_s
            self._phase, self._due_s = figures.phase, now_s + self._interval_s(seconds)
            self._rate.update(figures, now_s)
            self._guarded(partial(self._draw, figures, seconds, last=force))
        self._log_error()

    def say(self, text: str) -> None:
        """Write a line of text that is not overwritten by later progress."""
        with self._lock:
            self._guarded(partial(self._write, text))
        self._log_error()

    def _guarded(self, output: Callable[[], object]) -> None:
        """Call ``output`` and suppress its exceptions; after the first exception, do nothing."""
        if self._has_failed:
            return
        try:
            output()
        except Exception as error:  # streams, terminals and notebooks raise errors of many kinds
            self._has_failed, self._unlogged_error = True, error

    def _log_error(self) -> None:
        """Log the exception that ended the display, once.

        The caller must not hold the display's lock, because another thread that logs may wait for
        that lock while it holds the lock of a logging handler.
        """
        with self._lock:
            error, self._unlogged_error = self._unlogged_error, None
        if error is not None:
            with suppress(Exception):  # a handler may write to the same closed stream
                log.warning("progress display stopped (the fit continues): %r", error)

    def close(self) -> None:
        """End the display. Idempotent."""

    def _interval_s(self, seconds: float) -> float:
        """Return the seconds until the next drawing, given the seconds since the fit's start."""
        return self.every_s

    def _draw(self, figures: DisplayedFigures, seconds: float, *, last: bool) -> None:
        """Draw the progress ``seconds`` after the fit's start; ``last`` marks the final state."""

    def _write(self, text: str) -> None:
        """Write one line of text."""


class PlainTextDisplay(ProgressDisplay):
    """Writes a progress line at intervals and at each change of phase, for files, logs and CI."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self._stream: TextIO | None = stream or sys.stderr  # None: the program has none

    def _interval_s(self, seconds: float) -> float:
        """Return the seconds until the next line: a twentieth of ``seconds``, within bounds."""
        return min(LOG_EVERY_S_MAX, max(LOG_EVERY_S, seconds / LOG_INTERVAL_DIVISOR))

    def _draw(self, figures: DisplayedFigures, seconds: float, *, last: bool) -> None:
        """Write the progress as one line of text."""
        self._write(format_progress_line(figures, self._rate, seconds))

    def _write(self, text: str) -> None:
        """Write one line of text to the stream; do nothing if the program has no stderr."""
        if self._stream is not None:
            write_and_flush(self._stream, f"{text}\n")


def write_and_flush(stream: TextIO, text: str) -> None:
    """Write text and flush; escape non-ASCII characters if the stream's encoding lacks some."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        stream.write(text.encode("ascii", "backslashreplace").decode())
    stream.flush()


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal; False if it is None or closed."""
    try:
        return stream is not None and stream.isatty()
    except (OSError, ValueError):
        return False


def format_progress_line(figures: DisplayedFigures, rate: ProgressRate, seconds: float) -> str:
    """Return the progress as one line of plain text, ``seconds`` after the fit's start."""
    if figures.is_starting:
        return f"sparkstrom: {figures.phase}  {seconds:.0f} s"
    text = "  ".join(figures.to_texts(rate))
    return f"sparkstrom: {figures.phase} {figures.fraction_done:.0%}  {text}  {seconds:.0f} s"
