"""Render a fit's summary as text for a terminal and as HTML for a notebook.

The input is ``TrainingSummary.to_dict()``, either directly or from a run log; values that an older
or damaged log lacks are omitted. The standard library builds the HTML elements and escapes text and
attributes. In a notebook, the HTML inherits the colours of its surroundings, so it is readable on
light and dark backgrounds.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from sparkstrom.observe.reporting.run_log_reader import as_dict, as_list, as_number, as_text

UNKNOWN = "not known"
ROUNDED_UP = 0.9995  # from this share of a unit on, three digits round up to 1 of it
UNKNOWN_SUMMARY = "This fit was skipped, and its figures are not known"


def format_count(value: float | None) -> str:
    """Format a count as 1,234,567."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def format_number(value: float | None) -> str:
    """Format a number to four significant digits; from 10,000 to 1,000,000 as a whole number."""
    if value is None:
        return UNKNOWN
    if 9999.5 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    if value and not 1e-3 <= abs(value) < 9999.5:
        return f"{value:.3g}"
    return f"{value:.4g}"


def format_bytes(value: float | None) -> str:
    """Format a number of bytes as 1.23 MB; a MB is 1,000,000 bytes."""
    if value is None:
        return UNKNOWN
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= ROUNDED_UP * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} bytes"


def format_duration(seconds: float | None) -> str:
    """Format a duration as 0.4 s, 41 s, 3 min 20 s or 2 h 5 min."""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_reduction(value: float | None, base: float | None) -> str:
    """Format base / value as "N times less"; return "" if either is unknown, or it is not less."""
    if not value or not base or value >= base:
        return ""
    return f"{base / value:,.0f} times less"


def pluralize(n: float | None, thing: str) -> str:
    """Format a count with its noun, as in 1 worker or 4 workers."""
    return f"{format_count(n)} {thing}{'' if n == 1 else 's'}"


WORKERS_SHOWN = 32  # rows in the table of workers; ``to_dict()`` contains all workers
ACTIVITIES_SHOWN = 4  # activity columns in the table of workers, for the longest activities

Row = tuple[str, str]  # (name, text)
Figures = Mapping[str, Any]  # a fit's summary, or one worker's part of it, by name


@dataclass(frozen=True, slots=True)
class Table:
    """A table of strings, from which rows may be left out."""

    columns: tuple[str, ...]  # headings
    rows: Sequence[tuple[str, ...]]  # cells of each row
    more: int = 0  # number of rows left out, which is shown below the table


@dataclass(frozen=True, slots=True)
class FigureGroup:
    """Values under a common title; rows, lines and table may each be empty."""

    title: str  # heading
    rows: list[Row]  # (name, text)
    lines: tuple[str, ...] = ()  # bullet points
    table: Table | None = None  # shown last


def _was_fit_skipped(summary: Figures) -> bool:
    """Return whether a summary lacks all values, because its fit was skipped (it has 0 workers)."""
    return as_number(summary.get("workers")) == 0


def summary_headline(summary: Figures) -> str:
    """Return one line about what was trained."""
    if _was_fit_skipped(summary):
        return UNKNOWN_SUMMARY
    workers, epochs = as_number(summary.get("workers")), as_number(summary.get("epochs"))
    before = as_number(summary.get("epochs_resumed"))
    here = epochs - before if epochs is not None and before else epochs
    resumed = f", after {pluralize(before, 'epoch')} before it was resumed" if before else ""
    n_params = as_number(summary.get("n_params"))
    of_parameters = "" if n_params is None else f" of {pluralize(n_params, 'parameter')}"
    return (
        f"{pluralize(workers, 'worker')} trained {pluralize(here, 'epoch')}{of_parameters} in"
        f" {format_duration(as_number(summary.get('seconds')))}{resumed}"
    )


def result_group(summary: Figures) -> FigureGroup:
    """Return the most important results: loss, held-out score, speed and how the fit ended."""
    rows = [("loss", _format_loss(as_number(summary.get("loss")))), *_held_out_rows(summary)]
    rows += _best_epoch_rows(summary)
    if summary.get("replicas_equal") is True:
        rows.append(("replicas", "bit-identical, on the driver and all workers"))
    elif summary.get("replicas_equal") is False:
        rows.append(("replicas", "NOT equal: see the warnings"))
    rows += [(name, as_text(summary.get(key))) for name, key in ENDING_ROWS if summary.get(key)]
    rows += _speed_rows(summary)
    took, dense = as_number(summary.get("bytes_sent")), as_number(summary.get("bytes_dense"))
    less = format_reduction(took, dense)
    than_dense = f", {less} than dense updates" if less else ""
    rows.append(("sent", f"{format_bytes(took)} of updates{than_dense}"))
    return FigureGroup("Result", rows)


ENDING_ROWS = (
    ("ended early", "stopped"),
    ("resumed from", "resumed_from"),
    ("checkpoint", "checkpoint"),
)


def summary_warnings(summary: Figures) -> list[str]:
    """Return the warnings of a summary."""
    return [as_text(one) for one in as_list(summary.get("warnings"))]


def figure_groups(summary: Figures) -> list[FigureGroup]:
    """Return all non-empty groups of values except ``result_group``."""
    groups = [part(summary) for part in GROUP_BUILDERS]
    return [group for group in groups if group.rows or group.lines or group.table]


def _format_loss(value: float | None) -> str:
    """Format the loss of the last epoch."""
    if value is None:
        return "not a number: no epoch was completed, no row counts, or training diverged"
    return f"{format_number(value)} in the last epoch"


def _speed_rows(summary: Figures) -> list[Row]:
    """Return the row with the throughput over the training phase, or else the whole fit."""
    phases = as_dict(summary.get("phase_seconds"))
    seconds = as_number(phases.get("train")) or as_number(summary.get("seconds"))
    examples = as_number(summary.get("examples"))
    if not seconds or not examples:
        return []
    return [("speed", f"{format_count(round(examples / seconds))} examples/s")]


def _held_out_rows(summary: Figures) -> list[Row]:
    """Return the row with the held-out score of the last epoch; [] if it has none."""
    history = [as_dict(epoch_figures) for epoch_figures in as_list(summary.get("history"))]
    last = history[-1] if history else {}
    score = as_number(last.get("validation"))
    if score is None:
        return []
    epoch = format_count(as_number(last.get("epoch")))
    return [("held-out rows", f"{format_number(score)} at the end of epoch {epoch}")]


def _best_epoch_rows(summary: Figures) -> list[Row]:
    """Return the row with the best epoch; [] if early stopping was not used."""
    best = as_dict(summary.get("best"))
    if not best:
        return []
    commit = as_number(best.get("commit"))
    delivery = (
        "" if commit is None else f"; its parameters (commit {format_count(commit)}) are returned"
    )
    score = f"{as_text(best.get('metric'))} {format_number(as_number(best.get('value')))}"
    return [("best epoch", f"{format_count(as_number(best.get('epoch')))}: {score}{delivery}")]


def _rows_if_known(
    summary: Figures, *specs: tuple[str, str, Callable[[float | None], str]]
) -> list[Row]:
    """Return a row for each (title, key, formatter) whose value is known."""
    return [
        (title, format_value(value))
        for title, key, format_value in specs
        if (value := as_number(summary.get(key))) is not None
    ]


def _training_group(summary: Figures) -> FigureGroup:
    """Return the amount of training: parameters, minibatches, rows and batch sizes."""
    rows = _rows_if_known(summary, ("parameters", "n_params", format_count))
    done = as_number(summary.get("minibatches"))
    expected = as_number(summary.get("minibatches_expected"))
    if done is not None:
        before = as_number(summary.get("minibatches_resumed"))
        resumed = f", {format_count(before)} of them before it was resumed" if before else ""
        text = f"{format_count(done)} of {format_count(expected)}, each counted once{resumed}"
        rows.append(("minibatches", text))
    held, trained = as_number(summary.get("rows_held_out")), as_number(summary.get("rows_trained"))
    if trained is not None:
        text = f"{format_count(trained)} trained in every epoch, {format_count(held)} held out"
        rows.append(("rows", text))
    rows += _rows_if_known(
        summary,
        ("examples trained", "examples", format_count),
        ("updates", "updates", format_count),
    )
    return FigureGroup("Training", [*rows, *_batch_rows(summary), *_horizon_rows(summary)])


def _batch_rows(summary: Figures) -> list[Row]:
    """Return the row with the batch size of one step and of a round (one step per worker)."""
    per_worker = as_number(summary.get("batch_size_per_worker"))
    per_round = as_number(summary.get("effective_batch"))
    if per_worker is None or per_round is None:
        return []
    workers = pluralize(per_round / per_worker, "worker") if per_worker else "no workers"
    step = f"{format_count(per_worker)} rows per step"
    return [("batch", f"{step}; {format_count(per_round)} in a round of {workers}")]


def _horizon_rows(summary: Figures) -> list[Row]:
    """Return the row on how momentum and schedules were adapted to the number of workers."""
    changes = as_dict(summary.get("horizons"))
    text = ", ".join(
        f"{as_text(name)} {as_text(to)}" for name, to in changes.items() if name != "workers"
    )
    return [(f"for {as_text(changes.get('workers'))} workers", text)] if text else []


def _update_group(summary: Figures) -> FigureGroup:
    """Return how updates were encoded: sent fraction, threshold, and changes not sent or lost."""
    rows = _rows_if_known(
        summary,
        ("sent fraction", "sent_fraction", format_number),
        ("threshold (tau)", "tau", format_number),
        ("residual norm", "residual_norm", format_number),
    )
    for kind in ("clipped", "scaled_away", "lost"):
        if value := as_number(summary.get(f"mass_{kind}")):
            rows.append((f"mass {kind.replace('_', ' ')}", format_number(value)))
    return FigureGroup("Updates", rows)


def _staleness_group(summary: Figures) -> FigureGroup:
    """Return how late learned changes arrive: on the way, in commits, and in residuals."""

    def of(key: str) -> str:
        return format_number(as_number(summary.get(key)))

    if as_number(summary.get("staleness_minibatches")) is None:
        return FigureGroup("", [])
    rows = [
        ("on the way", f"{of('staleness_minibatches')} minibatches of other workers (max"
         f" {of('staleness_minibatches_max')})"),
        ("in commits", f"{of('staleness_mean')} (max {of('staleness_max')})"),
        ("in residuals", f"{of('residual_minibatches')} more minibatches"),
    ]  # fmt: skip
    return FigureGroup("Staleness", rows)


def _bytes_group(summary: Figures) -> FigureGroup:
    """Return the bytes by kind, ignored messages and slow links."""
    kinds = as_dict(summary.get("bytes_by_kind"))
    rows = [
        (as_text(kind).replace("_", " "), format_bytes(as_number(size)))
        for kind, size in kinds.items()
    ]
    rows += _rows_if_known(summary, ("left interfaces", "bytes_wire", format_bytes))
    rejected = as_number(summary.get("rejected_frames"))
    if rejected:
        rows.append(("frames rejected", format_count(rejected)))
    rows += _ignored_message_rows(summary)
    slow_links = tuple(map(as_text, as_list(summary.get("slow_links"))))
    return FigureGroup("Bytes per hop", rows, slow_links)


def _ignored_message_rows(summary: Figures) -> list[Row]:
    """Return the row of ignored messages, such as ``14: 9 stranger, 5 late``."""
    counts = {
        as_text(why).replace("_", " "): as_number(n) or 0
        for why, n in as_dict(summary.get("ignored_messages")).items()
    }
    if not any(counts.values()):
        return []
    reasons = ", ".join(f"{format_count(n)} {why}" for why, n in counts.items())
    return [("messages ignored", f"{format_count(sum(counts.values()))}: {reasons}")]


def _phase_group(summary: Figures) -> FigureGroup:
    """Return the seconds of each phase."""
    phases = as_dict(summary.get("phase_seconds")).items()
    rows = [(as_text(name), format_duration(as_number(value))) for name, value in phases]
    return FigureGroup("Time by phase", rows)


def _workers_group(summary: Figures) -> FigureGroup:
    """Return the table of the first ``WORKERS_SHOWN`` workers."""
    workers = [as_dict(worker) for worker in as_list(summary.get("per_worker"))]
    if not workers:
        return FigureGroup("", [])
    activities = rank_activities(workers)[:ACTIVITIES_SHOWN]
    columns = ("node", "partition", "host", "steps", "examples", "loss", "sent", *activities)
    rows = [
        (
            *(as_text(worker.get(key)) for key in ("node", "partition", "host")),
            *(format_count(as_number(worker.get(key))) for key in ("steps", "examples")),
            format_number(as_number(worker.get("loss"))),
            format_bytes(as_number(worker.get("bytes_sent"))),
            *(format_duration(activity_seconds(worker, activity)) for activity in activities),
        )
        for worker in workers[:WORKERS_SHOWN]
    ]
    more = max(0, len(workers) - WORKERS_SHOWN)
    return FigureGroup("Workers", [], table=Table(columns, rows, more))


def activity_seconds(worker: Figures, activity: str) -> float:
    """Return the seconds that a worker spent on an activity."""
    return max(0.0, as_number(as_dict(worker.get("seconds")).get(activity)) or 0.0)


def rank_activities(workers: list[dict[str, Any]]) -> list[str]:
    """Return the names of all workers' activities, the longest in total first."""
    total: dict[str, float] = {}
    for worker in workers:
        for name in as_dict(worker.get("seconds")):
            total[name] = total.get(name, 0.0) + activity_seconds(worker, name)
    return sorted(total, key=lambda name: -total[name])


def _faults_group(summary: Figures) -> FigureGroup:
    """Return the faults that the fit survived."""
    faults = tuple(map(_format_fault, as_list(summary.get("faults"))))
    return FigureGroup("Faults survived", [], faults)


def _format_fault(fault: Any) -> str:
    """Describe one fault in one line."""
    fields = as_dict(fault)
    seconds, node = as_number(fields.get("seconds")), as_number(fields.get("node"))
    when = "" if seconds is None else f"after {format_duration(seconds)}: "
    worker = (
        "" if node is None else f" (node {node:.0f}, partition {as_text(fields.get('partition'))})"
    )
    kind, host = as_text(fields.get("what")), as_text(fields.get("host"))
    return f"{when}{kind}{worker} on {host}: {as_text(fields.get('reason'))}"


GROUP_BUILDERS: tuple[Callable[[Figures], FigureGroup], ...] = (
    _training_group, _staleness_group, _update_group, _bytes_group, _phase_group, _workers_group,
    _faults_group,
)  # fmt: skip


def short_rows(figures: Figures) -> list[Row]:
    """Return the rows of the short table, as ``TrainingSummary.table()`` shows it.

    ``figures`` are the fields of a TrainingSummary as Python values, so NaN is shown as NaN.
    """
    f = figures
    sent, dense, best, horizons = f["bytes_sent"], f["bytes_dense"], f["best"], f["horizons"]
    changes = ", ".join(f"{name} {to}" for name, to in horizons.items() if name != "workers")
    rows = [
        ("minibatches", f"{f['minibatches']:,} of {f['minibatches_expected']:,}"),
        ("rows", f"{f['rows']:,}: {f['rows_trained']:,} trained, {f['rows_held_out']:,} held out"),
        ("loss (last epoch)", f"{f['loss']:.4f}"),
    ]
    if best is not None:
        delivered = "" if best.commit is None else f", parameters of commit {best.commit}"
        rows.append(("best epoch", f"{best.epoch} ({best.metric} {best.value:.4f}{delivered})"))
    rows += [
        ("bytes sent", f"{sent:,} (dense {dense:,}: {dense / sent if sent else math.inf:.0f} x)"),
        ("bytes on the wire", f"{f['bytes_wire']:,}"),
        ("sent fraction", f"{f['sent_fraction']:.2e}"),
        (
            "staleness",
            f"{f['staleness_minibatches']:.1f} minibatches of others (max"
            f" {f['staleness_minibatches_max']:.0f}), {f['staleness_mean']:.1f} commits (max"
            f" {f['staleness_max']}); {f['residual_minibatches']:.0f} more in residuals",
        ),
        ("residual norm", f"{f['residual_norm']:.4f}"),
        ("threshold", f"{f['tau']:.2e}"),
    ]
    if horizons:
        rows.append(("horizons", f"{horizons['workers']} workers: {changes}"))
    return [
        *rows,
        ("seconds", " + ".join(f"{name} {s:.1f}" for name, s in f["phase_seconds"].items())),
        ("", f"= {f['seconds']:.1f}"),
        *((f"hash {name}", digest[:16]) for name, digest in f["hashes"].items()),
        ("replicas equal", str(f["replicas_equal"])),
    ]


HtmlChild = Element | str | None


def make_element(tag: str, *children: HtmlChild, **attributes: Any) -> Element:
    """Make an HTML element from children and attributes; those that are None are omitted.

    In attribute names, ``class_`` means class, and other underscores mean hyphens.
    """
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    parent = Element(
        tag, {name: _attribute_text(value) for name, value in named.items() if value is not None}
    )
    for child in children:
        if isinstance(child, str):
            _append_text(parent, as_text(child))
        elif child is not None:
            parent.append(child)
    return parent


def to_html(element: Element) -> str:
    """Serialize an element as HTML."""
    return ElementTree.tostring(element, encoding="unicode", method="html")


def _attribute_text(value: Any) -> str:
    """Return an attribute's value as text; floats are pixels, with at most one decimal."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else as_text(value)


def _append_text(parent: Element, text: str) -> None:
    """Append text after the element's last child."""
    if len(parent):
        parent[-1].tail = (parent[-1].tail or "") + text
    else:
        parent.text = (parent.text or "") + text


def group_section(group: FigureGroup, heading: str = "h3") -> Element:
    """Return a group of values as an HTML section with a heading."""
    return make_element(
        "section",
        make_element(heading, group.title),
        name_value_table(group.rows) if group.rows else None,
        bullet_list(group.lines) if group.lines else None,
        table_element(group.table) if group.table else None,
    )


def name_value_table(rows: list[tuple[str, str]]) -> Element:
    """Return an HTML table with two columns: names and values."""
    lines = (
        make_element("tr", make_element("th", name, scope="row"), make_element("td", value))
        for name, value in rows
    )
    return make_element("table", make_element("tbody", *lines), class_="pairs")


def bullet_list(lines: tuple[str, ...] | list[str], class_: str | None = None) -> Element:
    """Return an HTML bullet list; ``class_`` is its CSS class."""
    return make_element("ul", *(make_element("li", line) for line in lines), class_=class_)


def table_element(table: Table) -> Element:
    """Return an HTML table with headings, in a box that scrolls sideways if it is too wide."""
    head = make_element("tr", *(make_element("th", name, scope="col") for name in table.columns))
    rows = (make_element("tr", *(make_element("td", cell) for cell in row)) for row in table.rows)
    more = make_element("p", f"and {table.more:,} more", class_="muted") if table.more else None
    body = make_element(
        "table", make_element("thead", head), make_element("tbody", *rows), class_="wide"
    )
    return make_element("div", body, more, class_="scrolls", tabindex="0")


ALL_FIGURES_HINT = "All figures: print(summary.table(all=True))"
NO_WARNINGS = "No warnings"
WIDTH = 100  # characters per line; tables may be wider
NAME_WIDTH = 18  # characters in the column of names
STYLE = """
.sparkstrom-summary{font:13px/1.5 system-ui,sans-serif;color:inherit;max-width:60rem}
.sparkstrom-summary h3{font-size:1.15em;margin:.2em 0}
.sparkstrom-summary h4{font-size:1em;margin:.8em 0 .2em}
.sparkstrom-summary table{border-collapse:collapse;background:transparent;color:inherit;margin:0}
.sparkstrom-summary tr{background:transparent!important}
.sparkstrom-summary th,.sparkstrom-summary td{text-align:left!important;padding:.1em 1.2em .1em 0;
vertical-align:top;border:0;color:inherit;font-weight:normal;white-space:normal}
.sparkstrom-summary th{opacity:.75;white-space:nowrap}
.sparkstrom-summary ul{margin:.2em 0;padding-left:1.2em}
.sparkstrom-summary .warns{border-left:3px solid #d55e00;padding-left:1.6em}
.sparkstrom-summary .scrolls{overflow-x:auto}
.sparkstrom-summary summary{cursor:pointer;margin-top:.6em}
"""


def summary_text(summary: Mapping[str, Any], *, whole: bool = False) -> str:
    """Return a summary as text: results and warnings, and with ``whole`` all other values."""
    warnings = summary_warnings(summary)
    title = "1 warning" if len(warnings) == 1 else f"{len(warnings)} warnings"
    more = (
        [_group_lines(group) for group in figure_groups(summary)] if whole else [[ALL_FIGURES_HINT]]
    )
    shown = [title, *_bullet_lines(warnings)] if warnings else [NO_WARNINGS]
    headline = [summary_headline(summary)]
    if _was_fit_skipped(summary):
        parts = [headline, shown]
    else:
        parts = [headline, _group_lines(result_group(summary)), shown, *more]
    return "\n\n".join("\n".join(part) for part in parts if part)


def short_text(figures: Mapping[str, Any]) -> str:
    """Return the lines of ``TrainingSummary.table()``; see ``short_rows``."""
    if _was_fit_skipped(figures):
        return summary_text(figures)
    return "\n".join(f"{name:<20}{value}" for name, value in short_rows(figures))


def summary_html(summary: Mapping[str, Any]) -> str:
    """Return a summary as an HTML fragment with its own style sheet, for a notebook."""
    warnings = summary_warnings(summary)
    is_known = not _was_fit_skipped(summary)
    more = make_element(
        "details",
        make_element("summary", "All figures"),
        *(group_section(group, "h4") for group in figure_groups(summary)),
    )
    page = make_element(
        "div",
        make_element("style", STYLE),
        make_element("h3", summary_headline(summary)),
        group_section(result_group(summary), "h4") if is_known else None,
        bullet_list(warnings, "warns") if warnings else None,
        more if is_known else None,
        class_="sparkstrom-summary",
    )
    return to_html(page)


def _group_lines(group: FigureGroup) -> list[str]:
    """Return a group of values as lines of text."""
    rows = [line for name, value in group.rows for line in _row_lines(name, value)]
    table = list(table_lines(group.table)) if group.table else []
    return [group.title, *rows, *_bullet_lines(group.lines), *table]


def _row_lines(name: str, value: str) -> list[str]:
    """Return one name and value as wrapped lines."""
    margin = " " * (NAME_WIDTH + 2)
    first = f"  {name:<{NAME_WIDTH}}"
    return textwrap.wrap(value, WIDTH, initial_indent=first, subsequent_indent=margin) or [first]


def _bullet_lines(lines: Iterable[str]) -> list[str]:
    """Return bullet points as wrapped lines."""
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    ]


def table_lines(table: Table) -> Iterator[str]:
    """Yield the lines of a table whose columns are as wide as their contents."""
    rows = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    for row in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        yield "  " + "  ".join(cells).rstrip()
    if table.more:
        yield f"  and {table.more:,} more, in to_dict()"
