"""The listeners included in the package: DL4J's, and writers for TensorBoard and MLflow."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from sparkstrom.base.errors import SetupError
from sparkstrom.base.option_types import COUNT_MAX, KEY, whole
from sparkstrom.observe.listener_events import (
    EpochEnd,
    FitBegin,
    FitEnd,
    Iteration,
    TrainingListener,
    WorkerChange,
)

log = logging.getLogger("sparkstrom.listeners")

WriteLine = Callable[[str], None]


def log_or_print(text: str) -> None:
    """Log a line at level INFO, or write it to stderr if logging would not show it.

    Without this, a program that has not configured logging would not see its listeners' output.
    """
    if log.isEnabledFor(logging.INFO) and _has_handlers(log):
        log.info("%s", text)
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed or missing stderr
        bars = sys.modules.get("tqdm")  # its write keeps a progress bar below the line
        if bars is not None:
            bars.tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)


def _has_handlers(logger: logging.Logger | None) -> bool:
    """Return whether records of ``logger`` reach a handler other than NullHandler."""
    while logger is not None:
        if any(not isinstance(each, logging.NullHandler) for each in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


class PeriodicListener(TrainingListener):
    """Base class of listeners that act every ``frequency`` minibatches or epochs of a fit.

    ``say`` receives each line of text. Raises UsageError if ``frequency`` is less than 1.
    """

    def __init__(self, frequency: int = 100, say: WriteLine = log_or_print) -> None:
        self._frequency = whole(1, COUNT_MAX)[KEY].read("frequency", frequency)
        self._next, self._say = self._frequency, say

    def on_fit_begin(self, event: FitBegin) -> None:
        """Start counting from 0 again."""
        self._next = self._frequency

    def _is_due(self, count: int) -> bool:
        """Return whether ``count`` has reached or passed the next multiple of ``frequency``.

        If so, the multiple above ``count`` becomes the next one.
        """
        if count < self._next:
            return False
        self._next = (count // self._frequency + 1) * self._frequency
        return True


class ScoreIterationListener(PeriodicListener):
    """Logs the loss every ``frequency`` minibatches of the fit. DL4J: ``ScoreIterationListener``.

    ``say`` receives each line; by default, ``log_or_print`` logs the line to
    ``sparkstrom.listeners`` at level INFO, or writes it to stderr if logging would not show it.
    """

    def on_iteration(self, event: Iteration) -> None:
        """Log the loss if it is due."""
        if event.loss is not None and self._is_due(event.minibatches):
            self._say(f"loss at minibatch {event.minibatches:,} is {event.loss:.6g}")


class PerformanceListener(PeriodicListener):
    """Logs the throughput every ``frequency`` minibatches. DL4J: ``PerformanceListener``."""

    _last: Iteration | None = None  # the event of the last line; at first, the first event
    _examples = 0  # rows trained at the newest event

    def on_fit_begin(self, event: FitBegin) -> None:
        """Forget the throughput of an earlier fit."""
        super().on_fit_begin(event)
        self._last = None

    def on_iteration(self, event: Iteration) -> None:
        """Log the throughput since the last line, if it is due.

        The first event only starts the measurement: the time before it includes the start of the
        workers, and its minibatches those before a resume. So does the first one after the loss of
        a controller, when workers count their rows from 0 again.
        """
        is_due, last = self._is_due(event.minibatches), self._last
        before, self._examples = self._examples, event.examples
        if last is None or event.examples < before:
            self._last = event
            return
        since_s = event.seconds - last.seconds
        if not is_due or since_s <= 0:
            return
        self._last = event
        examples = event.examples - last.examples
        minibatches = event.minibatches - last.minibatches
        self._say(
            f"minibatch {event.minibatches:,}: {examples / since_s:,.0f} examples/s,"
            f" {minibatches / since_s:,.1f} minibatches/s, {event.bytes_sent / 1e6:.2f} MB sent,"
            f" {event.workers} of {event.workers_wanted} workers"
        )


class TimeIterationListener(PeriodicListener):
    """Logs the estimated remaining time every ``frequency`` minibatches.

    DL4J: ``TimeIterationListener``.
    """

    _first: Iteration | None = None  # the first event of the fit, or after a lost controller
    _examples = 0  # rows trained at the newest event

    def on_fit_begin(self, event: FitBegin) -> None:
        """Forget when an earlier fit began."""
        super().on_fit_begin(event)
        self._first = None

    def on_iteration(self, event: Iteration) -> None:
        """Log the remaining time, if it is due."""
        if self._first is None or event.examples < self._examples:
            self._first = event  # excludes the time to start workers, also after a lost controller
        first, self._examples = self._first, event.examples
        done = event.minibatches - first.minibatches
        if done <= 0 or not self._is_due(event.minibatches):
            return
        minutes, seconds = divmod(round(estimate_remaining_s(first, event)), 60)
        self._say(f"remaining: {minutes:,} min {seconds} s")


def estimate_remaining_s(first: Iteration, now: Iteration) -> float:
    """Return the estimated seconds until the fit ends, at the pace since the event ``first``."""
    pace = (now.seconds - first.seconds) / (now.minibatches - first.minibatches)
    return max(0.0, pace * (now.minibatches_expected - now.minibatches))


class CollectScoresListener(PeriodicListener):
    """Collects (minibatches, loss) pairs in ``scores``. DL4J: CollectScoresIterationListener."""

    def __init__(self, frequency: int = 1) -> None:
        super().__init__(frequency)
        self.scores: list[tuple[int, float]] = []

    def on_iteration(self, event: Iteration) -> None:
        """Collect the loss, if it is due."""
        if event.loss is not None and self._is_due(event.minibatches):
            self.scores.append((event.minibatches, event.loss))


class EvaluativeListener(PeriodicListener):
    """Evaluates the model on given rows every ``frequency`` epochs. DL4J: ``EvaluativeListener``.

    The evaluation runs on the driver while workers train, with a copy of the current parameters, so
    pass some thousand rows rather than all. ``results`` holds (epoch, evaluation) pairs.
    """

    def __init__(
        self,
        features: Any,
        labels: Any,
        *,
        frequency: int = 1,
        metrics: Any = None,
        say: WriteLine = log_or_print,
    ) -> None:
        """Create the listener.

        Args:
            features: rows to evaluate on, as for ``network.evaluate``.
            labels: labels of these rows.
            frequency: number of epochs between two evaluations.
            metrics: metrics, as for ``network.evaluate``.
            say: receives each line of text.
        """
        super().__init__(frequency, say)
        self._rows, self._metrics = (features, labels), metrics
        self._epochs = 0
        self.results: list[tuple[int, Any]] = []

    def on_fit_begin(self, event: FitBegin) -> None:
        """Count epochs from 0 again."""
        super().on_fit_begin(event)
        self._epochs = 0

    def on_epoch(self, event: EpochEnd) -> None:
        """Evaluate the model, if an evaluation is due."""
        self._epochs += 1
        if not self._is_due(self._epochs):
            return
        found = event.evaluate(*self._rows, self._metrics)
        self.results.append((event.epoch, found))
        self._say(f"epoch {event.epoch}:\n{found.table()}")


class WorkerChangeReporter(TrainingListener):
    """Reports lost and replaced workers at once; added to every fit that shows progress."""

    fails_fit = False

    def __init__(self, say: WriteLine) -> None:
        self._say = say
        self._lost: set[int] = set()

    def on_worker_change(self, event: WorkerChange) -> None:
        """Report lost workers with the reasons, and partitions that have a new worker."""
        for reason in event.reasons:
            self._say(f"sparkstrom lost a worker: {reason}")
        lost = self._lost | event.left
        for partition in sorted(event.joined & lost):
            self._say(f"sparkstrom continues: partition {partition} has a new worker")
        self._lost = lost - event.joined

    def on_fit_end(self, event: FitEnd) -> None:
        """Forget the workers lost in this fit."""
        self._lost.clear()


# Listeners for other tools import that tool's library in their constructor, so that a missing
# library is reported before any work starts.
SCALAR_INTERVAL_S = 1.0  # minimum seconds between two points of a curve


class ScalarListener(TrainingListener):
    """Base class of listeners that log named scalars, over minibatches or over epochs.

    An error in ``on_fit_begin``, such as for a wrong address, ends the fit. A later one does not,
    unless ``fails_fit`` is set to True.
    """

    fails_fit = None

    def __init__(self) -> None:
        self._due_s = 0.0
        self._last: Iteration | None = None

    def on_fit_begin(self, event: FitBegin) -> None:
        """Forget the state of an earlier fit."""
        self._due_s, self._last = 0.0, None

    def on_iteration(self, event: Iteration) -> None:
        """Log the state of training, at most once per ``SCALAR_INTERVAL_S``."""
        if event.seconds < self._due_s:
            return
        self._due_s = event.seconds + SCALAR_INTERVAL_S
        last, self._last = self._last, event
        for name, value in iteration_scalars(event, last):
            self._log_scalar(f"train/{name}", value, event.minibatches)

    def on_epoch(self, event: EpochEnd) -> None:
        """Log the epoch's loss and validation score."""
        self._log_scalar("epoch/loss", event.loss, event.epoch)
        if event.validation is not None:
            self._log_scalar("epoch/validation", event.validation, event.epoch)

    def _log_scalar(self, name: str, value: float, step: int) -> None:
        """Log one value; ``step`` is its position: a number of minibatches, or an epoch."""
        raise NotImplementedError


def iteration_scalars(event: Iteration, last: Iteration | None) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of an event's known values and of the throughput since ``last``.

    ``last`` is an earlier event; without it (None), the throughput is omitted.
    """
    names = ("loss", "sent_fraction", "tau", "staleness", "bytes_sent", "workers")
    for name in names:
        if (value := getattr(event, name)) is not None:
            yield name, float(value)
    if last is None or event.seconds <= last.seconds or event.examples < last.examples:
        return  # there are fewer after the loss of a controller: workers count from 0 again
    pace = (event.examples - last.examples) / (event.seconds - last.seconds)
    yield "examples_per_second", pace


class TensorBoardListener(ScalarListener):
    """Writes scalars to ``log_dir`` for TensorBoard; needs the ``tensorboard`` package.

    Minibatches are counted over all fits of a network that this object has followed. A fit that
    failed is not counted, because the network stays as it was before.
    """

    _before = 0  # minibatches of the network's earlier fits
    _newest = 0  # minibatches of the current fit at the newest event

    def __init__(self, log_dir: str) -> None:
        super().__init__()
        self._writers = _import_required(
            "tensorboard.summary.writer.event_file_writer", "tensorboard"
        )
        self._event_pb2 = _import_required("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary_pb2 = _import_required("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._log_dir = log_dir
        self._writer: Any = None

    def on_fit_begin(self, event: FitBegin) -> None:
        """Open an event file."""
        super().on_fit_begin(event)
        if event.resumed_from is None:  # else the fit counts those before the resume itself
            self._before = self._before + self._newest if event.first_epoch else 0
        self._newest = 0
        self._writer = self._writers.EventFileWriter(self._log_dir)

    def on_iteration(self, event: Iteration) -> None:
        """Log the state of training, as in the base class."""
        self._newest = event.minibatches
        super().on_iteration(replace(event, minibatches=self._before + event.minibatches))

    def on_fit_end(self, event: FitEnd) -> None:
        """Close the event file."""
        if event.error is not None:
            self._newest = 0
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _log_scalar(self, name: str, value: float, step: int) -> None:
        """Append one point to the event file, if a file is open."""
        if self._writer is None:
            return
        scalar = self._summary_pb2.Summary.Value(tag=name, simple_value=value)
        summary = self._summary_pb2.Summary(value=[scalar])
        point = self._event_pb2.Event(wall_time=time.time(), step=step, summary=summary)
        self._writer.add_event(point)


class MlflowListener(ScalarListener):
    """Logs the options and metrics of each fit as an MLflow run.

    Needs the package ``mlflow`` or ``mlflow-skinny``. If ``tracking_uri`` is None, MLflow's own
    environment variables apply. ``run_id`` identifies the run of the latest fit.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "sparkstrom") -> None:
        super().__init__()
        mlflow = _import_required("mlflow", "mlflow-skinny")
        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._experiment = experiment
        self.run_id: str | None = None

    def on_fit_begin(self, event: FitBegin) -> None:
        """Start a run and log the options."""
        super().on_fit_begin(event)
        known = self._client.get_experiment_by_name(self._experiment)
        where = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self.run_id = self._client.create_run(where).info.run_id
        facts = {"model": event.model, "n_params": event.n_params, "workers": event.workers}
        for name, value in (facts | event.options).items():
            self._client.log_param(self.run_id, name, str(value)[:500])

    def on_fit_end(self, event: FitEnd) -> None:
        """End the run as finished or failed."""
        if self.run_id is not None:
            status = "FINISHED" if event.error is None else "FAILED"
            self._client.set_terminated(self.run_id, status=status)

    def _log_scalar(self, name: str, value: float, step: int) -> None:
        """Log one metric to the MLflow run; do nothing before the first fit."""
        if self.run_id is not None:
            self._client.log_metric(self.run_id, name, value, step=step)


def _import_required(module: str, package: str) -> Any:
    """Import a module; if it is missing, raise SetupError naming the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SetupError(
            f"this listener needs the package {package} on the driver: pip install {package}"
            f" ({error})"
        ) from error
