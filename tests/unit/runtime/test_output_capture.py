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


class ManualClock:
    """A clock that a test sets."""

    now_s = 5.0

    def monotonic_s(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def output(clock: ManualClock) -> WorkerOutput:
    made = WorkerOutput(clock)
    made.phase = lambda: "training"
    return made


@pytest.fixture
def active_capture(output: WorkerOutput, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerOutput]:
    """An output that captures during the test; warnings are kept out of pytest's report."""
    monkeypatch.setattr(warnings, "showwarning", lambda *_: None)
    with capture_output(output):
        yield output


def take_lines(output: WorkerOutput) -> list[str]:
    """Remove and return the texts of the captured lines."""
    said = output.take()
    return [text for _, text in said.lines] if said is not None else []


def test_finalizer_may_print_while_line_is_added() -> None:
    """``add`` may be called within ``add``: a finalizer that prints can run at any time."""

    class Collecting(ManualClock):
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
    assert take_lines(output) == ["unclosed session", "step 1"]


def test_printed_lines_are_captured_and_still_written_to_stdout(
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
    assert take_lines(output) == ["loss 0.25", "no end yet; now"]
    assert output.take() is None
    assert capsys.readouterr().out == "loss 0.25\nno end yet; now\n\n"


def test_tee_stream_writes_each_line_in_one_call(
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
    assert take_lines(output) == ["loss 0.25"]


def test_text_before_carriage_return_is_not_captured(output: WorkerOutput) -> None:
    """Text before a carriage return, as of a progress bar, is not captured."""
    stream = TeeStream(io.StringIO(), output.add)
    stream.writelines(["\r 10 %", "\r 20 %", "\rdone\n"])
    assert take_lines(output) == ["done"]


def test_unfinished_line_uses_limited_memory(output: WorkerOutput) -> None:
    """The stored part of an unfinished line is limited, and so is a captured line."""
    stream = TeeStream(io.StringIO(), output.add)
    for _ in range(1000):
        stream.write("x" * 1000)
    assert len(stream._partial) == output_capture.PARTIAL_CHARS_MAX
    stream.write("\n")
    (line,) = take_lines(output)
    assert len(line) == LINE_CHARS_MAX


def test_warning_is_captured_with_category_file_and_line(active_capture: WorkerOutput) -> None:
    """A warning is captured with its category, file and line number."""
    warnings.simplefilter("default")
    warnings.warn("mind the gap", RuntimeWarning, stacklevel=1)
    (line,) = take_lines(active_capture)
    assert line.startswith("RuntimeWarning: mind the gap (")
    assert "test_output_capture.py, line " in line


def test_newest_sparkstrom_warning_per_place_is_kept_for_summary(
    active_capture: WorkerOutput,
) -> None:
    """The newest warning from each place is kept, of a few places; those of others are not."""
    warnings.simplefilter("always")
    for line, text in ((1, "a"), (1, "b"), (2, "c" * 9999), (3, "d"), (4, "e")):
        warnings.warn_explicit(text, UserWarning, f"{output_capture.PACKAGE}models/m.py", line)
    warnings.warn_explicit("a user's", UserWarning, "/home/me/train.py", 1)
    warnings.warn_explicit("NumPy's", RuntimeWarning, f"{output_capture.PACKAGE}models/m.py", 9)
    kept = list(active_capture.warnings.values())
    assert [text[0] for text in kept] == ["b", "c", "d"]
    assert len(kept[1]) == output_capture.WARNING_CHARS_MAX


def test_repeated_warning_is_captured_once_per_task(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each capture records a repeated warning once, also if an earlier capture had it."""
    monkeypatch.setattr(warnings, "showwarning", lambda *_: None)
    for _ in range(2):
        output = WorkerOutput(clock)
        with capture_output(output):
            warnings.simplefilter("default")
            for _ in range(3):
                warnings.warn("once", UserWarning, stacklevel=1)
        assert len(take_lines(output)) == 1


def test_log_records_from_warning_up_are_captured_without_propagation(
    active_capture: WorkerOutput,
) -> None:
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
    assert take_lines(active_capture) == [
        "WARNING quiet.module: 3 rows are empty",
        "ERROR quiet.module: gave up (ValueError: broken)",
    ]


def test_log_record_with_wrong_arguments_is_captured_unformatted(
    active_capture: WorkerOutput,
) -> None:
    """A log record whose arguments do not match its format is captured as the bare format."""
    logging.getLogger("careless").makeRecord("careless", 30, "", 1, "%d rows", ("no",), None)
    assert take_lines(active_capture) == ["WARNING careless: %d rows"]
    assert logging.makeLogRecord({"msg": "from elsewhere"}).msg == "from elsewhere"


def test_log_warnings_without_handler_still_reach_stderr() -> None:
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


def test_lines_beyond_burst_rate_and_total_are_only_counted(
    output: WorkerOutput, clock: ManualClock
) -> None:
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


def test_lines_of_concurrent_threads_are_all_captured_or_counted(output: WorkerOutput) -> None:
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


def test_longest_worker_log_encodes_below_16_kib(output: WorkerOutput) -> None:
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


def make_worker_log(*texts: str, host: str = "host7", skipped: int = 0) -> WorkerLog:
    """Return a log message of partition 2 with these lines."""
    lines = [("training", text) for text in texts]
    return WorkerLog(host=host, partition=2, lines=lines, skipped=skipped)


def test_driver_escapes_control_characters_and_truncates_lines() -> None:
    """Control characters in a worker's lines and host name are escaped, and lines are cut."""
    heard = WorkerLogBuffer()
    heard.add(make_worker_log("\x1b]0;mine\x07" + "x" * 500, host="h\x1b[2J"), 0.0)
    (line,) = heard.lines
    assert line.host == "h\\x1b[2J"
    assert line.text.startswith("\\x1b]0;mine\\x07xxx")
    assert len(line.text) == LINE_CHARS_MAX


def test_driver_keeps_limited_number_of_worker_lines() -> None:
    """The driver keeps a limited number of lines and counts the others."""
    heard = WorkerLogBuffer()
    for _ in range(1000):
        heard.add(make_worker_log("hello", skipped=3), 0.0)
    assert (
        heard.lines
        == (WorkerLogLine(2, "host7", "training", "hello"),) * heard_lines.LOG_LINES_BURST
    )
    assert heard.skipped == 1000 - heard_lines.LOG_LINES_BURST + 3000
    for second in range(10_000):
        heard.add(make_worker_log("hello"), float(second))
    assert len(heard.lines) == heard_lines.LOG_LINES_MAX


@pytest.mark.parametrize("stream", [None, "closed"])
def test_lines_are_captured_if_stdout_is_missing_or_closed(
    stream: str | None, output: WorkerOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are captured even if standard output is missing or closed."""
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed if stream else None)
    with capture_output(output):
        print("loss", 0.25, flush=True)
    assert take_lines(output) == ["loss 0.25"]
