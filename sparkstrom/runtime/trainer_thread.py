"""Train one worker's model on the task's thread, evaluate it, and collect statistics.

``TrainerChannel`` connects the trainer to the thread of the worker's node, which exchanges messages
with other nodes. The trainer posts events; the node's thread passes items, such as received
updates, and the current directive, a command such as "train". A thread waits for the other only
while the other changes the queue of items. ``training_loop`` decides what follows a batch boundary
(the time between two steps) or a step. ``ResidualAge`` measures how long learned changes wait to be
sent, and ``GlobalStepEstimator`` estimates the whole fit's progress.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.clock import Clock, SystemClock
from sparkstrom.base.errors import PeerError
from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import Activity, Payload, ResidualCheckpoint
from sparkstrom.data.row_store import Batches
from sparkstrom.models.base import (
    EpochAware,
    FitLength,
    FitLengthAware,
    Paced,
    get_step_weight,
)
from sparkstrom.observe.early_stopping import LOSS
from sparkstrom.observe.epoch_history import EpochLog, PartitionEpoch
from sparkstrom.observe.telemetry import ResidualFigures, TrainingCounters
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import (
    ActivityChanged,
    Command,
    CommitApplied,
    Directive,
    Event,
    OutputPrinted,
)
from sparkstrom.protocol.worker.node_state import ALTERNATING
from sparkstrom.runtime.optimizer_states import (
    OptimizerStateServer,
    encode_worker_state,
    load_optimizer_state,
)
from sparkstrom.runtime.theta import Replica
from sparkstrom.runtime.training_loop import LoopAction, TrainerInbox, TrainerItem, TrainingLoop

RESIDUAL_PERCENTILES = (50, 95, 99, 99.9, 99.99)

ACTIVITY_NAMES = {  # command of a directive -> what the worker does, as text for users
    Command.WAIT: "waiting",
    Command.TRAIN: "training",
    Command.PAUSE: "copying parameters",
    Command.DRAIN: "draining",
    Command.AUDIT: "comparing replicas",
}


def no_output() -> None:
    """Return None: a ``read_output`` for workers whose output is not captured."""


class NodeConnection(Protocol):
    """Interface of a trainer's connection to its node, in another thread or in virtual time."""

    stats: TrainingCounters | None  # replaced, never changed, by the trainer

    @property
    def command(self) -> Directive:
        """The current directive."""

    def post(self, event: Event) -> None:
        """Send an event to the node."""

    def take(self) -> tuple[list[TrainerItem], Directive]:
        """Remove and return the waiting items, with the current directive."""
        ...

    def wait(self, seconds: float, known: Directive) -> None:
        """Wait up to ``seconds`` for an item, or a directive other than ``known``."""


class TrainerChannel:
    """Connects the threads of a worker's trainer and node: passes events, items and directives."""

    def __init__(
        self,
        inbox: TrainerInbox,
        *,
        wake: Callable[[], None],
        read_output: Callable[[], OutputPrinted | None] = no_output,
    ) -> None:
        """Connect the two threads.

        Args:
            inbox: queue of items for the trainer.
            wake: wakes the node's thread after an event was posted.
            read_output: returns what the worker's code printed since its last call.
        """
        self._changed = threading.Condition()
        self._inbox = inbox
        self._command = Directive(Command.WAIT, "joining")
        self._error: BaseException | None = None
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._wake = wake
        self._activity = Activity.CATCHING_UP  # as the trainer posted last
        self.stats: TrainingCounters | None = None  # replaced, never changed, by the trainer
        self.read_output = read_output

    def post(self, event: Event) -> None:
        """Send an event to the node's thread, and wake it unless the event can wait."""
        self.events.put(event)
        if not self._can_wait(event):
            self._wake()

    def _can_wait(self, event: Event) -> bool:
        """Return whether the node's thread may handle the event some milliseconds later."""
        if not isinstance(event, ActivityChanged):
            return isinstance(event, CommitApplied)
        known, self._activity = self._activity, Activity(event.activity)
        return {known, self._activity} <= ALTERNATING

    def take(self) -> tuple[list[TrainerItem], Directive]:
        """Remove and return the waiting items, with the current directive.

        If the node's thread has failed, raise its error.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            return self._inbox.take(), self._command

    @property
    def command(self) -> Directive:
        """The current directive; the last one if the node's thread has failed."""
        return self._command

    def describe_activity(self) -> str:
        """Return what the worker is doing, as text for users."""
        return ACTIVITY_NAMES.get(self._command.order, "ending")

    def wait(self, seconds: float, known: Directive) -> None:
        """Wait up to ``seconds`` for an item, a directive other than ``known``, or an error.

        If ``known`` is the directive that the last ``take`` returned, no newer one is missed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_changed(known), seconds)

    def _has_changed(self, known: Directive) -> bool:
        """Return whether there is an item, a directive other than ``known``, or an error."""
        return len(self._inbox) > 0 or self._command != known or self._error is not None

    def publish(self, items: list[TrainerItem], directive: Directive) -> None:
        """Make new items and the directive available to the trainer, and wake it if needed."""
        if not items and (directive is self._command or directive == self._command):
            return
        with self._changed:
            for item in items:
                self._inbox.put(item)  # type: ignore[arg-type]
            self._command = directive
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Pass the error with which the node's thread failed to the trainer."""
        with self._changed:
            self._error = error
            self._changed.notify_all()


class GlobalStepEstimator:
    """Estimates how many minibatches the whole fit has trained, and passes that to the model.

    Between two reports of the controller, all workers are assumed to be as fast as this one.
    Because reports arrive late, a worker that trains alone keeps its estimate if a report
    contains a smaller number.

    Args:
        model: the model, whose momentum and schedules depend on the estimate.
        before: number of minibatches of earlier fits.
    """

    def __init__(self, model: Paced, before: int) -> None:
        self._model, self._before = model, before
        self._reported = 0  # minibatches of this fit, as the controller last reported
        self._workers = 1
        # The estimate when this worker had taken ``_since`` steps.
        self._base, self._since = 0, 0
        self._estimate = 0  # the largest estimate so far

    def update_model(self, directive: Directive, steps: int) -> None:
        """Pass the estimate after ``steps`` steps of this worker to the model.

        ``directive`` has the controller's last report: minibatches of the fit, number of workers.
        """
        if directive.minibatches > self._reported:
            self._reported = directive.minibatches
            is_alone = self._workers == directive.workers == 1
            self._base = max(self._reported, self._estimate_at(steps) if is_alone else 0)
            self._since = steps
        elif directive.workers != self._workers:
            self._base, self._since = self._estimate_at(steps), steps
        self._workers = directive.workers
        self._estimate = max(self._estimate, self._estimate_at(steps))
        summed = min(self._workers, directive.summed or self._workers)
        self._model.keep_pace(summed, self._before + self._estimate, self._before + self._reported)

    def _estimate_at(self, steps: int) -> int:
        """Return the whole fit's estimated minibatches after ``steps`` steps of this worker."""
        return self._base + self._workers * (steps - self._since)


# Updates get more steps if encoding one would otherwise exceed this share of its steps' time.
ENCODING_SHARE_MAX = 0.2
# A worker's first updates contain one step each, because parameters move most at the beginning.
EARLY_PUBLICATIONS = 50
RECENT_WEIGHT = 1 / 32  # weight of the newest value in a RecentMean


class RecentMean:
    """An exponentially weighted mean of durations; values before the last 200 hardly count."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def add(self, seconds: float) -> None:
        """Add a duration; the first 32 have equal weights."""
        self._count += 1
        self.value += (seconds - self.value) * max(RECENT_WEIGHT, 1 / self._count)


RESIDUAL_AGE_POLL_S = 1.0
MEASURING_SHARE_MAX = 0.002  # largest share of a worker's time for measuring the residual


class ResidualAge:
    """Measures how long learned changes wait in a worker's residual before they are sent, in steps.

    By Little's law, the mean wait is the mass of the residual, summed over all steps, divided by
    the mass that has left it. A mass is a sum of absolute values in parameter units. The residual
    is measured after some publications, and assumed to change linearly in between.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.waited = 0.0  # mass of the residual, summed over this worker's steps
        self.mass = 0.0  # mass of the residual at the last measurement
        self._steps = 0  # this worker's steps at the last measurement
        self._next_steps, self._next_s = 1, 0.0  # steps and time that make the next one due

    def measure_if_due(self, replica: Replica, steps: int) -> None:
        """Measure the residual after 1, 2, 4, 8 ... steps and, unless costly, every second."""
        if steps < self._next_steps and self._clock.monotonic_s() < self._next_s:
            return
        self.measure(replica, steps)

    def measure(self, replica: Replica, steps: int) -> None:
        """Measure the residual, after ``steps`` steps of this worker, and add to ``waited``."""
        began_s = self._clock.monotonic_s()
        mass = replica.residual_mass()
        self.waited += (self.mass + mass) / 2 * (steps - self._steps)
        self.mass, self._steps = mass, steps
        now_s = self._clock.monotonic_s()
        self._next_s = now_s + max(RESIDUAL_AGE_POLL_S, (now_s - began_s) / MEASURING_SHARE_MAX)
        while self._next_steps <= steps:
            self._next_steps *= 2


WAIT_POLL_S = 0.2  # longest wait before checking for a directive again
COUNTERS_INTERVAL_S = 1.0
EPOCH_COUNTERS_INTERVAL_S = 0.25  # at the end of epochs, for whose figures early stopping waits


@dataclass(slots=True)
class TrainerCounts:
    """Counts of one trainer's work since it began, which ``TrainingCounters`` also contains."""

    steps: int = 0  # minibatches trained
    examples: int = 0  # rows trained
    loss_sum: float = 0.0  # sum over minibatches of weight x mean loss
    loss_weight: float = 0.0  # sum of these weights
    last_loss_sum: float = 0.0  # the same sums in the last finished epoch
    last_loss_weight: float = 0.0
    fresh_updaters: int = 0  # 1 if the worker joined late and got no optimizer state in time
    seconds: dict[str, float] = field(default_factory=dict)  # activity -> seconds


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """How long to train, how often to publish, and what to report."""

    epochs: int  # number of epochs to train
    # Steps per update; None: publish when the last update is committed, see ``TrainingLoop``.
    publish_every: int | None
    # Limit on an update's steps times the number of workers, if ``publish_every`` is None.
    minibatches_per_update_max: int = 1
    sleep_ms: int = 0  # milliseconds added to each step, to simulate a slow worker
    show_residual: bool = False  # whether to report statistics of the residual
    metric: str = LOSS  # metric of the shared parameters on held-out rows at each epoch's end
    partition: int = 0  # number of the worker's partition
    attempt: int = 0  # attempt of the task; the counters of the highest one are used
    # Number of minibatches of earlier fits; None: models count their own steps.
    minibatches_before: int | None = None
    start: tuple[int, int] = (0, 0)  # epochs and minibatches of earlier fits


SaveResidual = Callable[[Replica], ResidualCheckpoint | None]  # returns the file, if it saved one
AddSavedResiduals = Callable[[Replica, tuple[str, ...]], None]  # adds the residuals at these paths


class Trainer:
    """Trains, publishes updates and reports until the node orders the end (END or FAIL).

    ``run`` does so on the task's thread. A rehearsal, which simulates a fit in virtual time, calls
    ``pass_boundary``, ``begin_step``, ``finish_training`` and ``end_step`` instead.

    Args:
        channel: connection to the node.
        replica: model, parameters and encoder.
        batches: the partition's minibatches.
        options: options of the training.
        save_residual: saves the residual (changes not sent yet) for the next fit.
        add_residuals: adds residuals that earlier fits saved.
        optimizer_server: serves copies of the optimizer state.
        clock: source of time.
    """

    def __init__(
        self,
        channel: NodeConnection,
        replica: Replica,
        batches: Batches,
        options: TrainerOptions,
        *,
        save_residual: SaveResidual,
        add_residuals: AddSavedResiduals,
        optimizer_server: OptimizerStateServer,
        clock: Clock | None = None,
    ) -> None:
        self._channel, self._replica, self._batches = channel, replica, batches
        self._clock = clock or SystemClock()
        self._options = options
        self._save_residual, self._add_residuals = save_residual, add_residuals
        model, before = replica.model, options.minibatches_before
        self._global_steps = None
        if before is not None and isinstance(model, Paced):
            self._global_steps = GlobalStepEstimator(model, before)
        self._scheduled_model = model if isinstance(model, FitLengthAware) else None
        self._epochal = model if isinstance(model, EpochAware) else None
        self.counts, self._residual_age = TrainerCounts(), ResidualAge(self._clock)
        self.epochs = EpochLog(options.partition, options.attempt)
        self._loop = TrainingLoop(
            replica,
            self,
            optimizer_server,
            batches=batches.batches_per_epoch,
            end=Position(options.epochs if batches.rows else 0, 0),
            publish_every=options.publish_every,
        )
        self._counters_due_s = self._counted_s = 0.0
        self._read_s = self._trained_s = 0.0  # when the step's minibatch had been read, and trained
        self._step_s, self._encode_s = RecentMean(), RecentMean()  # of steps, and of publications
        self._epoch_loss, self._epoch_weight, self._epoch_examples = 0.0, 0.0, 0
        self._is_evaluator = not batches.rows and batches.held_out.rows > 0
        # trained by the other workers; evaluated here
        self._epochs_trained = self._epochs_measured = 0
        self._final_reported = False  # True once the final counters are reported

    def run(self) -> Directive:
        """Train to the fit's end; return the directive END.

        Raises PeerError for the directive FAIL, and any error of training.
        """
        while True:
            action, directive = self.pass_boundary()
            match action:
                case LoopAction.STEP:
                    self.begin_step(directive)
                    self.finish_training()
                    self.end_step()
                case LoopAction.WAIT:
                    self._wait(directive)
                case LoopAction.END:
                    return directive
                case LoopAction.FAIL:
                    raise PeerError(directive.reason)

    def pass_boundary(self) -> tuple[LoopAction, Directive]:
        """Between steps, apply what the node has sent; return the next action and its directive."""
        items, directive = self._channel.take()
        self._epochs_trained = max(self._epochs_trained, directive.epochs)
        return self._loop.at_boundary(items, directive), directive

    def _wait(self, directive: Directive) -> None:
        """Evaluate and report if due; then wait briefly for items or another directive."""
        self.evaluate_and_report()
        began_s = self._clock.monotonic_s()
        self._channel.wait(WAIT_POLL_S, directive)
        self._add_seconds("waiting", self._clock.monotonic_s() - began_s)

    def evaluate_and_report(self) -> None:
        """Evaluate if other workers have finished an epoch, and report counters that are due."""
        self._evaluate_with_others()
        self._report_counters(now=False)

    def post(self, event: ev.Event) -> None:
        """Send an event to the node."""
        self._channel.post(event)

    def publish(self, commit_latency_s: float) -> Payload | None:
        """Adapt the encoder to ``commit_latency_s``; return the next update, or None.

        See ``LoopDriver.publish``.
        """
        seconds = self.counts.seconds
        step_s = (seconds.get("stepping", 0.0) + seconds.get("reading", 0.0)) / self.counts.steps
        if commit_latency_s:
            self._replica.encoder.follow_link(commit_latency_s, step_s)
        payload = self._replica.publish(is_last=self._loop.finished)
        self._residual_age.measure_if_due(self._replica, self.counts.steps)
        return payload

    def min_steps_per_update(self, workers: int) -> int:
        """Return how many steps an update must contain so that encoding takes little time.

        That is at most ``ENCODING_SHARE_MAX`` of the steps' time. The result is 1 for the first
        updates, and never above ``TrainerOptions.minibatches_per_update_max / workers``.
        """
        most = self._options.minibatches_per_update_max // workers
        if most < 2 or self._replica.encoder.counters.publications < EARLY_PUBLICATIONS:
            return 1
        for steps in range(1, most):
            if self._encode_s.value <= ENCODING_SHARE_MAX * steps * self._step_s.value:
                return steps
        return most

    def publish_buffers(self) -> bytes:
        """Return the model's encoded buffers, to publish; empty if it has none."""
        return self._replica.publish_buffers()

    def load_optimizer_state(self, payload: bytes | None) -> None:
        """Continue with another worker's optimizer state; None keeps this worker's initial one."""
        if payload is None:
            self.counts.fresh_updaters += 1
        else:
            load_optimizer_state(self._replica, payload)

    def updater_state(self) -> bytes:
        """Return this worker's optimizer and encoder state as bytes."""
        return encode_worker_state(self._replica, self._options.partition)

    def save_residual(self) -> ResidualCheckpoint | None:
        """Report the final counters, then save the residual for the next fit.

        Return the file, or None if nothing was saved.
        """
        self._evaluate_with_others()
        self._report_counters(now=True)
        return self._save_residual(self._replica)

    def add_saved_residuals(self, paths: tuple[str, ...]) -> None:
        """Add residuals that earlier fits saved on this executor."""
        self._add_residuals(self._replica, paths)

    def begin_step(self, directive: Directive) -> float:
        """Train on one minibatch and count it; return its mean loss.

        ``finish_training`` and ``end_step`` must follow.
        """
        began_s = self._clock.monotonic_s()
        batch = self._batches.get(*self._loop.position)
        self._read_s = self._clock.monotonic_s()
        self._add_seconds("reading", self._read_s - began_s)
        if self._options.sleep_ms:
            time.sleep(self._options.sleep_ms / 1000)
        if self._scheduled_model is not None and self.counts.steps == 0:
            self._scheduled_model.set_fit_length(self._make_fit_length(directive))
        if self._global_steps is not None:
            self._global_steps.update_model(directive, self.counts.steps)
        if self._epochal is not None:
            self._epochal.set_position(*self._batches.place(*self._loop.position))
        self._replica.encoder.set_workers(directive.workers, directive.summed)
        loss = self._replica.step(batch)
        self._count(batch.rows, loss, get_step_weight(self._replica.model, batch))
        return loss

    def finish_training(self) -> bool:
        """Record when the step was trained; return whether ``end_step`` would publish now."""
        self._trained_s = self._clock.monotonic_s()
        self._step_s.add(self._trained_s - self._read_s)
        return self._loop.is_update_due(self._channel.command)

    def end_step(self) -> None:
        """Publish what the step has learned if that is due, and report."""
        published = self._replica.encoder.counters.publications
        self._loop.after_step(self._channel.command)
        encode_s = self._clock.monotonic_s() - self._trained_s
        if self._replica.encoder.counters.publications > published:
            self._encode_s.add(encode_s)
        self._add_seconds("stepping", self._trained_s - self._read_s)
        self._add_seconds("encoding", encode_s)
        if self._loop.position.batch == 0:
            self._finish_epoch()
        self._report_counters(now=False)

    def _make_fit_length(self, directive: Directive) -> FitLength:
        """Return the length of the fit in epochs and minibatches, for the model's schedules."""
        options, batches = self._options, self._batches.batches_per_epoch
        minibatches = options.epochs * batches
        if options.minibatches_before is not None:
            minibatches = directive.minibatches_expected or minibatches * directive.workers
        return FitLength(options.epochs, minibatches, *options.start)

    def _finish_epoch(self) -> None:
        """Record the epoch, with theta's metric on the held-out rows of this partition."""
        loss, self._epoch_loss = self._epoch_loss, 0.0
        weight, self._epoch_weight = self._epoch_weight, 0.0
        examples, self._epoch_examples = self._epoch_examples, 0
        self.counts.last_loss_sum, self.counts.last_loss_weight = loss, weight
        held = self._evaluate() if self._batches.held_out.rows else (0.0, 0.0)
        epoch = self._loop.position.epoch - 1
        self.epochs.add(PartitionEpoch(epoch, loss, examples, *held, loss_weight=weight))
        self._counters_due_s = self._counted_s + EPOCH_COUNTERS_INTERVAL_S

    def _evaluate_with_others(self) -> None:
        """Evaluate when other workers finish an epoch, if this partition has only held-out rows.

        Epochs that finished since the last evaluation get the same figures, those of the current
        theta.
        """
        if not self._is_evaluator or self._epochs_measured == self._epochs_trained:
            return
        held = self._evaluate()
        for epoch in range(self._epochs_measured, self._epochs_trained):
            self.epochs.add(PartitionEpoch(epoch, 0.0, 0, *held))
        self._epochs_measured = self._epochs_trained
        self._counters_due_s = 0.0  # report at once: early stopping waits for these figures

    def _evaluate(self) -> tuple[float, float]:
        """Evaluate theta on held-out rows; return (weighted sum of the metric, sum of weights)."""
        began_s = self._clock.monotonic_s()
        held = self._replica.measure(self._batches.held_out, self._options.metric)
        self._add_seconds("measuring", self._clock.monotonic_s() - began_s)
        return held

    def _count(self, rows: int, loss: float, weight: float) -> None:
        """Count one step: its number of rows, and its mean loss, which has a weight in averages."""
        self.counts.steps += 1
        self.counts.examples += rows
        self.counts.loss_sum += weight * loss
        self.counts.loss_weight += weight
        self._epoch_loss += weight * loss
        self._epoch_weight += weight
        self._epoch_examples += rows

    def _add_seconds(self, activity: str, seconds: float) -> None:
        """Add to the time spent with an activity."""
        self.counts.seconds[activity] = self.counts.seconds.get(activity, 0.0) + seconds

    def _report_counters(self, *, now: bool) -> None:
        """Pass the counters to the node if they are due, or as the final ones if ``now``."""
        if not now and (self._final_reported or self._clock.monotonic_s() < self._counters_due_s):
            return
        self._final_reported |= now
        self._counted_s = self._clock.monotonic_s()
        self._counters_due_s = self._counted_s + COUNTERS_INTERVAL_S
        if now:
            self._residual_age.measure(self._replica, self.counts.steps)
        self._channel.stats = self._counters(is_final=now)

    def _counters(self, *, is_final: bool) -> TrainingCounters:
        """Return the counters; final ones include the residual's norm, which is slow to compute."""
        sent, theta = self._replica.encoder.counters, self._replica.theta
        tau = self._replica.encoder.tau if sent.publications else None
        residual = None
        if self._options.show_residual and tau is not None:
            residual = residual_statistics(self._replica.residual(), tau)
        return TrainingCounters(
            partition=self._options.partition,
            attempt=self._options.attempt,
            epoch=self._loop.position.epoch,
            rows_held_out=self._batches.held_out.rows,
            spilled_bytes=self._batches.spilled_bytes,
            publications=sent.publications,
            hits=sent.hits,
            mass_clipped=sent.mass_clipped,
            mass_scaled_away=sent.mass_scaled_away,
            mass_left=sent.mass_sent + sent.mass_clipped + sent.mass_scaled_away,
            mass_waited=self._residual_age.waited,
            overflows=theta.overflows + sent.overflows,
            residual_square=self._replica.residual_norm() ** 2 if is_final else None,
            tau=tau,
            epochs=self.epochs.recent_figures(),
            residual=residual,
            **asdict(self.counts),
        )


def residual_statistics(residual: NDArray[np.float32], tau: float) -> ResidualFigures:
    """Return statistics of the absolute values of a residual, f32[n_params].

    ``tau``: threshold in parameter units; the result counts the entries that reach it.
    """
    sizes = np.abs(residual)
    points = np.percentile(sizes, RESIDUAL_PERCENTILES)
    return ResidualFigures(
        tau,
        float(np.count_nonzero(sizes >= tau)),
        float(sizes.mean(dtype=np.float64)),
        float(sizes.max()),
        *map(float, points),
    )
