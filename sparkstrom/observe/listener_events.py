"""Define a fit's events, the listener interface, and the run log (events as JSON lines).

DL4J's ``TrainingListener`` and ``IterationListener`` run inside a worker. Listeners here run on the
driver while workers train, and their events describe all workers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import URL_AS_PATH, shown
from sparkstrom.base.untrusted_files import find_local_path, open_regular, open_to_append
from sparkstrom.base.version import __version__
from sparkstrom.observe.progress import ProgressFigures


@dataclass(frozen=True, slots=True)
class FitBegin:
    """The options of a fit have been checked, and its workers are about to start."""

    model: str  # name of the model's class
    n_params: int  # number of parameters
    workers: int  # requested number of workers
    epochs: int  # epochs of this fit
    first_epoch: int  # number of epochs trained by earlier fits
    options: dict[str, Any]  # options of the training master, as JSON values
    resumed_from: str | None = None  # path of the checkpoint that the fit resumes from


@dataclass(frozen=True, slots=True)
class Iteration:
    """The state of training; sent only if minibatches were committed since the previous event.

    A minibatch or update is committed when the controller has numbered the update. The driver polls
    ten times a second, so one event covers many minibatches of all workers.
    """

    minibatches: int  # committed in this fit
    minibatches_expected: int  # number in the whole fit
    epoch: float  # position in this fit in epochs, averaged over partitions
    loss: float | None  # mean over each partition's last epoch; None: no step yet
    examples: int  # rows trained so far
    seconds: float  # since the fit began
    updates: int  # updates committed so far
    bytes_sent: int  # size of the encrypted updates, each counted once, where it originates
    sent_fraction: float | None  # mean fraction of the parameters that one update contains
    tau: float | None  # the workers' mean threshold
    staleness: float  # mean number of the fit's minibatches that an update had not seen
    waiting: float  # mean number of the fit's minibatches before a learned change is sent
    workers: int  # live workers
    workers_wanted: int  # number of workers that the fit was started with
    bytes_wire: int = 0  # bytes that left network interfaces, headers included
    # Kind of message -> bytes passed to the transport, counted at every hop.
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    slow_links: tuple[str, ...] = ()  # descriptions of links found too slow so far


@dataclass(frozen=True, slots=True)
class WorkerChange:
    """Workers have joined or left; the partition of a replaced worker is in both sets."""

    joined: frozenset[int]  # partitions with a new worker
    left: frozenset[int]  # partitions whose worker is gone
    training: frozenset[int]  # partitions that have a worker now
    seconds: float  # since the fit began
    reasons: tuple[str, ...] = ()  # why workers left, with partition and host


@dataclass(frozen=True, slots=True)
class WorkerSays:
    """A line that a worker's code printed, warned or logged.

    Long lines are cut, and control characters are escaped.
    """

    partition: int  # the worker's partition
    host: str  # its host
    phase: str  # description of what the worker was doing
    text: str  # the line
    seconds: float  # since the fit began


@dataclass(frozen=True, slots=True)
class EpochEnd:
    """All partitions have completed an epoch."""

    epoch: int  # from 1, counted over all fits of a network
    loss: float  # mean over rows; each minibatch is evaluated before its own step
    # Loss or accuracy on the held-out rows; None: none are held out, or not all figures arrived.
    validation: float | None
    examples: int  # rows trained, over all partitions
    seconds: float  # since the fit began
    copy: Callable[[], Any] = field(repr=False, compare=False)  # implements ``snapshot``

    # Implements ``evaluate``.
    evaluator: Callable[..., Any] = field(repr=False, compare=False)

    def snapshot(self) -> Any:
        """Return a copy of the parameters on the driver as of now, made by this call.

        The copy has ``commit``, ``parameters`` (float32[n_params]) and ``buffers``.
        """
        return self.copy()

    def evaluate(self, features: Any, labels: Any, metrics: Any = None) -> Any:
        """Evaluate a ``snapshot()`` on two arrays in this thread; see ``network.evaluate``."""
        return self.evaluator(features, labels, metrics)


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """A checkpoint has been written completely."""

    path: str  # directory of the checkpoint
    epochs: float  # epochs that all partitions had completed
    write_seconds: float  # time to copy and write the checkpoint
    seconds: float = 0.0  # since the fit began


@dataclass(frozen=True, slots=True)
class FitEnd:
    """The fit has ended, and all its threads and jobs have stopped."""

    summary: Any  # TrainingSummary; None: the fit failed
    error: str | None  # reason for the failure, in one line; None: the fit succeeded
    seconds: float  # since the fit began


Event = FitBegin | Iteration | WorkerChange | WorkerSays | EpochEnd | CheckpointWritten | FitEnd


class TrainingListener:
    """Base class of listeners; any object with some of these methods also works as a listener."""

    # True: an exception in a method ends the fit. False: the exception is logged, and the listener
    # receives no more events. None: only an exception in ``on_fit_begin`` ends the fit.
    fails_fit: bool | None = True

    def on_fit_begin(self, event: FitBegin) -> None:
        """Handle the beginning of a fit, before the first worker starts."""

    def on_iteration(self, event: Iteration) -> None:
        """Handle training progress."""

    def on_worker_change(self, event: WorkerChange) -> None:
        """Handle workers that joined or left."""

    def on_worker_says(self, event: WorkerSays) -> None:
        """Handle a line that a worker's code printed, warned or logged."""

    def on_epoch(self, event: EpochEnd) -> None:
        """Handle an epoch that all partitions have completed."""

    def on_checkpoint(self, event: CheckpointWritten) -> None:
        """Handle a checkpoint that has been written."""

    def on_fit_end(self, event: FitEnd) -> None:
        """Handle the end of a fit, successful or failed; this is the last event."""


def iteration_from_progress(
    figures: ProgressFigures, seconds: float, minibatches: tuple[int, int]
) -> Iteration:
    """Convert progress values to an event; ``minibatches`` is (committed, expected)."""
    return Iteration(
        minibatches=minibatches[0],
        minibatches_expected=minibatches[1],
        epoch=figures.epoch,
        loss=figures.loss,
        examples=figures.examples,
        seconds=seconds,
        updates=figures.updates,
        bytes_sent=figures.bytes_sent,
        sent_fraction=figures.sent_fraction,
        tau=figures.tau,
        staleness=figures.staleness,
        waiting=figures.waiting,
        workers=figures.workers,
        workers_wanted=figures.partitions,
    )


RUN_LOG_FORMAT = 1  # in the first line of each fit
ITERATION_INTERVAL_S = 0.5  # minimum seconds between two lines of iterations
EVENT_NAMES = {
    FitBegin: "fit_begin",
    Iteration: "iteration",
    WorkerChange: "worker_change",
    WorkerSays: "worker_says",
    EpochEnd: "epoch",
    CheckpointWritten: "checkpoint",
    FitEnd: "fit_end",
}


class JsonLines(TrainingListener):
    """Appends every event to the run log at the local ``path``, one JSON object per line.

    Every line has ``event`` and ``time`` (UTC, ISO 8601); the first line of a fit also has
    ``format`` and ``sparkstrom``, their versions. NaN and infinity are stored as null. A file may
    hold several fits. A full disk ends the log, not the fit.
    """

    fails_fit = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        local = find_local_path(os.fspath(path))
        if local is None or URL_AS_PATH.match(local):
            raise UsageError(
                f"run log {shown(path)}: a log grows line by line, which such a store cannot do;"
                " name a file on this machine, and copy it after the fit"
            )
        self.path = Path(local)
        self._file: TextIO | None = None
        self._iteration_due_s = 0.0

    def on_fit_begin(self, event: FitBegin) -> None:
        """Open the log, end a line that a crash left incomplete, and write the first line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_to_append(self.path)
        if _ends_mid_line(self.path):
            self._file.write("\n")
        self._iteration_due_s = 0.0
        self._write(event, format=RUN_LOG_FORMAT, sparkstrom=__version__)

    def on_iteration(self, event: Iteration) -> None:
        """Write the state of training, at most once per ``ITERATION_INTERVAL_S``."""
        if event.seconds >= self._iteration_due_s:
            self._iteration_due_s = event.seconds + ITERATION_INTERVAL_S
            self._write(event)

    def on_worker_change(self, event: WorkerChange) -> None:
        """Write the workers that joined or left."""
        self._write(event)

    def on_worker_says(self, event: WorkerSays) -> None:
        """Write a line that a worker's code printed, warned or logged."""
        self._write(event)

    def on_epoch(self, event: EpochEnd) -> None:
        """Write the results of the epoch."""
        self._write(event)

    def on_checkpoint(self, event: CheckpointWritten) -> None:
        """Write the path of the checkpoint."""
        self._write(event)

    def on_fit_end(self, event: FitEnd) -> None:
        """Write the last line and close the log."""
        self._write(event)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: Event, **more: Any) -> None:
        """Append one line for an event, with the fields ``more``; do nothing if no log is open."""
        if self._file is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"event": EVENT_NAMES[type(event)], "time": now} | more | to_json_value(event)
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()


def to_json_value(value: Any) -> Any:
    """Convert a value to JSON types: dataclasses to objects, sets to sorted lists, NaN to None.

    Fields that hold functions are omitted. A dataclass with a method ``to_dict`` is converted by
    it. Values of other types become floats if they can, otherwise text.
    """
    match value:
        case _ if is_dataclass(value) and not isinstance(value, type):
            if hasattr(value, "to_dict"):
                return to_json_value(value.to_dict())
            named = {each.name: getattr(value, each.name) for each in fields(value)}
            return {name: to_json_value(one) for name, one in named.items() if not callable(one)}
        case Mapping():
            return {str(key): to_json_value(one) for key, one in value.items()}
        case set() | frozenset():
            return sorted(to_json_value(one) for one in value)
        case list() | tuple():
            return [to_json_value(one) for one in value]
        case float():
            return value if math.isfinite(value) else None
        case None | bool() | int() | str():
            return value
        case os.PathLike():
            return os.fspath(value)
        case _:
            return float(value) if hasattr(value, "__float__") else str(value)


def read_run_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the events of a run log; skip lines that are not JSON objects, such as cut-off ones."""
    with open_regular(path) as file:
        lines = file.read().decode("utf-8").split("\n")
    return [event for line in lines if (event := _parse_line(line)) is not None]


def _parse_line(line: str) -> dict[str, Any] | None:
    """Return the line's JSON object, or None if the line is not one."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _ends_mid_line(path: Path) -> bool:
    """Return whether the file ends without a line break; False for a device such as a terminal."""
    with path.open("rb") as file:
        if not file.seekable() or not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
