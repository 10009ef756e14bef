"""Report text: findings as a table of 100 columns, and the matrix of who hears whom."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from sparkstrom.spark.doctor.findings import Finding, Level, Matrix, Report, UdpWay

COLUMNS = 100
LEVELS = {Level.OK: "ok", Level.WARNING: "warning", Level.FAILURE: "FAILURE"}
WHERE_MAX, CHECK_MAX = 22, 15
CELL = 12
ROW_NAME_MAX = 16
NAMES_MAX = 6  # processes in the printed matrix; JSON has them all


def text_of(report: Report) -> str:
    """The whole report, for people."""
    failures = sum(f.level is Level.FAILURE for f in report.findings)
    warnings = sum(f.level is Level.WARNING for f in report.findings)
    parts = [_table(report.findings)]
    if report.matrix:
        parts.append(_matrix(report.matrix))
    verdict = "training would fail here" if failures else "training would work here"
    parts.append(f"{verdict}: {_count(failures, 'failure')}, {_count(warnings, 'warning')}")
    return "\n\n".join(parts)


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'' if number == 1 else 's'}"


def _table(findings: Sequence[Finding]) -> str:
    """What was found alike in several places stands there once."""
    together: dict[tuple[str, Level, str, str], list[str]] = {}
    checks = list(dict.fromkeys(each.check for each in findings))
    for each in sorted(findings, key=lambda each: checks.index(each.check)):
        key = each.check, each.level, each.found, each.remedy
        together.setdefault(key, []).append(each.where)
    lines = [_row("check", "", "where", "found"), "-" * COLUMNS]
    for (check, level, found, remedy), places in together.items():
        lines += _entry(check, LEVELS[level], ", ".join(dict.fromkeys(places)), found, remedy)
    return "\n".join(lines)


def _entry(check: str, level: str, places: str, found: str, remedy: str) -> list[str]:
    width = COLUMNS - CHECK_MAX - 9 - WHERE_MAX - 2
    said = textwrap.wrap(found, width, break_on_hyphens=False) or [""]
    if remedy:
        said += textwrap.wrap(
            f"-> {remedy}", width, break_on_hyphens=False, subsequent_indent="   "
        )
    where = textwrap.wrap(places, WHERE_MAX, break_on_hyphens=False)
    lines = []
    for number in range(max(len(said), len(where))):
        first = number == 0
        lines.append(
            _row(
                check if first else "",
                level if first else "",
                where[number] if number < len(where) else "",
                said[number] if number < len(said) else "",
            )
        )
    return lines


def _row(check: str, level: str, where: str, found: str) -> str:
    return f"{check:<{CHECK_MAX}} {level:<8} {where:<{WHERE_MAX}} {found}".rstrip()


def _matrix(matrix: Matrix) -> str:
    """Rows send, columns receive; of many processes the first."""
    names = list(matrix)[:NAMES_MAX]
    more = len(matrix) - len(names)
    title = "UDP, from the row to the column: MB/s and ms there and back"
    if more:
        title += f" (the first {NAMES_MAX} of {len(matrix)}; --json has all)"
    head = "from \\ to"
    lines = [title, f"{head:<{ROW_NAME_MAX}} " + " ".join(f"{_short(n):>{CELL}}" for n in names)]
    for sender in names:
        cells = [_cell(matrix[sender].get(receiver)) for receiver in names]
        lines.append(f"{_short(sender, ROW_NAME_MAX):<{ROW_NAME_MAX}} " + " ".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def _short(name: str, width: int = CELL) -> str:
    """Its end, which tells hosts apart."""
    return name if len(name) <= width else "~" + name[1 - width :]


def _cell(way: UdpWay | None) -> str:
    if way is None:
        return f"{'':>{CELL}}"
    if not way.heard:
        return f"{'NOTHING':>{CELL}}"
    rate = "-" if way.bytes_s is None else f"{way.bytes_s / 1e6:.3g}"
    trip = "-" if way.round_trip_ms is None else f"{way.round_trip_ms:.2g}"
    return f"{f'{rate}  {trip}':>{CELL}}"
