"""Trainer: one worker's loop over its minibatches, obeying its node at each batch boundary."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sparkstrom.base.errors import PeerError
from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import BUFFERS, Activity, ResidualCheckpoint
from sparkstrom.codec.states import decode_state_untrusted
from sparkstrom.observe.epochs import EpochLog, Finished
from sparkstrom.observe.residual_figures import figures_of
from sparkstrom.observe.stopping import LOSS
from sparkstrom.observe.telemetry import TrainingCounters
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Directive, Order
from sparkstrom.runtime.batches import Batches
from sparkstrom.runtime.optimizer_lending import OptimizerLender
from sparkstrom.runtime.pacemaker import Pacemaker
from sparkstrom.runtime.replica import Replica
from sparkstrom.runtime.residual_age import ResidualAge
from sparkstrom.runtime.trainer_channel import TrainerChannel
from sparkstrom.runtime.trainer_inbox import Item, Merged

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
        station: TrainerChannel,
        replica: Replica,
        batches: Batches,
        schedule: Schedule,
        *,
        keep: Keep,
        grant: Grant,
        lender: OptimizerLender,
    ) -> None:
        self._station, self._replica, self._batches = station, replica, batches
        self._schedule, self._keep, self._grant = schedule, keep, grant
        self._lender = lender
        before = schedule.minibatches_before
        self._pacemaker = None if before is None else Pacemaker(before)
        self.counts, self._unsent = Counts(), ResidualAge()
        self.epochs = EpochLog(schedule.partition, schedule.attempt)
        self._position = Position(0, 0)
        self._sent = (
            self._position
        )  # up to there, what was learnt has been published where it could
        self._steps = 0
        self._unpublished = 0
        self._activity = Activity.CATCHING_UP
        self._said: set[tuple[Order, int, int]] = set()
        self._grants: tuple[str, ...] = ()
        self._stats_due_s = 0.0
        self._epoch_loss, self._epoch_examples = 0.0, 0

    def run(self) -> str:
        """Train to the end; return why it ended. Raises what failed."""
        while True:
            items, command = self._station.take()
            for item in items:
                self._take(item)
            self._lender.at_boundary(self._replica.model)
            if items:
                self._station.post(ev.Applied(self._replica.theta.commit))
            if command.order is Order.END:
                return command.reason
            if command.order is Order.FAIL:
                raise PeerError(command.reason)
            self._obey(command)

    @property
    def _finished(self) -> bool:
        return self._batches.rows == 0 or self._position >= Position(self._schedule.epochs, 0)

    def _obey(self, command: Directive) -> None:
        beyond = command.steps_max is not None and self._steps >= command.steps_max
        match command.order:
            case Order.TRAIN if not (self._finished or beyond):
                self._say(Activity.STEPPING)
                self._step(command)
                return
            case Order.PAUSE:
                self._once(command, ev.Paused(command.number))
            case Order.DRAIN:
                self._once(command, ev.Drained())
            case Order.AUDIT if (Order.AUDIT, command.commit, 0) not in self._said:
                self._tell_stats(now=True)
                kept = self._keep(self._replica)
                self._once(command, ev.Hashed(command.commit, self._replica.theta.digest(), kept))
            case Order.RELEASE if (Order.RELEASE, 0, 0) not in self._said:
                self._tell_stats(now=True)
                self._take_grants()  # it may have to go before it had a replica
                self._once(command, ev.Released(self._keep(self._replica)))
            case _:
                pass
        self._rest(command)

    def _rest(self, command: Directive) -> None:
        """Say what is waited for, and wait."""
        if self._activity is not Activity.CATCHING_UP and command.order is not Order.PAUSE:
            self._say(Activity.FINISHED if self._finished else Activity.WAITING)
        self._tell_stats(now=False)
        began_s = time.monotonic()
        self._station.wait(LOOK_S, command)
        self._spend("waiting", time.monotonic() - began_s)

    def _say(self, activity: Activity) -> None:
        if activity is not self._activity:
            self._activity = activity
            self._station.post(ev.Busy(activity))

    def _once(self, command: Directive, event: ev.Event) -> None:
        key = (command.order, command.commit, command.number)
        if key not in self._said:
            self._said.add(key)
            self._station.post(event)

    # -- what comes in ---------------------------------------------------------------------------

    def _take(self, item: Item) -> None:
        match item:
            case ev.Deliver(update=update):
                if update.form == BUFFERS:
                    self._replica.take_buffers(update.payload, update.commit)
                else:
                    self._replica.apply(self._replica.theta.read(update), update.commit)
            case ev.Passed(commit=commit):
                self._replica.passed(commit)
            case Merged():
                self._replica.apply_merged(item)
            case ev.DeliverMerged():
                self._replica.apply_range(item)
            case ev.Install() | ev.Begin():
                self._install(item)
            case ev.InstallUpdater(payload=payload):
                self._install_updater(payload)
            case ev.Admitted(returned=False):
                self._position, self._steps = Position(item.epoch, item.batch), item.steps
                self._sent = self._position
                self._grants = item.grants
            case ev.Admitted():
                pass  # back under a new id, with theta, residual and position as they were

    def _install(self, install: ev.Install | ev.Begin) -> None:
        if isinstance(install, ev.Install):
            self._replica.install(install)
        else:
            self._replica.begin()
        self._take_grants()
        self._station.post(ev.Installed())
        if self._activity is Activity.CATCHING_UP:
            self._say(Activity.FINISHED if self._finished else Activity.WAITING)

    def _take_grants(self) -> None:
        """Add what earlier fits left on this executor, once."""
        if self._grants:
            self._grant(self._replica, self._grants)
            self._grants = ()

    def _install_updater(self, payload: bytes | None) -> None:
        """Go on with another worker's updater state, or with a fresh one, which is counted."""
        if payload is None:
            self.counts.fresh_updaters += 1
        else:
            self._replica.model.load_updater_state(decode_state_untrusted(payload))

    # -- training --------------------------------------------------------------------------------

    def _step(self, command: Directive) -> None:
        began_s = time.monotonic()
        batch = self._batches.get(*self._position)
        read_s = time.monotonic()
        if self._schedule.sleep_ms:
            time.sleep(self._schedule.sleep_ms / 1000)
        if self._pacemaker is not None:
            self._pacemaker.keep(self._replica.model, command, self.counts.steps)
        loss = self._replica.step(batch)
        self._count(batch.rows, loss)
        stepped_s = time.monotonic()
        self._advance()
        if self._position.batch == 0:
            self._publish_buffers()
        self._publish_if_due()
        self._spend("reading", read_s - began_s)
        self._spend("stepping", stepped_s - read_s)
        self._spend("encoding", time.monotonic() - stepped_s)
        if self._position.batch == 0:
            self._finish_epoch()
        self._tell_stats(now=False)

    def _advance(self) -> None:
        batch = self._position.batch + 1
        if batch == self._batches.per_epoch:
            self._position = Position(self._position.epoch + 1, 0)
            self.counts.last_loss_sum, self._epoch_loss = self._epoch_loss, 0.0
            self.counts.last_examples, self._epoch_examples = self._epoch_examples, 0
        else:
            self._position = Position(self._position.epoch, batch)
        self._steps += 1
        self._unpublished += 1

    def _finish_epoch(self) -> None:
        """Measure theta on the rows that are held out here, its own last update included."""
        began_s = time.monotonic()
        held = (0.0, 0.0)
        if self._batches.held_out.rows:
            held = self._replica.measure(self._batches.held_out, self._schedule.metric)
            self._spend("measuring", time.monotonic() - began_s)
        loss, examples = self.counts.last_loss_sum, self.counts.last_examples
        self.epochs.add(Finished(self._position.epoch - 1, loss, examples, *held))

    def _publish_buffers(self) -> None:
        """Before the epoch's last position: once that is committed, so are the buffers."""
        seen, buffers = self._replica.theta.commit, self._replica.report_buffers()
        if buffers:
            where = (self._sent.epoch, self._sent.batch, self._steps - 1)
            self._station.post(ev.Published(BUFFERS, 0, 0, buffers, seen, *where))

    def _publish_if_due(self) -> None:
        """Publish when it is time, and at the very end; otherwise only say how far it is.

        A step that is held back is not claimed as trained: were this worker lost, its residual
        would be, too, and the step has to be taken again.
        """
        seen = self._replica.theta.commit
        encoded = None
        if self._is_due or self._finished:
            self._unpublished, self._sent = 0, self._position
            self._follow_link()
            encoded = self._replica.publish()
            self._unsent.look(self._replica, self.counts.steps)
        else:
            self._replica.hold_back()
        where = (self._sent.epoch, self._sent.batch, self._steps)
        if encoded is None:
            self._station.post(ev.Progressed(*where))
            return
        self._station.post(
            ev.Published(
                int(encoded.form), encoded.tau_quanta, encoded.count, encoded.payload, seen, *where
            )
        )

    @property
    def _is_due(self) -> bool:
        """After so many steps; or as soon as the link has carried what was published before.

        Asked after the step: what was under way when it began may be committed now.
        """
        every = self._schedule.publish_every
        return self._station.command.publishes if every is None else self._unpublished >= every

    def _follow_link(self) -> None:
        """How much is sent follows how soon the last publication was committed."""
        round_s, seconds = self._station.command.round_s, self.counts.seconds
        step_s = (seconds.get("stepping", 0.0) + seconds.get("reading", 0.0)) / self.counts.steps
        if round_s:
            self._replica.encoder.follow_link(round_s, step_s)

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
        self._station.stats = self._counters(whole=now)

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
            epoch=self._position.epoch,
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
            breaches=theta.breaches + sent.breaches,
            residual_square=self._replica.residual_norm() ** 2 if whole else None,
            tau=tau,
            seconds=dict(counts.seconds),
            epochs=self.epochs.figures(),
            residual=residual,
        )
