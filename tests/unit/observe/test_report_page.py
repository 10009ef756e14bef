"""Tests of the report page of a run log, also for failed fits, damaged files and odd values."""

from __future__ import annotations

import copy
import math
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.observe.reporting.report_page import FITS_SHOWN, compute_throughput, render_report
from sparkstrom.observe.reporting.run_log_reader import (
    UNREADABLE_LINES_MAX,
    RunHistory,
    read_history,
)
from tests.unit.observe.run_logs import PLOTS, REAL, Line, make_long_log, read_real_log, write_log

PAGE_BYTES_MAX = 500_000
ODD: list[Any] = [
    None, True, -1, 0, 1e308, -1e-320, 10**400, "1", "<b>", "\ud800\x00", [], [[1]], {}, {"a": {}},
    math.nan, -math.inf,
]  # fmt: skip
# Number of values to replace in each line, by event.
CHANGED = {"fit_begin": 9, "iteration": 2, "worker_change": 2, "epoch": 2, "fit_end": 30}


class Page(HTMLParser):
    """A parsed page: the tags, attributes, number of plots and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.plots, self.said, self.text = 0, "", text
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.plots += tag == "svg" and ("class", "plot") in attrs

    def handle_data(self, data: str) -> None:
        self.said += data


def history(tmp_path: Path, lines: list[Line], torn: str = "") -> RunHistory:
    return read_history(write_log(tmp_path / "run.jsonl", lines, torn))


def page(tmp_path: Path, lines: list[Line], torn: str = "") -> Page:
    """Return the parsed report of these lines, after a check of its size."""
    text = render_report(history(tmp_path, lines, torn))
    assert len(text.encode()) < PAGE_BYTES_MAX
    return Page(text)


# -- fits ----------------------------------------------------------------------------------------


def test_page_of_completed_fit_has_all_plots_and_faults() -> None:
    """The page of a completed fit has all plots, the faults and the options, but no scripts."""
    made = Page(render_report(read_history(REAL)))
    assert made.plots == PLOTS
    titles = (
        "Loss", "Throughput", "Sent fraction", "Threshold (tau)", "Staleness on the way",
        "Staleness in residuals", "Bytes handed over, by kind", "Workers", "Time by phase",
        "Time of each worker",
    )  # fmt: skip
    assert [title for title in titles if title not in made.said] == []
    assert "worker lost: partition" in made.said
    assert "another worker trains partition" in made.said
    assert "media driver replaced" in made.said
    assert "batch_size_per_worker" in made.said
    assert "bit-identical" in made.said
    assert {"script", "img", "iframe", "object"}.isdisjoint(made.tags)


def test_each_plot_has_name_units_and_caption() -> None:
    """Each plot has an accessible name, units and a caption."""
    made = Page(render_report(read_history(REAL)))
    names = [value for name, value in made.attributes if name == "aria-label"]
    assert len(names) == PLOTS
    assert all(names)
    assert made.said.count("seconds since the fit began") == PLOTS - 2
    assert made.tags.count("figure") == made.tags.count("figcaption") == PLOTS
    assert "examples/s" in made.said


def test_page_of_failed_fit_has_error_and_recorded_plots(tmp_path: Path) -> None:
    """The page of a failed fit has the error message and the plots of what was recorded."""
    *lines, end = read_real_log()
    made = page(tmp_path, [*lines, end | {"summary": None, "error": "loss is NaN on host-7"}])
    assert made.plots == PLOTS - 1
    assert "failed" in made.said
    assert "loss is NaN on host-7" in made.said
    assert "times of each worker come with the summary" in made.said


@pytest.mark.parametrize(
    ("error", "how"),
    [("KeyboardInterrupt", "interrupted"), ("the job was cancelled: by x", "interrupted")],
)
def test_interrupted_fit_is_not_shown_as_failed(tmp_path: Path, error: str, how: str) -> None:
    """A fit that was interrupted or cancelled is not shown as failed."""
    made = page(
        tmp_path, [*read_real_log()[:-1], {"event": "fit_end", "summary": None, "error": error}]
    )
    assert how in made.said
    assert "failed" not in made.said


def test_fit_without_end_is_shown_as_running_or_killed(tmp_path: Path) -> None:
    """A fit without an end event is shown as still running or killed."""
    made = page(tmp_path, read_real_log()[:-1])
    assert "it is still running, or the driver program was killed" in made.said
    assert made.plots == PLOTS - 1
    only_begun = page(tmp_path, read_real_log()[:1])
    assert only_begun.plots == 0
    assert "before any worker trained" in only_begun.said


def test_torn_last_line_is_mentioned_and_others_are_plotted(tmp_path: Path) -> None:
    """A torn last line is mentioned, and the lines before it are plotted."""
    made = page(tmp_path, read_real_log()[:-1], '{"event": "iterat')
    assert "The last line is torn" in made.said
    assert made.plots == PLOTS - 1


def test_only_newest_of_several_fits_are_plotted(tmp_path: Path) -> None:
    """With several fits, each has a row but only the newest are plotted; ``only`` selects one."""
    made = page(tmp_path, read_real_log() * 6)
    (all_fits,) = re.findall("All fits.*?</table>", made.text)
    assert re.findall(r"<tr><td>(\d+)</td>", all_fits) == ["6", "5", "4", "3", "2", "1"]
    assert made.plots == FITS_SHOWN * PLOTS
    assert "6 fits" in made.said
    assert "2 fits of the log not shown below" in made.said
    one = Page(render_report(history(tmp_path, read_real_log() * 6), only=2))
    assert one.plots == PLOTS
    assert "Fit 2:" in one.said
    assert "Fit 6:" not in one.said


@pytest.mark.parametrize("number", [0, 3, -1])
def test_rejects_fit_number_outside_log(tmp_path: Path, number: int) -> None:
    """A number that is not that of a fit in the log raises ``UsageError``."""
    with pytest.raises(UsageError, match=r"has 2 fits; give a number from 1 on"):
        render_report(history(tmp_path, read_real_log() * 2), only=number)


def test_fit_after_torn_line_is_separate_fit(tmp_path: Path) -> None:
    """A fit that was appended after a torn line is a separate fit."""
    path = write_log(tmp_path / "run.jsonl", read_real_log()[:-1], '{"event": "iter\n')
    path.write_text(path.read_text() + REAL.read_text())
    made = read_history(path)
    assert len(made.fits) == 2
    assert made.unreadable_lines == [len(read_real_log())]
    assert "1 line could not be read" in Page(render_report(made)).said


def test_long_log_gives_page_below_size_limit(tmp_path: Path) -> None:
    """A log with thousands of iterations gives a page below the maximum size."""
    made = page(tmp_path, make_long_log(4_000))
    assert made.plots == PLOTS
    assert "minutes since the fit began" in made.said or "hours since" in made.said
    page(tmp_path, make_long_log(600) * 5)


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_nonfinite_loss_is_mentioned_on_page(tmp_path: Path, loss: float | None) -> None:
    """A loss that is not a finite number is no point of the curve, and is marked and mentioned."""
    lines = read_real_log()
    whole = page(tmp_path, lines)
    for line in lines[len(lines) // 2 :]:
        if line["event"] in ("iteration", "epoch"):
            line["loss"] = loss
    made = page(tmp_path, lines)
    assert made.plots == PLOTS
    assert "the loss is not a number" in made.said
    assert ("class", "mark bad") in made.attributes
    assert ("class", "mark bad") not in whole.attributes
    last_x, last_x_of_whole = (float(loss_points(one)[-1].split(",")[0]) for one in (made, whole))
    (mark_x,) = map(float, set(re.findall(r'class="mark bad">.*?x1="(.*?)"', made.text)))
    assert last_x < mark_x < last_x_of_whole


def loss_points(made: Page) -> list[str]:
    """Return the points "x,y" of the first curve, which is that of the training loss."""
    (points, *_) = re.findall('<polyline points="(.*?)" class="curve c0">', made.text)
    return str(points).split()


def test_epoch_without_loss_and_examples_is_no_nan_loss(tmp_path: Path) -> None:
    """An epoch without loss and examples is not a NaN loss: old run logs have such lines."""
    lines = read_real_log()
    for line in lines:
        if line["event"] == "epoch":
            line |= {"loss": None, "examples": 0}
    assert "not a number" not in page(tmp_path, lines).said


def test_fit_without_any_loss_is_not_reported_as_nan(tmp_path: Path) -> None:
    """A fit whose rows all weigh 0 has no losses, from the first one on."""
    lines = read_real_log()
    for line in lines:
        if line["event"] in ("iteration", "epoch"):
            line["loss"] = None
    assert "the loss is not a number" not in page(tmp_path, lines).said


def test_slow_link_is_listed_once_with_time(tmp_path: Path) -> None:
    """A slow link is listed once, with the time at which it was found."""
    link = "the link to node 3 (host7) carries 1.2 MB/s, training would fill 9: updates are summed"
    lines = read_real_log()
    told = [line for line in lines if line["event"] == "iteration"][-2:]
    for line in told:
        line["slow_links"] = [link]
    made = page(tmp_path, lines)
    assert made.said.count(link) == 1
    assert f"{told[0]['seconds']:.1f} s" in made.said
    assert "No link was found too slow" in Page(render_report(read_history(REAL))).said


def test_checkpoints_are_marked_on_loss_plot(tmp_path: Path) -> None:
    """Checkpoints are marks on the loss plot, and the newest path is mentioned."""
    begin, *middle, end = read_real_log()
    written_at = [
        {"event": "checkpoint", "seconds": s, "path": f"/saved/{s}", "epochs": 1.0} for s in (1, 2)
    ]
    lost = [line for line in middle if line["event"] == "worker_change"]
    made = page(tmp_path, [begin, *written_at, *middle, end])
    before = page(tmp_path, read_real_log())
    classes = [value for name, value in made.attributes if name == "class"]
    assert classes.count("mark saved") == 2
    assert lost
    assert made.attributes.count(("class", "mark lost")) == before.attributes.count(
        ("class", "mark lost")
    )
    assert "/saved/2, at 2.0 s" in made.said
    assert "Checkpoints" not in before.said


def test_old_log_without_bytes_by_kind_has_all_plots(tmp_path: Path) -> None:
    """A log without bytes by kind still has all plots."""
    lines = read_real_log()
    for line in lines:
        line.pop("bytes_by_kind", None)
    assert page(tmp_path, lines).plots == PLOTS


# -- files that are not run logs ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"not JSON\n", "no whole line of a run log"),
        (b'{"loss": 1}\n[1]\n3\n', "no whole line of a run log"),
        (b"\x00\xff\xfe" * 1000 + b"\n", "no whole line of a run log"),
        (b'{"event": "fit_be', "no whole line of a run log"),
        (b"x\n" * 5000, f"the first {UNREADABLE_LINES_MAX:,} lines"),
        (b"[" * 100_000 + b"\n", "no whole line of a run log"),
    ],
)
def test_rejects_file_without_run_log_lines(tmp_path: Path, content: bytes, why: str) -> None:
    """A file without a line of a run log raises ``UsageError`` with the reason and a hint."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=why) as refused:
        read_history(path)
    assert "sparkstrom-runs" in str(refused.value)


def test_rejects_named_pipe_without_opening(tmp_path: Path) -> None:
    """A named pipe is refused without being opened, which would block."""
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(UsageError, match="not a regular file"):
        read_history(tmp_path / "log.jsonl")


def test_rejects_missing_file_and_directory(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            read_history(path)


# -- arbitrary values in the log -----------------------------------------------------------------

EVIL = "</style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u202e\x1b[2J"


def replace_strings(value: Any, said: str) -> Any:
    """Return the value with all strings, keys included, replaced, except events and times."""
    match value:
        case dict():
            kept = ("event", "time")
            return {k: v if k in kept else replace_strings(v, said) for k, v in value.items()}
        case list():
            return [replace_strings(one, said) for one in value]
        case str():
            return said
        case _:
            return value


def test_log_strings_are_escaped_in_page(tmp_path: Path) -> None:
    """Strings of a log, keys included, appear on the page as text, never as markup."""
    lines = [replace_strings(line, EVIL) for line in read_real_log()]
    lines[0]["options"][EVIL] = EVIL
    lines[-1]["summary"]["phase_seconds"][EVIL] = 3.0
    lines[-1]["summary"]["horizons"] = {"workers": EVIL, EVIL: EVIL}
    lines[-1]["summary"]["stopped"] = EVIL
    for line in lines:
        line.get("bytes_by_kind", {})[EVIL] = 5
    made = page(tmp_path, lines)
    assert made.plots == PLOTS
    assert {"script", "img"}.isdisjoint(made.tags)
    assert [name for name, _ in made.attributes if name.startswith("on") or name == "src"] == []
    assert "<script>alert(1)</script>" in made.said
    assert "\x1b" not in made.said


def fields(line: Line) -> list[tuple[Any, Any]]:
    """Return all places in a line, at any depth, as pairs of container and key."""
    places: list[tuple[Any, Any]] = []
    left: list[Any] = [line]
    while left:
        at = left.pop()
        keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else []
        places += [(at, key) for key in keys if key != "event"]
        left += [at[key] for key in keys]
    return places


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_odd_values_at_random_places_still_give_page(tmp_path: Path, odd: Any) -> None:
    """A log with an odd value at random places still gives a page."""
    rng = random.Random(repr(odd))
    for kind, places in CHANGED.items():
        lines = read_real_log()
        for line in lines:
            for _ in range(places if line["event"] == kind else 0):
                at, key = rng.choice(fields(line))
                at[key] = copy.deepcopy(odd)  # odd containers may be nested in each other
        assert page(tmp_path, lines).tags


@pytest.mark.parametrize("odd", ["x", {}])
def test_odd_summary_value_still_gives_page(tmp_path: Path, odd: Any) -> None:
    """A summary in which any one value is odd still gives a page."""
    *lines, end = read_real_log()
    for key in end["summary"]:
        changed = end | {"summary": end["summary"] | {key: odd}}
        assert page(tmp_path, [lines[0], changed]).tags


def test_throughput_spans_have_minimum_length() -> None:
    """Throughput is computed over spans of a minimum length, which skip unknown counts."""
    seconds = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert compute_throughput(seconds, [0, 50, 100, 150, None, 250], 10.0) == (
        [1.0, 2.5],
        [100.0, 100.0],
    )
    assert compute_throughput([1.0, 3.0], [10, 4], 3.0) == ([3.0], [0.0])
    assert compute_throughput([], [], 0.0) == ([], [])


def test_iterations_before_first_minibatch_are_no_training(tmp_path: Path) -> None:
    """Iterations before the first minibatch, as in logs of earlier versions, are no training."""
    begin, *lines, _ = read_real_log()
    first = next(line for line in lines if line["event"] == "iteration")
    assert first["minibatches"] == 0
    said = page(tmp_path, [begin, first]).said
    assert "no step was reported" in said
    started = page(tmp_path, [begin, *lines]).said
    assert "no step was reported" not in started
    assert "start, seconds: 28 s" in started  # before, all of it was training
