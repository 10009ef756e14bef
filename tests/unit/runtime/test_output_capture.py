"""Output capture: user code's output is copied for the driver, limited, and still written."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator

import pytest

from sparkstrom.codec.messages import WorkerLog
from sparkstrom.codec.wire import decode_untrusted, encode
from sparkstrom.observe.progress import LINE_CHARS_MAX
from sparkstrom.runtime import master_control as heard_lines
from sparkstrom.runtime import output_capture
from sparkstrom.runtime.master_control import WorkerLogBuffer, WorkerLogLine
from sparkstrom.runtime.output_capture import TeeStream, WorkerOutput, capture_output


class Clock:
    """A clock that a test sets."""

    now_s = 5.0

    def monotonic_s(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def output(clock: Clock) -> WorkerOutput:
    made = WorkerOutput(clock)
    made.phase = lambda: "training"
    return made


@pytest.fixture
def capturing(output: WorkerOutput, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerOutput]:
    """An output that captures during the test; warnings are kept out of pytest's report."""
    monkeypatch.setattr(warnings, "showwarning", lambda *_: None)
    with capture_output(output):
        yield output


def lines(output: WorkerOutput) -> list[str]:
    """Remove and return the texts of the captured lines."""
    said = output.take()
    return [text for _, text in said.lines] if said is not None else []


def test_a_finalizer_may_print_while_a_line_is_added() -> None:
    """``add`` may be called within ``add``: a finalizer that prints can run at any time."""

    class Collecting(Clock):
        def monotonic_s(self) -> float:
            if not collected:
                collected.append("unclosed session")
                output.add("unclosed session")
            return super().monotonic_s()

    collected: list[str] = []
    output = WorkerOutput(Collecting())
    adding = threading.Thread(target=output.add, args=("step 1",), daemon=True)
    adding.start()
    adding.join(5.0)
    assert lines(output) == ["unclosed session", "step 1"]


def test_a_print_is_copied_and_goes_where_it_went(
    output: WorkerOutput, capsys: pytest.CaptureFixture[str]
) -> None:
    """Printed lines are captured, and reach standard output unchanged."""
    before = sys.stdout
    with capture_output(output):
        print("loss", 0.25)
        print("no end yet", end="")
        print("; now")
        print()
    assert sys.stdout is before
    assert lines(output) == ["loss 0.25", "no end yet; now"]
    assert output.take() is None
    assert capsys.readouterr().out == "loss 0.25\nno end yet; now\n\n"


def test_a_line_is_written_at_once_so_that_those_of_two_workers_stay_apart(
    output: WorkerOutput,
) -> None:
    """A line is written in one call, so that workers' lines do not mix; a flush writes parts."""
    written: list[str] = []
    stream = io.StringIO()
    stream.write = written.append  # type: ignore[method-assign, assignment]
    copied = TeeStream(stream, output.add)
    print("loss", 0.25, file=copied)
    print("no end yet", end="", file=copied)
    assert written == ["loss 0.25\n"]
    copied.flush()
    print(" 10 %", end="\r", file=copied)
    assert written == ["loss 0.25\n", "no end yet", " 10 %\r"]
    assert lines(output) == ["loss 0.25"]


def test_what_is_drawn_over_is_not_shown(output: WorkerOutput) -> None:
    """Text before a carriage return, as of a progress bar, is not captured."""
    stream = TeeStream(io.StringIO(), output.add)
    stream.writelines(["\r 10 %", "\r 20 %", "\rdone\n"])
    assert lines(output) == ["done"]


def test_a_line_that_never_ends_fills_no_memory(output: WorkerOutput) -> None:
    """The stored part of an unfinished line is limited, and so is a captured line."""
    stream = TeeStream(io.StringIO(), output.add)
    for _ in range(1000):
        stream.write("x" * 1000)
    assert len(stream._partial) == output_capture.PARTIAL_CHARS_MAX
    stream.write("\n")
    (line,) = lines(output)
    assert len(line) == LINE_CHARS_MAX


def test_a_warning_is_told_with_its_place(capturing: WorkerOutput) -> None:
    """A warning is captured with its category, file and line number."""
    warnings.simplefilter("default")
    warnings.warn("mind the gap", RuntimeWarning, stacklevel=1)
    (line,) = lines(capturing)
    assert line.startswith("RuntimeWarning: mind the gap (")
    assert "test_output_capture.py, line " in line


def test_sparkstroms_own_warnings_are_kept_for_the_summary(capturing: WorkerOutput) -> None:
    """The newest warning from each place is kept, of a few places; those of others are not."""
    warnings.simplefilter("always")
    for line, text in ((1, "a"), (1, "b"), (2, "c" * 9999), (3, "d"), (4, "e")):
        warnings.warn_explicit(text, UserWarning, f"{output_capture.PACKAGE}models/m.py", line)
    warnings.warn_explicit("a user's", UserWarning, "/home/me/train.py", 1)
    warnings.warn_explicit("NumPy's", RuntimeWarning, f"{output_capture.PACKAGE}models/m.py", 9)
    kept = list(capturing.warnings.values())
    assert [text[0] for text in kept] == ["b", "c", "d"]
    assert len(kept[1]) == output_capture.WARNING_CHARS_MAX


def test_a_warning_of_an_earlier_task_is_told_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each capture records a repeated warning once, also if an earlier capture had it."""
    monkeypatch.setattr(warnings, "showwarning", lambda *_: None)
    for _ in range(2):
        output = WorkerOutput(clock)
        with capture_output(output):
            warnings.simplefilter("default")
            for _ in range(3):
                warnings.warn("once", UserWarning, stacklevel=1)
        assert len(lines(output)) == 1


def test_records_from_warning_on_are_told_whoever_handles_them(capturing: WorkerOutput) -> None:
    """Log records from WARNING on are captured, even of loggers that do not propagate."""
    quiet = logging.getLogger("quiet.module")
    quiet.propagate = False
    quiet.addHandler(logging.NullHandler())
    quiet.warning("%d rows are empty", 3)
    quiet.info("not this")
    try:
        raise ValueError("broken")
    except ValueError:
        quiet.exception("gave up")
    assert lines(capturing) == [
        "WARNING quiet.module: 3 rows are empty",
        "ERROR quiet.module: gave up (ValueError: broken)",
    ]


def test_a_record_whose_arguments_do_not_fit_is_told_without_them(capturing: WorkerOutput) -> None:
    """A log record whose arguments do not match its format is captured as the bare format."""
    logging.getLogger("careless").makeRecord("careless", 30, "", 1, "%d rows", ("no",), None)
    assert lines(capturing) == ["WARNING careless: %d rows"]
    assert logging.makeLogRecord({"msg": "from elsewhere"}).msg == "from elsewhere"


def test_records_are_in_the_executors_log_as_they_were_without_us() -> None:
    """Log warnings without a handler reach stderr; ours do so only during capture."""
    program = """
import logging, sparkstrom
from sparkstrom.base.clock import SystemClock
from sparkstrom.runtime.output_capture import WorkerOutput, capture_output
with capture_output(WorkerOutput(SystemClock())):
    logging.getLogger("theirs").warning("theirs is told")
    logging.getLogger("sparkstrom.spark").warning("ours is told")
logging.getLogger("sparkstrom.spark").warning("and not on the driver")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr.splitlines() == ["theirs is told", "ours is told"]


def test_a_print_in_every_step_is_counted_and_not_told(output: WorkerOutput, clock: Clock) -> None:
    """Lines beyond a burst, a rate and a total are only counted."""
    for step in range(10_000):
        output.add(f"step {step}")
    said = output.take()
    assert said is not None
    assert len(said.lines) == output_capture.LINES_BURST
    assert said.skipped == 10_000 - output_capture.LINES_BURST
    clock.now_s += output_capture.LINE_INTERVAL_S
    output.add("later")
    output.add("too soon")
    assert output.take() == output_capture.OutputPrinted([("training", "later")], 1)
    for step in range(1000):
        clock.now_s += 100
        output.add(f"step {step}")
    told = 0
    while (said := output.take()) is not None:
        assert len(said.lines) <= output_capture.MESSAGE_LINES_MAX
        told += len(said.lines)
    assert told == output_capture.LINES_MAX - output_capture.LINES_BURST - 1


def test_threads_may_print_at_once(output: WorkerOutput) -> None:
    """Each line of concurrent threads is captured or counted."""
    threads = [
        threading.Thread(target=lambda: [output.add("x") for _ in range(1000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    said = output.take()
    assert said is not None
    assert len(said.lines) + said.skipped == 4000


def test_the_longest_message_goes_over_the_wire(output: WorkerOutput) -> None:
    """A message with the most and longest lines stays below 16 KiB and decodes to itself."""
    for _ in range(output_capture.LINES_BURST):
        output.add("木" * 1000)
    said = output.take()
    assert said is not None
    says = WorkerLog(host="h", partition=1, lines=said.lines, skipped=said.skipped)
    kind, body = encode(says)
    assert decode_untrusted(kind, body) == says
    assert len(body) < 16 * 1024


# -- on the driver -------------------------------------------------------------------------------


def says(*texts: str, host: str = "host7", skipped: int = 0) -> WorkerLog:
    """Return a log message of partition 2 with these lines."""
    lines = [("training", text) for text in texts]
    return WorkerLog(host=host, partition=2, lines=lines, skipped=skipped)


def test_the_driver_trusts_no_worker_with_its_terminal() -> None:
    """Control characters in a worker's lines and host name are escaped, and lines are cut."""
    heard = WorkerLogBuffer()
    heard.add(says("\x1b]0;mine\x07" + "x" * 500, host="h\x1b[2J"), 0.0)
    (line,) = heard.lines
    assert line.host == "h\\x1b[2J"
    assert line.text.startswith("\\x1b]0;mine\\x07xxx")
    assert len(line.text) == LINE_CHARS_MAX


def test_a_thousand_workers_do_not_flood_the_driver() -> None:
    """The driver keeps a limited number of lines and counts the others."""
    heard = WorkerLogBuffer()
    for _ in range(1000):
        heard.add(says("hello", skipped=3), 0.0)
    assert (
        heard.lines
        == (WorkerLogLine(2, "host7", "training", "hello"),) * heard_lines.LOG_LINES_BURST
    )
    assert heard.skipped == 1000 - heard_lines.LOG_LINES_BURST + 3000
    for second in range(10_000):
        heard.add(says("hello"), float(second))
    assert len(heard.lines) == heard_lines.LOG_LINES_MAX


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_print_reaches_the_driver_where_standard_output_cannot_be_written(
    stream: str | None, output: WorkerOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are captured even if standard output is missing or closed."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed if stream else None)
    with capture_output(output):
        print("loss", 0.25, flush=True)
    assert lines(output) == ["loss 0.25"]
