"""Worker output: what a user's code prints, warns of and logs in a worker, for the driver to show.

All of it still goes where it would go without us, which is the executor's stderr. Of that a
bounded number of lines is kept for the node's thread, which takes them; the others are counted.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TextIO

from sparkstrom.base.clock import Clock
from sparkstrom.observe.plain_text import LINE_CHARS_MAX, Allowance, printable
from sparkstrom.protocol.common.events import Said

BURST, EVERY_S, TOTAL = 10, 5.0, 100  # lines of a task: at once, then one so often, in all
TAKEN_MAX = 16  # lines in a message, which is a few frames at most
PARTIAL_CHARS_MAX = 4 * LINE_CHARS_MAX  # of a line that has not ended


class WorkerOutput:
    """Lines that wait to be told, from any thread; ``phase`` says what the worker is doing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._allowance = Allowance(BURST, EVERY_S, TOTAL)
        self._lines: list[tuple[str, str]] = []
        self._skipped = 0
        self.phase: Callable[[], str] = lambda: "starting"

    def add(self, text: str) -> None:
        """One line, unless there were too many."""
        with self._lock:
            if self._allowance.grants(self._clock.monotonic_s()):
                self._lines.append((self.phase(), printable(text)))
            else:
                self._skipped += 1

    def take(self) -> Said | None:
        """What has come since, or None."""
        if not (self._lines or self._skipped):
            return None
        with self._lock:
            lines, self._lines = self._lines[:TAKEN_MAX], self._lines[TAKEN_MAX:]
            skipped, self._skipped = self._skipped, 0
        return Said(lines, skipped)


class CopiedStream:
    """A wrapper of a text stream that also passes each whole line to ``add``.

    Text is held back until a write contains a newline or a carriage return, until it is long, or
    until ``flush``: the workers of local mode share one standard error, and their lines would mix.
    If the stream fails (it is closed, or its disk is full), lines still reach ``add``.
    """

    def __init__(self, stream: TextIO | None, add: Callable[[str], None]) -> None:
        self._stream, self._add, self._partial = stream, add, ""
        self._unwritten = ""
        self._is_mute = stream is None

    def _guarded(self, output: Callable[[TextIO], object]) -> None:
        """Call ``output``, unless an earlier one has failed."""
        if self._is_mute or self._stream is None:
            return
        try:
            output(self._stream)
        except (OSError, ValueError):
            self._is_mute = True

    def flush(self) -> None:
        """Write what was held back, and flush the stream."""
        self._put(self._unwritten)
        self._unwritten = ""
        self._guarded(lambda stream: stream.flush())

    def _put(self, text: str) -> None:
        if text:
            self._guarded(lambda stream: stream.write(text))

    def write(self, text: str) -> int:
        """Write the text or hold it back, and return its length."""
        count, unwritten = len(text), self._unwritten + text
        is_part = "\n" not in text and "\r" not in text and len(unwritten) <= LINE_CHARS_MAX
        self._unwritten = unwritten if is_part else ""
        self._put("" if is_part else unwritten)
        if "\n" not in text:  # most writes of a print are a part of its line
            self._partial = (self._partial + text)[-PARTIAL_CHARS_MAX:]
            return count
        *whole, self._partial = (self._partial + text).split("\n")
        self._partial = self._partial[-PARTIAL_CHARS_MAX:]
        for line in whole:
            shown = line.rstrip("\r").rpartition("\r")[2]  # what is drawn over is not shown
            if shown.strip():
                self._add(shown)
        return count

    def writelines(self, lines: Any) -> None:
        """Each as ``write`` does it."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def captured(output: WorkerOutput) -> Iterator[None]:
    """While it lasts, prints, warnings and log records from WARNING on are lines of ``output``."""
    with ExitStack() as undo:
        undo.enter_context(_prints(output))
        undo.enter_context(_warnings(output))
        undo.enter_context(_records(output))
        yield


@contextmanager
def _prints(output: WorkerOutput) -> Iterator[None]:
    before, copied = sys.stdout, CopiedStream(sys.stdout, output.add)
    sys.stdout = copied
    try:
        yield
    finally:
        if sys.stdout is copied:  # a user's code may have put its own there
            sys.stdout = before
        copied.flush()


@contextmanager
def _warnings(output: WorkerOutput) -> Iterator[None]:
    """A process is used for many tasks: each hears again what it was warned of once before."""
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
            with suppress(OSError, ValueError):  # from a stream that is closed, or full
                shows(message, category, filename, lineno, file, line)
            output.add(f"{category.__name__}: {message} ({filename}, line {lineno})")

        warnings.showwarning = show
        yield


@contextmanager
def _records(output: WorkerOutput) -> Iterator[None]:
    """Where a record is made, so that handlers, and what sets them up, work as they always do."""
    makes, ours = logging.getLogRecordFactory(), logging.getLogger("sparkstrom")

    def make(name: str, level: int, *rest: Any, **keywords: Any) -> logging.LogRecord:
        record = makes(name, level, *rest, **keywords)
        if isinstance(level, int) and level >= logging.WARNING:
            output.add(f"{record.levelname} {name}: {_message(record)}")
        return record

    quiet = [one for one in ours.handlers if isinstance(one, logging.NullHandler)]
    for handler in quiet:  # what we warn of goes to the executor's stderr, as others' do
        ours.removeHandler(handler)
    logging.setLogRecordFactory(make)
    try:
        yield
    finally:
        logging.setLogRecordFactory(makes)
        for handler in quiet:
            ours.addHandler(handler)


def _message(record: logging.LogRecord) -> str:
    """With what was raised, if it tells of that; where its arguments do not fit, without them."""
    try:
        text = record.getMessage()
    except Exception:  # logging itself reports it, where the record is written
        text = str(record.msg)
    raised = record.exc_info[1] if record.exc_info else None
    return f"{text} ({type(raised).__name__}: {raised})" if raised is not None else text
