"""A worker process under simulation: the node's machine and a trainer that obeys it.

As in a real worker, a step takes time: it begins under the command that held at the boundary
before it, and ends with an event that the machine may not have expected any more.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import get_args

from sparkstrom.base.clock import Clock
from sparkstrom.base.identity import CommitNo, EdgeNo, NodeId, Position
from sparkstrom.codec.messages import Heartbeat, Payload, ResidualCheckpoint
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Order, Send
from sparkstrom.protocol.worker.node import Identity, Node, NodeLimits
from sparkstrom.runtime.optimizer_lending import CHUNK_BYTES, OptimizerLender
from sparkstrom.runtime.trainer_inbox import CommitSum, Effect, TrainerInbox
from sparkstrom.runtime.training_loop import Move, TrainingLoop
from sparkstrom.simulation.deaths import Doom, outlives
from sparkstrom.simulation.sim_replica import SimLearner, SimReplica, SimSum, Theta, mass
from sparkstrom.simulation.weights import Weights, padded

BUFFER = struct.Struct("<III")  # partition, attempt, epoch
UPDATER = struct.Struct("<III")  # attempt, steps, 1 where the state began fresh in mid-training
COPY_CHUNKS = 8  # so many that a lender may be gone before the last
STEP_S_MIN = 0.004
WEIGHTLESS = Weights()
ITEMS = frozenset(get_args(Effect))
Perform = Callable[["SimProcess", ev.Effect], None]
FAILURE = "training raised"
FAILED_BY = {Order.END: Move.END, Order.FAIL: Move.FAIL}  # how a task ends whose training raised


@dataclass(slots=True)
class Made:
    """An update as its trainer made it, with the minibatches ``first + 1`` to ``last`` in it."""

    first: int
    last: int
    payload: bytes
    commit: CommitNo | None = None  # once it has one
    buffers: bool = False


@dataclass(frozen=True, slots=True)
class EdgeEnd:
    """One end of an edge."""

    edge: EdgeNo
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
        "_buffered", "_end", "_hurry", "_inbox", "_is_fresh", "_now_s", "_perform", "_rate",
        "_replace", "_scratch", "_shift_s", "_wake", "added", "alive", "awake_s", "borrowed", "cut",
        "doom", "failing", "identity", "installed", "learner", "left", "lender", "limits", "links",
        "loop", "made", "me", "name", "node", "port", "quiet", "replica", "slots", "slowness_s",
        "stepping", "tick_s", "ticks", "turn", "weights", "woken",
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
        time: Clock,
        clock: tuple[float, float] = (1.0, 0.0),
        buffered: bool = False,
        weights: Weights = WEIGHTLESS,
    ) -> None:
        now_s = time.monotonic_s()
        self.name, self.identity, self.limits = name, identity, limits
        self._perform, self._scratch = perform, scratch
        self._wake, self._hurry = wake, hurry  # its trainer; its machine, which has to answer
        self._replace = replace  # its media driver, which died
        self.doom: Doom | None = None  # of that driver
        self._rate, self._shift_s = clock
        self.node = Node(identity, limits, self._rate * now_s + self._shift_s)
        self.weights = weights
        self._inbox = TrainerInbox(limits.window_bytes, self._train_with(seed))
        self.lender = OptimizerLender(time, self.copy_bytes)
        self._end = Position(epochs if identity.rows else 0, 0)
        self.loop = TrainingLoop(
            self.replica,
            self,
            self.lender,
            batches=identity.batches,
            end=self._end,
            publish_every=publish_every or None,
        )
        self._now_s = now_s  # at its last boundary
        self.made: list[Made] = []
        self.quiet: set[int] = set()  # minibatches that sent nothing when they were trained
        self.added: list[str] = []  # kept files that it has taken in
        self.left: ResidualCheckpoint | None = None  # what it has left for the next fit
        self.stepping = False  # inside a step, which began under an earlier command
        self._buffered = buffered
        self.installed = False  # a replica
        self._is_fresh = False  # its updater's state, although training had begun
        self.borrowed: list[bytes | None] = []
        self.failing = False
        self.port = 0  # a new one with each media driver, and each time it listens anew
        self.me = self.node.node  # by which id it sends and receives
        self.slots: dict[NodeId, EdgeEnd] = {}  # its neighbours
        self.links: dict[SimProcess | None, SentCount] = {}  # to whomever it has sent
        self.cut: Cut | None = None
        self.awake_s = now_s
        self.turn = 0  # of its trainer: what was due for an earlier one is not done any more
        self.ticks, self.tick_s = 0, 0.0  # how many were planned, and for when the newest is
        self.woken = False  # its next turn is soon
        self.slowness_s = 0.0  # its steps take up to so long
        self.alive = True

    def _train_with(self, seed: int) -> Callable[[], CommitSum]:
        """Have a replica and a learner; return what sums commits that wait for these."""
        self.replica = SimReplica(self.weights.chunk_bytes, whole=self.identity.whole)
        self.learner = SimLearner(random.Random(seed))
        return SimSum

    def leap(self, seconds: float) -> None:
        """Its clock goes forward."""
        self._shift_s += seconds

    def feed(self, event: ev.Event, now_s: float) -> None:
        """One event for the machine, and its effects performed; its media driver may die there."""
        before = self.node.command
        effects = self.node.step(event, self._rate * now_s + self._shift_s)
        lives = not effects or outlives(effects, self._carry, self.doom)
        command = self.node.command
        if self._inbox or (command is not before and command != before):
            self._wake(self)
        elif type(event) is ev.Received and type(event.message) is Heartbeat:
            self._hurry(self)
        if not lives:
            self._replace(self)

    def _carry(self, effect: ev.Effect) -> None:
        """Out, one effect."""
        if type(effect) in ITEMS:
            self._inbox.put(effect)  # type: ignore[arg-type]
            if type(effect) is ev.Admitted:
                self.me = effect.node
                if not effect.returned:
                    goes_on = (effect.epoch, effect.batch) > self.identity.start
                    self._is_fresh = effect.steps > 0 or goes_on
        else:
            self._perform(self, effect)

    def answers_to(self, token: int, node: NodeId | None) -> bool:
        """Is what the master says directly to these for it? Its endpoint opens nothing else."""
        return token == self.identity.token and node in (None, self.me)

    def _ordinal(self, position: Position) -> int:
        """Minibatches up to there, counted through all epochs."""
        return position.epoch * self.identity.batches + position.batch

    @property
    def steps(self) -> int:
        return self.loop.steps

    @property
    def goal(self) -> int:
        """Minibatches of all epochs."""
        return self._ordinal(self._end)

    @property
    def finished(self) -> bool:
        return self.loop.finished

    # -- the trainer -----------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Items that came since its last boundary."""
        return len(self._inbox)

    def boundary(self, now_s: float) -> Move:
        """The step under way ends; what came is taken in; then as the machine says."""
        self._now_s, stepped, self.stepping = now_s, self.stepping, False
        if self.failing:
            return FAILED_BY.get(self.node.command.order, Move.WAIT)
        if stepped:
            self.learner.step()
            self.loop.after_step(self.node.command)
        move = self.loop.at_boundary(self._inbox.take(), self.node.command)
        self.stepping = move is Move.STEP
        self.lend()
        return move

    def lend(self) -> None:
        """Answer who wants its updater's state, where there is a copy."""
        for to, chunk in self.lender.answers():
            self._perform(self, Send(to, chunk))

    def fail(self, now_s: float) -> None:
        """Training raises, in the step under way if there is one; then only the machine acts."""
        self.failing = True
        self.feed(ev.TrainerFailed(FAILURE, "trace"), now_s)

    # -- what the training loop asks for ---------------------------------------------------------

    def post(self, event: ev.Event) -> None:
        """Its machine hears at once."""
        self.installed |= type(event) is ev.Installed
        self.feed(event, self._now_s)

    def publish(self, round_s: float) -> Payload | None:
        """What reached the threshold, as long as it would be."""
        first, last = self._ordinal(self.loop.sent), self._ordinal(self.loop.position)
        payload = self.learner.publish()
        if not payload:
            self.quiet |= set(range(first + 1, last + 1))
            return None
        payload = padded(payload, self.weights.update_bytes)
        self.replica.publish(payload)
        self.made.append(Made(first, last, payload))
        return Payload(0, 1, self.weights.entries or len(payload) // 2, payload)

    def report_buffers(self) -> bytes:
        """An epoch's statistics, which say whose and of when they are."""
        if not self._buffered:
            return b""
        who, sent = self.identity, self._ordinal(self.loop.sent)
        payload = BUFFER.pack(who.partition, who.attempt, self.loop.position.epoch - 1)
        self.replica.publish_buffers()
        self.made.append(Made(sent, sent, payload, buffers=True))
        return payload

    def load_updater(self, payload: bytes | None) -> None:
        """Somebody's state, or a fresh one."""
        self.borrowed.append(payload)
        self._is_fresh = payload is None

    def updater_state(self) -> bytes:
        """Each part of it says whose it is."""
        state = UPDATER.pack(self.identity.attempt, self.steps, self._is_fresh)
        count = max(COPY_CHUNKS, self.weights.updater_chunks)
        return padded(state, self.copy_bytes) * count

    def keep(self) -> ResidualCheckpoint:
        """Onto the executor's disk."""
        path = f"{self.identity.executor}/{self.name}"
        self._scratch[path] = list(self.learner.residual)
        self.left = ResidualCheckpoint(path, mass(self.learner.residual))
        return self.left

    def grant(self, paths: tuple[str, ...]) -> None:
        """From there."""
        for path in paths:
            self._grant_one(self._scratch[path])
            self.added.append(path)

    def _grant_one(self, residual: Theta) -> None:
        self.learner.add(residual)

    @property
    def copy_bytes(self) -> int:
        """Of one part of its updater's state."""
        return CHUNK_BYTES if self.weights.params else UPDATER.size
