"""Summary page: a summary for a terminal, and for a notebook.

In a notebook it takes the colours of its surroundings, so that it is legible on light and on dark.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sparkstrom.observe.reporting.markup import bullets, element, group_section, html
from sparkstrom.observe.reporting.summary_groups import (
    Group,
    Table,
    groups_of,
    headline,
    result,
    warnings_in,
)

MORE = "All figures: print(summary.table(all=True))"
NO_WARNINGS = "No warnings"
WIDTH = 100  # of a terminal's page, but for tables
NAME_WIDTH = 18
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


def summary_text(made: Mapping[str, Any], *, whole: bool = False) -> str:
    """Return the page for a terminal: the result and warnings; ``whole``: all figures, too."""
    warnings = warnings_in(made)
    title = "1 warning" if len(warnings) == 1 else f"{len(warnings)} warnings"
    more = [_group_text(group) for group in groups_of(made)] if whole else [[MORE]]
    parts = [
        [headline(made)],
        _group_text(result(made)),
        [title, *_bullets(warnings)] if warnings else [NO_WARNINGS],
        *more,
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def summary_html(made: Mapping[str, Any]) -> str:
    """The same for a notebook: a fragment with a style of its own."""
    warnings = warnings_in(made)
    more = element(
        "details",
        element("summary", "All figures"),
        *(group_section(group, "h4") for group in groups_of(made)),
    )
    page = element(
        "div",
        element("style", STYLE),
        element("h3", headline(made)),
        group_section(result(made), "h4"),
        bullets(warnings, "warns") if warnings else None,
        more,
        class_="sparkstrom-summary",
    )
    return html(page)


def _group_text(group: Group) -> list[str]:
    rows = [line for name, value in group.rows for line in _row(name, value)]
    table = list(_table(group.table)) if group.table else []
    return [group.title, *rows, *_bullets(group.lines), *table]


def _row(name: str, value: str) -> list[str]:
    margin = " " * (NAME_WIDTH + 2)
    first = f"  {name:<{NAME_WIDTH}}"
    return textwrap.wrap(value, WIDTH, initial_indent=first, subsequent_indent=margin) or [first]


def _bullets(lines: Iterable[str]) -> list[str]:
    return [
        part
        for line in lines
        for part in textwrap.wrap(line, WIDTH, initial_indent="  - ", subsequent_indent="    ")
    ]


def _table(table: Table) -> Iterator[str]:
    """Columns as wide as what is in them."""
    rows = [table.columns, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    for row in rows:
        cells = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        yield "  " + "  ".join(cells).rstrip()
    if table.more:
        yield f"  and {table.more:,} more, in to_dict()"
