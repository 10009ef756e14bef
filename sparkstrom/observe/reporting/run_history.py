"""Run history: a run log as the fits in it, whatever its lines hold.

A driver program that is killed leaves a last line that is torn, and a fit without an end. Such a
line is left out and told; so is any other that is none of a run log.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.base.files import open_regular
from sparkstrom.observe.reporting.plain_values import listing, mapping, number, text

COLUMNS = (
    "minibatches", "minibatches_expected", "epoch", "loss", "examples", "bytes_sent", "bytes_wire",
    "sent_fraction", "tau", "staleness", "waiting", "workers", "workers_wanted",
)  # fmt: skip
KINDS_MAX = 16  # of bytes
SECONDS_MAX = 1e9  # no fit lasts thirty years
STRANGE_LINES_MAX = 1000  # at the beginning, after which a file is taken for something else
REMEDY = "name a file that fit(..., run_log=...) wrote, or one of the directory sparkstrom-runs"

Values = list[float | None]


@dataclass(frozen=True, slots=True)
class EpochPoint:
    """The end of an epoch."""

    seconds: float
    epoch: float | None
    loss: float | None  # None: not a number
    validation: float | None


@dataclass(frozen=True, slots=True)
class Change:
    """Workers came or went; partitions as text."""

    seconds: float
    joined: tuple[str, ...]
    left: tuple[str, ...]
    training: int  # workers, after it
    reasons: tuple[str, ...]


@dataclass(slots=True)
class FitHistory:
    """One fit, as far as its lines are there."""

    begin: dict[str, Any] = field(default_factory=dict)  # its first line; empty: it is missing
    seconds: list[float] = field(default_factory=list)  # of each iteration, never less than before
    columns: dict[str, Values] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    kinds: dict[str, Values] = field(default_factory=dict)  # bytes by kind
    epochs: list[EpochPoint] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    checkpoints: list[tuple[float, str]] = field(default_factory=list)  # when and where written
    slow_links: dict[str, float] = field(default_factory=dict)  # words -> when first told
    diverged_s: float | None = None  # when the loss was no number, first
    end: dict[str, Any] | None = None  # its last line; None: it is missing
    newest: str = ""  # time of its newest line

    @property
    def summary(self) -> dict[str, Any]:
        return mapping(mapping(self.end).get("summary"))

    @property
    def error(self) -> str:
        return text(mapping(self.end).get("error"))

    @property
    def last_s(self) -> float:
        """How long it has gone on, as far as is known."""
        ended = _moment(mapping(self.end)) or 0.0
        epochs = [one.seconds for one in self.epochs[-1:]]
        changes = [one.seconds for one in self.changes[-1:]]
        return max([ended, *self.seconds[-1:], *epochs, *changes])

    @property
    def trained(self) -> tuple[list[float], dict[str, Values]]:
        """Seconds and columns from the first iteration on that has a minibatch."""
        told = self.columns["minibatches"]
        begin = next((i for i, count in enumerate(told) if count is None or count > 0), len(told))
        return self.seconds[begin:], {name: all_[begin:] for name, all_ in self.columns.items()}

    def last(self, column: str) -> float | None:
        """The newest figure of a column."""
        known = (one for one in reversed(self.columns[column]) if one is not None)
        return next(known, None)


@dataclass(slots=True)
class RunHistory:
    """The fits of one file, in order, and which of its lines could not be read."""

    path: Path
    fits: list[FitHistory] = field(default_factory=list)
    strange: list[int] = field(default_factory=list)  # numbers of lines, from 1
    is_torn: bool = False  # the last line is not whole


def read_history(path: str | os.PathLike[str]) -> RunHistory:
    """Raise UsageError for a file that is not there, empty, or no run log."""
    made = RunHistory(Path(path))
    try:
        for index, line in _lines(made.path):
            _take(made, index, line)
    except OSError as error:
        raise UsageError(f"{made.path} cannot be read ({error.strerror}); {REMEDY}") from error
    if not made.fits:
        is_empty = not made.strange and not made.is_torn
        why = "is empty" if is_empty else "has no whole line of a run log"
        raise UsageError(f"{made.path} {why}: there is nothing to report; {REMEDY}")
    return made


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open_regular(path) as file:
        for index, line in enumerate(file, 1):
            if line.strip():
                yield index, line


def _take(made: RunHistory, index: int, line: bytes) -> None:
    event = _parsed(line)
    take = TAKES.get(text(event.get("event")))
    if take is None and "event" not in event:
        if not line.endswith(b"\n"):
            made.is_torn = True
            return
        made.strange.append(index)
        if len(made.strange) >= STRANGE_LINES_MAX and not made.fits:
            raise UsageError(
                f"the first {STRANGE_LINES_MAX:,} lines of {made.path} are none of a run log;"
                f" {REMEDY}"
            )
        return
    is_new = text(event["event"]) == "fit_begin"
    if is_new or not made.fits or made.fits[-1].end is not None:
        made.fits.append(FitHistory())
    fit = made.fits[-1]
    fit.newest = text(event.get("time")) or fit.newest
    if take is not None:
        take(fit, event)


def _parsed(line: bytes) -> dict[str, Any]:
    """Empty for what is no JSON object."""
    try:
        return mapping(json.loads(line))
    except (ValueError, RecursionError):
        return {}


def _moment(event: dict[str, Any]) -> float | None:
    """Seconds since the fit began, where they can be such."""
    seconds = number(event.get("seconds"))
    return seconds if seconds is not None and 0 <= seconds <= SECONDS_MAX else None


def _begin(fit: FitHistory, event: dict[str, Any]) -> None:
    fit.begin = event


def _iteration(fit: FitHistory, event: dict[str, Any]) -> None:
    seconds = _moment(event)
    if seconds is None or seconds < (fit.seconds[-1] if fit.seconds else 0.0):
        return
    fit.seconds.append(seconds)
    for name, values in fit.columns.items():
        values.append(number(event.get(name)))
    _kinds(fit, mapping(event.get("bytes_by_kind")))
    for link in listing(event.get("slow_links")):
        fit.slow_links.setdefault(text(link), seconds)
    has_trained = (fit.columns["examples"][-1] or 0.0) > 0
    if has_trained and fit.columns["loss"][-1] is None and fit.diverged_s is None:
        fit.diverged_s = seconds


def _kinds(fit: FitHistory, told: dict[str, Any]) -> None:
    before = len(fit.seconds) - 1
    for kind in told:
        if len(fit.kinds) < KINDS_MAX:
            fit.kinds.setdefault(kind, [None] * before)
    for kind, values in fit.kinds.items():
        values.append(number(told.get(kind)))


def _epoch(fit: FitHistory, event: dict[str, Any]) -> None:
    seconds = _moment(event)
    if seconds is None:
        return
    epoch, loss, held = (number(event.get(name)) for name in ("epoch", "loss", "validation"))
    is_known = number(event.get("examples")) != 0  # with no example the loss was not told in time
    if loss is None and is_known and fit.diverged_s is None:
        fit.diverged_s = seconds
    fit.epochs.append(EpochPoint(seconds, epoch, loss, held))


def _change(fit: FitHistory, event: dict[str, Any]) -> None:
    seconds = _moment(event)
    if seconds is None:
        return
    joined, left, reasons = (
        tuple(text(one) for one in listing(event.get(name)))
        for name in ("joined", "left", "reasons")
    )
    fit.changes.append(Change(seconds, joined, left, len(listing(event.get("training"))), reasons))


def _checkpoint(fit: FitHistory, event: dict[str, Any]) -> None:
    seconds = _moment(event)
    if seconds is not None:
        fit.checkpoints.append((seconds, text(event.get("path"))))


def _end(fit: FitHistory, event: dict[str, Any]) -> None:
    fit.end = event


TAKES: dict[str, Callable[[FitHistory, dict[str, Any]], None]] = {
    "fit_begin": _begin,
    "iteration": _iteration,
    "worker_change": _change,
    "epoch": _epoch,
    "checkpoint": _checkpoint,
    "fit_end": _end,
}
