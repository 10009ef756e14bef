"""Fit plots: which plots a fit of a run log has, and what is in each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from xml.etree.ElementTree import Element

from sparkstrom.observe.reporting.plain_values import listing, mapping, number, text
from sparkstrom.observe.reporting.quantities import byte_count, count, duration, figure
from sparkstrom.observe.reporting.run_history import FitHistory, Values
from sparkstrom.observe.reporting.summary_groups import activities_of, spent
from sparkstrom.observe.reporting.svg_plots import (
    STYLES,
    Bar,
    BarPlot,
    Curve,
    Mark,
    TimeAxis,
    TimePlot,
    bar_plot,
    time_plot,
)

PACES = 100  # spans of time at least as long as this part of the fit have a throughput
PACE_S = 1.0  # and as this
START_SHOWN = 0.1  # of the fit; plots of one that took longer to start begin where it trains
SAVED_MAX = 24  # checkpoints: the newest
BARS_MAX = 24  # of workers: those that waited longest
NEVER_BEGAN = "no step was told: the fit ended, or was cut off, before anybody trained"
NO_SUMMARY = "times of each worker come with the summary, at the end of a fit that is done"


def plots_of(fit: FitHistory) -> list[Element]:
    """As figures of a page; what the log knows nothing of is left out."""
    axis, marks = TimeAxis.of(_first_s(fit), fit.last_s), marks_of(fit)
    found = [time_plot(plot, axis) for plot in _time_plots(fit, marks) if _has_values(plot)]
    bars = [plot for plot in (_phases(fit), _workers(fit)) if plot.bars]
    return found + [bar_plot(plot) for plot in bars]


def _first_s(fit: FitHistory) -> float:
    """Where plots begin: a long start, of which there is nothing to see, is left out."""
    began_s = next(iter(fit.trained[0]), 0.0)
    return began_s if began_s > START_SHOWN * fit.last_s else 0.0


def missing_in(fit: FitHistory) -> list[str]:
    """Why there are not all of them, in words."""
    missing = [] if fit.seconds else [NEVER_BEGAN]
    return missing if listing(fit.summary.get("per_worker")) else [*missing, NO_SUMMARY]


def marks_of(fit: FitHistory) -> list[Mark]:
    """Workers that were lost or came again, and a loss that was none."""
    marks, gone = [], set[str]()
    for change in fit.changes:
        if change.left:
            gone |= set(change.left)
            why = "; ".join(change.reasons) or f"partition {', '.join(change.left)}"
            marks.append(Mark(change.seconds, "lost", f"worker lost: {why}"))
        back = [partition for partition in change.joined if partition in gone]
        if back:
            gone -= set(back)
            said = f"another worker trains partition {', '.join(back)}"
            marks.append(Mark(change.seconds, "back", said))
    if fit.diverged_s is not None:
        marks.append(Mark(fit.diverged_s, "bad", "the loss is not a number"))
    return marks


def _has_values(plot: TimePlot) -> bool:
    return any(curve.known for curve in plot.curves)


def _time_plots(fit: FitHistory, marks: list[Mark]) -> Iterator[TimePlot]:
    seconds, columns = fit.trained
    yield _loss(fit, marks)
    paces = throughput(seconds, columns["examples"], fit.last_s)
    pace = Curve.of("all workers", 0, *paces)
    yield TimePlot("Throughput", "examples/s", [pace], marks, from_zero=True, say=_per_second)
    yield _plain(fit, marks, "Sent fraction", "entries sent / parameters", "sent_fraction")
    yield _plain(fit, marks, "Threshold (tau)", "parameter units", "tau")
    stale = Curve.of("mean so far", 0, seconds, columns["staleness"])
    yield TimePlot("Staleness on the way", "minibatches of others", [stale], marks, from_zero=True)
    waiting = Curve.of("until it is sent, mean", 0, seconds, columns["waiting"])
    yield TimePlot("Staleness in residuals", "minibatches", [waiting], marks, from_zero=True)
    yield _bytes(fit, marks)
    yield _workers_over_time(fit, marks)


def _loss(fit: FitHistory, marks: list[Mark]) -> TimePlot:
    """By epoch; while there are no two of them, as the workers told it last."""
    moments, losses = [one.seconds for one in fit.epochs], [one.loss for one in fit.epochs]
    training = Curve.of("training", 0, moments, losses, has_dots=True)
    if len(training.known) < 2:
        training = Curve.of("training, so far", 0, fit.seconds, fit.columns["loss"])
    judged = [one.validation for one in fit.epochs]
    held_out = Curve.of("held-out rows", 1, moments, judged, has_dots=True)
    known = [curve for curve in (training, held_out) if curve.known]
    values = [y for curve in known for _, y in curve.known]
    wide = bool(values) and min(values) > 0 and max(values) > 20 * min(values)
    saved = [Mark(seconds, "saved", f"checkpoint {path}") for seconds, path in fit.checkpoints]
    unit = "loss (log)" if wide else "loss"
    return TimePlot("Loss", unit, known, [*marks, *saved[-SAVED_MAX:]], is_log=wide)


def _plain(fit: FitHistory, marks: list[Mark], title: str, unit: str, column: str) -> TimePlot:
    seconds, columns = fit.trained
    curve = Curve.of("mean of all workers", 0, seconds, columns[column])
    return TimePlot(title, f"{unit} (log)", [curve], marks, is_log=True)


def throughput(
    seconds: Sequence[float], examples: Values, last_s: float
) -> tuple[list[float], Values]:
    """Examples per second over spans that are long enough to tell; moments are their ends."""
    span_s = max(PACE_S, last_s / PACES)
    known = [(s, e) for s, e in zip(seconds, examples, strict=True) if e is not None]
    ends = known[:1]
    for point in known[1:]:
        if point[0] - ends[-1][0] >= span_s:
            ends.append(point)
    paces: Values = [
        max(0.0, (after[1] - before[1]) / (after[0] - before[0]))
        for before, after in pairwise(ends)
    ]
    return [moment for moment, _ in ends[1:]], paces


def _bytes(fit: FitHistory, marks: list[Mark]) -> TimePlot:
    """By kind where the log has them, the largest first."""
    kinds = sorted(fit.kinds, key=lambda kind: -(_last(fit.kinds[kind]) or 0.0))
    curves = [
        Curve.of(text(kind).replace("_", " "), i, fit.seconds, fit.kinds[kind])
        for i, kind in enumerate(kinds[:STYLES])
    ]
    if not curves:
        curves = [Curve.of("updates", 0, fit.seconds, fit.columns["bytes_sent"])]
    title, unit = "Bytes handed over, by kind", "bytes so far, each hop"
    return TimePlot(title, unit, curves, marks, from_zero=True, say=byte_count)


def _last(values: Values) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _workers_over_time(fit: FitHistory, marks: list[Mark]) -> TimePlot:
    """By changes where they are told; each marked on every plot."""
    if fit.changes:
        moments = [0.0, *(one.seconds for one in fit.changes), fit.last_s]
        counts: Values = [0.0, *(float(one.training) for one in fit.changes)]
        training = Curve.of("training", 0, moments, [*counts, counts[-1]], has_steps=True)
    else:
        known = fit.seconds, fit.columns["workers"]
        training = Curve.of("alive", 0, *known, has_steps=True)
    wanted = _last(fit.columns["workers_wanted"]) or number(fit.begin.get("workers"))
    goal = Curve.of("wanted", 3, [0.0, fit.last_s], [wanted, wanted])
    curves = [training, goal] if training.known and wanted is not None else [training]
    return TimePlot("Workers", "workers", curves, marks, from_zero=True, say=count)


def _phases(fit: FitHistory) -> BarPlot:
    """As the summary tells; without one, what can be seen of them."""
    told = mapping(fit.summary.get("phase_seconds")).items()
    phases = [(text(name), number(value) or 0.0) for name, value in told]
    if not phases and fit.seconds:
        phases = [("start", fit.seconds[0]), ("train", fit.last_s - fit.seconds[0])]
    elif not phases and fit.last_s:
        phases = [("start", fit.last_s)]
    bars = [Bar(name, [("seconds", max(0.0, value))]) for name, value in phases[:BARS_MAX]]
    return BarPlot("Time by phase", "seconds", bars, ["seconds"], duration)


def _workers(fit: FitHistory) -> BarPlot:
    """What each did with its time; of many those that waited longest."""
    workers = [mapping(one) for one in listing(fit.summary.get("per_worker"))]
    names = activities_of(workers)[:STYLES]
    title = "Time of each worker"
    if len(workers) > BARS_MAX:
        workers = sorted(workers, key=lambda one: -spent(one, "waiting"))[:BARS_MAX]
        title = f"Time of the {BARS_MAX} workers that waited longest"
    bars = [
        Bar(
            f"node {text(one.get('node'))}, {text(one.get('host'))}",
            [(name, spent(one, name)) for name in names],
            f"partition {text(one.get('partition'))}",
        )
        for one in workers
        if names
    ]
    return BarPlot(title, "seconds", bars, names, duration)


def _per_second(value: float | None) -> str:
    return f"{figure(value)} examples/s"
