"""A simulated worker process: the real protocol node and training loop, with a toy model.

The node exchanges messages and gives the trainer directives: train, pause, drain and so on. A
training step takes time, as in a real worker, and obeys the newest directive at its beginning. When
the step ends, there may already be another directive.
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
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command, Send
from sparkstrom.protocol.worker.node import Identity, Node, NodeLimits
from sparkstrom.runtime.optimizer_states import CHUNK_BYTES, OptimizerStateServer
from sparkstrom.runtime.training_loop import (
    CommitSum,
    LoopAction,
    TrainerEffect,
    TrainerInbox,
    TrainingLoop,
)
from sparkstrom.simulation.replica import (
    IntTheta,
    MessageSizes,
    SimLearner,
    SimReplica,
    SimSum,
    pad_payload,
    residual_mass,
)
from sparkstrom.simulation.run_options import DriverFault, perform_with_fault

BUFFERS_STRUCT = struct.Struct("<III")  # partition, attempt, epoch
OPTIMIZER_STRUCT = struct.Struct("<III")  # attempt, steps, 1: joined late without a state
OPTIMIZER_CHUNKS_MIN = 8  # enough that the sender may die before the last one
STEP_S_MIN = 0.004
UNPADDED = MessageSizes()
INBOX_EFFECTS = frozenset(get_args(TrainerEffect))
EffectHandler = Callable[["SimProcess", ev.Effect], None]
FAILURE_REASON = "training raised"
MOVE_AFTER_FAILURE = {Command.END: LoopAction.END, Command.FAIL: LoopAction.FAIL}


@dataclass(slots=True)
class PublishedUpdate:
    """An update of parameters, or a report of buffers, as its trainer published it."""

    first: int  # contains the minibatches first + 1 to last
    last: int  # number of the last minibatch in it
    payload: bytes  # encoded entries
    commit: CommitNo | None = None  # number of its commit; None: not committed yet
    buffers: bool = False  # a report of buffers, not an update of parameters


@dataclass(frozen=True, slots=True)
class EdgeEnd:
    """One end of an edge, the connection between a node and its parent in the tree."""

    edge: EdgeNo  # number of the edge
    target: SimProcess | None  # the process at the other end; None: the master
    opened_s: float  # virtual time


@dataclass(frozen=True, slots=True)
class Outage:
    """A time during which messages from a worker, to it, or both are blocked."""

    until_s: float  # virtual time of its end
    up: bool  # blocks messages from the worker
    down: bool  # blocks messages to the worker


@dataclass(slots=True)
class SentTraffic:
    """Counts of what one process has sent to another over all their edges."""

    newest_s: list[float] = field(default_factory=lambda: [0.0, 0.0])  # last arrival: control, data
    messages: int = 0  # counted only if the network has ``counts_traffic``
    bytes: int = 0  # size of these messages


class SimProcess:
    """One attempt at a worker's task, with its protocol node, trainer and edges.

    Args:
        name: name in messages to people.
        identity: what the process reports when it joins.
        limits: the node's deadlines and sizes.
        epochs: epochs to train.
        publish_every: steps between publications; 0: publish when the last one is committed.
        seed: seed of what its trainer learns.
        perform: performs the node's effects that concern the network or the task.
        wake_trainer: called when its waiting trainer has something to do.
        tick_soon: called when its node has something to report.
        replace_driver: called when its media driver (Aeron's process for UDP) has died.
        scratch: the executors' files, by path.
        time: virtual time.
        clock: rate of the process's own clock, and its value at virtual time 0.
        buffered: whether its model has buffers.
        message_sizes: sizes of its messages.
    """

    __slots__ = (  # there may be 32,768 of them, and each is touched at every commit
        "_buffered", "_clock_offset_s", "_end", "_has_fresh_optimizer", "_inbox", "_now_s",
        "_perform", "_rate", "_replace_driver", "_scratch", "_tick_soon", "_wake_trainer", "added",
        "alive", "borrowed", "cut", "driver_fault", "has_replica", "identity", "is_failing",
        "is_woken", "learner", "left", "lender", "limits", "links", "loop", "made", "me",
        "message_sizes", "name", "node", "paused_until_s", "port", "quiet", "replica", "slots",
        "step_s_max", "stepping", "tick_s", "ticks", "turn",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 -- parts and callbacks, by keyword
        self,
        name: str,
        identity: Identity,
        limits: NodeLimits,
        *,
        epochs: int,
        publish_every: int,
        seed: int,
        perform: EffectHandler,
        wake_trainer: Callable[[SimProcess], None],
        tick_soon: Callable[[SimProcess], None],
        replace_driver: Callable[[SimProcess], None],
        scratch: dict[str, IntTheta],
        time: Clock,
        clock: tuple[float, float] = (1.0, 0.0),
        buffered: bool = False,
        message_sizes: MessageSizes = UNPADDED,
    ) -> None:
        now_s = time.monotonic_s()
        self.name, self.identity, self.limits = name, identity, limits
        self._perform, self._scratch = perform, scratch
        self._wake_trainer, self._tick_soon = wake_trainer, tick_soon
        self._replace_driver = replace_driver
        self.driver_fault: DriverFault | None = None  # pending death of the media driver
        self._rate, self._clock_offset_s = clock
        self.node = Node(identity, limits, self._rate * now_s + self._clock_offset_s)
        self.message_sizes = message_sizes
        self._create_trainer(seed)
        self._inbox = TrainerInbox(limits.window_bytes, self._new_sum)
        self.lender = OptimizerStateServer(time, self.copy_bytes)
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
        self.made: list[PublishedUpdate] = []  # all updates that it published, in order
        self.quiet: set[int] = set()  # minibatches after which nothing was published
        self.added: list[str] = []  # residual files that it has added
        self.left: ResidualCheckpoint | None = None  # its residual file for the next fit
        self.stepping = False  # in a step, which began under an earlier directive
        self._buffered = buffered
        self.has_replica = False
        self._has_fresh_optimizer = False  # it joined late and received no optimizer state
        self.borrowed: list[bytes | None] = []  # optimizer states received; None: none available
        self.is_failing = False
        self.port = 0  # a new one for each media driver and each opening of streams
        self.me = self.node.node  # the id with which it sends and receives
        self.slots: dict[NodeId, EdgeEnd] = {}  # its edges, by neighbour
        self.links: dict[SimProcess | None, SentTraffic] = {}  # by receiver
        self.cut: Outage | None = None  # its newest outage
        self.paused_until_s = now_s
        self.turn = 0  # number of its trainer's next boundary; others that are scheduled are void
        self.ticks, self.tick_s = 0, 0.0  # number of scheduled ticks; time of the newest
        self.is_woken = False  # its next boundary is soon
        self.step_s_max = 0.0  # its longest step
        self.alive = True

    def _create_trainer(self, seed: int) -> None:
        """Create the process's replica and learner."""
        self.replica = SimReplica(self.message_sizes.chunk_bytes, whole=self.identity.whole)
        self.learner = SimLearner(random.Random(seed))

    def _new_sum(self) -> CommitSum:
        """Return an empty sum, for commits that wait for the trainer."""
        return SimSum()

    def advance_clock(self, seconds: float) -> None:
        """Set the process's own clock forward by ``seconds``."""
        self._clock_offset_s += seconds

    def handle(self, event: ev.Event, now_s: float) -> None:
        """Pass an event to the node and perform its effects.

        If an injected fault kills the media driver between two effects, replace the driver.
        """
        before = self.node.directive
        effects = self.node.step(event, self._rate * now_s + self._clock_offset_s)
        lives = not effects or perform_with_fault(effects, self._apply_effect, self.driver_fault)
        command = self.node.directive
        if self._inbox or (command is not before and command != before):
            self._wake_trainer(self)
        elif type(event) is ev.Received and type(event.message) is Heartbeat:
            self._tick_soon(self)
        if not lives:
            self._replace_driver(self)

    def _apply_effect(self, effect: ev.Effect) -> None:
        """Queue an effect for the trainer, or perform it."""
        if type(effect) in INBOX_EFFECTS:
            self._inbox.put(effect)  # type: ignore[arg-type]
            if type(effect) is ev.IdAssigned:
                self.me = effect.node
                if not effect.returned:
                    goes_on = (effect.epoch, effect.batch) > self.identity.start
                    self._has_fresh_optimizer = effect.steps > 0 or goes_on
        else:
            self._perform(self, effect)

    def accepts_direct(self, token: int, node: NodeId | None) -> bool:
        """Return True if a direct message to this token and node id is for this process."""
        return token == self.identity.token and node in (None, self.me)

    def _minibatch_number(self, position: Position) -> int:
        """Return the number of minibatches before a position, over all epochs."""
        return position.epoch * self.identity.batches + position.batch

    @property
    def steps(self) -> int:
        """Steps trained by this process."""
        return self.loop.steps

    @property
    def minibatches_total(self) -> int:
        """Minibatches of all epochs."""
        return self._minibatch_number(self._end)

    @property
    def finished(self) -> bool:
        """Whether it has trained all minibatches."""
        return self.loop.finished

    @property
    def waiting(self) -> int:
        """Number of items in the inbox since its last boundary."""
        return len(self._inbox)

    def run_boundary(self, now_s: float) -> LoopAction:
        """End the running step, apply waiting items, and return what to do next."""
        self._now_s, stepped, self.stepping = now_s, self.stepping, False
        if self.is_failing:
            return MOVE_AFTER_FAILURE.get(self.node.directive.order, LoopAction.WAIT)
        if stepped:
            self.learner.step()
            self.loop.after_step(self.node.directive)
        move = self.loop.at_boundary(self._inbox.take(), self.node.directive)
        self.stepping = move is LoopAction.STEP
        self.send_optimizer_chunks()
        return move

    def send_optimizer_chunks(self) -> None:
        """Send requested chunks of the optimizer state, if a copy exists."""
        for to, chunk in self.lender.ready_chunks():
            self._perform(self, Send(to, chunk))

    def fail(self, now_s: float) -> None:
        """Make training raise an exception; from now on, only the node acts."""
        self.is_failing = True
        self.handle(ev.TrainerFailed(FAILURE_REASON, "trace"), now_s)

    # The methods below implement ``runtime.training_loop.LoopDriver``.

    def post(self, event: ev.Event) -> None:
        """Pass a trainer's event to the node at once."""
        self.has_replica |= type(event) is ev.ReplicaInstalled
        self.handle(event, self._now_s)

    def publish(self, commit_latency_s: float) -> Payload | None:
        """Return an update of what reached the threshold, padded to realistic size.

        Return None if nothing reached it. ``commit_latency_s`` is ignored.
        """
        first = self._minibatch_number(self.loop.sent)
        last = self._minibatch_number(self.loop.position)
        payload = self.learner.publish()
        if not payload:
            self.quiet |= set(range(first + 1, last + 1))
            return None
        payload = pad_payload(payload, self.message_sizes.update_bytes)
        self.replica.publish(payload)
        self.made.append(PublishedUpdate(first, last, payload))
        return Payload(0, 1, self.message_sizes.entries or len(payload) // 2, payload)

    def min_steps_per_update(self, workers: int) -> int:
        """Return 1 or 2 by partition, so that a fit contains workers with each number."""
        return 1 + self.identity.partition % 2

    def publish_buffers(self) -> bytes:
        """Return buffers that identify partition, attempt and epoch; empty if there are none."""
        if not self._buffered:
            return b""
        who, sent = self.identity, self._minibatch_number(self.loop.sent)
        payload = BUFFERS_STRUCT.pack(who.partition, who.attempt, self.loop.position.epoch - 1)
        self.replica.publish_buffers()
        self.made.append(PublishedUpdate(sent, sent, payload, buffers=True))
        return payload

    def load_optimizer_state(self, payload: bytes | None) -> None:
        """Record the optimizer state with which training starts; None: a fresh one."""
        self.borrowed.append(payload)
        self._has_fresh_optimizer = payload is None

    def updater_state(self) -> bytes:
        """Return an optimizer state, each chunk of which identifies this attempt."""
        state = OPTIMIZER_STRUCT.pack(self.identity.attempt, self.steps, self._has_fresh_optimizer)
        count = max(OPTIMIZER_CHUNKS_MIN, self.message_sizes.optimizer_chunks)
        return pad_payload(state, self.copy_bytes) * count

    def save_residual(self) -> ResidualCheckpoint:
        """Write the residual to the executor's disk for the next fit; return its path and mass."""
        path = f"{self.identity.executor}/{self.name}"
        self._scratch[path] = list(self.learner.residual)
        self.left = ResidualCheckpoint(path, residual_mass(self.learner.residual))
        return self.left

    def add_saved_residuals(self, paths: tuple[str, ...]) -> None:
        """Add the residuals of an earlier fit from the executor's disk."""
        for path in paths:
            self._add_kept_residual(self._scratch[path])
            self.added.append(path)

    def _add_kept_residual(self, residual: IntTheta) -> None:
        """Add one residual of an earlier fit."""
        self.learner.add(residual)

    @property
    def copy_bytes(self) -> int:
        """Size in bytes of one chunk (part) of its optimizer state."""
        return CHUNK_BYTES if self.message_sizes.params else OPTIMIZER_STRUCT.size
