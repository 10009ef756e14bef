"""Training loop: what a worker's trainer does at each batch boundary, and after each step.

It does no I/O, has no thread and asks no clock. In production the task's thread drives it
(``runtime.trainer``), in simulation virtual time does: what simulation proves, it proves of this.
Between ``at_boundary`` and ``after_step`` a step takes its time, and other orders may come.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from sparkstrom.base.identity import CommitNo, Position
from sparkstrom.codec.messages import BUFFERS, Activity, Committed, Payload, ResidualCheckpoint
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Directive, Order
from sparkstrom.runtime.trainer_inbox import Item, Merged


class Move(enum.Enum):
    """What comes after a batch boundary."""

    STEP = "step"  # train on the minibatch at ``position``, then say so: ``after_step``
    WAIT = "wait"  # until there is an item or another order
    END = "end"  # the task ends with success
    FAIL = "fail"  # the task fails


class LoopReplica(Protocol):
    """The replica that the loop keeps in commit order."""

    @property
    def commit(self) -> CommitNo: ...
    def apply_update(self, update: Committed) -> None: ...
    def take_buffers(self, buffers: bytes, commit: CommitNo) -> None: ...
    def passed(self, commit: CommitNo) -> None: ...
    def apply_merged(self, merged: Merged[Any]) -> None: ...
    def apply_range(self, item: ev.DeliverMerged) -> None: ...
    def install(self, install: ev.Install) -> None: ...
    def begin(self) -> None: ...
    def hold_back(self) -> None: ...
    def digest(self) -> str: ...


class LoopOwner(Protocol):
    """Who drives the loop: its way to the node, and what lies outside the replica."""

    def post(self, event: ev.Event) -> None:
        """Tell the node."""

    def publish(self, round_s: float) -> Payload | None:
        """What of all that was learnt goes out now, already added to the replica; None: nothing.

        ``round_s``: so long the way from a publication to its commit was, lately.
        """

    def report_buffers(self) -> bytes:
        """The model's buffers at an epoch's end; empty where it has none."""

    def load_updater(self, payload: bytes | None) -> None:
        """Go on with another worker's updater state; None: with a fresh one."""

    def updater_state(self) -> bytes:
        """Its own, for others."""

    def keep(self) -> ResidualCheckpoint | None:
        """Leave the residual for the next fit."""

    def grant(self, paths: tuple[str, ...]) -> None:
        """Add what earlier fits left there."""


class Lender(Protocol):
    """Copies the updater's state at a boundary, where somebody wants it."""

    def at_boundary(self, state: Callable[[], bytes]) -> None: ...


class TrainingLoop:
    """One worker's. ``publish_every``: steps; None: when the last publication is committed."""

    __slots__ = (  # the simulator has one for each of 32,768 workers
        "_activity", "_answers", "_batches", "_end", "_grants", "_lender", "_owner",
        "_publish_every", "_replica", "_unpublished", "position", "sent", "steps",
    )  # fmt: skip

    def __init__(
        self,
        replica: LoopReplica,
        owner: LoopOwner,
        lender: Lender,
        *,
        batches: int,
        end: Position,
        publish_every: int | None,
    ) -> None:
        self._replica, self._owner, self._lender = replica, owner, lender
        self._batches, self._end, self._publish_every = batches, end, publish_every
        self.position = Position(0, 0)
        self.sent = self.position  # up to there, what was learnt has been published where it could
        self.steps = 0
        self._unpublished = 0
        self._activity = Activity.CATCHING_UP
        self._answers: set[tuple[Order, int, int]] = set()
        self._grants: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.position >= self._end

    # -- at a batch boundary ---------------------------------------------------------------------

    def at_boundary(self, items: Iterable[Item], directive: Directive) -> Move:
        """Take in what came with this directive, in order, and say what follows from it."""
        for item in items:
            self._take(item)
        self._lender.at_boundary(self._owner.updater_state)
        if items:
            self._owner.post(ev.Applied(self._replica.commit))
        if directive.order is Order.END:
            return Move.END
        if directive.order is Order.FAIL:
            return Move.FAIL
        return self._obey(directive)

    def _obey(self, directive: Directive) -> Move:
        beyond = directive.steps_max is not None and self.steps >= directive.steps_max
        match directive.order:
            case Order.TRAIN if not (self.finished or beyond):
                self._say(Activity.STEPPING)
                return Move.STEP
            case Order.PAUSE:
                self._once(directive, lambda: ev.Paused(directive.number))
                return Move.WAIT
            case Order.DRAIN:
                self._once(directive, ev.Drained)
            case Order.AUDIT:
                self._once(directive, lambda: self._hashed(directive.commit))
            case Order.RELEASE:
                self._once(directive, self._released)
            case _:
                pass
        if self._activity is not Activity.CATCHING_UP:
            self._say_idle()
        return Move.WAIT

    def _hashed(self, commit: CommitNo) -> ev.Event:
        kept = self._owner.keep()
        return ev.Hashed(commit, self._replica.digest(), kept)

    def _released(self) -> ev.Event:
        self._take_grants()  # it may have to go before it had a replica
        return ev.Released(self._owner.keep())

    def _say_idle(self) -> None:
        self._say(Activity.FINISHED if self.finished else Activity.WAITING)

    def _say(self, activity: Activity) -> None:
        if activity is not self._activity:
            self._activity = activity
            self._owner.post(ev.Busy(activity))

    def _once(self, directive: Directive, answer: Callable[[], ev.Event]) -> None:
        """Make and post the answer to an order that has none yet."""
        key = (directive.order, directive.commit, directive.number)
        if key not in self._answers:
            self._answers.add(key)
            self._owner.post(answer())

    # -- what comes in ---------------------------------------------------------------------------

    def _take(self, item: Item) -> None:
        match item:
            case ev.Deliver(update=update):
                if update.payload.form == BUFFERS:
                    self._replica.take_buffers(update.payload.data, update.commit)
                else:
                    self._replica.apply_update(update)
            case ev.Passed(commit=commit):
                self._replica.passed(commit)
            case Merged():
                self._replica.apply_merged(item)
            case ev.DeliverMerged():
                self._replica.apply_range(item)
            case ev.Install():
                self._replica.install(item)
                self._go_on()
            case ev.Begin():
                self._replica.begin()
                self._go_on()
            case ev.InstallUpdater(payload=payload):
                self._owner.load_updater(payload)
            case ev.Admitted(returned=False):
                self.position, self.steps = Position(item.epoch, item.batch), item.steps
                self.sent, self._grants = self.position, item.grants
            case ev.Admitted():
                pass  # back under a new id, with replica, residual and position as they were

    def _go_on(self) -> None:
        """There is a replica."""
        self._take_grants()
        self._owner.post(ev.Installed())
        if self._activity is Activity.CATCHING_UP:
            self._say_idle()

    def _take_grants(self) -> None:
        """Add what earlier fits left on this executor, once."""
        if self._grants:
            self._owner.grant(self._grants)
            self._grants = ()

    # -- after a step ----------------------------------------------------------------------------

    def after_step(self, directive: Directive) -> None:
        """A step is done: publish where it is time for it, and say how far it is.

        The directive is the one that holds now: what was under way when the step began may be
        committed.
        """
        self._advance()
        is_due = self.finished or self._is_due(directive)
        if self.position.batch == 0:
            self._publish_buffers()
        if is_due:
            self._publish(directive.round_s)
        else:
            self._replica.hold_back()
            self._post_progress()

    def _advance(self) -> None:
        epoch, batch = self.position
        whole = batch + 1 == self._batches
        self.position = Position(epoch + 1, 0) if whole else Position(epoch, batch + 1)
        self.steps += 1
        self._unpublished += 1

    def _is_due(self, directive: Directive) -> bool:
        """After so many steps; or as soon as the link has carried what was published before."""
        every = self._publish_every
        return directive.publishes if every is None else self._unpublished >= every

    def _publish_buffers(self) -> None:
        """Before the epoch's last position: once that is committed, so are the buffers."""
        buffers = self._owner.report_buffers()
        if buffers:
            where = (*self.sent, self.steps - 1)
            seen = self._replica.commit
            self._owner.post(ev.Published(Payload(BUFFERS, 0, 0, buffers), seen, *where))

    def _publish(self, round_s: float) -> None:
        seen, made = self._replica.commit, self._owner.publish(round_s)
        self._unpublished, self.sent = 0, self.position
        if made is None:
            self._post_progress()
            return
        self._owner.post(ev.Published(made, seen, *self.sent, self.steps))

    def _post_progress(self) -> None:
        """How far it is.

        A step that is held back is not claimed as trained: were this worker lost, its residual
        would be, too, and the step has to be taken again.
        """
        self._owner.post(ev.Progressed(*self.sent, self.steps))
