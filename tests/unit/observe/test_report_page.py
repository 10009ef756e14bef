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
from tests.unit.observe.run_logs import PLOTS, REAL, Line, long, real, written

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
    return read_history(written(tmp_path / "run.jsonl", lines, torn))


def page(tmp_path: Path, lines: list[Line], torn: str = "") -> Page:
    """Return the parsed report of these lines, after a check of its size."""
    text = render_report(history(tmp_path, lines, torn))
    assert len(text.encode()) < PAGE_BYTES_MAX
    return Page(text)


# -- fits ----------------------------------------------------------------------------------------


def test_a_fit_that_is_done_has_all_plots_its_faults_and_its_figures() -> None:
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


def test_each_plot_has_a_name_units_and_its_values_as_a_table() -> None:
    """Each plot has an accessible name, units and a caption."""
    made = Page(render_report(read_history(REAL)))
    names = [value for name, value in made.attributes if name == "aria-label"]
    assert len(names) == PLOTS
    assert all(names)
    assert made.said.count("seconds since the fit began") == PLOTS - 2
    assert made.tags.count("figure") == made.tags.count("figcaption") == PLOTS
    assert "examples/s" in made.said


def test_a_fit_that_failed_says_why_and_shows_what_there_was(tmp_path: Path) -> None:
    """The page of a failed fit has the error message and the plots of what was recorded."""
    *lines, end = real()
    made = page(tmp_path, [*lines, end | {"summary": None, "error": "loss is NaN on host-7"}])
    assert made.plots == PLOTS - 1
    assert "failed" in made.said
    assert "loss is NaN on host-7" in made.said
    assert "times of each worker come with the summary" in made.said


@pytest.mark.parametrize(
    ("error", "how"),
    [("KeyboardInterrupt", "interrupted"), ("the job was cancelled: by x", "interrupted")],
)
def test_a_fit_that_a_person_ended_is_no_failure(tmp_path: Path, error: str, how: str) -> None:
    """A fit that was interrupted or cancelled is not shown as failed."""
    made = page(tmp_path, [*real()[:-1], {"event": "fit_end", "summary": None, "error": error}])
    assert how in made.said
    assert "failed" not in made.said


def test_a_fit_without_an_end_may_still_be_running(tmp_path: Path) -> None:
    """A fit without an end event is shown as still running or killed."""
    made = page(tmp_path, real()[:-1])
    assert "it is still running, or the driver program was killed" in made.said
    assert made.plots == PLOTS - 1
    only_begun = page(tmp_path, real()[:1])
    assert only_begun.plots == 0
    assert "before any worker trained" in only_begun.said


def test_a_torn_line_is_told_and_what_was_before_it_is_there(tmp_path: Path) -> None:
    """A torn last line is mentioned, and the lines before it are plotted."""
    made = page(tmp_path, real()[:-1], '{"event": "iterat')
    assert "The last line is torn" in made.said
    assert made.plots == PLOTS - 1


def test_of_several_fits_each_has_a_row_and_the_newest_their_plots(tmp_path: Path) -> None:
    """With several fits, each has a row but only the newest are plotted; ``only`` selects one."""
    made = page(tmp_path, real() * 6)
    (all_fits,) = re.findall("All fits.*?</table>", made.text)
    assert re.findall(r"<tr><td>(\d+)</td>", all_fits) == ["6", "5", "4", "3", "2", "1"]
    assert made.plots == FITS_SHOWN * PLOTS
    assert "6 fits" in made.said
    assert "2 fits of the log not shown below" in made.said
    one = Page(render_report(history(tmp_path, real() * 6), only=2))
    assert one.plots == PLOTS
    assert "Fit 2:" in one.said
    assert "Fit 6:" not in one.said


@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_fit_that_is_not_in_the_log_is_refused(tmp_path: Path, number: int) -> None:
    """A number that is not that of a fit in the log raises ``UsageError``."""
    with pytest.raises(UsageError, match=r"has 2 fits; give a number from 1 on"):
        render_report(history(tmp_path, real() * 2), only=number)


def test_a_fit_that_begins_after_a_torn_line_is_one_of_its_own(tmp_path: Path) -> None:
    """A fit that was appended after a torn line is a separate fit."""
    path = written(tmp_path / "run.jsonl", real()[:-1], '{"event": "iter\n')
    path.write_text(path.read_text() + REAL.read_text())
    made = read_history(path)
    assert len(made.fits) == 2
    assert made.unreadable_lines == [len(real())]
    assert "1 line could not be read" in Page(render_report(made)).said


def test_hours_of_iterations_make_a_small_page(tmp_path: Path) -> None:
    """A log with thousands of iterations gives a page below the maximum size."""
    made = page(tmp_path, long(4_000))
    assert made.plots == PLOTS
    assert "minutes since the fit began" in made.said or "hours since" in made.said
    page(tmp_path, long(600) * 5)


@pytest.mark.parametrize("loss", [math.nan, math.inf, None])
def test_a_loss_that_is_no_number_is_a_gap_and_a_mark(tmp_path: Path, loss: float | None) -> None:
    """A loss that is not a finite number is no point of the curve, and is marked and mentioned."""
    lines = real()
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


def test_an_epoch_whose_rows_were_not_told_in_time_is_no_fault(tmp_path: Path) -> None:
    """An epoch without loss and examples is not a NaN loss: old run logs have such lines."""
    lines = real()
    for line in lines:
        if line["event"] == "epoch":
            line |= {"loss": None, "examples": 0}
    assert "not a number" not in page(tmp_path, lines).said


def test_rows_that_do_not_count_are_not_a_divergence(tmp_path: Path) -> None:
    """A fit whose rows all weigh 0 has no losses, from the first one on."""
    lines = real()
    for line in lines:
        if line["event"] in ("iteration", "epoch"):
            line["loss"] = None
    assert "the loss is not a number" not in page(tmp_path, lines).said


def test_slow_links_are_named_with_the_moment(tmp_path: Path) -> None:
    """A slow link is listed once, with the time at which it was found."""
    link = "the link to node 3 (host7) carries 1.2 MB/s, training would fill 9: updates are summed"
    lines = real()
    told = [line for line in lines if line["event"] == "iteration"][-2:]
    for line in told:
        line["slow_links"] = [link]
    made = page(tmp_path, lines)
    assert made.said.count(link) == 1
    assert f"{told[0]['seconds']:.1f} s" in made.said
    assert "No link was found too slow" in Page(render_report(read_history(REAL))).said


def test_checkpoints_are_dotted_on_the_loss_and_the_newest_is_named(tmp_path: Path) -> None:
    """Checkpoints are marks on the loss plot, and the newest path is mentioned."""
    begin, *middle, end = real()
    written_at = [
        {"event": "checkpoint", "seconds": s, "path": f"/saved/{s}", "epochs": 1.0} for s in (1, 2)
    ]
    lost = [line for line in middle if line["event"] == "worker_change"]
    made = page(tmp_path, [begin, *written_at, *middle, end])
    before = page(tmp_path, real())
    classes = [value for name, value in made.attributes if name == "class"]
    assert classes.count("mark saved") == 2
    assert lost
    assert made.attributes.count(("class", "mark lost")) == before.attributes.count(
        ("class", "mark lost")
    )
    assert "/saved/2, at 2.0 s" in made.said
    assert "Checkpoints" not in before.said


def test_an_old_log_without_kinds_of_bytes_shows_updates(tmp_path: Path) -> None:
    """A log without bytes by kind still has all plots."""
    lines = real()
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
def test_another_file_is_refused_with_the_reason(tmp_path: Path, content: bytes, why: str) -> None:
    """A file without a line of a run log raises ``UsageError`` with the reason and a hint."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=why) as refused:
        read_history(path)
    assert "sparkstrom-runs" in str(refused.value)


def test_a_named_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """A named pipe is refused without being opened, which would block."""
    os.mkfifo(tmp_path / "log.jsonl")
    with pytest.raises(UsageError, match="not a regular file"):
        read_history(tmp_path / "log.jsonl")


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            read_history(path)


# -- arbitrary values in the log -----------------------------------------------------------------

EVIL = "</style><script>alert(1)</script><img src=x onerror=alert(1)>\"'&\u202e\x1b[2J"


def with_strings(value: Any, said: str) -> Any:
    """Return the value with all strings, keys included, replaced, except events and times."""
    match value:
        case dict():
            kept = ("event", "time")
            return {k: v if k in kept else with_strings(v, said) for k, v in value.items()}
        case list():
            return [with_strings(one, said) for one in value]
        case str():
            return said
        case _:
            return value


def test_what_a_log_says_is_text_and_never_markup(tmp_path: Path) -> None:
    """Strings of a log, keys included, appear on the page as text, never as markup."""
    lines = [with_strings(line, EVIL) for line in real()]
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
def test_any_value_in_any_place_makes_a_page(tmp_path: Path, odd: Any) -> None:
    """A log with an odd value at random places still gives a page."""
    rng = random.Random(repr(odd))
    for kind, places in CHANGED.items():
        lines = real()
        for line in lines:
            for _ in range(places if line["event"] == kind else 0):
                at, key = rng.choice(fields(line))
                at[key] = copy.deepcopy(odd)  # odd containers may be nested in each other
        assert page(tmp_path, lines).tags


@pytest.mark.parametrize("odd", ["x", {}])
def test_each_value_of_a_summary_may_be_odd(tmp_path: Path, odd: Any) -> None:
    """A summary in which any one value is odd still gives a page."""
    *lines, end = real()
    for key in end["summary"]:
        changed = end | {"summary": end["summary"] | {key: odd}}
        assert page(tmp_path, [lines[0], changed]).tags


def test_throughput_is_over_spans_that_are_long_enough() -> None:
    """Throughput is computed over spans of a minimum length, which skip unknown counts."""
    seconds = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert compute_throughput(seconds, [0, 50, 100, 150, None, 250], 10.0) == (
        [1.0, 2.5],
        [100.0, 100.0],
    )
    assert compute_throughput([1.0, 3.0], [10, 4], 3.0) == ([3.0], [0.0])
    assert compute_throughput([], [], 0.0) == ([], [])


def test_a_running_fit_that_has_not_trained_says_so(tmp_path: Path) -> None:
    """Iterations before the first minibatch, as in logs of earlier versions, are no training."""
    begin, *lines, _ = real()
    first = next(line for line in lines if line["event"] == "iteration")
    assert first["minibatches"] == 0
    said = page(tmp_path, [begin, first]).said
    assert "no step was reported" in said
    started = page(tmp_path, [begin, *lines]).said
    assert "no step was reported" not in started
    assert "start, seconds: 28 s" in started  # before, all of it was training
