"""The result of a rehearsal: its runs as a table, a page or JSON, and advice on which one to use.

A run is a fit with some number of workers, simulated under one scaling rule, or a baseline:
training in one process, or with DistributedDataParallel (DDP). A scaling rule is a value of the
option ``scaling``, which adapts hyperparameters to the number of workers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from sparkstrom.base.errors import UsageError
from sparkstrom.base.version import __version__
from sparkstrom.observe.reporting.report_page import render_document
from sparkstrom.observe.reporting.summary_rendering import (
    ROUNDED_UP,
    Table,
    bullet_list,
    format_duration,
    format_number,
    make_element,
    table_element,
    table_lines,
    to_html,
)
from sparkstrom.observe.reporting.svg_plots import (
    STYLE_COUNT,
    Curve,
    TimeAxis,
    TimePlot,
    render_time_plot,
)
from sparkstrom.planning.scaling import WORTHWHILE_SPEEDUP
from sparkstrom.rehearsal.conditions import Conditions
from sparkstrom.rehearsal.fit import CurvePoint, SimulatedFit
from sparkstrom.rehearsal.rounds import JOB_S

ONE_PROCESS, SPARKSTROM, ALL_REDUCE = "one process", "sparkstrom", "DDP all-reduce"
CURVES_MAX = STYLE_COUNT  # curves in one plot; more could not be distinguished
TITLE = "Rehearsal"
OPTIONAL_COLUMNS = ("accuracy", "staleness", "deaths")  # left out if they are empty


@dataclass(frozen=True, slots=True)
class RehearsedRun:
    """The results of one run of a rehearsal."""

    system: str  # ONE_PROCESS, SPARKSTROM or ALL_REDUCE (DDP)
    workers: int  # number of workers, or of DDP's ranks
    scaling: str  # scaling rule; "" for the systems that have none
    loss: float  # of the delivered parameters; inf if training failed
    accuracy: float | None  # None: no classes, or training failed
    seconds: float  # virtual seconds of training
    seconds_to_loss: float | None  # virtual seconds until the target loss; None: not reached
    speedup: float | None  # of seconds_to_loss (without a target, of rows/s) over one process
    efficiency: float  # rows per second and worker, relative to one process
    worker_hours: float  # number of workers x hours of training
    # Mean number of other workers' minibatches that an update had not seen; None: in rounds.
    staleness: float | None
    update_bytes: int  # bytes of all published updates, each counted once
    times_fewer_bytes: float | None  # bytes of float32 gradients / update_bytes; None: no updates
    link_bytes: dict[str, tuple[float, float]]  # host -> bytes sent and received
    busiest_host: str  # host whose link carries the most bytes; "": there is no traffic
    busiest_link_share: float  # mean fraction of that link's rate that is used
    deaths: int  # workers that died and were replaced
    minibatches: int  # trained by all workers
    digest: str  # hash of the delivered parameters
    replicas_equal: bool  # whether the replicas of all workers were equal at the end
    error: str  # why training failed; "": it succeeded
    points: tuple[CurvePoint, ...]  # curves of loss and accuracy, in order of time

    @property
    def name(self) -> str:
        """The run's name in tables and legends."""
        if self.system == ONE_PROCESS:
            return self.system
        rule = f", {self.scaling}" if self.scaling else ""
        return f"{self.workers} x {self.system}{rule}"


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The result of ``rehearse``: all runs, the simulated conditions, and advice."""

    runs: tuple[RehearsedRun, ...]  # the run of one process is the first
    conditions: Conditions  # the simulated cluster
    n_params: int  # the model's number of parameters
    # Mean fraction of the parameters that an update contains; None: training in rounds.
    density: float | None
    rows: int  # number of rows in the sample
    rows_total: int  # number of rows in the data
    epochs: int  # epochs of each run
    batch_rows: int  # rows in a minibatch of one worker
    is_held_out: bool  # losses are of held-out rows; otherwise of rows that were trained on
    to_loss: float | None  # the target loss; None: neither given nor derived from one process
    averaging_frequency: int | None = None  # minibatches in a round; None: gradient sharing

    @property
    def best(self) -> RehearsedRun:
        """The run that first reaches ``to_loss``, or the one with the lowest loss if none does.

        It is a failed run only if all failed.
        """
        reaching = [run for run in self.runs if run.seconds_to_loss is not None]
        if reaching:
            return min(reaching, key=lambda run: (run.seconds_to_loss or 0.0, run.workers))
        return min(self.runs, key=lambda run: (run.loss, run.workers))

    @property
    def best_scaling(self) -> str:
        """The scaling rule of the best sparkstrom run with the largest number of workers.

        It is "" if only one rule was rehearsed, or if training failed with every rule.
        """
        ours = [run for run in self.runs if run.system == SPARKSTROM and run.workers > 1]
        if len({run.scaling for run in ours}) < 2:
            return ""
        most = max(run.workers for run in ours)
        best = min((run for run in ours if run.workers == most), key=_rank)
        return "" if best.error else best.scaling

    @property
    def pays_up_to(self) -> int:
        """The largest worthwhile number of workers.

        Up to this number, each additional worker raises the speedup by at least 0.5, on average.
        """
        workers, speedup = 1, 1.0
        for run in self._best_of_each_number():
            gained = (run.speedup or 0.0) - speedup
            if run.workers > workers and gained >= WORTHWHILE_SPEEDUP * (run.workers - workers):
                workers, speedup = run.workers, run.speedup or 0.0
        return workers

    def _best_of_each_number(self) -> list[RehearsedRun]:
        """Return the best sparkstrom run of each number of workers, in ascending order."""
        ours = [run for run in self.runs if run.system == SPARKSTROM]
        numbers = sorted({run.workers for run in ours})
        return [min((run for run in ours if run.workers == k), key=_rank) for k in numbers]

    def verdict(self) -> list[str]:
        """Return the advice that follows from the runs, as a list of sentences."""
        best, lines = self.best, []
        if self.to_loss is not None and best.seconds_to_loss:
            after = format_duration(best.seconds_to_loss)
            lines.append(f"Loss {format_number(self.to_loss)} first: {best.name}, after {after}.")
        if best.error:
            lines.append("Every run failed, so there is no advice on the number of workers.")
        elif best.seconds_to_loss is None:
            if self.to_loss is not None:
                lines.append(f"No run reaches loss {format_number(self.to_loss)}: add epochs.")
            lines.append(f"The lowest loss is that of {best.name}.")
        elif not best.seconds_to_loss:
            lines.append("The loss is as low before training: give a lower to_loss.")
        elif best.system == ONE_PROCESS:
            lines.append("Use one machine: no number of workers that was rehearsed is faster.")
        elif best.system == ALL_REDUCE:
            lines.append("Use DistributedDataParallel: these links carry dense gradients in time.")
        pays = self.pays_up_to
        if pays > 1:
            lines.append(
                f"Up to {pays} workers, each added worker gives at least half of its speed."
            )
        if self.best_scaling:
            lines.append(f"Of the scaling rules, take scaling={self.best_scaling!r}.")
        lines += [f"{run.name} failed: {run.error}" for run in self.runs if run.error]
        if self.rows < self.rows_total:
            times = self.rows_total / self.rows
            lines.append(
                f"The sample has {self.rows:,} of {self.rows_total:,} rows: an epoch of all takes"
                f" {times:.3g} times as long, and longer fits favour more workers."
            )
        return lines

    def table(self) -> Table:
        """Return the runs as a table."""
        target = "" if self.to_loss is None else f"to loss {format_number(self.to_loss)}"
        columns = (
            *("run", "loss", "accuracy", "training", target, "speedup", "efficiency"),
            *("staleness", "fewer bytes", "busiest link", "worker-hours", "deaths"),
        )
        rows = [_cells(run) for run in self.runs]
        used = [
            i
            for i, name in enumerate(columns)
            if name and (name not in OPTIONAL_COLUMNS or any(row[i] for row in rows))
        ]
        return Table(tuple(columns[i] for i in used), [tuple(row[i] for i in used) for row in rows])

    def describe(self) -> list[str]:
        """Return sentences that describe the rehearsed conditions, one per line."""
        conditions, times = self.conditions, self.conditions.times
        rows = f"{self.rows:,} rows" if self.rows == self.rows_total else f"{self.rows:,} sampled"
        lines = [
            f"Rehearsed in virtual time: {self.n_params:,} parameters, {rows}, {self.epochs} epochs"
            f" of {self.batch_rows} rows a minibatch; losses are of"
            f" {'held-out' if self.is_held_out else 'training'} rows.",
            f"A step takes {_format_seconds(times.step_s)} (jitter {times.jitter:g}), encoding"
            f" {_format_seconds(times.encode_s)}, applying {_format_seconds(times.apply_s)}; links"
            f" of {conditions.link_bits_s / 1e6:,.4g} Mbit/s,"
            f" {_format_seconds(conditions.latency_s)} one way; seed {conditions.seed}.",
        ]
        if slow := self._describe_stragglers():
            speed = f"{conditions.straggler_speed:g} times the speed"
            lines.append(f"Slow workers: {slow}, with {speed}.")
        if self.averaging_frequency is not None:
            lines.append(
                f"Rounds of at most {self.averaging_frequency} minibatches, each with a Spark job"
                f" of {_format_seconds(JOB_S)}; shuffles of rows are not simulated."
            )
        return lines

    def _describe_stragglers(self) -> str:
        """Return the number of slow workers, such as "1" or "3 of 4, 5 of 16"; "" without any.

        Fits of few workers have fewer slow ones than were asked for.
        """
        numbers = sorted({run.workers for run in self.runs if run.workers > 1})
        slow = {workers: self.conditions.for_workers(workers).stragglers for workers in numbers}
        if {*slow.values()} <= {self.conditions.stragglers}:
            return str(self.conditions.stragglers) if any(slow.values()) else ""
        return ", ".join(f"{count} of {workers}" for workers, count in slow.items())

    def __str__(self) -> str:
        lines = [*self.describe(), "", *table_lines(self.table()), "", *self.verdict()]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return all figures by name as JSON values; numbers that are not finite are None."""
        best = self.best
        figures = {
            "n_params": self.n_params,
            "density": self.density,
            "rows": self.rows,
            "rows_total": self.rows_total,
            "epochs": self.epochs,
            "batch_rows": self.batch_rows,
            "is_held_out": self.is_held_out,
            "to_loss": self.to_loss,
            "averaging_frequency": self.averaging_frequency,
            "best": {"system": best.system, "workers": best.workers, "scaling": best.scaling},
            "pays_up_to": self.pays_up_to,
            "verdict": self.verdict(),
            "conditions": asdict(self.conditions),
            "runs": [asdict(run) for run in self.runs],
        }
        value: dict[str, Any] = _replace_nonfinite(figures)
        return value

    def _repr_html_(self) -> str:
        """Return table and verdict as HTML for a notebook."""
        return render_summary(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page with the table of all runs, and plots of the best ones.

        Args:
            path: HTML file to write; it needs no network and no script.

        Raises:
            UsageError: The file cannot be written.
        """
        try:
            Path(path).write_text(render_page(self), encoding="utf-8")
        except OSError as error:
            reason = f"cannot be written: {error.strerror}; name a file in a writable directory"
            raise UsageError(f"path={os.fspath(path)!r}: {reason}") from error


def make_run(
    system: str,
    scaling: str,
    simulated: SimulatedFit,
    one: SimulatedFit,
    *,
    to_loss: float | None,
    n_params: int,
    link_bits_s: float,
) -> RehearsedRun:
    """Return the results of a run, ``simulated``, compared with ``one``, the run of one process.

    ``scaling``: the scaling rule or ""; ``to_loss``: the loss whose time is compared, or None;
    ``link_bits_s``: rate of each host's link, in bits per second.
    """
    last = simulated.points[-1].measures if simulated.points and not simulated.error else {}
    loss = math.inf if simulated.error else last.get("loss", simulated.training_loss)
    reached, one_reached = seconds_to(simulated, to_loss), seconds_to(one, to_loss)
    speedup = one_reached / reached if reached and one_reached else None
    rate, one_rate = _rows_per_second(simulated), _rows_per_second(one)
    if to_loss is None and one_rate and not (simulated.error or one.error):
        speedup = rate / one_rate
    host, share = _busiest_link(simulated, link_bits_s)
    dense = 4 * n_params * simulated.minibatches
    return RehearsedRun(
        system,
        simulated.workers,
        scaling,
        loss,
        last.get("accuracy"),
        simulated.seconds,
        reached,
        speedup,
        rate / one_rate / simulated.workers if one_rate else 0.0,
        simulated.workers * simulated.seconds / 3600,
        simulated.staleness,
        simulated.update_bytes,
        dense / simulated.update_bytes if simulated.update_bytes else None,
        simulated.link_bytes,
        host,
        share,
        simulated.deaths,
        simulated.minibatches,
        simulated.digest,
        simulated.replicas_equal,
        simulated.error,
        tuple(simulated.points),
    )


def seconds_to(simulated: SimulatedFit, to_loss: float | None) -> float | None:
    """Return the virtual seconds after which a run first reaches a loss, interpolated linearly.

    Return None if it never does, if ``to_loss`` is None, or if training failed, because a real fit
    would then return nothing.
    """
    if to_loss is None or simulated.error:
        return None
    curve = [(point.seconds, point.measures.get("loss", math.inf)) for point in simulated.points]
    if curve and curve[0][1] <= to_loss:
        return curve[0][0]
    for (from_s, above), (until_s, loss) in pairwise(curve):
        if loss <= to_loss:
            share = (above - to_loss) / (above - loss) if math.isfinite(above) else 1.0
            return from_s + (until_s - from_s) * share
    return None


def _rank(run: RehearsedRun) -> tuple[bool, float, float]:
    """Return a sort key: runs that reach the target loss come first, by time, others by loss."""
    reached = run.seconds_to_loss
    return reached is None, run.loss if reached is None else reached, run.loss


def _rows_per_second(simulated: SimulatedFit) -> float:
    """Return the rows trained per virtual second by all workers."""
    return simulated.examples / simulated.seconds if simulated.seconds else 0.0


def _busiest_link(simulated: SimulatedFit, link_bits_s: float) -> tuple[str, float]:
    """Return the host whose link is used most, and the mean fraction of the rate that is used.

    A link counts with the direction that carries more bytes. Return ("", 0.0) without traffic.
    """
    if not simulated.link_bytes or not simulated.seconds:
        return "", 0.0
    loads = {host: max(both) for host, both in simulated.link_bytes.items()}
    host = max(loads, key=lambda name: loads[name])
    return host, 8 * loads[host] / simulated.seconds / link_bits_s


def _cells(run: RehearsedRun) -> tuple[str, ...]:
    """Return a run's row of the table, as text."""
    several = run.workers > 1
    link = f"{run.busiest_host} {run.busiest_link_share:.1%}" if run.busiest_host else ""
    reached = "not reached" if run.seconds_to_loss is None else format_duration(run.seconds_to_loss)
    return (
        run.name,
        format_number(run.loss) if math.isfinite(run.loss) else "failed",
        "" if run.accuracy is None else f"{run.accuracy:.3f}",
        format_duration(run.seconds),
        reached,
        "" if run.speedup is None else f"{run.speedup:.2f}",
        f"{run.efficiency:.0%}",
        f"{run.staleness:.1f}"
        if several and run.system == SPARKSTROM and run.staleness is not None
        else "",
        f"{_format_ratio(run.times_fewer_bytes)} times"
        if several and run.system == SPARKSTROM and run.times_fewer_bytes
        else "",
        link if several else "",
        f"{run.worker_hours:.3g}",
        str(run.deaths) if run.deaths else "",
    )


def _format_ratio(value: float) -> str:
    """Format a ratio as a whole number, or with two significant digits if it is below 10."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _format_seconds(value: float) -> str:
    """Format a short time in s, ms or us."""
    if value >= ROUNDED_UP:
        return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"
    if value >= ROUNDED_UP * 1e-3:
        return f"{1e3 * value:.3g} ms"
    return f"{1e6 * value:.3g} us"


def _replace_nonfinite(value: Any) -> Any:
    """Return a value for JSON, with None for numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _replace_nonfinite(one) for key, one in value.items()}
    return [_replace_nonfinite(one) for one in value] if isinstance(value, list | tuple) else value


# The page, and the short form for notebooks: both show conditions, verdict and table.


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
    """Return plots of a measure, such as "loss", over virtual time and over rows.

    Return [] if no run has the measure.
    """
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
    is_positive = all(value > 0 for curve in curves for _, value in curve.known)
    return TimePlot(title, measure, curves, is_log=measure == "loss" and is_positive)


def _choose_runs(rehearsal: Rehearsal) -> list[RehearsedRun]:
    """Return one process and the best runs with several workers, in the order of the rehearsal.

    The best runs have the lowest loss. At most CURVES_MAX runs are returned. If no run has several
    workers, the best of the other runs are returned instead.
    """
    one, *others = rehearsal.runs
    several = [run for run in others if run.workers > 1] or others
    ranked = sorted(several, key=lambda run: (run.loss, run.seconds))[: CURVES_MAX - 1]
    return [one, *(run for run in others if run in ranked)]
