"""Tests of the progress display of a fit: its texts, and the plain lines at intervals."""

from __future__ import annotations

import io
import logging
import sys
from contextlib import closing

import pytest

from sparkstrom.observe import progress
from sparkstrom.observe.progress import (
    PlainTextDisplay,
    ProgressDisplay,
    ProgressFigures,
    ProgressRate,
    format_clock_time,
)
from sparkstrom.observe.progress_bar import TerminalBar
from sparkstrom.observe.progress_display import make_progress_display


class Clock:
    """A replacement of the module ``time`` that tests advance by hand."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def line(
    examples: int = 0,
    loss: float | None = None,
    waiting: float = 0.0,
    *,
    phase: str = "training",
    epoch: float = 1.5,
    slow_links: int = 0,
) -> ProgressFigures:
    """Return the figures of a fit of 3 epochs with 3 of 4 workers."""
    return ProgressFigures(
        phase, 3, 4, epoch, 3, loss, examples, 1234, 5_000_000, 5.2, waiting, 0.0123, 0.00071,
        slow_links,
    )  # fmt: skip


def test_plain_display_writes_one_line_per_interval(clock: Clock) -> None:
    """The plain display writes a line per interval, and if forced, without control characters."""
    stream = io.StringIO()
    shown = PlainTextDisplay(stream)
    for _ in range(100):
        clock.now_s += 0.1
        shown.show(line())
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10 // progress.LOG_EVERY_S + 1
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert lines[0].startswith("sparkstrom: training 50%  epoch 1.5/3  3/4 workers  sent 1.23%")
    assert lines[0].endswith("tau 0.00071  staleness 5  1,234 updates  5.00 MB  0 s")
    shown.show(line(waiting=71.4), force=True)
    assert "  staleness 5+71  " in stream.getvalue().splitlines()[-1]


def test_plain_display_writes_few_lines_in_long_fit(clock: Clock) -> None:
    """In the sixth hour of a fit, the plain display writes one line a minute."""
    stream, written = io.StringIO(), list[int]()
    shown = PlainTextDisplay(stream)
    for _ in range(6):
        for _ in range(3600):
            clock.now_s += 1.0
            shown.show(line())
        written.append(len(stream.getvalue().splitlines()))
    assert written[-1] - written[-2] == 60
    assert written[-1] < 6 * 60 + 100


def test_plain_display_writes_phase_change_at_once(clock: Clock) -> None:
    """The plain display writes a line at once when the phase changes, but does not repeat it."""
    stream = io.StringIO()
    shown = PlainTextDisplay(stream)
    for phase in ("starting 4 Python workers", "3 of 4 workers ready", "copying parameters"):
        shown.show(line(phase=phase, epoch=0.0))
        shown.show(line(phase=phase, epoch=0.0))
    assert stream.getvalue().splitlines() == [
        "sparkstrom: starting 4 Python workers  0 s",
        "sparkstrom: 3 of 4 workers ready  0 s",
        "sparkstrom: copying parameters  0 s",
    ]


def test_progress_rate_covers_only_last_seconds() -> None:
    """Speed and remaining time are those of the last seconds: after a stall, zero and unknown."""
    pace = ProgressRate()
    pace.update(line(epoch=0.0), 0.0)
    assert (pace.examples_per_s, pace.remaining_s) == (None, None)
    for second in range(11):
        pace.update(line(100 * second, epoch=0.1 + second * 0.1), float(second))
    assert pace.examples_per_s == pytest.approx(100)
    assert pace.remaining_s == pytest.approx((3 - 1.1) / 0.1)
    for second in range(11, 200):  # a stall
        pace.update(line(1000, epoch=1.1), float(second))
    assert (pace.examples_per_s, pace.remaining_s) == (0, None)


def test_progress_texts_begin_with_most_important_figures() -> None:
    """The texts begin with epoch, loss, speed, remaining time, workers and slow links."""
    pace = ProgressRate(2000.4, 65.2)
    assert line(loss=0.25, slow_links=2).to_texts(pace)[:6] == [
        "epoch 1.5/3",
        "loss 0.2500",
        "2,000 examples/s",
        "1:05 left",
        "3/4 workers",
        "2 slow links",
    ]
    assert "1 slow link" in line(slow_links=1).to_texts(pace)
    assert not any("left" in each for each in line(epoch=3.0).to_texts(pace))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (3600, "1:00:00"), (7387, "2:03:07")]
)
def test_seconds_are_formatted_as_clock_time(seconds: float, text: str) -> None:
    assert format_clock_time(seconds) == text


def test_note_is_written_on_its_own_line(clock: Clock) -> None:
    """A note is written as a line of its own."""
    stream = io.StringIO()
    shown = PlainTextDisplay(stream)
    shown.show(line())
    shown.say("waiting")
    assert stream.getvalue().splitlines()[-1] == "waiting"


def test_disabled_display_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """A display that is switched off writes nothing."""
    with closing(ProgressDisplay()) as shown:
        shown.show(line(), force=True)
        shown.say("waiting")
    assert capfd.readouterr() == ("", "")


class UnwritableStream(io.StringIO):
    """A stream whose every write fails, as if its reader were gone or its disk full."""

    encoding = "utf-8"

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error, self.tries = error, 0

    def write(self, text: str) -> int:
        self.tries += 1
        raise self._error

    def isatty(self) -> bool:
        return True


FAILURES = [BrokenPipeError(32, "Broken pipe"), OSError(28, "no space"), ValueError("closed file")]


@pytest.mark.parametrize("error", FAILURES)
@pytest.mark.parametrize("kind", [PlainTextDisplay, TerminalBar])
def test_display_is_silent_after_first_failed_write(
    kind: type[PlainTextDisplay | TerminalBar], error: Exception, clock: Clock
) -> None:
    """After its first failed write a display writes nothing more; the fit gets no exception."""
    stream = UnwritableStream(error)
    with closing(kind(stream)) as shown:
        shown.say("a note")
        tries = stream.tries
        shown.show(line(), force=True)
        shown.say("another note")
    assert stream.tries == tries == 1


def test_failing_log_handler_on_closed_stderr_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """In a daemon with closed standard error, the failing log handler raises no exception."""
    stream = UnwritableStream(ValueError("closed file"))
    monkeypatch.setattr(sys, "stderr", stream)
    handler = logging.StreamHandler(stream)
    logging.getLogger("sparkstrom").addHandler(handler)
    try:
        with closing(PlainTextDisplay(stream)) as shown:
            shown.say("a note")
    finally:
        logging.getLogger("sparkstrom").removeHandler(handler)
    assert stream.tries > 1


@pytest.mark.parametrize("kind", [PlainTextDisplay, TerminalBar])
def test_displays_raise_nothing_without_stdout_and_stderr(
    kind: type[PlainTextDisplay | TerminalBar], monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Without standard error and output, the displays raise no exception."""
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", None)
    assert isinstance(make_progress_display("auto"), PlainTextDisplay)
    with closing(kind()) as shown:
        shown.say("a note")
        shown.show(line(), force=True)


def test_characters_missing_in_stream_encoding_are_escaped(clock: Clock) -> None:
    """Characters that the stream's encoding lacks are written as escapes."""
    written = io.BytesIO()
    with closing(PlainTextDisplay(io.TextIOWrapper(written, encoding="ascii"))) as shown:
        shown.say("a word…")
        shown.say("another one")
        assert written.getvalue() == b"a word\\u2026\nanother one\n"


def test_progress_rate_restarts_after_controller_loss() -> None:
    """Workers of another controller count from 0. Before, the speed was negative for 15 s."""
    rate = ProgressRate()
    for now_s in range(5):
        rate.update(line(1000 * now_s, epoch=1 + now_s / 10), float(now_s))
    assert rate.examples_per_s == 1000
    rate.update(line(0, epoch=1.2), 30.0)
    assert (rate.examples_per_s, rate.remaining_s) == (None, None)
    rate.update(line(4000, epoch=1.4), 32.0)
    assert rate.examples_per_s == 2000


def test_progress_rate_is_unknown_while_resumed_fit_starts() -> None:
    """While its workers start, a resumed fit has epochs but no rows. Before, this was a stall."""
    rate = ProgressRate()
    for now_s in range(10):
        rate.update(line(0, epoch=1.5), float(now_s))
        assert (rate.examples_per_s, rate.remaining_s) == (None, None)
    rate.update(line(3000, epoch=1.6), 12.0)
    assert rate.examples_per_s == 1000
