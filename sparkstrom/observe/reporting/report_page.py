"""Report page: a run log as one page that needs nothing else, no network and no script.

What the log holds is text to it: elements are made by the standard library, which escapes, and
the page forbids browsers to run or to fetch anything.
"""

from __future__ import annotations

from typing import Any
from xml.etree.ElementTree import Element

from sparkstrom.base.errors import UsageError
from sparkstrom.base.version import __version__
from sparkstrom.observe.reporting.fit_plots import marks_of, missing_in, plots_of
from sparkstrom.observe.reporting.markup import bullets, element, group_section, html, pairs, table
from sparkstrom.observe.reporting.plain_values import mapping, number, text
from sparkstrom.observe.reporting.quantities import (
    byte_count,
    count,
    duration,
    figure,
    plural,
    times,
)
from sparkstrom.observe.reporting.report_style import STYLE
from sparkstrom.observe.reporting.run_history import FitHistory, RunHistory
from sparkstrom.observe.reporting.summary_groups import (
    Row,
    Table,
    groups_of,
    headline,
    result,
    warnings_in,
)

FITS_SHOWN = 4  # the newest; of all there is a row
ROWS_SHOWN = 200  # of fits, likewise
LINES_SHOWN = 50  # of faults, and of options
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'"

Numbered = tuple[int, FitHistory]  # from 1

DONE, STOPPED, FAILED, INTERRUPTED, OPEN = (
    "done", "ended early", "failed", "interrupted", "no end in the log",
)  # fmt: skip
IS_OPEN = (
    "The log has no end of this fit: it is still running, or the driver program was killed. Newest"
    " line: {}."
)
ENDED_BY_PEOPLE = ("KeyboardInterrupt", "the job was cancelled")


def report(history: RunHistory, only: int | None = None) -> str:
    """The page. ``only``: this fit of the log, from 1; raise UsageError where there is none."""
    numbered = list(enumerate(history.fits, 1))
    if only is not None and not 1 <= only <= len(numbered):
        have = plural(len(numbered), "fit")
        raise UsageError(f"fit {only}: {history.path} has {have}; give a number from 1 on")
    shown = numbered[-FITS_SHOWN:] if only is None else [numbered[only - 1]]
    body = element(
        "body",
        element("h1", f"{history.path.name}: {plural(len(numbered), 'fit')}"),
        element("p", f"Written by sparkstrom {__version__}.", class_="muted"),
        *(element("p", said, class_="bad") for said in _damage(history)),
        _overview(numbered, shown) if len(numbered) > 1 else None,
        *(_fit(number_of, fit) for number_of, fit in reversed(shown)),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", f"sparkstrom: {history.path.name}"),
        element("style", STYLE),
    )
    return "<!DOCTYPE html>\n" + html(element("html", head, body, lang="en")) + "\n"


def _damage(history: RunHistory) -> list[str]:
    said = []
    if history.is_torn:
        said.append(
            "The last line is torn: the driver program ended, or was about to write, in its middle."
        )
    if history.strange:
        lines = plural(len(history.strange), "line")
        said.append(
            f"{lines} could not be read and are left out (first: line {history.strange[0]})."
        )
    return said


# -- all fits ------------------------------------------------------------------------------------


def _overview(
    numbered: list[tuple[int, FitHistory]], shown: list[tuple[int, FitHistory]]
) -> Element:
    """A row for each, the newest first."""
    columns = ("fit", "began (UTC)", "how it ended", "epochs", "loss", "held out", "time")
    rows = [
        (
            str(index),
            _moment(fit.begin.get("time")),
            outcome(fit),
            count(number(fit.begin.get("epochs"))),
            figure(_loss(fit)),
            figure(_held_out(fit)),
            duration(fit.last_s),
        )
        for index, fit in reversed(numbered[-ROWS_SHOWN:])
    ]
    more = max(0, len(numbered) - ROWS_SHOWN)
    left_out = len(numbered) - len(shown)
    hint = (
        f"{plural(left_out, 'fit')} of the log not shown below: sparkstrom report ... --fit NUMBER"
    )
    return element(
        "section",
        element("h2", "All fits"),
        table(Table(columns, rows, more)),
        element("p", hint, class_="muted") if left_out else None,
    )


def outcome(fit: FitHistory) -> str:
    """How it ended, in two words."""
    if fit.end is None:
        return OPEN
    if fit.error:
        return INTERRUPTED if fit.error.startswith(ENDED_BY_PEOPLE) else FAILED
    return STOPPED if fit.summary.get("stopped") else DONE


def _moment(time: Any) -> str:
    return text(time).replace("T", " ").split(".")[0] or "not known"


def _loss(fit: FitHistory) -> float | None:
    return number(fit.summary.get("loss")) if fit.summary else fit.last("loss")


def _held_out(fit: FitHistory) -> float | None:
    return fit.epochs[-1].validation if fit.epochs else None


# -- one fit -------------------------------------------------------------------------------------


def _fit(index: int, fit: FitHistory) -> Element:
    figures, plots = fit.summary, plots_of(fit)
    how = outcome(fit)
    warnings = warnings_in(figures)
    return element(
        "section",
        element("h2", f"Fit {index}: {_what(fit)}"),
        element("p", how, class_="good" if how in (DONE, STOPPED) else "bad"),
        *(element("p", said) for said in _ending(fit)),
        _tiles(fit),
        element("h3", plural(len(warnings), "warning")) if warnings else None,
        bullets(warnings, "warns") if warnings else None,
        element("h3", "Over time"),
        element("p", said, class_="muted") if (said := _marks_in_words(fit)) else None,
        element("div", *plots, class_="plots"),
        *(element("p", f"Not shown: {why}.", class_="muted") for why in missing_in(fit)),
        *_events(fit),
        *_figures(figures),
        *_options(fit),
    )


def _what(fit: FitHistory) -> str:
    if fit.summary:
        return headline(fit.summary)
    model, epochs = text(fit.begin.get("model")) or "a model", number(fit.begin.get("epochs"))
    workers = plural(number(fit.begin.get("workers")), "worker")
    return f"{workers}, {plural(epochs, 'epoch')} of {model} wanted"


def _ending(fit: FitHistory) -> list[str]:
    if fit.end is None:
        return [IS_OPEN.format(_moment(fit.newest))]
    return [part for part in (fit.error, text(fit.summary.get("stopped"))) if part]


def _tiles(fit: FitHistory) -> Element:
    sent = number(fit.summary.get("bytes_sent")) or fit.last("bytes_sent")
    less = times(sent, number(fit.summary.get("bytes_dense")))
    lost = sum(len(change.reasons) or len(change.left) for change in fit.changes if change.left)
    done, expected = (
        number(fit.summary.get(name)) or fit.last(name)
        for name in ("minibatches", "minibatches_expected")
    )
    tiles: list[Row] = [
        ("model", text(fit.begin.get("model")) or "not known"),
        ("parameters", count(number(fit.begin.get("n_params")))),
        ("loss", figure(_loss(fit))),
        ("held-out rows", figure(_held_out(fit)) if _held_out(fit) is not None else "none"),
        ("time", duration(number(fit.summary.get("seconds")) or fit.last_s)),
        ("minibatches", f"{count(done)} of {count(expected)}"),
        ("sent", byte_count(sent) + (f", {less}" if less else "")),
        ("workers lost", count(lost)),
    ]
    made = (element("li", element("span", name), element("strong", value)) for name, value in tiles)
    return element("ul", *made, class_="tiles")


def _marks_in_words(fit: FitHistory) -> str:
    if not marks_of(fit):
        return ""
    return (
        "Dashed lines: ▼ a worker was lost, ▲ another one trains in its place; why is told under"
        " the pointer, and below."
    )


def _events(fit: FitHistory) -> list[Element]:
    """What happened to workers, and links that were too slow."""
    marks = marks_of(fit)
    events = [(f"{mark.seconds:.1f} s", mark.words) for mark in marks[:LINES_SHOWN]]
    if len(marks) > LINES_SHOWN:
        events.append(("", f"and {len(marks) - LINES_SHOWN:,} more"))
    slow = [(f"{s:.1f} s", words) for words, s in list(fit.slow_links.items())[:LINES_SHOWN]]
    title = "Workers lost and replaced" if fit.diverged_s is None else "What went wrong"
    faults = [element("h3", title), pairs(events)] if events else []
    links = pairs(slow) if slow else element("p", "No link was found too slow.", class_="muted")
    return [*faults, *_checkpoints(fit), element("h3", "Links"), links]


def _checkpoints(fit: FitHistory) -> list[Element]:
    """How many were written, and the newest; nothing for a fit that wrote none."""
    if not fit.checkpoints:
        return []
    seconds, path = fit.checkpoints[-1]
    told = [("written", count(len(fit.checkpoints))), ("newest", f"{path}, at {seconds:.1f} s")]
    return [element("h3", "Checkpoints"), pairs(told)]


def _figures(figures: dict[str, Any]) -> list[Element]:
    if not figures:
        return []
    groups = [group_section(group, "h4") for group in (result(figures), *groups_of(figures))]
    return [element("h3", "Figures"), element("div", *groups, class_="groups")]


def _options(fit: FitHistory) -> list[Element]:
    told = list(mapping(fit.begin.get("options")).items())[:LINES_SHOWN]
    if not told:
        return []
    rows = [(name, "None" if value is None else text(value)) for name, value in told]
    shown = element("details", element("summary", "of the SharedTrainingMaster"), pairs(rows))
    return [element("h3", "Options"), shown]
