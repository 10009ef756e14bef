"""Helpers and fixtures of these tests: messages with defaults, and drivers for node and master."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.base.identity import MASTER, Endpoint
from sparkstrom.codec.messages import (
    Activity,
    Address,
    Adopt,
    Attach,
    AttachReply,
    Chunk,
    Commit,
    Heartbeat,
    IdClosed,
    Join,
    MergedRange,
    Message,
    Payload,
    Phase,
    SnapshotRequired,
    State,
    Status,
    Update,
    Welcome,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.master import Master
from sparkstrom.protocol.master.members import MasterLimits, Member
from sparkstrom.protocol.worker.node import Identity, Node, NodeLimits
from tests.unit.protocol.meshes import MESH
from tests.unit.protocol.parents import Parent

HERE = Address("here", 7, 10, 11)
UP = Address("above", 1, 1002, 1003)
DIRECTLY = None  # the sender of a message that a process sends directly to the master


class Make:
    """A factory of messages; fields that the caller does not name have default values."""

    def update(
        self, origin: int, seq: int, payload: bytes = b"abcd", form: int = 0, **fields: Any
    ) -> Update:
        given = {"seen": 0, "epoch": 0, "batch": seq, "steps": seq} | fields
        return Update(origin=origin, seq=seq, payload=self.payload(payload, form), **given)

    def payload(self, data: bytes = b"abcd", form: int = 0, count: int | None = None) -> Payload:
        return Payload(form, 2, len(data) if count is None else count, data)

    def committed(
        self,
        commit: int,
        origin: int = 9,
        payload: bytes = b"abcd",
        seq: int | None = None,
        **said: int,
    ) -> Commit:
        return Commit(
            commit=commit,
            origin=origin,
            seq=commit if seq is None else seq,
            payload=self.payload(payload, **said),
        )

    def merged(
        self, after: int, commit: int, last: list[tuple[int, int]] | None = None, count: int = 4
    ) -> MergedRange:
        last = last or [(9, commit)]
        return MergedRange(after=after, commit=commit, last=last, count=count, payload=b"sum!")

    def join(self, partition: int = 0, token: int = 0, **fields: Any) -> Join:
        given = {
            "token": token or 100 + partition, "count": 1, "request": 1, "partition": partition,
            "attempt": 10 + partition, "rows": 7, "checksum": 5, "batches": 3,
            "address": Address(f"w{partition}", 7, 10, 11), "host": "h", "executor": "e", "pid": 1,
            "version": "v", "alone": False,
        }  # fmt: skip
        return Join(**(given | fields))

    def welcome(self, node: int = 1, **fields: Any) -> Welcome:
        given = {
            "token": 1, "count": 1, "request": 1, "parent": MASTER, "edge": 1, "up": UP,
            "chunks": 1, "closed": [], "epoch": 0, "batch": 0, "steps": 0, "grants": [],
        }  # fmt: skip
        return Welcome(node=node, **(given | fields))

    def adopt(self, node: int, edge: int = 50) -> Adopt:
        return Adopt(node=node, edge=edge, local=UP, peer=HERE)

    def attach(self, have: int = 0, *ids: int, whole: bool = False, **fields: Any) -> Attach:
        given: dict[str, Any] = {"catching": False} | fields
        return Attach(have=have, whole=whole, ids=list(ids), **given)

    def attached(
        self, base: int = 0, last: list[tuple[int, int]] | None = None, *, snapshot: bool = True
    ) -> AttachReply:
        return AttachReply(base=base, snapshot=snapshot, last=last or [])

    def status(self, node: int = 1, **fields: Any) -> Status:
        given = {
            "edge": 1, "count": 1, "after_seq": 0, "epoch": 0, "batch": 0, "steps": 0,
            "activity": Activity.WAITING,
        }  # fmt: skip
        return Status(node=node, **(given | fields))

    def report(self, *news: Status, **fields: Any) -> Heartbeat:
        given: dict[str, Any] = {
            "received": 0,
            "bytes_received": 0,
            "catching": False,
            "stamp": 0,
        } | fields
        return Heartbeat(statuses=list(news), **given)

    def state(self, phase: Phase = Phase.RUNNING, **fields: Any) -> State:
        given: dict[str, Any] = {"beat": 0, "head": 0, "final": 0, "slowest": 0, "nodes": 1}
        given |= {
            "training": 1,
            "minibatches": 0,
            "epochs": 0,
            "wait_ms": 0,
            "closed": [],
            "stamp": 0,
            "sent": 0,
            "bytes_received": 0,
            "bytes_forwarded": 0,
        } | fields
        return State(phase=phase, **given)

    def closed(self, node: int, seq: int = 0, *, free: bool = True, **fields: Any) -> IdClosed:
        given: dict[str, Any] = {"token": 1, "count": 1, "reason": "its lease ran out"} | fields
        return IdClosed(node=node, seq=seq, free=free, **given)

    def behind(self, base: int, last: list[tuple[int, int]] | None = None) -> SnapshotRequired:
        return SnapshotRequired(base, last or [])

    def chunk(self, commit: int, index: int = 0) -> Chunk:
        return Chunk(index=index, commit=commit, payload=b"theta")

    def published(
        self, batch: int = 1, payload: bytes = b"abcd", epoch: int = 0
    ) -> ev.UpdatePublished:
        return ev.UpdatePublished(self.payload(payload), 0, epoch, batch, batch)


class NodeDriver:
    """A ``Node`` and a clock; ``parent`` is the node under which the master places it."""

    def __init__(
        self, make: Make, parent: int = MASTER, *, whole: bool = False, **limits: Any
    ) -> None:
        self.make, self.parent = make, parent
        identity = Identity(1, 0, 10, 7, 5, 3, "h", "e", 1, "v", whole)
        self.machine = Node(identity, NodeLimits(**limits), 0.0)
        self.me = self.machine
        self.now_s = 0.0
        self.beat = 0

    def step(self, event: ev.Event, after_s: float = 0.0) -> list[ev.Effect]:
        """Advance the clock by ``after_s``, process the event and return the effects."""
        self.now_s += after_s
        return self.machine.step(event, self.now_s)

    def hear(
        self, message: Message, after_s: float = 0.0, sender: int | None = None
    ) -> list[ev.Effect]:
        """Deliver a message from ``sender``, by default from the parent."""
        return self.step(ev.Received(self.parent if sender is None else sender, message), after_s)

    def told(self, message: Message, after_s: float = 0.0) -> list[ev.Effect]:
        """Deliver a message that the master sends directly."""
        return self.hear(message, after_s, MASTER)

    def alive(self, phase: Phase = Phase.RUNNING, **fields: Any) -> list[ev.Effect]:
        """Deliver a state with the next beat, which shows that the master is alive."""
        self.beat += 1
        return self.hear(self.make.state(phase, beat=self.beat, **fields))

    def tick(self, after_s: float = 0.0) -> list[ev.Effect]:
        return self.step(ev.Tick(), after_s)

    @property
    def order(self) -> ev.Command:
        return self.machine.directive.order

    def opened(self, *, alone: bool = False) -> list[ev.Effect]:
        """Report that the node listens on fresh streams."""
        return self.step(ev.StreamsOpened(HERE, alone))

    def opened_anew(self) -> None:
        """Give the node a new edge to its parent, over which it continues."""
        self.opened()
        edge, request = self.me.link.edge + 1, self.me.membership.request
        self.told(self.make.welcome(self.me.node, parent=self.parent, edge=edge, request=request))
        self.hear(self.make.attached(self.me.replication.received, snapshot=False))
        assert self.me.link.attached

    def joined(self, **welcome: Any) -> NodeDriver:
        """Give the node its id and its place; it requests its first snapshot."""
        self.opened()
        self.told(self.make.welcome(parent=self.parent, **welcome))
        self.hear(self.make.attached())
        return self

    def training(self) -> NodeDriver:
        """Bring the node to the point where it has the replica of commit 0 and trains."""
        self.joined()
        self.hear(self.make.chunk(0))
        self.step(ev.TrainerPaused(1))
        self.tick()
        self.step(ev.ReplicaInstalled())
        self.step(ev.ActivityChanged(Activity.WAITING))
        self.hear(self.make.state())
        assert self.order is ev.Command.TRAIN
        return self

    def with_child(self, child: int = 5, have: int = 0, *ids: int, **fields: Any) -> NodeDriver:
        """Adopt and attach a child that has all commits up to ``have``."""
        edge = self.me.children.by_node[child].edge + 1 if child in self.me.children.by_node else 50
        self.told(self.make.adopt(child, edge))
        attach = self.make.attach(have, *(ids or (child,)), **({"whole": True} | fields))
        self.hear(attach, sender=child)
        assert self.me.children.by_node[child].answer is not None
        return self


class MasterDriver:
    """A ``Master`` and a clock; messages come from its children, or directly."""

    def __init__(self, make: Make, partitions: int = 2, **given: Any) -> None:
        self.make = make
        spec = FitSpec(partitions, given.pop("epochs", 2), n_params=1, version="v")
        fields: dict[str, Any] = {"chunks": 1, "kept": None} | {
            name: given.pop(name) for name in ("chunks", "kept") if name in given
        }
        self.machine = Master(
            spec,
            endpoint=Endpoint("master", 1),
            limits=MasterLimits(**given),
            now_s=0.0,
            **fields,
        )
        self.now_s = 0.0

    def step(self, event: ev.Event, after_s: float = 0.0) -> list[ev.Effect]:
        self.now_s += after_s
        return self.machine.step(event, self.now_s)

    def hear(self, sender: int | None, message: Message, after_s: float = 0.0) -> list[ev.Effect]:
        return self.step(ev.Received(sender, message), after_s)

    def direct(self, message: Message, after_s: float = 0.0) -> list[ev.Effect]:
        """Deliver a message that a process sends directly to the master."""
        return self.hear(DIRECTLY, message, after_s)

    def join(self, partition: int = 0, **fields: Any) -> list[ev.Effect]:
        return self.direct(self.make.join(partition, **fields))

    def attach(self, node: int, **fields: Any) -> list[ev.Effect]:
        """Deliver the attach message of a child of the master."""
        have, ids = fields.pop("have", 0), fields.pop("ids", (node,))
        return self.hear(node, self.make.attach(have, *ids, **fields))

    def enter(self, partition: int = 0, **fields: Any) -> list[ev.Effect]:
        """Let a worker join and take the place that the master assigns."""
        attach = {name: fields.pop(name) for name in ("have", "whole", "ids") if name in fields}
        effects = self.join(partition, **fields)
        node = self.machine.members.next_id - 1
        return effects + self.confirm(node, **attach)

    def confirm(self, node: int, **attach: Any) -> list[ev.Effect]:
        """Confirm the place of a node by its attach message, or a deeper one's by a status."""
        if self.machine.placement.tree.depth(node) == 1:
            return self.attach(node, **attach)
        return self.say(node)

    def say(self, node: int, received: int = 0, **fields: Any) -> list[ev.Effect]:
        """Deliver a status of the node in a heartbeat of the master's child above it.

        Fields that are not given keep the values that the master knows.
        """
        member = self.member(node)
        known: dict[str, Any] = {
            "steps": member.steps, "final": member.final, "whole": member.whole,
        }  # fmt: skip
        if member.activity is not Activity.CATCHING_UP:
            known["activity"] = member.activity
        if member.pending is not None:
            after_seq, (epoch, batch) = member.pending
            known |= {"after_seq": after_seq, "epoch": epoch, "batch": batch}
        edge, count = member.age
        if member.order is not None and member.order.edge > edge:
            edge = member.order.edge
        known |= {"edge": edge, "count": count + 1} | fields
        report = self.make.report(self.make.status(node, **known), received=received)
        return self.hear(self.machine.placement.tree.path(node)[0], report)

    def member(self, node: int) -> Member:
        found: Member = self.machine.members.live[node]
        return found

    def tick(self, after_s: float = 0.0) -> list[ev.Effect]:
        return self.step(ev.Tick(), after_s)

    @property
    def phase(self) -> Phase:
        return self.machine.phases.phase

    def running(self) -> MasterDriver:
        """Let a worker for each partition join and report a replica; ids are 1, 2, ..."""
        for partition in range(len(self.machine.partitions)):
            self.enter(partition)
        self.tick()
        for node in list(self.machine.members.live):
            self.say(node, activity=Activity.WAITING)
        assert self.phase is Phase.RUNNING
        return self

    def evict(self, node: int) -> list[ev.Effect]:
        """Keep a child silent until its lease expires; other children send heartbeats."""
        effects: list[ev.Effect] = []
        for _ in range(6):
            effects += self.tick(self.machine.limits.lease_s / 5)
            for other in list(self.machine.children.by_node):
                if other != node:
                    self.hear(other, self.make.report())
        assert node not in self.machine.members.live
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


@pytest.fixture
def parent_with(make: Make) -> Any:
    return lambda **given: Parent(make, **given)


@pytest.fixture
def parent(make: Make) -> Parent:
    return Parent(make)


@pytest.fixture
def make_mesh(master_with: Any) -> Any:
    """Return a function that makes a running mesh of so many nodes, one per executor."""

    def made(nodes: int, **given: Any) -> Any:
        master = master_with(partitions=nodes + 2, **(MESH | given))
        for partition in range(nodes):
            master.enter(partition, executor=f"e{partition}")
        master.machine.phases.phase = Phase.RUNNING
        assert list(master.machine.placement.moving) == []
        return master

    return made
