"""The progress line: redrawn on a terminal, now and then in a log, silent where it is off."""

from __future__ import annotations

import io

import pytest

from sparkstrom.observe import progress
from sparkstrom.observe.progress import Line, ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def line(examples: int = 0, loss: float | None = None, waiting: float = 0.0) -> Line:
    return Line("running", 3, 4, 1.5, 3, loss, examples, 1234, 5_000_000, 5.2, waiting)


def test_a_log_gets_a_plain_line_now_and_then(clock: Clock) -> None:
    stream = io.StringIO()
    shown = ProgressLine(stream)
    for _ in range(100):
        clock.now_s += 0.1
        shown.show(line())
    lines = stream.getvalue().splitlines()
    assert len(lines) == 10 // progress.LOG_EVERY_S + 1
    assert "\r" not in stream.getvalue()
    assert "epoch 1.5/3  loss      -" in lines[0]
    assert "1,234 updates  5.00 MB  staleness 5  3/4 workers" in lines[0]
    shown.show(line(waiting=71.4), force=True)
    assert "  staleness 5+71  3/4 workers" in stream.getvalue().splitlines()[-1]


def test_a_terminal_is_drawn_over_and_over(clock: Clock) -> None:
    stream = Terminal()
    shown = ProgressLine(stream)
    for _ in range(10):
        clock.now_s += 0.1
        shown.show(line(loss=0.25))
    assert 4 <= stream.getvalue().count("\r\x1b[K") <= 6
    assert "\n" not in stream.getvalue()
    assert "[##########          ]" in stream.getvalue()
    assert "loss 0.2500" in stream.getvalue()


def test_the_last_drawing_ends_its_line(clock: Clock) -> None:
    stream = Terminal()
    shown = ProgressLine(stream)
    shown.show(line())
    shown.show(line(), force=True)  # also when it is not time yet
    assert stream.getvalue().count("\r\x1b[K") == 2
    assert stream.getvalue().endswith("\n")


def test_the_rate_is_of_what_was_trained_since(clock: Clock) -> None:
    stream = io.StringIO()
    shown = ProgressLine(stream)
    for examples in (1000, 3000, 3000):
        clock.now_s += 10
        shown.show(line(examples))
    lines = stream.getvalue().splitlines()
    for text, rate in zip(lines, (100, 200, 200), strict=True):
        assert f"  {rate} examples/s" in text


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_what_is_said_stands_on_a_line_of_its_own(clock: Clock, stream: io.StringIO) -> None:
    shown = ProgressLine(stream)
    shown.show(line())
    shown.say("waiting")
    assert stream.getvalue().replace("\r\x1b[K", "\n").splitlines()[-1] == "waiting"


def test_switched_off_it_is_silent() -> None:
    stream = io.StringIO()
    shown = ProgressLine(stream, enabled=False)
    shown.show(line(), force=True)
    shown.say("waiting")
    assert stream.getvalue() == ""
