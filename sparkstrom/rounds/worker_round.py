"""Train one worker for one round, or evaluate it on its held-out rows, and report the results.

In a round, each worker trains some minibatches; then the results are averaged. Workers in Spark
tasks, in local processes and in rehearsals use these functions. ``train_locally`` first loads all
state into the model, so its result depends on its arguments only and a repeated task computes the
same bits.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import TrainingError, UsageError, format_reason
from sparkstrom.models.base import (
    Batch,
    EpochAware,
    FitLength,
    FitLengthAware,
    Flat,
    FlatModel,
    Paced,
    State,
    get_buffers,
    get_step_weight,
    load_buffers,
)
from sparkstrom.models.output_interpretation import measure_batch
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.output_capture import WorkerOutput, capture_output

TRACE_CHARS_MAX = 8_000  # characters of a traceback in a report
NOT_FINITE_LOSS = (
    "the loss is {} in minibatch {} of its round: training diverges or the data hold such values; "
    "lower the learning rate, clip gradients, or look at the features' scale"
)


class IncompleteInput(EOFError):
    """A round's input arrived incomplete, so the backend must run the task again."""


class ModelFailure(NamedTuple):
    """An exception that a user's model raised in a worker, in a form that can be sent."""

    reason: str  # the exception's type and message
    trace: str  # the end of its traceback
    is_usage: bool  # whether it is a UsageError


@dataclass(slots=True)
class WorkerReport:
    """A worker's report on one task of a round-based fit; subclasses add the task's results."""

    partition: int  # index of the worker's partition
    host: str = ""  # the worker's host
    activity: str = ""  # the worker's last activity, for messages
    seconds: dict[str, float] = field(default_factory=dict)  # time spent, by activity
    lines: list[tuple[str, str]] = field(default_factory=list)  # (activity, printed line)
    skipped: int = 0  # printed lines left out because of the limit
    # sparkstrom's warnings for the summary: place in the source -> text
    warnings: dict[str, str] = field(default_factory=dict)
    error: ModelFailure | None = None  # an exception of the user's model, which ended the task
    lost_attempts: list[str] = field(default_factory=list)  # why earlier attempts were lost

    def add_seconds(self, activity: str, since_s: float) -> None:
        """Add the time since ``since_s``, a ``time.monotonic`` reading, to an activity's total."""
        spent = time.monotonic() - since_s
        self.seconds[activity] = self.seconds.get(activity, 0.0) + spent


@dataclass(slots=True)
class RoundReport(WorkerReport):
    """A worker's report on one round of training."""

    activity: str = "reading parameters"
    executor: str = ""  # id of the executor that ran the task
    steps: int = 0  # minibatches trained
    examples: int = 0  # rows in all minibatches of the round
    # Sum of the minibatches' weights, see ``get_step_weight``; if 0, the worker's parameters do not
    # count.
    weight: float = 0.0
    loss_sum: float = 0.0  # sum over minibatches of weight x mean loss
    sent_bytes: int = 0  # size of the results that the worker sent
    buffers: bytes = b""  # the model's buffers after the round


@dataclass(slots=True)
class HeldOutReport(WorkerReport):
    """A worker's evaluation on its held-out rows after an epoch; total / weight is the metric."""

    activity: str = "measuring"
    total: float = 0.0  # sum of weight x loss, or of the weights of correct predictions
    weight: float = 0.0  # sum of the rows' weights


@dataclass(slots=True)
class ReplicaReport(WorkerReport):
    """A worker's report after the last round: a hash of the parameters as the worker sees them."""

    digest: str = ""  # SHA-256 of parameters and buffers


@contextmanager
def reporting(report: WorkerReport, output: WorkerOutput | None = None) -> Iterator[None]:
    """Record in ``report`` what the block prints, and any exception that it raises.

    IncompleteInput and interruptions are raised again. Other exceptions are only recorded, because
    they come from the user's model and would recur if a backend repeated the task. ``output``
    limits the number of lines of several tasks together; None means a limit for this task alone.
    """
    output = output or WorkerOutput(SystemClock())
    output.phase = lambda: report.activity
    try:
        with capture_output(output):
            yield
    except (IncompleteInput, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # a user's model may raise anything, even SystemExit
        trace = "".join(traceback.format_exception(error))[-TRACE_CHARS_MAX:]
        report.error = ModelFailure(format_reason(error), trace, isinstance(error, UsageError))
    report.warnings = dict(output.warnings)
    if printed := output.take():
        report.lines, report.skipped = printed.lines, printed.skipped


def raise_failure(reports: Iterable[WorkerReport]) -> None:
    """Raise UsageError or TrainingError for the first report with an error of a user's model."""
    for report in reports:
        if report.error is not None:
            reason, trace, is_usage = report.error
            if is_usage:
                raise UsageError(reason)
            raise TrainingError(reason, report.host, report.partition, trace, report.activity)


@dataclass(frozen=True, slots=True)
class RoundStart:
    """The state from which a worker trains one round."""

    parameters: Flat  # f32[n_params], owned by the worker and trained in place
    buffers: bytes  # b"" if the model has none
    updater: State  # optimizer state; emptied once it is loaded into the model
    steps_before: int  # number of steps of each worker in earlier rounds
    pace: RoundPace | None = None  # None if this is the only worker


@dataclass(frozen=True, slots=True)
class RoundPace:
    """The position of the whole fit at the start of a round, for learning-rate schedules."""

    before: int  # minibatches of all workers before the round, including those of earlier fits
    workers: int  # number of workers that train in this round
    minibatches: int  # minibatches of all these workers in this round
    length: FitLength  # length of the whole fit

    def minibatches_after(self, steps: int) -> int:
        """Return the fit's number of minibatches after ``steps`` steps of each worker.

        The number never includes the round's last minibatch, even if some workers take more steps
        than others.
        """
        return self.before + min(self.workers * steps, max(0, self.minibatches - 1))


class RoundBatch(NamedTuple):
    """A minibatch and its position in the worker's epoch."""

    batch: Batch
    place: tuple[int, int, int]  # (epoch, index of the minibatch, minibatches in the epoch)


@dataclass(frozen=True, slots=True)
class LocalRoundResult:
    """The results of one worker's round."""

    parameters: Flat  # f32[n_params]
    buffers: bytes  # b"" if the model has none
    updater: State  # the model's live optimizer state, not a copy
    weight: float  # sum of the minibatches' weights, in which labels may also be weighted
    steps: int  # trained minibatches
    examples: int  # trained rows
    loss_sum: float  # sum over minibatches of weight x mean loss


def train_locally(
    model: FlatModel, start: RoundStart, batches: Iterable[RoundBatch]
) -> LocalRoundResult:
    """Train ``model`` on the minibatches, starting from ``start``; return the results.

    The parameters of ``start`` are changed in place, and its optimizer state is emptied to free
    memory. Raise TrainingError if a loss is not finite.
    """
    model.bind(start.parameters)
    load_buffers(model, start.buffers)
    if start.pace is not None and isinstance(model, FitLengthAware):
        model.set_fit_length(start.pace.length)  # before the state: schedules may depend on it
    model.load_updater_state(start.updater)
    start.updater.clear()  # the model has a copy; free this memory
    weight, loss_sum, steps, examples = 0.0, 0.0, 0, 0
    for batch, place in batches:
        if isinstance(model, EpochAware):
            model.set_position(*place)
        _set_pace(model, start, steps)
        loss = model.step(batch)
        if not np.isfinite(loss):
            raise TrainingError(NOT_FINITE_LOSS.format(loss, steps))
        counted = get_step_weight(model, batch)
        weight, loss_sum = weight + counted, loss_sum + counted * loss
        steps, examples = steps + 1, examples + batch.rows
    buffers, state = get_buffers(model), model.updater_state()
    return LocalRoundResult(start.parameters, buffers, state, weight, steps, examples, loss_sum)


def train_and_report(
    model: FlatModel, start: RoundStart, batches: Iterable[RoundBatch], report: RoundReport
) -> LocalRoundResult:
    """Call ``train_locally``, record its statistics in ``report``, and return its result."""
    report.activity, began_s = "training", time.monotonic()
    result = train_locally(model, start, batches)
    report.add_seconds("stepping", began_s + report.seconds.get("reading", 0.0))
    report.steps, report.examples = result.steps, result.examples
    report.weight, report.loss_sum = result.weight, result.loss_sum
    report.buffers = result.buffers
    return result


def _set_pace(model: FlatModel, start: RoundStart, steps: int) -> None:
    """Set the position at which a Paced model evaluates its learning-rate schedules.

    The position is the number of the fit's minibatches so far, or of this worker's own steps if the
    model counts those or the worker trains alone. ``steps``: its steps in this round so far.
    """
    if isinstance(model, Paced):
        if start.pace is None or getattr(model, "counts_own_steps", False):
            done = start.steps_before + steps
        else:
            done = start.pace.minibatches_after(steps)
        model.keep_pace(1, done, done)


def fit_length(spec: FitSpec, minibatches: int) -> FitLength:
    """Return the length of a fit; ``minibatches`` includes those before the fit was resumed."""
    return FitLength(spec.epochs, minibatches, spec.first_epoch, spec.minibatches_before)


def measure_held_out(
    model: FlatModel,
    parameters: Flat,
    buffers: bytes,
    batches: Iterable[Batch],
    metric: str,
    report: HeldOutReport,
) -> None:
    """Evaluate the parameters on held-out rows, and write the sums of ``metric`` to ``report``."""
    began_s = time.monotonic()
    model.bind(parameters)
    load_buffers(model, buffers)
    figures = [measure_batch(model, batch, metric) for batch in batches]
    sums, weights = zip(*figures, strict=True) if figures else ((), ())
    report.total, report.weight = math.fsum(sums), math.fsum(weights)
    report.add_seconds("measuring", began_s)
