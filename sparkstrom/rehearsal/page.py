"""Render a rehearsal (simulated fits) as HTML: a page with plots, and a short form for notebooks.

Both show the conditions, a verdict and a table of the runs; the page also plots loss and accuracy.
"""

from __future__ import annotations

from collections.abc import Callable
from xml.etree.ElementTree import Element

from sparkstrom.base.version import __version__
from sparkstrom.observe.reporting.report_page import render_document
from sparkstrom.observe.reporting.summary_rendering import (
    bullet_list,
    make_element,
    table_element,
    to_html,
)
from sparkstrom.observe.reporting.svg_plots import (
    STYLE_COUNT,
    Curve,
    TimeAxis,
    TimePlot,
    render_time_plot,
)
from sparkstrom.rehearsal.fit import CurvePoint
from sparkstrom.rehearsal.result import Rehearsal, RehearsedRun

CURVES_MAX = STYLE_COUNT  # of one plot: more could not be told apart
TITLE = "Rehearsal"


def render_page(rehearsal: Rehearsal) -> str:
    """Return the page as HTML: conditions, verdict, table and plots."""
    body = make_element("body", make_element("h1", TITLE), *_overview(rehearsal))
    plots = [
        figure
        for measure, title in (("loss", "Loss"), ("accuracy", "Accuracy"))
        for figure in _plots(rehearsal, measure, title)
    ]
    if plots:
        body.append(make_element("h2", "Curves"))
        body.append(make_element("div", *plots, class_="plots"))
    body.append(make_element("p", f"Written by sparkstrom {__version__}.", class_="muted"))
    return render_document(TITLE.lower(), body)


def render_summary(rehearsal: Rehearsal) -> str:
    """Return conditions, verdict and table as HTML for a notebook."""
    return to_html(make_element("div", *_overview(rehearsal), class_="sparkstrom-rehearsal"))


def _overview(rehearsal: Rehearsal) -> list[Element]:
    """Return conditions, verdict and table as HTML elements."""
    return [
        *(make_element("p", line) for line in rehearsal.describe()),
        bullet_list(rehearsal.verdict()),
        table_element(rehearsal.table()),
    ]


def _plots(rehearsal: Rehearsal, measure: str, title: str) -> list[Element]:
    """Return a measure's plots over virtual time and over rows; none if no run has the measure."""
    runs = _choose_runs(rehearsal)
    if not any(measure in point.measures for run in runs for point in run.points):
        return []
    last_s = max(run.seconds for run in runs)
    last_examples = max((run.points[-1].examples for run in runs if run.points), default=1)
    over_examples = TimeAxis(0.0, float(max(1, last_examples)), 1.0, "rows")
    return [
        render_time_plot(
            _plot(runs, measure, f"{title} over time", lambda point: point.seconds),
            TimeAxis.spanning(0.0, last_s),
        ),
        render_time_plot(
            _plot(runs, measure, f"{title} over rows", lambda point: float(point.examples)),
            over_examples,
        ),
    ]


def _plot(
    runs: list[RehearsedRun], measure: str, title: str, place: Callable[[CurvePoint], float]
) -> TimePlot:
    """Return a plot of a measure with a curve for each run; ``place`` returns a point's x value."""
    curves = [
        Curve.from_values(
            run.name,
            style,
            [place(point) for point in run.points],
            [point.measures.get(measure) for point in run.points],
        )
        for style, run in enumerate(runs)
    ]
    return TimePlot(title, measure, curves, is_log=measure == "loss")


def _choose_runs(rehearsal: Rehearsal) -> list[RehearsedRun]:
    """Return one process and the best runs with several workers, in the order of the rehearsal.

    At most CURVES_MAX runs are returned. If no run has several workers, all others count instead.
    """
    one, *others = rehearsal.runs
    several = [run for run in others if run.workers > 1] or others
    ranked = sorted(several, key=lambda run: (run.loss, run.seconds))[: CURVES_MAX - 1]
    return [one, *(run for run in others if run in ranked)]
