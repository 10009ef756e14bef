"""A worker process under simulation: the node's machine and a trainer that obeys it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import Activity
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.events import Effect, Order
from sparkstrom.protocol.node import Identity, Node, NodeLimits
from sparkstrom.simulation.replica import SimLearner, SimReplica

Perform = Callable[["SimProcess", Effect], None]


class Made(NamedTuple):
    """An update as its trainer made it, with the minibatches ``first + 1`` to ``last`` in it."""

    first: int
    last: int
    payload: bytes


class SimProcess:
    """One attempt of one task."""

    def __init__(
        self,
        name: str,
        identity: Identity,
        limits: NodeLimits,
        epochs: int,
        seed: int,
        perform: Perform,
        now_s: float,
    ) -> None:
        self.name, self.identity = name, identity
        self._perform = perform
        self.node = Node(identity, limits, now_s)
        self.replica = SimReplica()
        self.learner = SimLearner(random.Random(seed))
        self._epochs = epochs
        self._inbox: deque[ev.Deliver | ev.Install] = deque()
        self.position = Position(0, 0)
        self.made: list[Made] = []
        self._reached = 0  # minibatch ordinal up to which its updates and reports reach
        self.steps = 0
        self._activity = Activity.CATCHING_UP
        self._done: set[str] = set()
        self.edge = 0
        self.awake_s = now_s
        self.alive = True

    def feed(self, event: ev.Event, now_s: float) -> None:
        """One event for the machine, and its effects performed."""
        for effect in self.node.step(event, now_s):
            match effect:
                case ev.Deliver() | ev.Install():
                    self._inbox.append(effect)
                case ev.Admitted(returned=False):
                    self.position = Position(effect.epoch, effect.batch)
                    self.steps = effect.steps
                    self._reached = self.ordinal
                case ev.Admitted():
                    pass
                case _:
                    self._perform(self, effect)

    @property
    def ordinal(self) -> int:
        """Minibatches up to here, counted through all epochs."""
        return self.position.epoch * self.identity.batches + self.position.batch

    def boundary(self, now_s: float) -> None:
        """What a trainer does between two batches."""
        self._drain_inbox(now_s)
        command = self.node.command
        finished = self.position >= Position(self._epochs, 0)
        match command.order:
            case Order.TRAIN if not finished and not self._beyond(command.steps_max):
                self._step(now_s)
            case Order.PAUSE:
                self._once(f"pause {command.number}", ev.Paused(command.number), now_s)
            case Order.DRAIN:
                self._once("drain", ev.Drained(), now_s)
            case Order.AUDIT:
                digest = self.replica.digest()
                self._once("audit", ev.Hashed(command.commit, digest, None), now_s)
            case Order.RELEASE:
                self._once("release", ev.Released(None), now_s)
            case Order.END | Order.FAIL:
                return
            case _:
                pass
        if command.order is not Order.PAUSE:
            self._say(self._idle_activity(), now_s)

    def _beyond(self, steps_max: int | None) -> bool:
        return steps_max is not None and self.steps >= steps_max

    def _idle_activity(self) -> Activity:
        finished = self.position >= Position(self._epochs, 0)
        if Activity.CATCHING_UP is self._activity and "installed" not in self._done:
            return Activity.CATCHING_UP
        return Activity.FINISHED if finished else Activity.WAITING

    def _say(self, activity: Activity, now_s: float) -> None:
        if activity is not self._activity:
            self._activity = activity
            self.feed(ev.Busy(activity), now_s)

    def _once(self, what: str, event: ev.Event, now_s: float) -> None:
        if what not in self._done:
            self._done.add(what)
            self.feed(event, now_s)

    def _drain_inbox(self, now_s: float) -> None:
        while self._inbox:
            match self._inbox.popleft():
                case ev.Deliver(update=update):
                    self.replica.apply(update)
                case ev.Install() as install:
                    self.replica.install(install)
                    self._done.add("installed")
                    self.feed(ev.Installed(), now_s)

    def _step(self, now_s: float) -> None:
        payload = self.learner.step()
        batch = self.position.batch + 1
        whole = batch == self.identity.batches
        self.position = Position(self.position.epoch + whole, 0 if whole else batch)
        self.steps += 1
        where = (self.position.epoch, self.position.batch, self.steps)
        if not payload:
            self.feed(ev.Progressed(*where), now_s)
            return
        self.replica.add(payload)
        self.made.append(Made(self._reached, self.ordinal, payload))
        self._reached = self.ordinal
        seen = self.replica.commit
        self.feed(ev.Published(0, 1, len(payload) // 2, payload, seen, *where), now_s)
