"""Decide what a worker's trainer does at each batch boundary and after each step.

``TrainingLoop`` does no I/O, has no thread and reads no clock. In production the task's thread
drives it (``runtime.trainer_thread``), and in simulations virtual time does, so simulations test
the same code. A step takes place between ``at_boundary`` and ``after_step``. A directive, the
node's current command to the trainer, may change during a step.

``TrainerInbox`` queues remote updates until the next batch boundary. When they reach its limit in
bytes, it adds up further updates instead of queueing each one. A sum with few entries is stored as
a sparse list; otherwise it needs one array of the parameters' size. Sums are exact, so they do not
change the result.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sparkstrom.base.identity import CommitNo, Position
from sparkstrom.codec.messages import BUFFERS, Activity, Commit, Payload, ResidualCheckpoint
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import (
    ApplyCommit,
    ApplyMergedRange,
    Command,
    Directive,
    IdAssigned,
    InstallOptimizer,
    InstallSnapshot,
    OwnCommitted,
    UseInitialReplica,
)


class CommitSum(Protocol):
    """Interface of a sum of several updates of other workers."""

    def add_update(self, update: Commit) -> bool:
        """Add an update; add nothing and return False if a non-empty sum could overflow."""


Sum = TypeVar("Sum")


@dataclass(slots=True)
class MergedCommits(Generic[Sum]):
    """The sum of several successive commits (numbered updates), the last one being ``commit``."""

    total: Sum  # the sum of other workers' commits
    commit: CommitNo  # number of the last commit
    own_commits: int  # number of these commits that are this worker's own, not part of ``total``


TrainerEffect = (
    ApplyCommit
    | OwnCommitted
    | ApplyMergedRange
    | InstallSnapshot
    | UseInitialReplica
    | InstallOptimizer
    | IdAssigned
)
TrainerItem = TrainerEffect | MergedCommits[Any]


class TrainerInbox:
    """A queue of what the trainer must apply to its replica, such as other workers' updates.

    Items are in commit order. If single updates exceed ``bytes_max`` bytes, further ones are added
    up, in a sum that ``begin_sum`` creates. Not thread-safe: its owner holds a lock.
    """

    __slots__ = ("_begin_sum", "_bytes", "_bytes_max", "_items", "merge_count")

    def __init__(self, bytes_max: int, begin_sum: Callable[[], CommitSum]) -> None:
        self._bytes_max, self._begin_sum = bytes_max, begin_sum
        self._items: list[TrainerItem] = []
        self._bytes = 0
        self.merge_count = 0  # number of sums begun

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: TrainerEffect) -> None:
        """Add an item; if it is an update that exceeds the byte limit, add it to a sum instead."""
        items = self._items
        if isinstance(item, ApplyCommit) and item.update.payload.form != BUFFERS:
            size = len(item.update.payload)
            if self._bytes + size > self._bytes_max:
                self._merge(item.update)
                return
            self._bytes += size
        elif isinstance(item, OwnCommitted) and items and isinstance(items[-1], MergedCommits):
            last = items[-1]  # one sum instead of several around own commits
            last.commit, last.own_commits = item.commit, last.own_commits + 1
            return
        items.append(item)

    def take(self) -> list[TrainerItem]:
        """Remove and return all waiting items."""
        items, self._items, self._bytes = self._items, [], 0
        return items

    def _merge(self, update: Commit) -> None:
        """Add an update to the last sum, or to a new one if that could overflow."""
        last = self._items[-1] if self._items else None
        if isinstance(last, MergedCommits) and last.total.add_update(update):
            last.commit = update.commit
            return
        total = self._begin_sum()
        total.add_update(update)
        self._items.append(MergedCommits(total, update.commit, 0))
        self.merge_count += 1


class LoopAction(enum.Enum):
    """What the caller of ``TrainingLoop.at_boundary`` must do next."""

    STEP = "step"  # train on the minibatch at ``position``, then call ``after_step``
    WAIT = "wait"  # wait for an item or another directive
    END = "end"  # the task ends with success
    FAIL = "fail"  # the task fails


class LoopReplica(Protocol):
    """Interface of a worker's copy of the parameters, with the operations that the loop needs."""

    @property
    def commit(self) -> CommitNo:
        """The number of the newest commit in the parameters."""

    def apply_update(self, update: Commit) -> None:
        """Add another worker's update to the parameters."""

    def take_buffers(self, buffers: bytes, commit: CommitNo) -> None:
        """Apply commit number ``commit``, which sets the buffers to the average of all workers."""

    def mark_committed(self, commit: CommitNo) -> None:
        """Record that this worker's oldest uncommitted update has been given number ``commit``."""

    def apply_merged(self, merged: MergedCommits[Any]) -> None:
        """Add a sum of other workers' commits, which this worker's inbox has merged."""

    def apply_range(self, item: ev.ApplyMergedRange) -> None:
        """Add a sum of commits that a neighbour merged, minus this worker's own updates in it."""

    def install(self, install: ev.InstallSnapshot) -> None:
        """Replace the parameters by a snapshot plus this worker's uncommitted updates."""

    def begin(self) -> None:
        """Prepare to train from the installed or initial parameters."""

    def accumulate_delta(self) -> None:
        """Add the last step's change to the residual, for a later publication."""

    def digest(self) -> str:
        """Return a hash of parameters and buffers."""


class LoopDriver(Protocol):
    """Interface of a loop's owner: its connection to the node, its encoder and its optimizer."""

    def post(self, event: ev.Event) -> None:
        """Send an event to the node."""

    def publish(self, commit_latency_s: float) -> Payload | None:
        """Return the next update, already added to the replica; None if there is none.

        ``commit_latency_s``: recent seconds from publishing an update to its commit, or the delay
        of a slow link that all workers wait for, if that is longer; 0 if unknown.
        """

    def min_steps_per_update(self, workers: int) -> int:
        """Return the minimum number of steps that an update must contain.

        ``workers``: number of workers that train. Not called if ``publish_every`` is a number.
        """

    def publish_buffers(self) -> bytes:
        """Return the model's buffers at an epoch's end; empty if it has none."""

    def load_optimizer_state(self, payload: bytes | None) -> None:
        """Continue with another worker's optimizer state; None keeps this worker's initial one."""

    def updater_state(self) -> bytes:
        """Return this worker's optimizer state, for other workers."""

    def save_residual(self) -> ResidualCheckpoint | None:
        """Save the residual for the next fit; return the file, or None if nothing was saved."""

    def add_saved_residuals(self, paths: tuple[str, ...]) -> None:
        """Add residuals that earlier fits saved at these paths."""


class OptimizerStateCopier(Protocol):
    """Interface that copies the optimizer state at a batch boundary, for other workers."""

    def at_boundary(self, state: Callable[[], bytes]) -> None:
        """Copy the state that ``state`` returns, if a copy was requested."""


class TrainingLoop:
    """The training loop of one worker: applies received items, and decides what follows.

    Args:
        replica: the parameters, to which commits are applied in order.
        driver: the owner of the loop, which trains and publishes.
        copier: copies the optimizer state for other workers.
        batches: minibatches per epoch.
        end: position at which training is finished.
        publish_every: steps between publications; None: publish when the last update is committed
            and at least ``LoopDriver.min_steps_per_update`` steps have been trained since.
    """

    __slots__ = (  # the simulator has one for each of 32,768 workers
        "_activity", "_answered", "_batches", "_copier", "_driver", "_end", "_grants",
        "_publish_every", "_replica", "_unpublished", "position", "sent", "steps",
    )  # fmt: skip

    def __init__(
        self,
        replica: LoopReplica,
        driver: LoopDriver,
        copier: OptimizerStateCopier,
        *,
        batches: int,
        end: Position,
        publish_every: int | None,
    ) -> None:
        self._replica, self._driver, self._copier = replica, driver, copier
        self._batches, self._end, self._publish_every = batches, end, publish_every
        self.position = Position(0, 0)
        self.sent = self.position  # position at the last publication, even if nothing reached tau
        self.steps = 0
        self._unpublished = 0
        self._activity = Activity.CATCHING_UP
        self._answered: set[tuple[Command, int, int]] = set()
        self._grants: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether all minibatches of this worker are trained."""
        return self.position >= self._end

    def at_boundary(self, items: Iterable[TrainerItem], directive: Directive) -> LoopAction:
        """Apply the items that came with this directive, in order; return what to do next."""
        for item in items:
            self._apply(item)
        self._copier.at_boundary(self._driver.updater_state)
        if items:
            self._driver.post(ev.CommitApplied(self._replica.commit))
        if directive.order is Command.END:
            return LoopAction.END
        if directive.order is Command.FAIL:
            return LoopAction.FAIL
        return self._follow_directive(directive)

    def _follow_directive(self, directive: Directive) -> LoopAction:
        """Answer the directive if it requires an answer; return what to do next."""
        is_too_far = directive.steps_max is not None and self.steps >= directive.steps_max
        match directive.order:
            case Command.TRAIN if not (self.finished or is_too_far):
                self._report_activity(Activity.STEPPING)
                return LoopAction.STEP
            case Command.PAUSE:
                self._post_once(directive, lambda: ev.TrainerPaused(directive.number))
                return LoopAction.WAIT
            case Command.DRAIN:
                self._post_once(directive, ev.TrainerDrained)
            case Command.AUDIT:
                self._post_once(directive, lambda: self._audit_event(directive.commit))
            case Command.RELEASE:
                self._post_once(directive, self._save_residual_for_release)
            case _:
                pass
        if self._activity is not Activity.CATCHING_UP:
            self._report_idle()
        return LoopAction.WAIT

    def _audit_event(self, commit: CommitNo) -> ev.Event:
        """Save the residual, and return the answer to an audit at ``commit``.

        The answer has the hash of the replica, and the file of the residual or None.
        """
        saved = self._driver.save_residual()
        return ev.ReplicaHashed(commit, self._replica.digest(), saved)

    def _save_residual_for_release(self) -> ev.Event:
        """Add saved residuals of earlier fits, save the sum, and return the answer to RELEASE."""
        self._add_saved_residuals()  # the worker may leave before it had a replica
        return ev.TrainerReleased(self._driver.save_residual())

    def _report_idle(self) -> None:
        """Post that this worker waits, or has trained all its minibatches."""
        self._report_activity(Activity.FINISHED if self.finished else Activity.WAITING)

    def _report_activity(self, activity: Activity) -> None:
        """Post an activity if it differs from the last one."""
        if activity is not self._activity:
            self._activity = activity
            self._driver.post(ev.ActivityChanged(activity))

    def _post_once(self, directive: Directive, answer: Callable[[], ev.Event]) -> None:
        """Post the result of ``answer``, unless this directive was answered before."""
        key = (directive.order, directive.commit, directive.number)
        if key not in self._answered:
            self._answered.add(key)
            self._driver.post(answer())

    def _apply(self, item: TrainerItem) -> None:
        """Apply one item of the inbox to the replica or the optimizer."""
        match item:
            case ev.ApplyCommit(update=update):
                if update.payload.form == BUFFERS:
                    self._replica.take_buffers(update.payload.data, update.commit)
                else:
                    self._replica.apply_update(update)
            case ev.OwnCommitted(commit=commit):
                self._replica.mark_committed(commit)
            case MergedCommits():
                self._replica.apply_merged(item)
            case ev.ApplyMergedRange():
                self._replica.apply_range(item)
            case ev.InstallSnapshot():
                self._replica.install(item)
                self._start()
            case ev.UseInitialReplica():
                self._replica.begin()
                self._start()
            case ev.InstallOptimizer(payload=payload):
                self._driver.load_optimizer_state(payload)
            case ev.IdAssigned(returned=False):
                self.position, self.steps = Position(item.epoch, item.batch), item.steps
                self.sent, self._grants = self.position, item.grants
            case ev.IdAssigned():
                pass  # the worker is back under a new id and keeps its state

    def _start(self) -> None:
        """Add saved residuals to the replica that was just installed, and report it to the node."""
        self._add_saved_residuals()
        self._driver.post(ev.ReplicaInstalled())
        if self._activity is Activity.CATCHING_UP:
            self._report_idle()

    def _add_saved_residuals(self) -> None:
        """Add residuals that earlier fits saved on this executor, once."""
        if self._grants:
            self._driver.add_saved_residuals(self._grants)
            self._grants = ()

    def after_step(self, directive: Directive) -> None:
        """Publish if it is due, and report progress after a step.

        ``directive`` is the current one, which may allow a publication that the directive at the
        start of the step did not.
        """
        is_due = self.is_update_due(directive)
        self._advance()
        if self.position.batch == 0:
            self._publish_buffers()
        if is_due:
            self._publish(directive.round_s)
        else:
            self._replica.accumulate_delta()
            self._post_progress()

    def is_update_due(self, directive: Directive) -> bool:
        """Return whether to publish an update after the current step.

        An update is due after the worker's last step. Before that, it is due every
        ``publish_every`` steps if that number is set. Otherwise it is due once the directive allows
        publications and the update contains ``LoopDriver.min_steps_per_update`` steps. If the
        directive has changed from TRAIN to another command, one step is enough.
        """
        if self._next_position() >= self._end:
            return True
        unpublished, every = self._unpublished + 1, self._publish_every
        if every is not None:
            return unpublished >= every
        if not directive.publishes:
            return False
        is_training = directive.order is Command.TRAIN
        wanted = self._driver.min_steps_per_update(directive.workers) if is_training else 1
        return unpublished >= wanted

    def _next_position(self) -> Position:
        """Return the position one minibatch further."""
        epoch, batch = self.position
        is_epoch_end = batch + 1 == self._batches
        return Position(epoch + 1, 0) if is_epoch_end else Position(epoch, batch + 1)

    def _advance(self) -> None:
        """Move the position forward by one minibatch."""
        self.position = self._next_position()
        self.steps += 1
        self._unpublished += 1

    def _publish_buffers(self) -> None:
        """Publish the model's buffers at an epoch's end, before the update that completes it."""
        buffers = self._driver.publish_buffers()
        if buffers:
            position = (*self.sent, self.steps - 1)
            seen = self._replica.commit
            self._driver.post(ev.UpdatePublished(Payload(BUFFERS, 0, 0, buffers), seen, *position))

    def _publish(self, commit_latency_s: float) -> None:
        """Publish residuals that reach the threshold; if there are none, only report progress.

        ``commit_latency_s`` is as for ``LoopDriver.publish``.
        """
        seen, payload = self._replica.commit, self._driver.publish(commit_latency_s)
        self._unpublished, self.sent = 0, self.position
        if payload is None:
            self._post_progress()
            return
        self._driver.post(ev.UpdatePublished(payload, seen, *self.sent, self.steps))

    def _post_progress(self) -> None:
        """Report the position up to which training is published.

        A step whose change is held back is not reported as trained: if this worker were lost, its
        residual would be lost too, and the step must be repeated.
        """
        self._driver.post(ev.StepCompleted(*self.sent, self.steps))
