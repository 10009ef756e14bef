"""What these tests share: messages with defaults, and machines brought to where a test begins."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import (
    Activity,
    Address,
    Behind,
    Chunk,
    Closed,
    Committed,
    Join,
    Message,
    Phase,
    Report,
    State,
    Update,
    Welcome,
)
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.fit import MasterLimits
from sparkstrom.protocol.master import Master
from sparkstrom.protocol.node import Identity, Node, NodeLimits

HERE = Address("here", 7, 10, 11)
UP = Address("master", 1, 1002, 1003)


class Make:
    """Messages by their telling fields."""

    def update(self, origin: int, seq: int, payload: bytes = b"abcd", **fields: Any) -> Update:
        given = {"seen": 0, "epoch": 0, "batch": seq, "steps": seq, "form": 0, "tau_quanta": 2}
        given |= {"count": len(payload)} | fields
        return Update(origin=origin, seq=seq, payload=payload, **given)

    def committed(self, commit: int, origin: int = 9, payload: bytes = b"abcd") -> Committed:
        return Committed(
            commit=commit,
            origin=origin,
            seq=commit,
            form=0,
            tau_quanta=2,
            count=len(payload),
            payload=payload,
        )

    def join(self, partition: int = 0, token: int = 0, **fields: Any) -> Join:
        given = {
            "token": token or 100 + partition, "count": 1, "edge": 1, "partition": partition,
            "attempt": 10 + partition, "rows": 7, "checksum": 5, "batches": 3, "address": HERE,
            "host": "h", "executor": "e", "pid": 1, "version": "v", "have": 0,
            "has_replica": False,
        }  # fmt: skip
        return Join(**(given | fields))

    def report(self, **fields: Any) -> Report:
        given = {
            "edge": 1, "received": 0, "after_seq": 0, "epoch": 0, "batch": 0, "steps": 0,
            "activity": Activity.WAITING,
        }  # fmt: skip
        return Report(**(given | fields))

    def welcome(self, node: int = 1, **fields: Any) -> Welcome:
        given = {
            "token": 1, "count": 1, "edge": 1, "up": UP, "base": 0, "snapshot": True, "chunks": 1,
            "last": [(node, 0)], "closed": [], "epoch": 0, "batch": 0, "steps": 0, "grants": [],
        }  # fmt: skip
        return Welcome(node=node, **(given | fields))

    def state(self, phase: Phase = Phase.RUNNING, **fields: Any) -> State:
        given = {"head": 0, "final": 0, "slowest": 0, "last_seq": 0}
        return State(phase=phase, **(given | fields))

    def closed(self, node: int, seq: int = 0, *, free: bool = True, **fields: Any) -> Closed:
        given: dict[str, Any] = {"token": 1, "count": 1, "reason": "its lease ran out"} | fields
        return Closed(node=node, seq=seq, free=free, **given)

    def behind(self, base: int, last: list[tuple[int, int]] | None = None) -> Behind:
        return Behind(base, 1, last or [])

    def chunk(self, commit: int, index: int = 0) -> Chunk:
        return Chunk(index=index, commit=commit, payload=b"theta")

    def published(self, batch: int = 1, payload: bytes = b"abcd", epoch: int = 0) -> ev.Published:
        return ev.Published(0, 2, len(payload), payload, 0, epoch, batch, batch)


class NodeDriver:
    """A node's machine and what it wanted last."""

    def __init__(self, make: Make, **limits: Any) -> None:
        self.make = make
        identity = Identity(1, 0, 10, 7, 5, 3, "h", "e", 1, "v")
        self.machine = Node(identity, NodeLimits(**limits), 0.0)
        self.me = self.machine.standing
        self.now_s = 0.0

    def step(self, event: ev.Event, after_s: float = 0.0) -> list[ev.Effect]:
        self.now_s += after_s
        return self.machine.step(event, self.now_s)

    def hear(self, message: Message, after_s: float = 0.0) -> list[ev.Effect]:
        return self.step(ev.Received(0, message), after_s)

    def tick(self, after_s: float = 0.0) -> list[ev.Effect]:
        return self.step(ev.Tick(), after_s)

    @property
    def order(self) -> ev.Order:
        return self.machine.command.order

    def joined(self) -> NodeDriver:
        """Welcomed, and its first snapshot asked for."""
        self.step(ev.Opened(HERE))
        self.hear(self.make.welcome())
        return self

    def training(self) -> NodeDriver:
        """It holds a replica as of commit 0 and trains."""
        self.joined()
        self.hear(self.make.chunk(0))
        self.step(ev.Paused(1))
        self.tick()
        self.step(ev.Installed())
        self.step(ev.Busy(Activity.WAITING))
        self.hear(self.make.state())
        assert self.order is ev.Order.TRAIN
        return self


class MasterDriver:
    """The master's machine."""

    def __init__(self, make: Make, partitions: int = 2, **given: Any) -> None:
        self.make = make
        fields: dict[str, Any] = {"epochs": 2, "chunks": 1, "kept": None} | {
            name: given.pop(name) for name in ("epochs", "chunks", "kept") if name in given
        }
        self.machine = Master(
            version="v",
            partitions=partitions,
            host="master",
            port=1,
            limits=MasterLimits(**given),
            now_s=0.0,
            **fields,
        )
        self.fit = self.machine.fit
        self.now_s = 0.0

    def step(self, event: ev.Event, after_s: float = 0.0) -> list[ev.Effect]:
        self.now_s += after_s
        return self.machine.step(event, self.now_s)

    def hear(self, sender: int, message: Message, after_s: float = 0.0) -> list[ev.Effect]:
        return self.step(ev.Received(sender, message), after_s)

    def join(self, partition: int = 0, **fields: Any) -> list[ev.Effect]:
        return self.hear(-1, self.make.join(partition, **fields))

    def tick(self, after_s: float = 0.0) -> list[ev.Effect]:
        return self.step(ev.Tick(), after_s)

    @property
    def phase(self) -> Phase:
        return self.fit.phases.phase

    def running(self) -> MasterDriver:
        """All have joined and hold a replica; ids are 1, 2 and so on."""
        for partition in range(len(self.fit.partitions)):
            self.join(partition)
        for node in list(self.fit.members.live):
            self.hear(node, self.make.report())
        assert self.phase is Phase.RUNNING
        return self

    def evict(self, node: int) -> list[ev.Effect]:
        """This one is silent for a lease, the others are not."""
        effects: list[ev.Effect] = []
        for _ in range(6):
            effects += self.tick(self.fit.limits.lease_s / 5)
            for other in list(self.fit.members.live):
                if other != node:
                    steps = self.fit.members.live[other].steps
                    self.hear(other, self.make.report(steps=steps))
        assert node not in self.fit.members.live
        return effects


@pytest.fixture
def make() -> Make:
    return Make()


@pytest.fixture
def node(make: Make) -> NodeDriver:
    return NodeDriver(make)


@pytest.fixture
def node_with(make: Make) -> Any:
    return lambda **limits: NodeDriver(make, **limits)


@pytest.fixture
def master(make: Make) -> MasterDriver:
    return MasterDriver(make)


@pytest.fixture
def master_with(make: Make) -> Any:
    return lambda **given: MasterDriver(make, **given)
