"""Tests of the terminal's progress bar: one line, redrawn in place, with other output above it."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any

import pytest
from tqdm import TMonitor, tqdm

from sparkstrom.observe import progress_bar
from sparkstrom.observe.progress import RehearsalFigures
from sparkstrom.observe.progress_bar import (
    ERASE,
    TerminalBar,
    join_within_width,
    terminal_columns,
)
from tests.unit.observe.test_progress import line


class Terminal(io.StringIO):
    """A fake terminal of 100 columns that can show the content of its screen."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Return the lines after carriage returns, erasures and newlines have had their effect."""
        rows, column = [""], 0
        for part in re.findall(r"\r|\n|\x1b\[J|[^\r\n\x1b]+", self.getvalue()):
            match part:
                case "\r":
                    column = 0
                case "\n":
                    rows.append("")
                    column = 0
                case "\x1b[J":
                    rows[-1] = rows[-1][:column]
                case _:
                    rows[-1] = rows[-1][:column] + part + rows[-1][column + len(part) :]
                    column += len(part)
        return rows


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


@contextmanager
def show_bar(terminal: Terminal) -> Iterator[TerminalBar]:
    """Show a bar on this terminal as standard output and error; check that both are restored."""
    with redirect_stdout(terminal), redirect_stderr(terminal):
        with closing(TerminalBar()) as bar:
            yield bar
        assert sys.stdout is terminal
        assert sys.stderr is terminal


def test_bar_redraws_one_line_and_ends_with_newline(terminal: Terminal) -> None:
    """The bar redraws one line during a fit and ends it with a newline when done."""
    with show_bar(terminal) as bar:
        bar.show(line(phase="starting 4 Python workers", epoch=0.0), force=True)
        assert terminal.screen() == ["sparkstrom: starting 4 Python workers  0 s"]
        for epoch in (0.5, 1.0, 1.5):
            bar.show(line(loss=0.25, epoch=epoch), force=True)
        (drawn,) = terminal.screen()
        assert drawn.startswith("training  50%|█")
        assert "|" in drawn[15:]
        assert drawn.split("| ")[1].startswith("epoch 1.5/3  loss 0.2500")
        bar.show(line(phase="done", epoch=3.0), force=True)
        bar.close()
        drawn, rest = terminal.screen()
        assert drawn.startswith("done 100%|██████████")
        assert rest == ""


def test_bar_limits_redraws_of_quick_updates(terminal: Terminal) -> None:
    """Updates in quick succession are drawn at most twice."""
    with show_bar(terminal) as bar:
        for _ in range(100):
            bar.show(line())
        assert terminal.getvalue().count("training") in (1, 2)  # tqdm draws a new bar at once


@pytest.mark.parametrize("columns", [20, 40, 80, 120, 250])
def test_bar_is_narrower_than_terminal(
    columns: int, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line is narrower than the terminal; figures are left out from the end."""
    with show_bar(terminal) as bar:
        monkeypatch.setenv("COLUMNS", str(columns))
        bar.show(line(loss=0.25, slow_links=3), force=True)
        (drawn,) = terminal.screen()
        assert len(drawn) < columns
        assert ("5.00 MB" in drawn) == (columns == 250)


def test_bar_is_drawn_in_terminal_of_size_0() -> None:
    """``docker exec -t`` without a client's terminal, for example, gives a terminal of size 0."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 0, 0, 0, 0))
    with os.fdopen(theirs, "w") as stream:
        assert terminal_columns(stream) >= 80
        bar = TerminalBar(stream)
        bar.show(RehearsalFigures("rehearsing", 0.5))
        drawn = ""
        while "rehearsing  50%|" not in drawn:  # a read returns what has arrived so far
            drawn += os.read(ours, 1000).decode()
        bar.close()
    os.close(ours)


def test_bar_returns_cursor_to_start_of_line(terminal: Terminal) -> None:
    """The cursor returns to the line's start, so that Spark's bar and ours overwrite each other."""
    with show_bar(terminal) as bar:
        bar.show(line(), force=True)
        assert terminal.getvalue().endswith("\r")
        terminal.write("\r[Stage 3:>" + " " * 60 + "(0 + 4) / 4]\r")
        bar.show(line(loss=0.25), force=True)
        (drawn,) = terminal.screen()
        assert drawn.startswith("training")
        assert "Stage" not in drawn
        assert "4]" not in drawn


def test_notes_and_printed_lines_appear_above_bar(terminal: Terminal) -> None:
    """Notes and printed lines appear above the bar, also if a line is printed in two parts."""
    with show_bar(terminal) as bar:
        bar.show(line(), force=True)
        bar.say("sparkstrom lost a worker: partition 2 on host7: silent")
        print("printed")
        print("in two", end=" ")
        bar.show(line(), force=True)  # must not be drawn into the unfinished line
        print("parts")
        screen = terminal.screen()
        assert screen[:-1] == [
            "sparkstrom lost a worker: partition 2 on host7: silent",
            "printed",
            "in two parts",
        ]
        assert screen[-1].startswith("training")


def test_log_lines_appear_above_bar_and_handlers_are_restored(terminal: Terminal) -> None:
    """Log lines appear above the bar; closing the bar restores the handlers' streams."""
    with show_bar(terminal) as bar:
        handler, log = logging.StreamHandler(sys.stderr), logging.getLogger("sparkstrom")
        log.addHandler(handler)
        try:
            bar.show(line(), force=True)
            logging.getLogger("sparkstrom.spark").warning("a slow link")
            assert terminal.screen()[0] == "a slow link"
            assert terminal.screen()[1].startswith("training")
            bar.close()
            assert handler.stream is terminal
        finally:
            log.removeHandler(handler)


def ends(call: Callable[[], object]) -> bool:
    """Return whether the call, run in a thread, ends within 5 s and so waits for no lock."""

    def run() -> None:
        with suppress(OSError):  # a terminal that has failed
            call()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5.0)
    return not thread.is_alive()


@contextmanager
def logging_to(stream: Any, handler: type[logging.StreamHandler[Any]]) -> Iterator[logging.Handler]:
    made, log = handler(stream), logging.getLogger("sparkstrom")
    log.addHandler(made)
    try:
        yield made
    finally:
        log.removeHandler(made)


def test_bar_does_not_wait_for_log_handler_lock(terminal: Terminal) -> None:
    """The bar does not wait for a thread that holds a log handler's lock: no deadlock."""
    with (
        show_bar(terminal) as bar,
        logging_to(terminal, logging.StreamHandler) as handler,
    ):
        assert handler.lock is not None
        with handler.lock:
            assert ends(lambda: bar.show(line(), force=True))
            assert ends(bar.close)


class AnnouncingLock:
    """A reentrant lock that sets an event when a thread asks for it."""

    def __init__(self) -> None:
        self._lock, self.wanted = threading.RLock(), threading.Event()

    def acquire(self, *arguments: Any) -> bool:
        self.wanted.set()
        return self._lock.acquire(*arguments)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.mark.parametrize("drawing", [True, False])
def test_thread_waiting_for_tqdm_lock_blocks_no_output(
    drawing: bool, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While ``tqdm.write`` holds tqdm's lock, a thread that waits for it blocks no other output."""
    lock = AnnouncingLock()
    monkeypatch.setattr(tqdm, "_lock", lock, raising=False)
    with show_bar(terminal) as bar:
        bar.show(line(), force=True)
        redirected, holds, released = sys.stderr, threading.Event(), threading.Event()

        def write() -> None:
            with lock:
                lock.wanted.clear()
                holds.set()
                assert lock.wanted.wait(5.0)
                tqdm.write("a line", file=redirected)
                released.set()

        threading.Thread(target=write, daemon=True).start()
        assert holds.wait(5.0)
        assert ends(lambda: bar.show(line(), force=True) if drawing else print("another"))
        assert released.wait(5.0)
        assert "a line" in terminal.screen()


class FailingTerminal(Terminal):
    """A terminal on which every write fails once ``broken`` is set."""

    broken = False

    def write(self, text: str) -> int:
        if self.broken:
            raise OSError(28, "no space")
        return super().write(text)


class ProbingHandler(logging.StreamHandler[Any]):
    """A log handler that records for each message whether another thread could print then."""

    def emit(self, record: logging.LogRecord) -> None:
        told = ends(lambda: sys.stdout.write("another thread's line\n"))
        probed.append((record.getMessage(), told))


probed: list[tuple[str, bool]] = []


@pytest.mark.parametrize("fails_in", ["show", "say", "close", "tqdm.write"])
def test_reason_for_bar_end_is_logged_without_blocking_output(
    fails_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason for the bar's end is logged while other threads can still write above it."""
    terminal = FailingTerminal()
    probed.clear()
    with show_bar(terminal) as bar, logging_to(io.StringIO(), ProbingHandler):
        bar.show(line(), force=True)
        redirected = sys.stderr
        terminal.broken = True
        match fails_in:
            case "show":
                bar.show(line(), force=True)
            case "say":
                bar.say("a note")
            case "tqdm.write":
                with suppress(OSError):
                    tqdm.write("a line", file=redirected)
                assert not probed
        bar.close()
        ((text, told),) = probed
        assert "progress display stopped" in text
        assert told


def test_failing_terminal_leaves_tqdm_lock_free() -> None:
    """After the terminal fails, tqdm's lock is free."""
    terminal = FailingTerminal()
    terminal.broken = True
    with show_bar(terminal) as bar:
        bar.show(line(), force=True)
        assert ends(lambda: tqdm.write("a line", file=io.StringIO()))


def test_bar_does_not_redirect_output_to_file(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output that goes to a file is not redirected through the bar."""
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    monkeypatch.setattr(sys, "stderr", terminal)
    with closing(TerminalBar()) as bar:
        bar.show(line(), force=True)
        assert sys.stdout is file
        print("result")
    assert file.getvalue() == "result\n"
    assert "result" not in terminal.getvalue()


def test_error_of_failed_fit_is_printed_below_last_drawing(
    terminal: Terminal,
) -> None:
    """If a fit fails, the last drawing stays and the error is printed below it."""
    with show_bar(terminal) as bar:
        bar.show(line(), force=True)
        bar.close()
        bar.close()
        print("Traceback")
        drawn, error, _ = terminal.screen()
        assert drawn.startswith("training  50%")
        assert error == "Traceback"
        assert terminal.getvalue().count(ERASE) < 10


def test_tqdm_monitor_thread_is_disabled() -> None:
    """A bar starts no thread, as tqdm's own does to redraw bars that are not updated."""
    with progress_bar.TqdmBar(total=1, file=io.StringIO()):
        monitors = [each for each in threading.enumerate() if isinstance(each, TMonitor)]
    assert [each for each in monitors if each.tqdm_cls is progress_bar.TqdmBar] == []


@pytest.mark.parametrize(("room", "text"), [(3, ""), (4, "abcd"), (9, "abcd"), (10, "abcd  efgh")])
def test_texts_beyond_width_are_omitted_from_end(room: int, text: str) -> None:
    """Texts are left out from the end if they exceed the width."""
    assert join_within_width(["abcd", "efgh"], room) == text
