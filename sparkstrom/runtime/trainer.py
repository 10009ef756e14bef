"""Trainer: drives one worker's training loop in the task's thread; steps, measures and counts.

What follows from an order at a batch boundary and what follows a step is ``training_loop``'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sparkstrom.base.errors import PeerError
from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import Payload, ResidualCheckpoint
from sparkstrom.models.base import Epochal, Paced
from sparkstrom.observe.epochs import EpochLog, Finished
from sparkstrom.observe.residual_figures import figures_of
from sparkstrom.observe.stopping import LOSS
from sparkstrom.observe.telemetry import TrainingCounters
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Directive
from sparkstrom.runtime.batches import Batches
from sparkstrom.runtime.lent_state import lent_state, load_updater
from sparkstrom.runtime.optimizer_lending import OptimizerLender
from sparkstrom.runtime.pacemaker import Pacemaker
from sparkstrom.runtime.replica import Replica
from sparkstrom.runtime.residual_age import ResidualAge
from sparkstrom.runtime.trainer_channel import TrainerChannel
from sparkstrom.runtime.training_loop import Move, TrainingLoop

LOOK_S = 0.2  # a waiting trainer looks around at least so often
STATS_S = 0.25


@dataclass(slots=True)
class Counts:
    """What a worker did, cumulative; goes to the master as named floats."""

    steps: int = 0
    examples: int = 0
    loss_sum: float = 0.0  # examples x mean loss
    last_loss_sum: float = 0.0  # of the last finished epoch
    last_examples: int = 0
    fresh_updaters: int = 0  # joined late, and nobody lent it an updater's state in time
    seconds: dict[str, float] = field(default_factory=dict)  # by activity


@dataclass(frozen=True, slots=True)
class Schedule:
    """How far and how often."""

    epochs: int
    publish_every: int | None  # steps; None: when the last publication is committed
    sleep_ms: int = 0  # in each step, to play a slow worker
    show_residual: bool = False  # its figures among the counters
    metric: str = LOSS  # of held-out rows, under theta at each epoch's end
    partition: int = 0
    attempt: int = 0  # of the task; the higher one has the last word
    minibatches_before: int | None = None  # of earlier fits; None: models count their own steps


Keep = Callable[[Replica], ResidualCheckpoint | None]
Grant = Callable[[Replica, tuple[str, ...]], None]


class Trainer:
    """Runs in the Spark task's thread until its node says END or FAIL."""

    def __init__(
        self,
        channel: TrainerChannel,
        replica: Replica,
        batches: Batches,
        schedule: Schedule,
        *,
        keep: Keep,
        grant: Grant,
        lender: OptimizerLender,
    ) -> None:
        self._channel, self._replica, self._batches = channel, replica, batches
        self._schedule, self._keep, self._grant = schedule, keep, grant
        model, before = replica.model, schedule.minibatches_before
        self._pacemaker = None
        if before is not None and isinstance(model, Paced):
            self._pacemaker = Pacemaker(model, before)
        self._epochal = model if isinstance(model, Epochal) else None
        self.counts, self._unsent = Counts(), ResidualAge()
        self.epochs = EpochLog(schedule.partition, schedule.attempt)
        self._loop = TrainingLoop(
            replica,
            self,
            lender,
            batches=batches.per_epoch,
            end=Position(schedule.epochs if batches.rows else 0, 0),
            publish_every=schedule.publish_every,
        )
        self._stats_due_s = 0.0
        self._epoch_loss, self._epoch_examples = 0.0, 0
        self._measures_only = not batches.rows and batches.held_out.rows > 0
        self._epochs_trained = self._epochs_measured = 0  # by the others, and then here

    def run(self) -> str:
        """Train to the end; return why it ended. Raises what failed."""
        while True:
            items, command = self._channel.take()
            self._epochs_trained = max(self._epochs_trained, command.epochs)
            match self._loop.at_boundary(items, command):
                case Move.STEP:
                    self._step(command)
                case Move.WAIT:
                    self._wait(command)
                case Move.END:
                    return command.reason
                case Move.FAIL:
                    raise PeerError(command.reason)

    def _wait(self, command: Directive) -> None:
        self._measure_for_others()
        self._tell_stats(now=False)
        began_s = time.monotonic()
        self._channel.wait(LOOK_S, command)
        self._spend("waiting", time.monotonic() - began_s)

    # -- what the loop asks for ------------------------------------------------------------------

    def post(self, event: ev.Event) -> None:
        """To the node's thread."""
        self._channel.post(event)

    def publish(self, round_s: float) -> Payload | None:
        """How much is sent follows how soon the last publication was committed."""
        seconds = self.counts.seconds
        step_s = (seconds.get("stepping", 0.0) + seconds.get("reading", 0.0)) / self.counts.steps
        if round_s:
            self._replica.encoder.follow_link(round_s, step_s)
        payload = self._replica.publish()
        self._unsent.look(self._replica, self.counts.steps)
        return payload

    def report_buffers(self) -> bytes:
        """As they are in the model."""
        return self._replica.report_buffers()

    def load_updater(self, payload: bytes | None) -> None:
        """Go on with another worker's updater state, or with a fresh one, which is counted."""
        if payload is None:
            self.counts.fresh_updaters += 1
        else:
            load_updater(self._replica, payload)

    def updater_state(self) -> bytes:
        """Its own, and its encoder's, for who joins in mid-training and for checkpoints."""
        return lent_state(self._replica, self._schedule.partition)

    def keep(self) -> ResidualCheckpoint | None:
        """With the last figures ahead of it: nothing is counted after that."""
        self._measure_for_others()
        self._tell_stats(now=True)
        return self._keep(self._replica)

    def grant(self, paths: tuple[str, ...]) -> None:
        """Add what earlier fits left on this executor."""
        self._grant(self._replica, paths)

    # -- training --------------------------------------------------------------------------------

    def _step(self, command: Directive) -> None:
        began_s = time.monotonic()
        batch = self._batches.get(*self._loop.position)
        read_s = time.monotonic()
        if self._schedule.sleep_ms:
            time.sleep(self._schedule.sleep_ms / 1000)
        if self._pacemaker is not None:
            self._pacemaker.keep(command, self.counts.steps)
        if self._epochal is not None:
            self._epochal.stand_at(*self._batches.place(*self._loop.position))
        self._replica.encoder.set_workers(command.workers)
        loss = self._replica.step(batch)
        self._count(batch.rows, loss)
        stepped_s = time.monotonic()
        self._loop.after_step(self._channel.command)
        self._spend("reading", read_s - began_s)
        self._spend("stepping", stepped_s - read_s)
        self._spend("encoding", time.monotonic() - stepped_s)
        if self._loop.position.batch == 0:
            self._finish_epoch()
        self._tell_stats(now=False)

    def _finish_epoch(self) -> None:
        """Measure theta on the rows that are held out here, its own last update included."""
        self.counts.last_loss_sum, self._epoch_loss = self._epoch_loss, 0.0
        self.counts.last_examples, self._epoch_examples = self._epoch_examples, 0
        held = self._measured() if self._batches.held_out.rows else (0.0, 0.0)
        loss, examples = self.counts.last_loss_sum, self.counts.last_examples
        self.epochs.add(Finished(self._loop.position.epoch - 1, loss, examples, *held))

    def _measure_for_others(self) -> None:
        """Where all rows are held out no epoch ends: measure when it has ended for all others.

        Epochs that ended since the last look have the same figure, of theta as it is now.
        """
        if not self._measures_only or self._epochs_measured == self._epochs_trained:
            return
        held = self._measured()
        for epoch in range(self._epochs_measured, self._epochs_trained):
            self.epochs.add(Finished(epoch, 0.0, 0, *held))
        self._epochs_measured = self._epochs_trained
        self._stats_due_s = 0.0  # who may end the fit waits for it

    def _measured(self) -> tuple[float, float]:
        began_s = time.monotonic()
        held = self._replica.measure(self._batches.held_out, self._schedule.metric)
        self._spend("measuring", time.monotonic() - began_s)
        return held

    # -- counting --------------------------------------------------------------------------------

    def _count(self, rows: int, loss: float) -> None:
        self.counts.steps += 1
        self.counts.examples += rows
        self.counts.loss_sum += rows * loss
        self._epoch_loss += rows * loss
        self._epoch_examples += rows

    def _spend(self, what: str, seconds: float) -> None:
        self.counts.seconds[what] = self.counts.seconds.get(what, 0.0) + seconds

    def _tell_stats(self, *, now: bool) -> None:
        """Hand the counters over, every now and then."""
        if not now and time.monotonic() < self._stats_due_s:
            return
        self._stats_due_s = time.monotonic() + STATS_S
        if now:
            self._unsent.measure(self._replica, self.counts.steps)
        self._channel.stats = self._counters(whole=now)

    def _counters(self, *, whole: bool) -> TrainingCounters:
        """What the driver is told; ``whole``: with what takes a look at all parameters."""
        counts, sent, theta = self.counts, self._replica.encoder.counters, self._replica.theta
        tau = self._replica.encoder.tau if sent.publications else None
        residual = None
        if self._schedule.show_residual and tau is not None:
            residual = figures_of(self._replica.residual(), tau)
        return TrainingCounters(
            partition=self._schedule.partition,
            attempt=self._schedule.attempt,
            epoch=self._loop.position.epoch,
            steps=counts.steps,
            examples=counts.examples,
            loss_sum=counts.loss_sum,
            last_loss_sum=counts.last_loss_sum,
            last_examples=counts.last_examples,
            rows_held_out=self._batches.held_out.rows,
            spilled_bytes=self._batches.spilled_bytes,
            fresh_updaters=counts.fresh_updaters,
            publications=sent.publications,
            hits=sent.hits,
            mass_clipped=sent.mass_clipped,
            mass_scaled_away=sent.mass_scaled_away,
            mass_left=sent.mass_sent + sent.mass_clipped + sent.mass_scaled_away,
            mass_waited=self._unsent.waited,
            overflows=theta.overflows + sent.overflows,
            residual_square=self._replica.residual_norm() ** 2 if whole else None,
            tau=tau,
            seconds=dict(counts.seconds),
            epochs=self.epochs.figures(),
            residual=residual,
        )
