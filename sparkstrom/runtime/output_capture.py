"""Capture what user code prints, warns and logs in a worker, to show it in the driver program.

Everything still goes to its usual destination, the executor's stderr. A limited number of lines is
also kept until the thread that exchanges messages sends them; further lines are only counted.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from sparkstrom.base.clock import Clock
from sparkstrom.observe.progress import LINE_CHARS_MAX, RateLimiter, to_printable_line
from sparkstrom.protocol.common.events_and_effects import OutputPrinted

# Lines of a task: initial burst, then one per interval, and in total.
LINES_BURST, LINE_INTERVAL_S, LINES_MAX = 10, 5.0, 100
MESSAGE_LINES_MAX = 16  # lines per message, which are a few frames at most
WARNINGS_MAX, WARNING_CHARS_MAX = 3, 1000  # of a task's warnings for the summary
PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
PARTIAL_CHARS_MAX = 4 * LINE_CHARS_MAX  # kept of an incomplete line


class WorkerOutput:
    """Collects lines that user code printed in a worker, until they are sent. Thread-safe.

    The attribute ``phase`` is a function that returns what the worker is doing; ``add`` calls it
    and stores the result with the line.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Reentrant: garbage collection may run a finalizer that prints while the lock is held.
        self._lock = threading.RLock()
        self._allowance = RateLimiter(LINES_BURST, LINE_INTERVAL_S, LINES_MAX)
        self._lines: list[tuple[str, str]] = []
        self._skipped = 0
        self.phase: Callable[[], str] = lambda: "starting"
        # sparkstrom's own warnings, for the summary: place in the source -> newest text.
        self.warnings: dict[str, str] = {}

    def add(self, text: str) -> None:
        """Add a line, or only count it if there have been too many; see ``LINES_BURST``."""
        with self._lock:
            if self._allowance.allows(self._clock.monotonic_s()):
                self._lines.append((self.phase(), to_printable_line(text)))
            else:
                self._skipped += 1

    def note_warning(self, place: str, text: str) -> None:
        """Keep a warning for the summary; a later one from the same place replaces it."""
        with self._lock:
            if place in self.warnings or len(self.warnings) < WARNINGS_MAX:
                self.warnings[place] = to_printable_line(text, WARNING_CHARS_MAX)

    def take(self) -> OutputPrinted | None:
        """Remove and return the oldest ``MESSAGE_LINES_MAX`` lines, or None if nothing is new."""
        if not (self._lines or self._skipped):
            return None
        with self._lock:
            lines = self._lines[:MESSAGE_LINES_MAX]
            del self._lines[:MESSAGE_LINES_MAX]
            skipped, self._skipped = self._skipped, 0
        return OutputPrinted(lines, skipped)


class TeeStream:
    """A text stream that also passes each complete line to ``add``.

    Text is held back until a write contains a newline or a carriage return, until it is long, or
    until ``flush``, because workers in local mode share one standard error and their lines would
    mix. If the stream is None or fails (closed, or disk full), lines still reach ``add``.
    """

    def __init__(self, stream: TextIO | None, add: Callable[[str], None]) -> None:
        self._stream, self._add, self._partial = stream, add, ""
        self._unwritten = ""
        self._is_mute = stream is None

    def _guarded(self, output: Callable[[TextIO], object]) -> None:
        """Call ``output`` with the stream, unless there is none or an earlier call has failed."""
        if self._is_mute or self._stream is None:
            return
        try:
            output(self._stream)
        except (OSError, ValueError):
            self._is_mute = True

    def flush(self) -> None:
        """Write what was held back, and flush the stream."""
        self._write_text(self._unwritten)
        self._unwritten = ""
        self._guarded(lambda stream: stream.flush())

    def _write_text(self, text: str) -> None:
        """Write text to the stream."""
        if text:
            self._guarded(lambda stream: stream.write(text))

    def write(self, text: str) -> int:
        """Write the text, or hold it back (see the class); return its length."""
        count, unwritten = len(text), self._unwritten + text
        is_part = "\n" not in text and "\r" not in text and len(unwritten) <= LINE_CHARS_MAX
        self._unwritten = unwritten if is_part else ""
        self._write_text("" if is_part else unwritten)
        if "\n" not in text:  # most writes of a print are parts of a line
            self._partial = (self._partial + text)[-PARTIAL_CHARS_MAX:]
            return count
        *whole, self._partial = (self._partial + text).split("\n")
        self._partial = self._partial[-PARTIAL_CHARS_MAX:]
        for line in whole:
            # text before a carriage return is overwritten
            shown = line.rstrip("\r").rpartition("\r")[2]
            if shown.strip():
                self._add(shown)
        return count

    def writelines(self, lines: Any) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def capture_output(output: WorkerOutput) -> Iterator[None]:
    """Add prints, warnings and log records (WARNING or above) to ``output`` during the block."""
    with _capture_prints(output), _capture_warnings(output), _capture_log_records(output):
        yield


@contextmanager
def _capture_prints(output: WorkerOutput) -> Iterator[None]:
    """Add complete lines that are written to ``sys.stdout`` during the block to ``output``."""
    before, copied = sys.stdout, TeeStream(sys.stdout, output.add)
    sys.stdout = copied
    try:
        yield
    finally:
        if sys.stdout is copied:  # user code may have replaced it
            sys.stdout = before
        copied.flush()


@contextmanager
def _capture_warnings(output: WorkerOutput) -> Iterator[None]:
    """Add warnings to ``output`` during the block, even if an earlier task has shown them."""
    with warnings.catch_warnings():
        shows = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            with suppress(OSError, ValueError):  # the stream may be closed or full
                shows(message, category, filename, lineno, file, line)
            output.add(f"{category.__name__}: {message} ({filename}, line {lineno})")
            if category is UserWarning and filename.startswith(PACKAGE):
                output.note_warning(f"{filename}:{lineno}", str(message))

        warnings.showwarning = show
        yield


@contextmanager
def _capture_log_records(output: WorkerOutput) -> Iterator[None]:
    """Add log records of level WARNING or above to ``output`` during the block.

    Handlers work as usual.
    """
    makes, ours = logging.getLogRecordFactory(), logging.getLogger("sparkstrom")

    def make(name: str, level: int, *rest: Any, **keywords: Any) -> logging.LogRecord:
        record = makes(name, level, *rest, **keywords)
        if isinstance(level, int) and level >= logging.WARNING:
            output.add(f"{record.levelname} {name}: {_format_record(record)}")
        return record

    quiet = [one for one in ours.handlers if isinstance(one, logging.NullHandler)]
    for handler in quiet:  # our warnings must go to stderr, as others' do
        ours.removeHandler(handler)
    logging.setLogRecordFactory(make)
    try:
        yield
    finally:
        logging.setLogRecordFactory(makes)
        for handler in quiet:
            ours.addHandler(handler)


def _format_record(record: logging.LogRecord) -> str:
    """Return a log record's text, with its exception if it has one."""
    try:
        text = record.getMessage()
    except Exception:  # logging itself reports this when the record is written
        text = str(record.msg)
    raised = record.exc_info[1] if record.exc_info else None
    return f"{text} ({type(raised).__name__}: {raised})" if raised is not None else text
