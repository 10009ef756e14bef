"""Tests of options that act in the state machines of node and master: each is set and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import MASTER, Endpoint
from sparkstrom.codec.messages import (
    Activity,
    Address,
    Attach,
    AttachReply,
    Chunk,
    Heartbeat,
    Join,
    Payload,
    Phase,
    State,
    Status,
    Update,
    Welcome,
)
from sparkstrom.data.row_blocks import read_row_blocks
from sparkstrom.fit import master_setup
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.master import Master
from sparkstrom.protocol.worker.node import Node
from sparkstrom.worker.task_environment import TaskEnvironment, load_batches
from sparkstrom.worker.training_job import TrainingJob
from sparkstrom.worker.training_task import make_identity, make_node_limits

PLACE = TaskEnvironment(1, 5, "host", "jvm", Path("/nowhere"))
RunningNode = Callable[..., Node]

# -- a node's machine ------------------------------------------------------------------------------

HERE = Address("127.0.0.1", 2, 11, 12)


@pytest.fixture
def running_node(make_job: Callable[..., TrainingJob]) -> RunningNode:
    return lambda **options: make_running_node(make_job(**options))


def make_state(beat: int, nodes: int = 1) -> State:
    """Return the master's State message of this heartbeat, with two training workers."""
    return State(
        phase=Phase.RUNNING, beat=beat, head=0, final=0, slowest=0, nodes=nodes, closed=[],
        training=2, minibatches=0, epochs=0, wait_ms=0, stamp=0, sent=0, bytes_received=0,
        bytes_forwarded=0,
    )  # fmt: skip


def make_running_node(job: TrainingJob) -> Node:
    """Return a node at time 0 that has its replica and may train; no worker has taken a step."""
    rows = [(np.zeros(6, np.float32), 0)] * 20
    batches = load_batches(job, PLACE, read_row_blocks(1, rows))
    node = Node(make_identity(job, PLACE, batches), make_node_limits(job), 0.0)
    welcome = Welcome(
        token=node.membership.identity.token,
        count=1,
        request=1,
        node=4,
        parent=MASTER,
        edge=1,
        up=Address("127.0.0.1", 1, 1, 2),
        chunks=1,
        closed=[],
        epoch=0,
        batch=0,
        steps=0,
        grants=[],
    )
    attached = AttachReply(base=0, snapshot=True, last=[])
    node.step(ev.StreamsOpened(HERE), 0.0)
    for message in (welcome, attached, make_state(0), Chunk(index=0, commit=0, payload=b"")):
        node.step(ev.Received(MASTER, message), 0.0)
    node.step(ev.TrainerPaused(node.directive.number), 0.0)
    node.step(ev.Tick(), 0.0)
    node.step(ev.ReplicaInstalled(), 0.0)
    node.step(ev.ActivityChanged(Activity.WAITING), 0.0)
    assert node.directive.order is Command.TRAIN
    return node


def make_published_event(payload_bytes: int, steps: int = 1) -> ev.UpdatePublished:
    """Return the event that the trainer published an update with this payload."""
    return ev.UpdatePublished(Payload(1, 2, 1, bytes(payload_bytes)), 0, 0, 0, steps)


@pytest.mark.flips("VoidConfiguration.window_bytes")
@pytest.mark.parametrize(("window_bytes", "order"), [(1000, Command.WAIT), (5000, Command.TRAIN)])
def test_window_bytes_limits_bytes_in_flight(
    running_node: RunningNode, window_bytes: int, order: Command
) -> None:
    """A node waits while its update in flight is larger than window_bytes."""
    options = {"publish_every": 1, "max_lead": None, "max_staleness": None}
    node = running_node(void=VoidConfiguration(window_bytes=window_bytes), **options)
    node.step(make_published_event(2000), 0.0)
    assert node.directive.order is order


@pytest.mark.flips("SharedTrainingMaster.max_lead")
@pytest.mark.parametrize(
    ("options", "workers", "steps"),
    [
        ({"max_lead": 3}, 2, 3),
        ({"max_lead": 16}, 100, 16),
        ({"max_lead": None}, 2, None),
        ({}, 2, 4),
        ({}, 3, 2),
        ({}, 4, 1),
        ({}, 25, 1),
        ({"publish_every": 1}, 2, 1),
        ({"publish_every": 4}, 17, 4),
    ],
)
def test_max_lead_limits_steps_ahead(
    running_node: RunningNode, options: dict[str, Any], workers: int, steps: int | None
) -> None:
    """max_lead limits how far a worker may be ahead; "auto" is fewer steps with more workers."""
    node = running_node(max_staleness=None, **options)
    node.step(ev.Received(MASTER, msgspec.structs.replace(make_state(1), training=workers)), 0.0)
    assert node.directive.steps_max == steps


@pytest.mark.flips("SharedTrainingMaster.max_staleness")
@pytest.mark.parametrize(
    ("options", "workers", "steps"),
    [
        ({"max_staleness": 0}, 2, 1),
        ({"max_staleness": 1}, 100, 2),
        ({"max_staleness": 3, "publish_every": 1}, 2, 4),
        ({"max_staleness": 1, "publish_every": 5}, 2, 6),
        ({"max_staleness": None}, 2, None),
        ({}, 2, 12),
        ({}, 8, 3),
        ({}, 12, 2),
        ({}, 13, 1),
        ({"publish_every": 3}, 4, 4),
    ],
)
def test_max_staleness_limits_uncommitted_steps(
    running_node: RunningNode, options: dict[str, Any], workers: int, steps: int | None
) -> None:
    """max_staleness rounds of steps may be uncommitted, and the next step is added to them."""
    node = running_node(max_lead=None, **options)
    node.step(ev.Received(MASTER, msgspec.structs.replace(make_state(1), training=workers)), 0.0)
    assert node.directive.steps_max == steps


def seconds_until(node: Node, wanted: Any, *, heard: bool) -> int:
    """Tick each second until ``wanted(effects, directive)`` is true; return the second.

    ``heard``: whether the master sends its state each second.
    """
    for second in range(1, 1000):
        if heard:
            node.step(ev.Received(MASTER, make_state(second)), second)
        if wanted(node.step(ev.Tick(), second), node.directive):
            return second
    raise AssertionError("it never happened")


@pytest.mark.flips("SharedTrainingMaster.step_timeout")
@pytest.mark.parametrize("step_timeout", [50.0, 600.0])
def test_step_timeout_fails_node_with_long_step(
    running_node: RunningNode, step_timeout: float
) -> None:
    """A step that takes longer than step_timeout ends the node with a hint about the option."""
    node = running_node(step_timeout=step_timeout)
    node.step(ev.ActivityChanged(Activity.STEPPING), 0.0)
    failed = seconds_until(node, lambda _, command: command.order is Command.FAIL, heard=True)
    assert failed == step_timeout + 1
    assert "raise step_timeout" in node.directive.reason


@pytest.mark.flips("VoidConfiguration.lease_s")
@pytest.mark.parametrize("lease_s", [8.0, 20.0])
def test_node_reopens_streams_after_half_lease_of_silence(
    running_node: RunningNode, lease_s: float
) -> None:
    """A node reopens its streams if no message from the master arrives for half a lease."""
    node = running_node(void=VoidConfiguration(lease_s=lease_s))
    reopens = seconds_until(node, lambda effects, _: ev.ReopenStreams() in effects, heard=False)
    assert reopens == lease_s / 2 + 1


# -- the master's machine --------------------------------------------------------------------------


def make_master(**options: Any) -> Master:
    """Return a master of two partitions at time 0; the first one's worker has joined and waits."""
    master = Master(
        FitSpec(2, epochs=1, n_params=100, version="1"),
        chunks=1,
        endpoint=Endpoint("127.0.0.1", 1),
        limits=master_setup.make_master_limits(SharedTrainingMaster(**options), 2, 100),
        now_s=0.0,
    )
    join = Join(
        token=1,
        count=1,
        request=1,
        partition=0,
        attempt=0,
        rows=20,
        checksum=1,
        batches=5,
        address=HERE,
        host="h",
        executor="e",
        pid=1,
        version="1",
        alone=False,
    )
    master.step(ev.Received(-1, join), 0.0)
    attach = Attach(have=0, whole=False, catching=False, ids=[1])
    master.step(ev.Received(min(master.members.live), attach), 0.0)
    report(master, 0.0)
    return master


def report(master: Master, now_s: float) -> list[ev.Effect]:
    """Send the master a heartbeat of its waiting worker; return the effects."""
    node = min(master.members.live)
    waits = Status(
        node=node, edge=1, count=1, after_seq=0, epoch=0, batch=0, steps=0,
        activity=Activity.WAITING,
    )  # fmt: skip
    told = Heartbeat(received=0, bytes_received=0, catching=False, stamp=1, statuses=[waits])
    return master.step(ev.Received(node, told), now_s)


def play(master: Master, seconds: int, *, reports: bool = True) -> Iterator[list[ev.Effect]]:
    """Yield each second's effects of a tick, and of a heartbeat while the worker is a member."""
    for second in range(1, seconds):
        told = report(master, second) if reports and master.members.live else []
        yield told + master.step(ev.Tick(), second)


@pytest.mark.flips("SharedTrainingMaster.start_timeout")
@pytest.mark.parametrize("start_timeout", [20.0, 60.0])
def test_training_starts_after_start_timeout_without_all_workers(start_timeout: float) -> None:
    """If a partition has no worker, training starts after start_timeout."""
    master = make_master(start_timeout=start_timeout)
    for _ in play(master, 100):
        pass
    assert start_timeout < master.phases.began_s[Phase.RUNNING] <= start_timeout + 1


@pytest.mark.flips("SharedTrainingMaster.min_workers")
@pytest.mark.parametrize(("min_workers", "aborts"), [(1, False), (2, True)])
def test_fit_aborts_with_fewer_than_min_workers_at_start_timeout(
    min_workers: int, aborts: bool
) -> None:
    """The fit is aborted if fewer than min_workers have joined when the start times out."""
    effects = [effect for tick in play(make_master(min_workers=min_workers), 70) for effect in tick]
    reasons = [effect.reason for effect in effects if isinstance(effect, ev.Abort)]
    assert bool(reasons) is aborts
    assert all("1 workers joined within" in reason for reason in reasons)


@pytest.mark.flips("VoidConfiguration.lease_s")
@pytest.mark.parametrize("lease_s", [8.0, 20.0])
def test_master_removes_worker_silent_for_lease_s(lease_s: float) -> None:
    """The master removes a worker that has sent nothing for lease_s."""
    master = make_master(void=VoidConfiguration(lease_s=lease_s))
    left = [
        second
        for second, effects in enumerate(play(master, 40, reports=False), 1)
        if any(isinstance(effect, ev.CloseEdge) for effect in effects)
    ]
    assert left == [lease_s + 1]


@pytest.mark.flips("VoidConfiguration.log_bytes")
@pytest.mark.parametrize(("log_bytes", "reaches"), [(2000, False), (100_000, True)])
def test_log_bytes_limits_commit_history(log_bytes: int, reaches: bool) -> None:
    """The history reaches back to the first commit only if log_bytes suffices for all commits."""
    master = make_master(void=VoidConfiguration(log_bytes=log_bytes, window_bytes=2000))
    node = min(master.members.live)
    for seq in range(1, 21):
        update = Update(
            origin=node,
            seq=seq,
            seen=0,
            epoch=0,
            batch=0,
            steps=seq,
            payload=Payload(form=1, tau_quanta=2, count=1, data=bytes(1000)),
        )
        master.step(ev.Received(node, update), 0.0)
    assert master.sequencer.head == 20
    assert master.sequencer.history.log.reaches(0) is reaches


# -- the mesh --------------------------------------------------------------------------------------


def make_joined_master(workers: int, **options: Any) -> Master:
    """Return a master that this many workers have asked to join, each on its own executor."""
    void = VoidConfiguration(**options)
    master = Master(
        FitSpec(workers, epochs=1, n_params=100, version="1"),
        chunks=1,
        endpoint=Endpoint("127.0.0.1", 1),
        limits=master_setup.make_master_limits(SharedTrainingMaster(void=void), workers, 100),
        now_s=0.0,
    )
    for partition in range(workers):
        join = Join(
            token=partition,
            count=1,
            request=1,
            partition=partition,
            attempt=0,
            rows=20,
            checksum=1,
            batches=5,
            address=HERE,
            host="h",
            executor=str(partition),
            pid=1,
            version="1",
            alone=False,
        )
        master.step(ev.Received(-1, join), 0.0)
    return master


def children(master: Master) -> list[int]:
    """Return the ids of the master's children."""
    return list(master.placement.tree.children(MASTER))


def depths(master: Master) -> int:
    """Return the depth of the tree."""
    return max(map(master.placement.tree.depth, master.members.live))


@pytest.mark.flips("VoidConfiguration.mesh_build_mode")
@pytest.mark.parametrize(
    ("mode", "workers", "neighbours"),
    [("plain", 40, 40), ("mesh", 12, 8), ("auto", 32, 32), ("auto", 33, 8)],
)
def test_mesh_build_mode_sets_children_of_master(mode: str, workers: int, neighbours: int) -> None:
    """In a mesh the master has 8 children; "auto" builds a mesh for more than 32 workers."""
    assert len(children(make_joined_master(workers, mesh_build_mode=mode))) == neighbours


@pytest.mark.flips("VoidConfiguration.mesh_fan_out")
@pytest.mark.parametrize("mesh_fan_out", [2, 3, 8])
def test_mesh_fan_out_sets_number_of_children(mesh_fan_out: int) -> None:
    master = make_joined_master(12, mesh_build_mode="mesh", mesh_fan_out=mesh_fan_out)
    assert len(children(master)) == mesh_fan_out


@pytest.mark.flips("VoidConfiguration.mesh_depth")
def test_mesh_depth_limits_depth_and_number_of_workers() -> None:
    """mesh_depth limits the depth of a mesh; a fit with more workers than places is refused."""
    mesh = {"mesh_build_mode": "mesh", "mesh_fan_out": 2}
    assert depths(make_joined_master(6, **mesh, mesh_depth=2)) == 2
    with pytest.raises(UsageError, match="7 workers, but a mesh with mesh_fan_out=2 and mesh_dept"):
        make_joined_master(7, **mesh, mesh_depth=2)
    assert depths(make_joined_master(7, **mesh, mesh_depth=3)) == 3


@pytest.mark.parametrize(("mode", "leases"), [("plain", 3), ("mesh", 6)])
def test_worker_waits_longer_for_silent_master_in_mesh(
    make_job: Callable[..., TrainingJob], mode: str, leases: int
) -> None:
    """A worker waits three leases for a silent master, and six leases in a mesh."""
    void = VoidConfiguration(mesh_build_mode=mode, lease_s=8.0)
    assert make_node_limits(make_job(void=void)).master_silent_s == leases * 8.0
