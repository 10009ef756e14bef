"""Listeners that write for other tools: TensorBoard's event files, MLflow's tracking.

Each asks for its library when it is made, so that a missing one is told before any work starts.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from typing import Any

from sparkstrom.base.errors import SetupError
from sparkstrom.observe.listening.fit_events import (
    EpochEnd,
    FitBegin,
    FitEnd,
    Iteration,
    TrainingListener,
)

ITERATION_S = 1.0  # between two points of a curve, at least


class Curves(TrainingListener):
    """What both draw: figures by name, over the fit's minibatches or over epochs."""

    def __init__(self) -> None:
        self._due_s = 0.0
        self._last: Iteration | None = None

    def on_fit_begin(self, event: FitBegin) -> None:
        self._due_s, self._last = 0.0, None

    def on_iteration(self, event: Iteration) -> None:
        if event.seconds < self._due_s:
            return
        self._due_s = event.seconds + ITERATION_S
        last, self._last = self._last, event
        for name, value in figures(event, last):
            self._point(f"train/{name}", value, event.minibatches)

    def on_epoch(self, event: EpochEnd) -> None:
        self._point("epoch/loss", event.loss, event.epoch)
        if event.validation is not None:
            self._point("epoch/validation", event.validation, event.epoch)

    def _point(self, name: str, value: float, step: int) -> None:
        raise NotImplementedError


def figures(event: Iteration, last: Iteration | None) -> Iterator[tuple[str, float]]:
    """By name, as far as they are known."""
    names = ("loss", "sent_fraction", "tau", "staleness", "bytes_sent", "workers")
    for name in names:
        if (value := getattr(event, name)) is not None:
            yield name, float(value)
    if last is not None and event.seconds > last.seconds:
        pace = (event.examples - last.examples) / (event.seconds - last.seconds)
        yield "examples_per_second", pace


class TensorBoardListener(Curves):
    """Writes scalars to ``log_dir`` for TensorBoard (the package ``tensorboard``)."""

    def __init__(self, log_dir: str) -> None:
        super().__init__()
        self._writers = _needed("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event_pb2 = _needed("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary_pb2 = _needed("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._log_dir = log_dir
        self._writer: Any = None

    def on_fit_begin(self, event: FitBegin) -> None:
        super().on_fit_begin(event)
        self._writer = self._writers.EventFileWriter(self._log_dir)

    def on_fit_end(self, event: FitEnd) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _point(self, name: str, value: float, step: int) -> None:
        if self._writer is None:
            return
        scalar = self._summary_pb2.Summary.Value(tag=name, simple_value=value)
        summary = self._summary_pb2.Summary(value=[scalar])
        point = self._event_pb2.Event(wall_time=time.time(), step=step, summary=summary)
        self._writer.add_event(point)


class MlflowListener(Curves):
    """Logs options and figures as one run of MLflow (the package ``mlflow`` or ``mlflow-skinny``).

    ``tracking_uri`` and ``experiment`` as MLflow has them; None: what its environment says.
    ``run_id`` is that of the newest fit's run.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "sparkstrom") -> None:
        super().__init__()
        mlflow = _needed("mlflow", "mlflow-skinny")
        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        self._experiment = experiment
        self.run_id: str | None = None

    def on_fit_begin(self, event: FitBegin) -> None:
        super().on_fit_begin(event)
        known = self._client.get_experiment_by_name(self._experiment)
        where = known.experiment_id if known else self._client.create_experiment(self._experiment)
        self.run_id = self._client.create_run(where).info.run_id
        facts = {"model": event.model, "n_params": event.n_params, "workers": event.workers}
        for name, value in (facts | event.options).items():
            self._client.log_param(self.run_id, name, str(value)[:500])

    def on_fit_end(self, event: FitEnd) -> None:
        if self.run_id is not None:
            status = "FINISHED" if event.error is None else "FAILED"
            self._client.set_terminated(self.run_id, status=status)

    def _point(self, name: str, value: float, step: int) -> None:
        if self.run_id is not None:
            self._client.log_metric(self.run_id, name, value, step=step)


def _needed(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SetupError(
            f"this listener needs the package {package} on the driver: pip install {package}"
            f" ({error})"
        ) from error
