"""Markup: elements of a page, whose text and attributes are escaped by the standard library."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from sparkstrom.observe.reporting.plain_values import text
from sparkstrom.observe.reporting.summary_groups import Group, Table

Child = Element | str | None


def element(tag: str, *children: Child, **attributes: Any) -> Element:
    """``class_`` is class, other underscores are hyphens; None is left out."""
    named = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
    made = Element(tag, {name: _said(value) for name, value in named.items() if value is not None})
    for child in children:
        if isinstance(child, str):
            _add_text(made, text(child))
        elif child is not None:
            made.append(child)
    return made


def html(made: Element) -> str:
    """As a browser reads it."""
    return ElementTree.tostring(made, encoding="unicode", method="html")


def _said(value: Any) -> str:
    """Pixels need no more than a digit after the point."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else text(value)


def _add_text(made: Element, said: str) -> None:
    if len(made):
        made[-1].tail = (made[-1].tail or "") + said
    else:
        made.text = (made.text or "") + said


def group_section(group: Group, heading: str = "h3") -> Element:
    """A group of figures."""
    return element(
        "section",
        element(heading, group.title),
        pairs(group.rows) if group.rows else None,
        bullets(group.lines) if group.lines else None,
        table(group.table) if group.table else None,
    )


def pairs(rows: list[tuple[str, str]]) -> Element:
    """Names and what they are."""
    lines = (
        element("tr", element("th", name, scope="row"), element("td", value))
        for name, value in rows
    )
    return element("table", element("tbody", *lines), class_="pairs")


def bullets(lines: tuple[str, ...] | list[str], class_: str | None = None) -> Element:
    """A list."""
    return element("ul", *(element("li", line) for line in lines), class_=class_)


def table(shown: Table) -> Element:
    """With headings; scrolls by itself where it is too wide."""
    head = element("tr", *(element("th", name, scope="col") for name in shown.columns))
    rows = (element("tr", *(element("td", cell) for cell in row)) for row in shown.rows)
    more = element("p", f"and {shown.more:,} more", class_="muted") if shown.more else None
    made = element("table", element("thead", head), element("tbody", *rows), class_="wide")
    return element("div", made, more, class_="scrolls", tabindex="0")
