"""A worker process under simulation: the node's machine and a trainer that obeys it.

As in a real worker, a step takes time: it begins under the command that held at the boundary
before it, and ends with an event that the machine may not have expected any more.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

from sparkstrom.base.identity import Position
from sparkstrom.codec.copies import Copy
from sparkstrom.codec.messages import (
    BUFFERS,
    Activity,
    AskUpdater,
    Heartbeat,
    ResidualCheckpoint,
    UpdaterChunk,
)
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import ENDS, Directive, Effect, Order
from sparkstrom.protocol.worker.node import Identity, Node, NodeLimits
from sparkstrom.simulation.deaths import Doom, outlives
from sparkstrom.simulation.sim_replica import SimLearner, SimReplica, Theta, mass
from sparkstrom.simulation.weights import CHUNK_BYTES, Weights, padded

Item = (
    ev.Deliver | ev.Passed | ev.DeliverMerged | ev.Install | ev.Begin | ev.InstallUpdater
    | ev.Admitted
)  # fmt: skip
BUFFER = struct.Struct("<III")  # partition, attempt, epoch
UPDATER = struct.Struct("<III")  # attempt, steps, 1 where the state began fresh in mid-training
COPY_CHUNKS = 8  # so many that a lender may be gone before the last
STEP_S_MIN = 0.004
WEIGHTLESS = Weights()
ITEMS = frozenset(get_args(Item))
Perform = Callable[["SimProcess", Effect], None]
FAILURE = "training raised"


@dataclass(slots=True)
class Made:
    """An update as its trainer made it, with the minibatches ``first + 1`` to ``last`` in it."""

    first: int
    last: int
    payload: bytes
    commit: int | None = None  # once it has one
    buffers: bool = False


@dataclass(frozen=True, slots=True)
class EdgeEnd:
    """One end of an edge."""

    edge: int
    target: SimProcess | None  # who is at the other end; None: the master
    opened_s: float


@dataclass(frozen=True, slots=True)
class Cut:
    """A worker is out of reach."""

    until_s: float
    up: bool  # what it sends does not get out
    down: bool  # what is sent to it does not get there


@dataclass(slots=True)
class SentCount:
    """What one end has sent to another one, over whatever edges they had."""

    newest_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # control, data: last arrival
    messages: int = 0
    bytes: int = 0


class SimProcess:
    """One attempt of one task. ``scratch`` is what executors keep on disk, by path.

    ``clock``: how fast its clock goes, and what it shows at virtual time 0.
    """

    __slots__ = (  # there may be 32,768 of them, and each is touched at every commit
        "_activity", "_applied", "_buffered", "_copy", "_end", "_grants", "_hurry", "_inbox",
        "_is_fresh", "_perform", "_publish_every", "_rate", "_reached", "_replace", "_said",
        "_scratch", "_sent", "_shift_s", "_unpublished", "_wake", "added", "alive", "awake_s",
        "borrowed", "cut", "doom", "failing", "identity", "installed", "learner", "left", "limits",
        "links", "made", "me", "name", "node", "port", "position", "quiet", "replica", "slots",
        "slowness_s", "stepping", "steps", "tick_s", "ticks", "turn", "weights", "woken",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        identity: Identity,
        limits: NodeLimits,
        *,
        epochs: int,
        publish_every: int,
        seed: int,
        perform: Perform,
        wake: Callable[[SimProcess], None],
        hurry: Callable[[SimProcess], None],
        replace: Callable[[SimProcess], None],
        scratch: dict[str, Theta],
        now_s: float,
        clock: tuple[float, float] = (1.0, 0.0),
        buffered: bool = False,
        weights: Weights = WEIGHTLESS,
    ) -> None:
        self.name, self.identity, self.limits = name, identity, limits
        self._perform, self._scratch = perform, scratch
        self._wake, self._hurry = wake, hurry  # its trainer; its machine, which has to answer
        self._replace = replace  # its media driver, which died
        self.doom: Doom | None = None  # of that driver
        self._rate, self._shift_s = clock
        self.node = Node(identity, limits, self._rate * now_s + self._shift_s)
        self.replica = SimReplica(weights.chunk_bytes, whole=identity.whole)
        self.learner = SimLearner(random.Random(seed))
        self._end = Position(epochs if identity.rows else 0, 0)
        self._publish_every, self._unpublished = publish_every, 0
        self._inbox: deque[Item] = deque()
        self.position = Position(0, 0)
        self.steps = 0
        self._sent = self.position  # up to there nothing was held back
        self._reached = 0  # minibatch ordinal up to which its updates reach
        self.made: list[Made] = []
        self.quiet: set[int] = set()  # minibatches that sent nothing when they were trained
        self._grants: tuple[str, ...] = ()
        self.added: list[str] = []  # kept files that it has taken in
        self.left: ResidualCheckpoint | None = None  # what it has left for the next fit
        self._activity = Activity.CATCHING_UP
        self._said: set[tuple[Order, int, int]] = set()
        self.stepping = False  # inside a step, which began under an earlier command
        self._buffered, self.weights = buffered, weights
        self._copy: Copy | None = None  # of its updater's state, once somebody has asked for it
        self._is_fresh = False  # that state, although training had begun
        self.borrowed: list[bytes | None] = []
        self.installed = False
        self._applied = 0  # as its machine knows it
        self.failing = False
        self.port = 0  # a new one with each media driver, and each time it listens anew
        self.me = self.node.node  # by which id it sends and receives
        self.slots: dict[int, EdgeEnd] = {}  # its neighbours
        self.links: dict[SimProcess | None, SentCount] = {}  # to whomever it has sent
        self.cut: Cut | None = None
        self.awake_s = now_s
        self.turn = 0  # of its trainer: what was due for an earlier one is not done any more
        self.ticks, self.tick_s = 0, 0.0  # how many were planned, and for when the newest is
        self.woken = False  # its next turn is soon
        self.slowness_s = 0.0  # its steps take up to so long
        self.alive = True

    def leap(self, seconds: float) -> None:
        """Its clock goes forward."""
        self._shift_s += seconds

    def feed(self, event: ev.Event, now_s: float) -> None:
        """One event for the machine, and its effects performed; its media driver may die there."""
        before = self.node.command
        effects = self.node.step(event, self._rate * now_s + self._shift_s)
        lives = outlives(effects, self._carry, self.doom)
        command = self.node.command
        if self._inbox or (command is not before and command != before):
            self._wake(self)
        elif type(event) is ev.Received and type(event.message) is Heartbeat:
            self._hurry(self)
        if not lives:
            self._replace(self)

    def _carry(self, effect: Effect) -> None:
        """Out, one effect."""
        if type(effect) in ITEMS:
            self._inbox.append(effect)  # type: ignore[arg-type]
            if type(effect) is ev.Admitted:
                self.me = effect.node
        else:
            self._perform(self, effect)

    def answers_to(self, token: int, node: int | None) -> bool:
        """Is what the master says directly to these for it? Its endpoint opens nothing else."""
        return token == self.identity.token and node in (None, self.me)

    @property
    def ordinal(self) -> int:
        """Minibatches up to here, counted through all epochs."""
        return self.position.epoch * self.identity.batches + self.position.batch

    @property
    def goal(self) -> int:
        """Minibatches of all epochs."""
        return self._end.epoch * self.identity.batches

    @property
    def finished(self) -> bool:
        return self.position >= self._end

    # -- the trainer's loop ----------------------------------------------------------------------

    def boundary(self, now_s: float) -> bool:
        """The step under way ends; what came is taken in; then as the machine says.

        Return whether the replica may have changed.
        """
        changed = self.stepping or bool(self._inbox)
        if self.stepping:
            self.stepping = False
            self._finish_step(now_s)
        if self.failing:
            return changed
        command = self.node.command
        while self._inbox:
            self._take(self._inbox.popleft(), now_s)
        if self.replica.commit != self._applied:
            self._applied = self.replica.commit
            self.feed(ev.Applied(self._applied), now_s)
        if command.order not in ENDS:
            self._obey(command, now_s)
        return changed

    def fail(self, now_s: float) -> None:
        """Training raises at this boundary; from now on only the machine acts."""
        self.failing = True
        self.feed(ev.TrainerFailed(FAILURE, "trace"), now_s)

    def _obey(self, command: Directive, now_s: float) -> None:
        beyond = command.steps_max is not None and self.steps >= command.steps_max
        match command.order:
            case Order.TRAIN if not (self.finished or beyond):
                self.stepping = True
                self._say(Activity.STEPPING, now_s)
                return
            case Order.PAUSE:
                self._once(command, ev.Paused(command.number), now_s)
                return
            case Order.DRAIN:
                self._once(command, ev.Drained(), now_s)
            case Order.AUDIT if not self._has_said(command):
                hashed = ev.Hashed(command.commit, self.replica.digest(), self._keep())
                self._once(command, hashed, now_s)
            case Order.RELEASE if not self._has_said(command):
                self._take_grants()  # it may have to go before it had a replica
                self._once(command, ev.Released(self._keep()), now_s)
            case _:
                pass
        if self._activity is not Activity.CATCHING_UP:
            self._say(self._idle, now_s)

    @property
    def _idle(self) -> Activity:
        return Activity.FINISHED if self.finished else Activity.WAITING

    def _say(self, activity: Activity, now_s: float) -> None:
        if activity is not self._activity:
            self._activity = activity
            self.feed(ev.Busy(activity), now_s)

    def _has_said(self, command: Directive) -> bool:
        return (command.order, command.commit, command.number) in self._said

    def _once(self, command: Directive, event: ev.Event, now_s: float) -> None:
        if not self._has_said(command):
            self._said.add((command.order, command.commit, command.number))
            self.feed(event, now_s)

    def _keep(self) -> ResidualCheckpoint:
        path = f"{self.identity.executor}/{self.name}"
        self._scratch[path] = list(self.learner.residual)
        self.left = ResidualCheckpoint(path, mass(self.learner.residual))
        return self.left

    def _take(self, item: Item, now_s: float) -> None:
        match item:
            case ev.Deliver():
                self.replica.apply(item.update)
            case ev.Passed(commit=commit):
                self.replica.passed(commit)
            case ev.DeliverMerged():
                self.replica.apply_merged(item)
            case ev.Admitted(returned=False):
                self.position, self.steps = Position(item.epoch, item.batch), item.steps
                self._sent, self._reached = self.position, self.ordinal
                self._is_fresh = self.steps > 0 or self.ordinal > 0
                self._grants = item.grants
            case ev.Admitted():
                pass  # back under a new id, with everything as it was
            case ev.Install() | ev.Begin():
                self._install(item, now_s)
            case ev.InstallUpdater(payload=payload):
                self.borrowed.append(payload)
                self._is_fresh = payload is None

    def _install(self, install: ev.Install | ev.Begin, now_s: float) -> None:
        if isinstance(install, ev.Install):
            self.replica.install(install)
        self._take_grants()
        self.installed = True
        self.feed(ev.Installed(), now_s)
        if self._activity is Activity.CATCHING_UP:
            self._say(self._idle, now_s)

    def _take_grants(self) -> None:
        for path in self._grants:
            self.learner.add(self._scratch[path])
            self.added.append(path)
        self._grants = ()

    def _publish_buffers(self, now_s: float) -> None:
        """An epoch's statistics, ahead of its last position."""
        payload = BUFFER.pack(
            self.identity.partition, self.identity.attempt, self.position.epoch - 1
        )
        self.replica.publish_buffers()
        self.made.append(Made(self._reached, self._reached, payload, buffers=True))
        seen = self.replica.commit
        where = (self._sent.epoch, self._sent.batch, self.steps - 1)
        self.feed(ev.Published(BUFFERS, 0, 0, payload, seen, *where), now_s)

    # -- updaters --------------------------------------------------------------------------------

    def lend(self, ask: AskUpdater) -> UpdaterChunk:
        """Part of a copy of its updater's state; each of its parts says whose it is."""
        if self._copy is None:
            part = padded(
                UPDATER.pack(self.identity.attempt, self.steps, self._is_fresh), self.copy_bytes
            )
            count = max(COPY_CHUNKS, self.weights.updater_chunks)
            self._copy = Copy.of(part * count, self.copy_bytes)
        return self._copy.chunk(ask)

    @property
    def copy_bytes(self) -> int:
        """Of one part of it."""
        return CHUNK_BYTES if self.weights.params else UPDATER.size

    def _is_due(self) -> bool:
        """After so many steps, or as soon as the last publication is committed."""
        if self._publish_every:
            return self._unpublished >= self._publish_every
        return self.node.command.publishes

    def _finish_step(self, now_s: float) -> None:
        self.learner.step()
        batch = self.position.batch + 1
        whole = batch == self.identity.batches
        self.position = Position(self.position.epoch + whole, 0 if whole else batch)
        self.steps += 1
        self._unpublished += 1
        if whole and self._buffered:
            self._publish_buffers(now_s)
        payload = b""
        if self._is_due() or self.finished:
            self._unpublished, self._sent = 0, self.position
            payload = self.learner.publish()
            if payload:
                payload = padded(payload, self.weights.update_bytes)
            else:
                self.quiet |= set(range(self._reached + 1, self.ordinal + 1))
        where = (self._sent.epoch, self._sent.batch, self.steps)
        if not payload:
            self.feed(ev.Progressed(*where), now_s)
            return
        self.replica.publish(payload)
        self.made.append(Made(self._reached, self.ordinal, payload))
        self._reached = self.ordinal
        seen = self.replica.commit
        count = self.weights.entries or len(payload) // 2
        self.feed(ev.Published(0, 1, count, payload, seen, *where), now_s)
