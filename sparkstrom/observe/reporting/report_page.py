"""Render a run log as one HTML page that needs no network and no scripts.

Everything in the log is treated as text: the standard library builds the elements and escapes it,
and the page's content security policy keeps the browser from running or fetching anything. Curves
differ in dashes and in colours that colour-blind people can tell apart (after Okabe and Ito), with
a contrast of at least 3:1 on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any
from xml.etree.ElementTree import Element

from sparkstrom.base.errors import UsageError
from sparkstrom.base.version import __version__
from sparkstrom.observe.reporting.run_log_reader import (
    FitHistory,
    RunHistory,
    Values,
    as_dict,
    as_list,
    as_number,
    as_text,
)
from sparkstrom.observe.reporting.summary_rendering import (
    Row,
    Table,
    activity_seconds,
    bullet_list,
    figure_groups,
    format_bytes,
    format_count,
    format_duration,
    format_number,
    format_reduction,
    group_section,
    make_element,
    name_value_table,
    pluralize,
    rank_activities,
    result_group,
    summary_headline,
    summary_warnings,
    table_element,
    to_html,
)
from sparkstrom.observe.reporting.svg_plots import (
    STYLE_COUNT,
    Bar,
    BarPlot,
    Curve,
    EventMark,
    TimeAxis,
    TimePlot,
    render_bar_plot,
    render_time_plot,
)

STYLE = """
:root{color-scheme:light dark;--page:#ffffff;--ink:#17212b;--muted:#56626e;--line:#d9dfe5;
--card:#f5f7f9;--good:#00694e;--bad:#b83a00;--c0:#0072b2;--c1:#c44e00;--c2:#007a5c;--c3:#a3427c;
--c4:#8a6100;--c5:#5b6470}
@media (prefers-color-scheme:dark){:root{--page:#12171d;--ink:#e4e9ee;--muted:#a1adb9;
--line:#35404b;--card:#1a2129;--good:#3fcf9f;--bad:#ff8f57;--c0:#56b4e9;--c1:#ff8f57;--c2:#2bc79a;
--c3:#e79ac4;--c4:#f0c24b;--c5:#a9b2bd}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1280px;padding:20px;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:0 0 4px}h2{font-size:1.25rem;margin:32px 0 4px}
h3{font-size:1.05rem;margin:24px 0 8px}h4{font-size:.95rem;margin:0}
p{margin:4px 0}a{color:var(--c0)}.muted{color:var(--muted)}
.good{color:var(--good);font-weight:600}.bad{color:var(--bad);font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(145px,1fr));gap:10px;
margin:16px 0;padding:0;list-style:none}
.tiles li{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:8px 10px}
.tiles span{display:block;color:var(--muted);font-size:.8rem}
.tiles strong{font-size:1rem;font-weight:600}
.warns{border-left:3px solid var(--bad);margin:12px 0;padding:2px 0 2px 28px}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(340px,100%),1fr));gap:16px}
figure{margin:0;padding:12px;background:var(--card);border:1px solid var(--line);border-radius:8px;
min-width:0}
figcaption{min-height:3.2em}
.legend{display:flex;flex-wrap:wrap;gap:0 14px;margin:0;padding:0;list-style:none;
font-size:.8rem;color:var(--muted)}
.key{width:26px;height:12px;margin-right:5px;vertical-align:-1px}.box{width:14px}
.plot{display:block;width:100%;height:auto;font-size:12px}
.plot text{fill:var(--muted)}
.grid{stroke:var(--line)}.axis{stroke:var(--muted)}
.curve{fill:none;stroke-width:2;stroke-linejoin:round}
.c0{stroke:var(--c0);--own:var(--c0)}.c1{stroke:var(--c1);--own:var(--c1);stroke-dasharray:7 3}
.c2{stroke:var(--c2);--own:var(--c2);stroke-dasharray:2 3}
.c3{stroke:var(--c3);--own:var(--c3);stroke-dasharray:8 3 2 3}
.c4{stroke:var(--c4);--own:var(--c4);stroke-dasharray:4 4}
.c5{stroke:var(--c5);--own:var(--c5);stroke-dasharray:1 4}
.dot,.bar{fill:var(--own);stroke:none}
.bar:hover{opacity:.75}
.mark line{stroke:var(--bad);stroke-dasharray:3 3}.mark polygon{fill:var(--bad)}
.mark.back line{stroke:var(--good)}.mark.back polygon{fill:var(--good)}
.mark.saved line{stroke:var(--muted);stroke-dasharray:1 5}.mark.saved polygon{fill:var(--muted)}
.look rect,.hit{fill:transparent}.look line{stroke:none}.look:hover line{stroke:var(--muted)}
section>section{break-inside:avoid}
.groups{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(380px,100%),1fr));
gap:0 32px}
.groups section:has(.scrolls){grid-column:1/-1}
.groups section{min-width:0;margin-bottom:18px}
table{border-collapse:collapse;font-size:.88rem}
th,td{text-align:left;padding:2px 18px 2px 0;vertical-align:top;font-weight:normal}
th{color:var(--muted)}
.pairs th{white-space:nowrap}
.wide th,.wide td{border-bottom:1px solid var(--line);white-space:nowrap;overflow-wrap:normal}
.scrolls{overflow-x:auto}
details{margin-top:8px}
summary{cursor:pointer;color:var(--muted);font-size:.88rem}
h3+details>summary{font-size:1rem}
code{font-size:.9em}
@media (max-width:500px){body{padding:12px}.plots{gap:12px}figure{padding:8px}
figcaption{min-height:0}}
"""


THROUGHPUT_SPANS_MAX = 100  # points of the throughput curve
THROUGHPUT_SPAN_MIN_S = 1.0  # minimum seconds between two of these points
START_FRACTION_MAX = 0.1  # if the start took a larger part of the fit, plots omit it
CHECKPOINT_MARKS_MAX = 24  # only the latest checkpoints are marked
BARS_MAX = 24  # if there are more workers, those that waited longest are shown
NO_STEPS_TEXT = "no step was reported: the fit ended, or was cut off, before any worker trained"
NO_SUMMARY_TEXT = "times of each worker come with the summary, at the end of a fit that is done"


def build_plots(fit: FitHistory) -> list[Element]:
    """Return the plots of a fit as figure elements; plots without values are omitted."""
    axis, marks = TimeAxis.spanning(_plot_start_s(fit), fit.last_s), build_event_marks(fit)
    plots = [render_time_plot(plot, axis) for plot in _time_plots(fit, marks) if _has_values(plot)]
    bars = [plot for plot in (_phase_bars(fit), _worker_time_bars(fit)) if plot.bars]
    return plots + [render_bar_plot(plot) for plot in bars]


def _plot_start_s(fit: FitHistory) -> float:
    """Return the time, in seconds, at which plots begin: 0, or the first step if it came late."""
    began_s = next(iter(fit.training_iterations[0]), 0.0)
    return began_s if began_s > START_FRACTION_MAX * fit.last_s else 0.0


def explain_missing_plots(fit: FitHistory) -> list[str]:
    """Return one sentence for each reason why plots are missing."""
    missing = [] if fit.training_iterations[0] else [NO_STEPS_TEXT]
    return missing if as_list(fit.summary.get("per_worker")) else [*missing, NO_SUMMARY_TEXT]


def build_event_marks(fit: FitHistory) -> list[EventMark]:
    """Return plot marks for lost and replaced workers and for a loss that is not finite."""
    marks, lost = [], set[str]()
    for change in fit.worker_changes:
        if change.left:
            lost |= set(change.left)
            reason = "; ".join(change.reasons) or f"partition {', '.join(change.left)}"
            marks.append(EventMark(change.seconds, "lost", f"worker lost: {reason}"))
        replaced = [partition for partition in change.joined if partition in lost]
        if replaced:
            lost -= set(replaced)
            text = f"another worker trains partition {', '.join(replaced)}"
            marks.append(EventMark(change.seconds, "back", text))
    if fit.diverged_s is not None:
        marks.append(EventMark(fit.diverged_s, "bad", "the loss is not a number"))
    return marks


def _has_values(plot: TimePlot) -> bool:
    """Return whether a plot has at least one point."""
    return any(curve.known for curve in plot.curves)


def _time_plots(fit: FitHistory, marks: list[EventMark]) -> Iterator[TimePlot]:
    """Yield all plots over time, including those without values."""
    seconds, columns = fit.training_iterations
    yield _loss_plot(fit, marks)
    throughput = compute_throughput(seconds, columns["examples"], fit.last_s)
    curve = Curve.from_values("all workers", 0, *throughput)
    yield TimePlot(
        "Throughput", "examples/s", [curve], marks, from_zero=True, format_value=_format_throughput
    )
    yield _log_scale_plot(fit, marks, "Sent fraction", "entries sent / parameters", "sent_fraction")
    yield _log_scale_plot(fit, marks, "Threshold (tau)", "parameter units", "tau")
    staleness = Curve.from_values("mean so far", 0, seconds, columns["staleness"])
    yield TimePlot(
        "Staleness on the way", "minibatches of others", [staleness], marks, from_zero=True
    )
    waiting = Curve.from_values("until it is sent, mean", 0, seconds, columns["waiting"])
    yield TimePlot("Staleness in residuals", "minibatches", [waiting], marks, from_zero=True)
    yield _bytes_plot(fit, marks)
    yield _worker_count_plot(fit, marks)


def _loss_plot(fit: FitHistory, marks: list[EventMark]) -> TimePlot:
    """Return the plot of the loss by epoch; before the second epoch, of the running loss."""
    moments = [epoch.seconds for epoch in fit.epochs]
    losses = [epoch.loss for epoch in fit.epochs]
    training = Curve.from_values("training", 0, moments, losses, has_dots=True)
    if len(training.known) < 2:
        training = Curve.from_values("training, so far", 0, fit.seconds, fit.columns["loss"])
    scores = [epoch.validation for epoch in fit.epochs]
    held_out = Curve.from_values("held-out rows", 1, moments, scores, has_dots=True)
    known = [curve for curve in (training, held_out) if curve.known]
    values = [y for curve in known for _, y in curve.known]
    is_log = bool(values) and min(values) > 0 and max(values) > 20 * min(values)
    saved = [EventMark(seconds, "saved", f"checkpoint {path}") for seconds, path in fit.checkpoints]
    unit = "loss (log)" if is_log else "loss"
    return TimePlot("Loss", unit, known, [*marks, *saved[-CHECKPOINT_MARKS_MAX:]], is_log=is_log)


def _log_scale_plot(
    fit: FitHistory, marks: list[EventMark], title: str, unit: str, column: str
) -> TimePlot:
    """Return the plot of one column on a logarithmic scale."""
    seconds, columns = fit.training_iterations
    curve = Curve.from_values("mean of all workers", 0, seconds, columns[column])
    return TimePlot(title, f"{unit} (log)", [curve], marks, is_log=True)


def compute_throughput(
    seconds: Sequence[float], examples: Values, last_s: float
) -> tuple[list[float], Values]:
    """Return times, and the examples per second over the interval that ends at each of them.

    ``seconds`` and ``examples`` are the times and counts of iterations, and ``last_s`` is the
    fit's end. Intervals are long enough to average out the spacing of events.
    """
    span_s = max(THROUGHPUT_SPAN_MIN_S, last_s / THROUGHPUT_SPANS_MAX)
    known = [(s, e) for s, e in zip(seconds, examples, strict=True) if e is not None]
    ends = known[:1]
    for point in known[1:]:
        if point[0] - ends[-1][0] >= span_s:
            ends.append(point)
    rates: Values = [
        max(0.0, (after[1] - before[1]) / (after[0] - before[0]))
        for before, after in pairwise(ends)
    ]
    return [moment for moment, _ in ends[1:]], rates


def _bytes_plot(fit: FitHistory, marks: list[EventMark]) -> TimePlot:
    """Return the plot of bytes sent so far: one curve per kind of message, largest first.

    A log without kinds gives one curve.
    """
    kinds = sorted(fit.kinds, key=lambda kind: -(_last_known(fit.kinds[kind]) or 0.0))
    curves = [
        Curve.from_values(as_text(kind).replace("_", " "), i, fit.seconds, fit.kinds[kind])
        for i, kind in enumerate(kinds[:STYLE_COUNT])
    ]
    if not curves:
        curves = [Curve.from_values("updates", 0, fit.seconds, fit.columns["bytes_sent"])]
    title, unit = "Bytes handed over, by kind", "bytes so far, each hop"
    return TimePlot(title, unit, curves, marks, from_zero=True, format_value=format_bytes)


def _last_known(values: Values) -> float | None:
    """Return the last known value, or None."""
    return next((value for value in reversed(values) if value is not None), None)


def _worker_count_plot(fit: FitHistory, marks: list[EventMark]) -> TimePlot:
    """Return the plot of live workers, from worker changes or, without any, from iterations."""
    if fit.worker_changes:
        moments = [0.0, *(change.seconds for change in fit.worker_changes), fit.last_s]
        counts: Values = [0.0, *(float(change.training) for change in fit.worker_changes)]
        training = Curve.from_values("training", 0, moments, [*counts, counts[-1]], has_steps=True)
    else:
        columns = fit.seconds, fit.columns["workers"]
        training = Curve.from_values("alive", 0, *columns, has_steps=True)
    wanted = _last_known(fit.columns["workers_wanted"]) or as_number(fit.begin.get("workers"))
    wanted_curve = Curve.from_values("wanted", 3, [0.0, fit.last_s], [wanted, wanted])
    curves = [training, wanted_curve] if training.known and wanted is not None else [training]
    return TimePlot("Workers", "workers", curves, marks, from_zero=True, format_value=format_count)


def _phase_bars(fit: FitHistory) -> BarPlot:
    """Return a bar plot of the seconds per phase, from the summary or estimated from the log."""
    phase_seconds = as_dict(fit.summary.get("phase_seconds")).items()
    phases = [(as_text(name), as_number(value) or 0.0) for name, value in phase_seconds]
    if not phases and (trained := fit.training_iterations[0]):
        phases = [("start", trained[0]), ("train", fit.last_s - trained[0])]
    elif not phases and fit.last_s:
        phases = [("start", fit.last_s)]
    bars = [Bar(name, [("seconds", max(0.0, value))]) for name, value in phases[:BARS_MAX]]
    return BarPlot("Time by phase", "seconds", bars, ["seconds"], format_duration)


def _worker_time_bars(fit: FitHistory) -> BarPlot:
    """Return a bar plot of workers' time by activity; if many, of those that waited longest."""
    workers = [as_dict(worker) for worker in as_list(fit.summary.get("per_worker"))]
    names = rank_activities(workers)[:STYLE_COUNT]
    title = "Time of each worker"
    if len(workers) > BARS_MAX:
        workers.sort(key=lambda worker: -activity_seconds(worker, "waiting"))
        workers = workers[:BARS_MAX]
        title = f"Time of the {BARS_MAX} workers that waited longest"
    bars = [
        Bar(
            f"node {as_text(worker.get('node'))}, {as_text(worker.get('host'))}",
            [(name, activity_seconds(worker, name)) for name in names],
            f"partition {as_text(worker.get('partition'))}",
        )
        for worker in workers
        if names
    ]
    return BarPlot(title, "seconds", bars, names, format_duration)


def _format_throughput(value: float | None) -> str:
    """Format a throughput with its unit."""
    return f"{format_number(value)} examples/s"


FITS_SHOWN = 4  # this many of the latest fits are shown in full
ROWS_SHOWN = 200  # maximum rows in the table of all fits
LINES_SHOWN = 50  # maximum lines in a list of faults or options
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'"
)

NumberedFit = tuple[int, FitHistory]  # number from 1

DONE, STOPPED, FAILED, INTERRUPTED, OPEN = (
    "done", "ended early", "failed", "interrupted", "no end in the log",
)  # fmt: skip
OPEN_FIT_TEXT = (
    "The log has no end of this fit: it is still running, or the driver program was killed. Newest"
    " line: {}."
)
INTERRUPTION_ERRORS = ("KeyboardInterrupt", "the job was cancelled")


def render_report(history: RunHistory, only: int | None = None) -> str:
    """Return the report page as HTML.

    Args:
        history: the run log.
        only: number, from 1, of the only fit to show; None: the latest fits and a table of all.

    Raises:
        UsageError: the log has no fit with that number.
    """
    numbered = list(enumerate(history.fits, 1))
    if only is not None and not 1 <= only <= len(numbered):
        have = pluralize(len(numbered), "fit")
        raise UsageError(f"fit {only}: {history.path} has {have}; give a number from 1 on")
    shown = numbered[-FITS_SHOWN:] if only is None else [numbered[only - 1]]
    body = make_element(
        "body",
        make_element("h1", f"{history.path.name}: {pluralize(len(numbered), 'fit')}"),
        make_element("p", f"Written by sparkstrom {__version__}.", class_="muted"),
        *(make_element("p", line, class_="bad") for line in _describe_damage(history)),
        _overview_section(numbered, shown) if len(numbered) > 1 else None,
        *(_fit_section(number_of, fit) for number_of, fit in reversed(shown)),
    )
    return render_document(history.path.name, body)


def render_document(title: str, body: Element) -> str:
    """Return an HTML document with this title, after "sparkstrom:", and this body."""
    head = make_element(
        "head",
        make_element("meta", charset="utf-8"),
        make_element("meta", http_equiv="Content-Security-Policy", content=CONTENT_SECURITY_POLICY),
        make_element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        make_element("meta", name="color-scheme", content="light dark"),
        make_element("link", rel="icon", href="data:,"),
        make_element("title", f"sparkstrom: {title}"),
        make_element("style", STYLE),
    )
    return "<!DOCTYPE html>\n" + to_html(make_element("html", head, body, lang="en")) + "\n"


def _describe_damage(history: RunHistory) -> list[str]:
    """Return sentences about the unreadable lines of the log."""
    problems = []
    if history.is_torn:
        problems.append(
            "The last line is torn: the driver program ended, or was about to write, in its middle."
        )
    if history.unreadable_lines:
        lines = pluralize(len(history.unreadable_lines), "line")
        first = history.unreadable_lines[0]
        problems.append(f"{lines} could not be read and are left out (first: line {first}).")
    return problems


def _overview_section(numbered: list[NumberedFit], shown: list[NumberedFit]) -> Element:
    """Return the table of all fits, latest first."""
    columns = ("fit", "began (UTC)", "how it ended", "epochs", "loss", "held out", "time")
    rows = [
        (
            str(index),
            _format_time(fit.begin.get("time")),
            describe_outcome(fit),
            format_count(as_number(fit.begin.get("epochs"))),
            format_number(_last_loss(fit)),
            format_number(_held_out_score(fit)),
            format_duration(fit.last_s),
        )
        for index, fit in reversed(numbered[-ROWS_SHOWN:])
    ]
    more = max(0, len(numbered) - ROWS_SHOWN)
    left_out = len(numbered) - len(shown)
    fits = pluralize(left_out, "fit")
    hint = f"{fits} of the log not shown below: sparkstrom report ... --fit NUMBER"
    return make_element(
        "section",
        make_element("h2", "All fits"),
        table_element(Table(columns, rows, more)),
        make_element("p", hint, class_="muted") if left_out else None,
    )


def describe_outcome(fit: FitHistory) -> str:
    """Return how a fit ended: DONE, STOPPED, FAILED, INTERRUPTED or OPEN."""
    if fit.end is None:
        return OPEN
    if fit.error:
        return INTERRUPTED if fit.error.startswith(INTERRUPTION_ERRORS) else FAILED
    return STOPPED if fit.summary.get("stopped") else DONE


def _format_time(time: Any) -> str:
    """Return an ISO time in readable form."""
    return as_text(time).replace("T", " ").split(".")[0] or "not known"


def _last_loss(fit: FitHistory) -> float | None:
    """Return the summary's loss, or the latest loss in the log."""
    return as_number(fit.summary.get("loss")) if fit.summary else fit.last("loss")


def _held_out_score(fit: FitHistory) -> float | None:
    """Return the held-out score of the last epoch, or None."""
    return fit.epochs[-1].validation if fit.epochs else None


def _fit_section(index: int, fit: FitHistory) -> Element:
    """Return the section of one fit."""
    figures, plots = fit.summary, build_plots(fit)
    outcome = describe_outcome(fit)
    warnings = summary_warnings(figures)
    return make_element(
        "section",
        make_element("h2", f"Fit {index}: {_fit_title(fit)}"),
        make_element("p", outcome, class_="good" if outcome in (DONE, STOPPED) else "bad"),
        *(make_element("p", text) for text in _ending_lines(fit)),
        _tile_list(fit),
        make_element("h3", pluralize(len(warnings), "warning")) if warnings else None,
        bullet_list(warnings, "warns") if warnings else None,
        make_element("h3", "Over time"),
        make_element("p", text, class_="muted") if (text := _marks_legend(fit)) else None,
        make_element("div", *plots, class_="plots"),
        *(
            make_element("p", f"Not shown: {why}.", class_="muted")
            for why in explain_missing_plots(fit)
        ),
        *_event_sections(fit),
        *_figures_section(figures),
        *_options_section(fit),
    )


def _fit_title(fit: FitHistory) -> str:
    """Return a headline: what the fit trained, or was meant to train."""
    if fit.summary:
        return summary_headline(fit.summary)
    model, epochs = as_text(fit.begin.get("model")) or "a model", as_number(fit.begin.get("epochs"))
    workers = pluralize(as_number(fit.begin.get("workers")), "worker")
    return f"{workers}, {pluralize(epochs, 'epoch')} of {model} wanted"


def _ending_lines(fit: FitHistory) -> list[str]:
    """Return sentences about how a fit ended."""
    if fit.end is None:
        return [OPEN_FIT_TEXT.format(_format_time(fit.newest))]
    return [part for part in (fit.error, as_text(fit.summary.get("stopped"))) if part]


def _tile_list(fit: FitHistory) -> Element:
    """Return the most important values of a fit as tiles."""
    sent = as_number(fit.summary.get("bytes_sent")) or fit.last("bytes_sent")
    reduction = format_reduction(sent, as_number(fit.summary.get("bytes_dense")))
    lost = sum(
        len(change.reasons) or len(change.left) for change in fit.worker_changes if change.left
    )
    done, expected = (
        as_number(fit.summary.get(name)) or fit.last(name)
        for name in ("minibatches", "minibatches_expected")
    )
    score = _held_out_score(fit)
    tiles: list[Row] = [
        ("model", as_text(fit.begin.get("model")) or "not known"),
        ("parameters", format_count(as_number(fit.begin.get("n_params")))),
        ("loss", format_number(_last_loss(fit))),
        ("held-out rows", "none" if score is None else format_number(score)),
        ("time", format_duration(as_number(fit.summary.get("seconds")) or fit.last_s)),
        ("minibatches", f"{format_count(done)} of {format_count(expected)}"),
        ("sent", format_bytes(sent) + (f", {reduction}" if reduction else "")),
        ("workers lost", format_count(lost)),
    ]
    items = (
        make_element("li", make_element("span", name), make_element("strong", value))
        for name, value in tiles
    )
    return make_element("ul", *items, class_="tiles")


def _marks_legend(fit: FitHistory) -> str:
    """Return the explanation of the plots' marks, or "" if there are none."""
    if not build_event_marks(fit):
        return ""
    return (
        "Dashed lines: ▼ a worker was lost, ▲ another one trains in its place. Point at a line to"
        " see the reason, which is also given below."
    )


def _event_sections(fit: FitHistory) -> list[Element]:
    """Return the sections about lost and replaced workers, checkpoints and slow links."""
    marks = build_event_marks(fit)
    events = [(f"{mark.seconds:.1f} s", mark.description) for mark in marks[:LINES_SHOWN]]
    if len(marks) > LINES_SHOWN:
        events.append(("", f"and {len(marks) - LINES_SHOWN:,} more"))
    slow = [(f"{s:.1f} s", words) for words, s in list(fit.slow_links.items())[:LINES_SHOWN]]
    title = "Workers lost and replaced" if fit.diverged_s is None else "What went wrong"
    faults = [make_element("h3", title), name_value_table(events)] if events else []
    links = (
        name_value_table(slow)
        if slow
        else make_element("p", "No link was found too slow.", class_="muted")
    )
    return [*faults, *_checkpoint_section(fit), make_element("h3", "Links"), links]


def _checkpoint_section(fit: FitHistory) -> list[Element]:
    """Return a heading and a table with the number of checkpoints and the latest one, or []."""
    if not fit.checkpoints:
        return []
    seconds, path = fit.checkpoints[-1]
    rows = [
        ("written", format_count(len(fit.checkpoints))),
        ("newest", f"{path}, at {seconds:.1f} s"),
    ]
    return [make_element("h3", "Checkpoints"), name_value_table(rows)]


def _figures_section(figures: dict[str, Any]) -> list[Element]:
    """Return a heading and the tables of all values in a fit's summary; [] without a summary."""
    if not figures:
        return []
    groups = [
        group_section(group, "h4") for group in (result_group(figures), *figure_groups(figures))
    ]
    return [make_element("h3", "Figures"), make_element("div", *groups, class_="groups")]


def _options_section(fit: FitHistory) -> list[Element]:
    """Return a heading and a collapsed table of the fit's options; [] if there are none."""
    options = list(as_dict(fit.begin.get("options")).items())[:LINES_SHOWN]
    if not options:
        return []
    rows = [(name, "None" if value is None else as_text(value)) for name, value in options]
    shown = make_element(
        "details", make_element("summary", "of the training master"), name_value_table(rows)
    )
    return [make_element("h3", "Options"), shown]
