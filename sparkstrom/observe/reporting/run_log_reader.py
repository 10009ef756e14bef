"""Read a run log into the history of its fits, tolerating damage.

If a driver program is killed, its log ends with a truncated line and a fit without an end. Lines
that cannot be read are skipped and counted. ``listener_events.read_run_log`` returns raw events.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.base.untrusted_files import open_regular
from sparkstrom.observe.listener_events import Iteration

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def as_number(value: Any) -> float | None:
    """Return a finite number as a float, or None for any other JSON value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def as_text(value: Any) -> str:
    """Return a value as text ("" for None); replace characters that HTML cannot contain."""
    if value is None:
        return ""
    text = str(value).encode("utf-8", "replace").decode("utf-8")
    return "".join(c if c.isprintable() or c in "\n\t" else REPLACEMENT for c in text)


def as_dict(value: Any) -> dict[str, Any]:
    """Return a JSON object unchanged, or an empty one for any other value."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a JSON array unchanged, or an empty one for any other value."""
    return value if isinstance(value, list) else []


# Names of the numeric fields in an iteration's line, except its time.
ITERATION_COLUMNS = tuple(
    each.name
    for each in fields(Iteration)
    if each.type in ("int", "float", "float | None") and each.name != "seconds"
)
BYTE_KINDS_MAX = 16
SECONDS_MAX = 1e9  # larger times are considered damaged: no fit lasts thirty years
UNREADABLE_LINES_MAX = 1000  # a file that begins with this many is not a run log
REMEDY = "name a file that fit(..., run_log=...) wrote, or one of the directory sparkstrom-runs"

Values = list[float | None]


@dataclass(frozen=True, slots=True)
class EpochPoint:
    """The results at the end of an epoch."""

    seconds: float  # since the fit began
    epoch: float | None  # number, from 1
    loss: float | None  # None: not finite, or unknown
    validation: float | None  # held-out score


@dataclass(frozen=True, slots=True)
class WorkerChangePoint:
    """A moment at which workers joined or left; partition numbers are stored as text."""

    seconds: float  # since the fit began
    joined: tuple[str, ...]  # partitions with a new worker
    left: tuple[str, ...]  # partitions whose worker is gone
    training: int  # number of workers afterwards
    reasons: tuple[str, ...]  # why workers left


@dataclass(slots=True)
class FitHistory:
    """The history of one fit in a run log; parts whose lines are missing are empty."""

    begin: dict[str, Any] = field(default_factory=dict)  # the first line
    seconds: list[float] = field(default_factory=list)  # time of each iteration, never descending

    # Values at each iteration, by name.
    columns: dict[str, Values] = field(
        default_factory=lambda: {name: [] for name in ITERATION_COLUMNS}
    )
    # Kind of message -> bytes sent so far, at each iteration.
    kinds: dict[str, Values] = field(default_factory=dict)
    epochs: list[EpochPoint] = field(default_factory=list)  # ends of epochs, in order
    worker_changes: list[WorkerChangePoint] = field(default_factory=list)  # in order
    checkpoints: list[tuple[float, str]] = field(default_factory=list)  # (seconds, path)
    slow_links: dict[str, float] = field(default_factory=dict)  # description -> first reported at
    has_loss: bool = False  # whether a finite loss was recorded
    diverged_s: float | None = None  # when a loss after that was first not finite; None: never
    end: dict[str, Any] | None = None  # the last line; None: missing
    newest: str = ""  # time of the latest line, as ISO 8601

    def note_loss(self, loss: float | None, seconds: float) -> None:
        """Record the time of the first loss that is not finite (None) after a finite one.

        Before the first finite loss, None means that no row was trained, or that all weigh 0.
        """
        if loss is not None:
            self.has_loss = True
        elif self.has_loss and self.diverged_s is None:
            self.diverged_s = seconds

    @property
    def summary(self) -> dict[str, Any]:
        """The summary in the fit's last event; empty if that event is missing."""
        return as_dict(as_dict(self.end).get("summary"))

    @property
    def error(self) -> str:
        """The error in the fit's last event; "" if the fit did not fail or the event is missing."""
        return as_text(as_dict(self.end).get("error"))

    @property
    def last_s(self) -> float:
        """The time of the latest known event, in seconds since the fit began."""
        ended = _seconds_of_event(as_dict(self.end)) or 0.0
        epochs = [one.seconds for one in self.epochs[-1:]]
        changes = [one.seconds for one in self.worker_changes[-1:]]
        return max([ended, *self.seconds[-1:], *epochs, *changes])

    @property
    def training_iterations(self) -> tuple[list[float], dict[str, Values]]:
        """Times and columns of the iterations, starting with the first committed minibatch."""
        minibatches = self.columns["minibatches"]
        first = next(
            (i for i, count in enumerate(minibatches) if count is None or count > 0),
            len(minibatches),
        )
        return self.seconds[first:], {name: all_[first:] for name, all_ in self.columns.items()}

    def last(self, column: str) -> float | None:
        """Return the latest known value of a column, or None."""
        known = (one for one in reversed(self.columns[column]) if one is not None)
        return next(known, None)


@dataclass(slots=True)
class RunHistory:
    """The contents of one run log: its fits and its unreadable lines."""

    path: Path  # the file
    fits: list[FitHistory] = field(default_factory=list)  # in order
    unreadable_lines: list[int] = field(default_factory=list)  # line numbers, from 1
    is_torn: bool = False  # whether the last line is truncated


def read_history(path: str | os.PathLike[str]) -> RunHistory:
    """Read a run log; raise UsageError if the file is missing, empty or not a run log."""
    history = RunHistory(Path(path))
    try:
        for index, line in _non_empty_lines(history.path):
            _add_line(history, index, line)
    except OSError as error:
        raise UsageError(f"{history.path} cannot be read ({error.strerror}); {REMEDY}") from error
    if not history.fits:
        is_empty = not history.unreadable_lines and not history.is_torn
        why = "is empty" if is_empty else "has no whole line of a run log"
        raise UsageError(f"{history.path} {why}: nothing to report; {REMEDY}")
    return history


def _non_empty_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (line number from 1, line) for each non-empty line of a file."""
    with open_regular(path) as file:
        for index, line in enumerate(file, 1):
            if line.strip():
                yield index, line


def _add_line(history: RunHistory, index: int, line: bytes) -> None:
    """Add one line of the file, with number ``index``, to the history, or record it as unreadable.

    Raise UsageError if the file begins with UNREADABLE_LINES_MAX unreadable lines.
    """
    event = _parse_object(line)
    if "event" not in event:
        if not line.endswith(b"\n"):
            history.is_torn = True
            return
        history.unreadable_lines.append(index)
        if len(history.unreadable_lines) >= UNREADABLE_LINES_MAX and not history.fits:
            raise UsageError(
                f"the first {UNREADABLE_LINES_MAX:,} lines of {history.path} are not from a run"
                f" log; {REMEDY}"
            )
        return
    kind, seconds = as_text(event["event"]), _seconds_of_event(event)
    if kind == "fit_begin" or not history.fits or history.fits[-1].end is not None:
        history.fits.append(FitHistory())
    fit = history.fits[-1]
    fit.newest = as_text(event.get("time")) or fit.newest
    if kind == "fit_begin":
        fit.begin = event
    elif kind == "fit_end":
        fit.end = event
    elif kind in EVENT_HANDLERS and seconds is not None:
        EVENT_HANDLERS[kind](fit, event, seconds)


def _parse_object(line: bytes) -> dict[str, Any]:
    """Return a line's JSON object, or an empty one if the line has none."""
    try:
        return as_dict(json.loads(line))
    except (ValueError, RecursionError):
        return {}


def _seconds_of_event(event: dict[str, Any]) -> float | None:
    """Return an event's seconds since the fit began; None if missing or implausible."""
    seconds = as_number(event.get("seconds"))
    return seconds if seconds is not None and 0 <= seconds <= SECONDS_MAX else None


def _add_iteration(fit: FitHistory, event: dict[str, Any], seconds: float) -> None:
    """Append an iteration; record the time if its loss is the first that is no longer finite.

    Ignore an iteration that is earlier than the one before it.
    """
    if seconds < (fit.seconds[-1] if fit.seconds else 0.0):
        return
    fit.seconds.append(seconds)
    for name, values in fit.columns.items():
        values.append(as_number(event.get(name)))
    _add_byte_kinds(fit, as_dict(event.get("bytes_by_kind")))
    for link in as_list(event.get("slow_links")):
        fit.slow_links.setdefault(as_text(link), seconds)
    fit.note_loss(fit.columns["loss"][-1], seconds)


def _add_byte_kinds(fit: FitHistory, by_kind: dict[str, Any]) -> None:
    """Append the latest iteration's bytes by kind of message, of at most BYTE_KINDS_MAX kinds."""
    before = len(fit.seconds) - 1
    for kind in by_kind:
        if len(fit.kinds) < BYTE_KINDS_MAX:
            fit.kinds.setdefault(kind, [None] * before)
    for kind, values in fit.kinds.items():
        values.append(as_number(by_kind.get(kind)))


def _add_epoch(fit: FitHistory, event: dict[str, Any], seconds: float) -> None:
    """Append the end of an epoch; record the time if its loss is the first that is not finite."""
    epoch, loss, held = (as_number(event.get(name)) for name in ("epoch", "loss", "validation"))
    # An epoch without examples was reported too late; its missing loss does not mean divergence.
    if as_number(event.get("examples")) != 0:
        fit.note_loss(loss, seconds)
    fit.epochs.append(EpochPoint(seconds, epoch, loss, held))


def _add_worker_change(fit: FitHistory, event: dict[str, Any], seconds: float) -> None:
    """Append the event that workers joined or left, ``seconds`` after the fit's start."""
    joined, left, reasons = (
        tuple(as_text(one) for one in as_list(event.get(name)))
        for name in ("joined", "left", "reasons")
    )
    fit.worker_changes.append(
        WorkerChangePoint(seconds, joined, left, len(as_list(event.get("training"))), reasons)
    )


def _add_checkpoint(fit: FitHistory, event: dict[str, Any], seconds: float) -> None:
    """Append a checkpoint that was written."""
    fit.checkpoints.append((seconds, as_text(event.get("path"))))


# Called with (fit, event, the event's seconds since the fit began).
EVENT_HANDLERS: dict[str, Callable[[FitHistory, dict[str, Any], float], None]] = {
    "iteration": _add_iteration,
    "worker_change": _add_worker_change,
    "epoch": _add_epoch,
    "checkpoint": _add_checkpoint,
}
