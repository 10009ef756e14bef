"""JSON lines: a fit's events in a file, one object a line, for ``sparkstrom report`` and others."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from sparkstrom.base.files import open_regular
from sparkstrom.base.version import __version__
from sparkstrom.observe.listening.fit_events import (
    CheckpointWritten,
    EpochEnd,
    Event,
    FitBegin,
    FitEnd,
    Iteration,
    TrainingListener,
    WorkerChange,
    WorkerSays,
)

FORMAT = 1
ITERATION_S = 0.5  # between two lines of iterations, at least
NAMES = {
    FitBegin: "fit_begin",
    Iteration: "iteration",
    WorkerChange: "worker_change",
    WorkerSays: "worker_says",
    EpochEnd: "epoch",
    CheckpointWritten: "checkpoint",
    FitEnd: "fit_end",
}


class JsonLines(TrainingListener):
    """Writes what it hears to ``path``, each line as soon as it is heard; several fits may follow.

    Every line has ``event`` and ``time`` (UTC, ISO 8601); the first of a fit also ``format`` and
    ``sparkstrom``. Numbers that are none are null. A disk that is full ends the writing, not the
    fit.
    """

    fails_fit = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: TextIO | None = None
        self._iteration_due_s = 0.0

    def on_fit_begin(self, event: FitBegin) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8")
        if _is_torn(self.path):
            self._file.write("\n")
        self._iteration_due_s = 0.0
        self._write(event, format=FORMAT, sparkstrom=__version__)

    def on_iteration(self, event: Iteration) -> None:
        if event.seconds >= self._iteration_due_s:
            self._iteration_due_s = event.seconds + ITERATION_S
            self._write(event)

    def on_worker_change(self, event: WorkerChange) -> None:
        self._write(event)

    def on_worker_says(self, event: WorkerSays) -> None:
        self._write(event)

    def on_epoch(self, event: EpochEnd) -> None:
        self._write(event)

    def on_checkpoint(self, event: CheckpointWritten) -> None:
        self._write(event)

    def on_fit_end(self, event: FitEnd) -> None:
        self._write(event)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: Event, **more: Any) -> None:
        if self._file is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"event": NAMES[type(event)], "time": now} | more | plain(event)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()


def plain(value: Any) -> Any:
    """As JSON has it: records as objects, sets as sorted lists, functions left out."""
    match value:
        case _ if is_dataclass(value) and not isinstance(value, type):
            if hasattr(value, "to_dict"):
                return plain(value.to_dict())
            named = {each.name: getattr(value, each.name) for each in fields(value)}
            return {name: plain(one) for name, one in named.items() if not callable(one)}
        case Mapping():
            return {str(key): plain(one) for key, one in value.items()}
        case set() | frozenset():
            return sorted(plain(one) for one in value)
        case list() | tuple():
            return [plain(one) for one in value]
        case float():
            return value if math.isfinite(value) else None
        case None | bool() | int() | str():
            return value
        case os.PathLike():
            return os.fspath(value)
        case _:
            return float(value) if hasattr(value, "__float__") else str(value)


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of such a file; those that were cut off by a crash are left out."""
    with open_regular(path) as file:
        lines = file.read().decode("utf-8").split("\n")
    return [event for line in lines if (event := _whole(line)) is not None]


def _whole(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _is_torn(path: Path) -> bool:
    """Does the file end in the middle of a line?"""
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
