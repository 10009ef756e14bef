"""Show a fit's events to the user: progress display, log, run log, and the user's listeners.

``ListenerThread`` calls the user's listeners and writes the run log, a file of JSON lines, in a
separate thread. Its events are queued, so that the fit does not wait for a listener. A slow
listener gets fewer iterations: only the newest waiting one is kept. An exception in a listener ends
the fit at the next poll, unless the listener has ``fails_fit = False``.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import re
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.base.option_types import shown, unquote
from sparkstrom.base.untrusted_files import find_local_path
from sparkstrom.codec.messages import Phase
from sparkstrom.fit.evaluation import Evaluation, evaluate_arrays, select_metrics
from sparkstrom.fit.events import FinishedFit, FitListener
from sparkstrom.fit.fit_context import FitRequest
from sparkstrom.fit.summary import TrainingSummary
from sparkstrom.models.base import FlatModel, load_buffers
from sparkstrom.observe.epoch_history import Epoch
from sparkstrom.observe.listener_events import (
    CheckpointWritten,
    EpochEnd,
    Event,
    FitBegin,
    FitEnd,
    Iteration,
    JsonLines,
    WorkerChange,
    WorkerSays,
    iteration_from_progress,
)
from sparkstrom.observe.progress import ProgressDisplay, ProgressFigures
from sparkstrom.observe.standard_listeners import WorkerChangeReporter
from sparkstrom.observe.telemetry import FitTotals, WorkerCounters, sum_link_bytes
from sparkstrom.options.common import CommonOptions, options_in
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import Partitions
from sparkstrom.runtime.master_control import Progress, Snapshot, WorkerLogLine

log = logging.getLogger(__name__)
residual_log = logging.getLogger("sparkstrom.encoding")

PHASE_TEXTS = {
    Phase.DRAINING: "draining: waiting for last updates",
    Phase.AUDIT: "comparing replicas",
    Phase.DONE: "done",
}


class ProgressListener(FitListener):
    """Updates the progress display during a fit and at its end.

    ``worker_lines``: whether to show the lines that workers print; a terminal may show them anyway.
    """

    def __init__(self, display: ProgressDisplay, *, worker_lines: bool = True) -> None:
        self._display, self._worker_lines = display, worker_lines
        self._spec: FitSpec | None = None
        self._newest: Progress | None = None
        self._held_out: float | None = None

    def on_fit_begin(self, spec: FitSpec) -> None:
        """Keep the description of the fit."""
        self._spec = spec

    def on_worker_says(self, line: WorkerLogLine) -> None:
        """Show a line of a worker's output, unless ``worker_lines`` is False."""
        if self._worker_lines:
            self._display.say(format_worker_output(line))

    def on_note(self, text: str) -> None:
        """Show a note."""
        self._display.say(f"sparkstrom notes: {text}")

    def on_epoch(self, epoch: Epoch) -> None:
        """Remember the newest finite value of the metric on held-out rows."""
        if epoch.held_weight and math.isfinite(epoch.validation):
            self._held_out = epoch.validation

    def on_progress(self, progress: Progress) -> None:
        """Show the progress, as often as the display allows."""
        self._newest = progress
        if progress.phase is not Phase.DONE:
            self._show(force=False)

    def on_fit_end(self, end: FinishedFit) -> None:
        """Show the final progress, and how many lines of workers were left out."""
        for epoch in end.history[-1:]:  # its values may have come with the tasks' reports
            self.on_epoch(epoch)
        self._show(force=True)
        if self._worker_lines and self._newest is not None and self._newest.worker_lines_skipped:
            self._display.say(
                f"sparkstrom: workers printed {self._newest.worker_lines_skipped:,} lines more than"
                " were shown; all of them are in the executors' stderr (Spark's UI, `yarn logs`)"
            )

    def _show(self, *, force: bool) -> None:
        """Show the newest progress; with ``force`` even if the display has just been updated."""
        if self._newest is not None and self._spec is not None:
            figures = make_progress_figures(self._newest, self._spec)
            self._display.show(replace(figures, held_out=self._held_out), force=force)


RESIDUAL_LOG_EVERY_S = 5.0


class ResidualLogListener(FitListener):
    """Logs statistics of residuals (changes that workers have not sent yet) at intervals.

    The option ``encoding_debug_mode`` adds these statistics to workers' counters.
    """

    def __init__(self) -> None:
        self._due_s = 0.0

    def on_counters(self, counters: Mapping[int, WorkerCounters]) -> None:
        """Log the statistics if the interval has passed."""
        self.log_statistics(counters)

    def on_fit_end(self, end: FinishedFit) -> None:
        """Log the last statistics."""
        self.log_statistics(end.outcome.stats, force=True)

    def log_statistics(
        self, counters: Mapping[int, WorkerCounters], *, force: bool = False
    ) -> None:
        """Log one line for each node with statistics, at most every RESIDUAL_LOG_EVERY_S seconds.

        ``counters``: by node id; ``force``: log even if the interval has not passed.
        """
        now_s = time.monotonic()
        if now_s < self._due_s and not force:
            return
        for node, one in sorted(counters.items()):
            if one.training is not None and one.training.residual is not None:
                self._due_s = now_s + RESIDUAL_LOG_EVERY_S
                figures = one.training.residual.by_name()
                text = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
                residual_log.info("node %d, absolute residual: %s", node, text)


def make_iteration_event(progress: Progress, spec: FitSpec, seconds: float) -> Iteration:
    """Return the progress and the network traffic as an event for the user's listeners.

    ``seconds``: time since the fit started.
    """
    counts = progress.minibatches, progress.minibatches_expected
    total = FitTotals.from_counters(progress.stats.values())
    by_kind = Counter(progress.by_kind)
    by_kind.update(total.node.by_kind)
    return replace(
        iteration_from_progress(make_progress_figures(progress, spec), seconds, counts),
        bytes_wire=sum_link_bytes([progress.wire, *total.links]),
        bytes_by_kind=dict(by_kind),
        slow_links=progress.slow_links,
    )


def format_worker_output(line: WorkerLogLine) -> str:
    """Return a line of worker output with its partition, host and activity."""
    return f"partition {line.partition} on {line.host} ({line.phase}) says: {line.text}"


def describe_phase(progress: Progress) -> str:
    """Return what the fit currently does as text, such as "training"."""
    here, wanted = progress.workers, progress.partitions
    if (words := PHASE_TEXTS.get(progress.phase)) is not None:
        return words
    if progress.phase is Phase.GATHERING and not here:
        return f"starting {wanted} Python worker{'s' * (wanted > 1)}"
    if progress.phase is Phase.GATHERING and here < wanted:
        return f"{here} of {wanted} workers ready"
    if progress.phase is Phase.GATHERING or not progress.copied:
        return "copying parameters"
    return "training" if progress.minibatches else "taking the first steps"


def make_progress_figures(progress: Progress, spec: FitSpec) -> ProgressFigures:
    """Return the values that the progress display shows of a running fit."""
    epochs, n_params = spec.epochs, spec.n_params
    total = FitTotals.from_counters(progress.stats.values())
    training = total.training
    weight, loss_sum = training.last_loss_weight, training.last_loss_sum
    if not weight:  # no worker has finished an epoch yet
        weight, loss_sum = training.loss_weight, training.loss_sum
    expected = progress.minibatches_expected
    return ProgressFigures(
        phase=describe_phase(progress),
        workers=progress.workers,
        partitions=progress.partitions,
        epoch=epochs * progress.minibatches / expected if expected else 0.0,
        epochs=epochs,
        loss=loss_sum / weight if weight else None,
        examples=training.examples,
        updates=progress.commits,
        bytes_sent=total.node.update_bytes,
        staleness=progress.staleness,
        waiting=total.residual_wait_minibatches(len(progress.training), progress.minibatches),
        sent_fraction=training.hits / training.publications / n_params
        if training.publications
        else None,
        tau=training.tau,
        slow_links=progress.slow_now,
    )


RUN_LOG_DIRECTORY = "sparkstrom-runs"  # in the driver program's working directory
RUNS_VARIABLE = "SPARKSTROM_RUNS"  # names another directory; empty: no run logs
RUN_LOGS_MAX = 100  # kept in the usual directory; a log of some thousand epochs takes about 1 MB
RUN_LOG_NAME = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{16}\.jsonl")  # made by ``open_run_log``
TUNING_MODULES = ("pyspark.ml.tuning", "pyspark.ml.connect.tuning")


def check_run_log(run_log: object) -> None:
    """Raise UsageError for a ``run_log`` argument, or SPARKSTROM_RUNS, that cannot name a file."""
    named = os.fspath(run_log) if isinstance(run_log, os.PathLike) else run_log
    if not (named is None or (isinstance(named, str) and "\0" not in named)):
        raise UsageError(
            f"run_log={shown(run_log)}: give the path of a file, None for a new one in"
            f' {RUN_LOG_DIRECTORY}, or "" for none'
        )
    if isinstance(run_log, str | os.PathLike):
        path = JsonLines(run_log).path  # refuses URLs
        if named and os.path.isdir(path):
            raise UsageError(
                f"run_log={shown(run_log)}: is a directory; name a file in it, or set"
                f" {RUNS_VARIABLE} to the directory, in which each fit then writes a new file"
            )
    elif (directory := find_run_log_directory()) and find_local_path(directory) is None:
        raise UsageError(
            f"{RUNS_VARIABLE}={shown(directory)}: run logs are written to a local disk; name a"
            " directory of this machine, or set it to nothing for no logs"
        )


def find_run_log_directory() -> str:
    """Return the directory for run logs; "" if none are to be written."""
    return unquote(os.environ.get(RUNS_VARIABLE, RUN_LOG_DIRECTORY))


def open_run_log(run_log: str | os.PathLike[str] | None, spec: FitSpec) -> JsonLines | None:
    """Return the writer of a fit's run log; None if no log is written.

    Args:
        run_log: File to write; "" for none; None for a new file in the usual directory or the one
            that SPARKSTROM_RUNS names. There the oldest logs beyond ``RUN_LOGS_MAX`` are removed,
            and fits of a cross-validation write no logs.
        spec: Description of the fit.
    """
    if run_log is not None:
        return JsonLines(run_log) if os.fspath(run_log) else None
    directory = find_run_log_directory()
    if not directory or is_tuning_fit():
        return None
    began = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    written = JsonLines(os.path.join(directory, f"{began}-{spec.job:016x}.jsonl"))
    remove_old_logs(written.path.parent, RUN_LOGS_MAX - 1)
    return written


def remove_old_logs(directory: Path, kept: int) -> None:
    """Remove automatically named run logs from a directory, except the newest ``kept``.

    Ignore errors of the file system.
    """
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(directory) if RUN_LOG_NAME.fullmatch(name))
        for name in names[: max(0, len(names) - kept)]:
            (directory / name).unlink()


def is_tuning_fit() -> bool:
    """Return whether pyspark's CrossValidator or TrainValidationSplit calls this fit."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        where = frame.f_globals.get("__name__"), frame.f_code.co_name
        if where[0] in TUNING_MODULES and where[1] == "singleTask":
            return True
    return False


CONTROLLER_LOST_REASON = "the controller was lost, and all workers with it"
LISTENERS_END_S = 120.0  # time that listeners may take after the end of training
LISTENER_METHODS: dict[type[Event], str] = {
    FitBegin: "on_fit_begin",
    Iteration: "on_iteration",
    WorkerChange: "on_worker_change",
    WorkerSays: "on_worker_says",
    EpochEnd: "on_epoch",
    CheckpointWritten: "on_checkpoint",
    FitEnd: "on_fit_end",
}


@dataclass(frozen=True, slots=True)
class ListenerFailure:
    """An exception that a user's listener raised."""

    where: str  # ListenerClass.method
    error: BaseException  # the exception

    def as_error(self) -> TrainingError:
        """Return the error with which the fit ends."""
        kind = type(self.error).__name__
        trace = "".join(traceback.format_exception(self.error))
        return TrainingError(
            f"listener {self.where} raised {kind}: {self.error}; fix the listener, or set"
            " fails_fit = False to continue without it",
            trace=trace,
        )


def check_listeners(listeners: Sequence[Any]) -> None:
    """Raise UsageError unless this is a sequence of objects with at least one listener method."""
    if isinstance(listeners, str | bytes | bytearray) or not isinstance(listeners, Sequence):
        raise UsageError(f"listeners={shown(listeners)}: must be a list of listeners, or ()")
    for listener in listeners:
        known = [
            name for name in LISTENER_METHODS.values() if callable(getattr(listener, name, None))
        ]
        if isinstance(listener, type) or not known:
            raise UsageError(
                f"listeners: {shown(listener)} has no method for events: give an object with one"
                f" of {', '.join(LISTENER_METHODS.values())} (sparkstrom.listeners has some)"
            )


def find_broken_stream() -> str:
    """Return "stdout" or "stderr", the first of both that cannot be flushed; "" if both can."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            return name
    return ""


class ListenerThread(FitListener):
    """Queues a fit's events in the program's main thread, and calls listeners in a separate thread.

    Args:
        listeners: The user's listeners and the writer of the run log.
        begin: The first event.
        spec: Description of the fit.
        copy: Returns a snapshot of the current parameters, for ``EpochEnd.snapshot``.
        judge: Evaluates arrays with the current parameters, for ``EpochEnd.evaluate``.
        say: Shows a line to the user.
    """

    def __init__(
        self,
        listeners: Sequence[Any],
        begin: FitBegin,
        spec: FitSpec,
        *,
        copy: Callable[[], Any],
        judge: Callable[..., Any],
        say: Callable[[str], None],
    ) -> None:
        self._listeners, self._begin, self._spec, self._say = list(listeners), begin, spec, say
        self.warnings: list[str] = []  # about listeners' failures that did not end the fit
        self._copy, self._judge = copy, judge
        self._has_lost_stream = False
        self._queue: deque[Event | None] = deque()
        self._changed = threading.Condition()
        self._raised: ListenerFailure | None = None
        self._called = ""  # the listener that was called last, and its method
        self._began_s = time.monotonic()
        self._training: frozenset[int] = frozenset()
        self._started: frozenset[int] = frozenset()  # partitions that have joined
        self._departures = 0  # number of departures that were queued
        self._minibatches = 0  # committed at the last iteration that was queued, or at the start
        self._thread = threading.Thread(target=self._run, name="sparkstrom-listeners", daemon=True)

    # Called in the program's main thread.

    def on_fit_begin(self, spec: FitSpec) -> None:
        """Queue the first event; after the loss of a controller, queue that all workers left."""
        self._spec = spec
        self._minibatches = Partitions.from_spec(spec, 0.0).minibatches
        if self._thread.ident is None:
            self._thread.start()
            self._put(self._begin)
            return
        left, self._departures = self._training, 0
        self._training = self._started = frozenset()
        if left:
            self._put(
                WorkerChange(
                    frozenset(), left, frozenset(), self._seconds(), (CONTROLLER_LOST_REASON,)
                )
            )

    def on_worker_says(self, line: WorkerLogLine) -> None:
        """Queue a line of a worker's output."""
        said = WorkerSays(line.partition, line.host, line.phase, line.text, self._seconds())
        self._put(said)

    def on_epoch(self, epoch: Epoch) -> None:
        """Queue the end of an epoch."""
        held_out = epoch.validation if epoch.held_weight > 0 else None
        self._put(
            EpochEnd(
                epoch.epoch,
                epoch.loss,
                held_out,
                epoch.examples,
                self._seconds(),
                self._copy,
                self._judge,
            )
        )

    def notify(self, event: CheckpointWritten) -> None:
        """Queue the event of a written checkpoint, with the time since the fit started."""
        self._put(replace(event, seconds=self._seconds()))

    def on_progress(self, progress: Progress) -> None:
        """Queue worker changes and iterations. Raise TrainingError if a listener has failed."""
        if self._raised is not None:
            raise self._raised.as_error() from self._raised.error
        self._queue_worker_changes(progress)
        # The controller in a task counts from 0 until its first report arrives.
        if progress.minibatches > self._minibatches:
            self._minibatches = progress.minibatches
            self._put(make_iteration_event(progress, self._spec, self._seconds()))

    def _queue_worker_changes(self, progress: Progress) -> None:
        """Queue an event if workers joined or left since the last call.

        That all workers leave at the end of the fit is not reported.
        """
        if progress.phase is Phase.DONE:
            joined = progress.started - self._started  # a short fit ends between two calls
            self._queue_worker_change(joined, frozenset(), self._training | joined, ())
            return
        new = progress.departures[self._departures :]
        self._departures = len(progress.departures)
        left = (self._training - progress.training) | {one.partition for one in new}
        joined = progress.training - (self._training - left)  # also those replaced at once
        reasons = tuple(f"partition {d.partition} on {d.host}: {d.reason}" for d in new)
        self._queue_worker_change(joined, left, progress.training, reasons)

    def _queue_worker_change(
        self,
        joined: frozenset[int],
        left: frozenset[int],
        training: frozenset[int],
        reasons: tuple[str, ...],
    ) -> None:
        """Queue an event with these partitions, unless none joined or left."""
        self._training, self._started = training, self._started | joined
        if joined or left:
            self._put(WorkerChange(joined, left, training, self._seconds(), reasons))

    def run_fit(self, fit: Callable[[], TrainingSummary]) -> TrainingSummary:
        """Call ``fit``, pass its end or failure to the listeners, and return its summary."""
        try:
            summary = fit()
        except BaseException as error:
            self._close(None, (str(error).splitlines() or [type(error).__name__])[0])
            raise
        self._close(summary, None)
        if self._raised is not None:  # too late to end the fit
            self._warn(str(self._raised.as_error()).splitlines()[0])
        summary.warnings.extend(self.warnings)
        return summary

    def _close(self, summary: TrainingSummary | None, why: str | None) -> None:
        """Queue the end of the fit and wait for the listeners, at most LISTENERS_END_S seconds.

        ``why``: the first line of the failure's message; None if the fit did not fail. Do nothing
        if the fit failed before it started.
        """
        if self._thread.ident is None:  # the fit failed before it started
            return
        self._put(FitEnd(summary, why, self._seconds()))
        self._put(None)
        self._thread.join(LISTENERS_END_S)
        if self._thread.is_alive():
            self._warn(
                f"listeners are still busy {LISTENERS_END_S:.0f} s after the end, in"
                f" {self._called}; not waiting"
            )

    def _warn(self, text: str) -> None:
        """Show and log a warning, and keep it for the summary."""
        self.warnings.append(text)
        log.warning("%s", text)
        self._say(f"sparkstrom warns: {text}")

    def _warn_of_lost_output(self, name: str, error: Exception) -> None:
        """Warn once that listeners' output is lost; listeners still get events."""
        if not self._has_lost_stream:
            self._has_lost_stream = True
            self._warn(
                f"sys.{name} cannot be written ({type(error).__name__}: {error}): what listeners"
                " print there is lost, and the fit continues"
            )

    def _seconds(self) -> float:
        """Return the time since the fit started."""
        return round(time.monotonic() - self._began_s, 3)

    def _put(self, event: Event | None) -> None:
        """Queue an event, or None to end the thread.

        If this event and the newest waiting one are iterations, it replaces the waiting one.
        """
        with self._changed:
            newest = self._queue[-1] if self._queue else None
            if isinstance(event, Iteration) and isinstance(newest, Iteration):
                self._queue.pop()
            self._queue.append(event)
            self._changed.notify()

    # Called in the listeners' thread.

    def _run(self) -> None:
        """Pass queued events to all listeners until the end of the thread is queued."""
        while (event := self._next()) is not None:
            method = LISTENER_METHODS[type(event)]
            for listener in list(self._listeners):
                self._call(listener, method, event)

    def _next(self) -> Event | None:
        """Wait for the next queued event and return it."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._queue))
            return self._queue.popleft()

    def _call(self, listener: Any, method: str, event: Event) -> None:
        """Call a listener's method if it exists.

        A listener that raises gets no more events, and ``fails_fit`` decides whether the fit ends.
        If it raised because stdout or stderr cannot be written, only warn.
        """
        handle = getattr(listener, method, None)
        if handle is None:
            return
        self._called = f"{type(listener).__name__}.{method}"
        try:
            handle(event)
        except BaseException as error:  # such as SystemExit, which would end this thread silently
            if isinstance(error, (OSError, ValueError)) and (broken := find_broken_stream()):
                self._warn_of_lost_output(broken, error)
                return
            self._listeners = [each for each in self._listeners if each is not listener]
            raised = ListenerFailure(self._called, error)
            fails_fit = getattr(listener, "fails_fit", True)
            if fails_fit is None:
                fails_fit = method == "on_fit_begin"
            if fails_fit:
                self._raised = self._raised or raised
            else:
                self._warn(
                    f"listener {raised.where} raised {type(error).__name__}: {error}; it gets"
                    " no more events of this fit"
                )


@dataclass(frozen=True, slots=True)
class SnapshotEvaluator:
    """Evaluates arrays with the current parameters of a running fit. Thread-safe."""

    model: FlatModel  # the fit's model, which is copied for each evaluation
    snapshot: Callable[[], Snapshot]  # returns the current parameters and buffers

    def __call__(self, features: Any, labels: Any, metrics: Any) -> Evaluation:
        """Return metrics like ``SparkNetwork.evaluate``, from a copy of the fit's model."""
        model, now = copy.deepcopy(self.model), self.snapshot()
        model.bind(now.parameters)
        load_buffers(model, now.buffers)
        return evaluate_arrays(model, select_metrics(model, metrics, 1), (features, labels))


def make_listener_thread(
    request: FitRequest,
    spec: FitSpec,
    model: FlatModel,
    master: CommonOptions,
    snapshot: Callable[[], Snapshot],
    progress: ProgressDisplay,
) -> ListenerThread:
    """Return a thread for the user's listeners and the run log of a fit.

    ``snapshot`` returns a copy of the current parameters; ``master`` has the user's options.
    """
    written = open_run_log(request.run_log, spec)
    return ListenerThread(
        # The run log is first, so that it is complete if a listener is still busy at the end.
        [*([written] if written else []), *request.listeners, WorkerChangeReporter(progress.say)],
        FitBegin(
            model=type(model).__name__,
            n_params=spec.n_params,
            workers=spec.workers,
            epochs=spec.epochs,
            first_epoch=spec.first_epoch,
            options={
                each.name: format_option(getattr(master, each.name)) for each in options_in(master)
            },
            resumed_from=request.resume_from.path if request.resume_from else None,
        ),
        spec,
        copy=snapshot,
        judge=SnapshotEvaluator(model, snapshot),
        say=progress.say,
    )


def format_option(option: Any) -> Any:
    """Return an option as a JSON value: a scalar unchanged, anything else as its repr."""
    return (
        option if option is None or isinstance(option, bool | int | float | str) else repr(option)
    )
