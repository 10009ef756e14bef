"""Fits in MESH mode over memory transports: relays, late workers, buffers, sums, dead drivers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.memory_transport import MemoryTransport
from sparkstrom.codec.messages import Activity
from sparkstrom.models.base import State
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.models.updaters import Adam
from sparkstrom.protocol.common.children import FlowLimits
from sparkstrom.protocol.common.events_and_effects import ApplyMergedRange
from sparkstrom.protocol.master.members import MasterLimits
from sparkstrom.runtime.node_thread import NodeThread
from sparkstrom.runtime.theta import CHUNK_PARAMS, Replica
from sparkstrom.transport.base import ReceivedFrame
from tests.unit.runtime.fits import (
    EPOCHS,
    MODEL,
    Mesh,
    TransportFactory,
    assert_fit_complete,
    wait_until,
)

WIDTHS = [5, 8, 3]
MAKE = Callable[..., Mesh]
SEVEN = 7  # levels of two, four and one


def make_binary_tree_limits(**limits: Any) -> MasterLimits:
    """Return limits for a tree with two children per node; ``limits`` replaces some."""
    # Workers that have finished stay while others are late.
    return MasterLimits(
        **({"lease_s": 30.0, "release_s": 300.0, "fan_out": 2, "depth": 3} | limits)
    )


def add_workers_in_order(mesh: Mesh, *workers: dict[str, Any]) -> None:
    """Start workers one after the other, so that their ids and places are known."""
    for partition, options in enumerate(workers):
        mesh.add_worker(partition, **options)
        wait_until(lambda: len(mesh.nodes) == mesh.master.progress.workers)


def start_training_without_late_workers(mesh: Mesh) -> None:
    """End the wait for more workers, once all that have joined are ready to train."""
    master = mesh.master._machine
    live = master.members.live
    wait_until(lambda: all(m.activity is not Activity.CATCHING_UP for m in list(live.values())))
    master.phases._start_s = 0.0


def test_tree_of_seven_workers_ends_with_equal_replicas(make_mesh: MAKE) -> None:
    """Seven workers in a tree of three levels end with equal replicas, and reject no frame."""
    mesh = make_mesh(make_binary_tree_limits(), SEVEN)
    mesh.begin()
    for partition in range(SEVEN):
        mesh.add_worker(partition)
    outcome = mesh.finish()
    assert_fit_complete(mesh, outcome)
    assert len(outcome.hashes) == SEVEN + 1
    tree = mesh.master._machine.placement.tree
    assert sorted(tree.depth(node) for node in range(1, SEVEN + 1)) == [1, 1, 2, 2, 2, 2, 3]
    assert outcome.traffic.rejected.total() == 0
    assert all(told.node.rejected == 0 for told in outcome.stats.values())


class LocalStreamRecorder(MemoryTransport):
    """A transport that records its local streams, which stay within its media driver."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.local: set[int] = set()

    def open_receiver(self, stream: int, *, local: bool = False) -> None:
        super().open_receiver(stream, local=local)
        if local:
            self.local.add(stream)


def test_workers_of_one_executor_form_subtree_with_local_streams(make_mesh: MAKE) -> None:
    """Workers of one executor form a subtree whose edges use local streams."""
    mesh = make_mesh(make_binary_tree_limits(), 4)
    mesh.begin()
    shared = mesh.network.open()
    opened = [LocalStreamRecorder(mesh.network, shared.endpoint) for _ in range(3)]
    openings: list[Any] = [lambda _, one=one: one for one in opened]
    add_workers_in_order(
        mesh,
        *({"opening": opening, "executor": "shared"} for opening in openings),
        {},
    )
    outcome = mesh.finish()
    assert_fit_complete(mesh, outcome)
    tree = mesh.master._machine.placement.tree
    assert [tree.parent(node) for node in (1, 2, 3, 4)] == [0, 1, 1, 0]
    assert [len(one.local) for one in opened] == [4, 2, 2]  # control and data of each edge


class GatedModel(DenseNetwork):
    """A model whose fourth step waits for the gate; it records the optimizer states it loads."""

    gate: threading.Event

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(WIDTHS, updater=Adam())
        self.gate, self.taken = gate, 0
        self.lent: list[State] = []

    def step(self, batch: Any) -> float:
        self.taken += 1
        if self.taken == 4:
            assert self.gate.wait(60), "the test never opened the gate"
        return super().step(batch)

    def load_updater_state(self, state: State) -> None:
        self.lent.append(state)
        super().load_updater_state(state)


def test_late_worker_loads_optimizer_state_of_other_worker(make_mesh: MAKE) -> None:
    """A seventh worker, which joins late below relays, loads another worker's optimizer state."""
    mesh = make_mesh(make_binary_tree_limits(start_s=300.0), SEVEN)
    mesh.begin()
    gate = threading.Event()
    models = [GatedModel(gate) for _ in range(SEVEN)]
    add_workers_in_order(mesh, *({"model": model} for model in models[:-1]))
    start_training_without_late_workers(mesh)
    wait_until(lambda: all(reported_slowest_steps(node) for node in mesh.nodes))
    mesh.add_worker(SEVEN - 1, model=models[-1])
    wait_until(lambda: is_fetching_optimizer_state(mesh.nodes[-1]) or bool(models[-1].lent))
    gate.set()
    assert_fit_complete(mesh, mesh.finish())
    assert mesh.master._machine.placement.tree.depth(SEVEN) == 3
    assert [trainer.counts.fresh_updaters for trainer in mesh.trainers] == [0] * SEVEN
    assert models[0].lent == []
    (lent,) = models[-1].lent
    assert set(lent) == set(models[0].updater_state())
    assert lent["steps"] >= 1


def is_fetching_optimizer_state(node: NodeThread) -> bool:
    """Return whether the node has begun to fetch an optimizer state."""
    return node._machine.transfers.fetch is not None


def reported_slowest_steps(node: NodeThread) -> int:
    """Return the fewest steps of any worker, as the master last reported to this node."""
    state = node._machine.fit.state
    return 0 if state is None else state.slowest


class BufferedModel(DenseNetwork):
    """A model with buffers: the sum of its features' means, and a count of steps."""

    def __init__(self) -> None:
        super().__init__(WIDTHS)
        self.statistics = np.zeros(6, np.float32)
        self.loaded: list[bytes] = []

    def step(self, batch: Any) -> float:
        self.statistics[:5] += batch.features.mean(0)
        self.statistics[5] += 1
        return super().step(batch)

    def buffers_bytes(self) -> bytes:
        return self.statistics.tobytes()

    def load_buffers_bytes(self, buffers: bytes) -> None:
        self.loaded.append(buffers)
        self.statistics[:] = np.frombuffer(buffers, np.float32)

    def average_buffers(self, reports: list[bytes]) -> bytes:
        every = np.stack([np.frombuffer(report, np.float32) for report in reports])
        return every.mean(0, dtype=np.float64).astype(np.float32).tobytes()


def test_buffers_are_averaged_and_equal_in_all_replicas(make_mesh: MAKE) -> None:
    """The master averages the workers' buffers; all replicas end with the average."""
    mesh = make_mesh(make_binary_tree_limits(), SEVEN)
    mesh.begin(average=BufferedModel().average_buffers)
    models = [BufferedModel() for _ in range(SEVEN)]
    for partition, model in enumerate(models):
        mesh.add_worker(partition, model=model)
    outcome = mesh.finish()
    assert_fit_complete(mesh, outcome)
    reports = [model.buffers_bytes() for model in models]
    average = models[0].average_buffers(reports)
    assert mesh.theta.buffers == average != reports[0]
    assert {replica.theta.buffers for replica in mesh.replicas} == {average}
    assert outcome.commits == sum(outcome.staleness.values())


def test_late_worker_loads_buffers_of_master(make_mesh: MAKE) -> None:
    """A late worker's model loads the master's buffers; models that began earlier load none."""
    mesh = make_mesh(make_binary_tree_limits(start_s=300.0), 3)
    mesh.begin(average=BufferedModel().average_buffers)
    models = [BufferedModel() for _ in range(3)]
    add_workers_in_order(mesh, *({"model": model} for model in models[:2]))
    start_training_without_late_workers(mesh)
    wait_until(lambda: mesh.master.progress.minibatches == 2 * EPOCHS * 5)
    before = mesh.theta.buffers
    mesh.add_worker(2, model=models[2])
    assert_fit_complete(mesh, mesh.finish())
    assert [model.loaded for model in models] == [[], [], [before]]
    assert {replica.theta.buffers for replica in mesh.replicas} == {mesh.theta.buffers}
    assert mesh.theta.buffers != before


@pytest.mark.parametrize("dies_at_frame", [5, 40, 120])
def test_fit_succeeds_after_relay_media_driver_death(make_mesh: MAKE, dies_at_frame: int) -> None:
    """A fit succeeds if the media driver of a relay dies once."""
    mesh = make_mesh(make_binary_tree_limits(lease_s=4.0), SEVEN)
    opening = TransportFactory(mesh.network, dies_at_frame)
    mesh.begin()
    add_workers_in_order(mesh, {"opening": opening}, *[{}] * (SEVEN - 1))
    assert_fit_complete(mesh, mesh.finish())
    assert len(opening.opened) == 2


class PausableTransport(MemoryTransport):
    """A transport that receives nothing while ``is_deaf``; frames wait, up to the queue's size."""

    is_deaf = False

    def poll(self, wait_s: float) -> list[ReceivedFrame]:
        if self.is_deaf:
            threading.Event().wait(wait_s)
            return []
        return super().poll(wait_s)


def test_worker_that_missed_commits_gets_sum_with_own_update(
    make_mesh: MAKE, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker under a relay that missed commits gets them as a sum, with its own update in it."""
    sums: list[ApplyMergedRange] = []
    apply_range = Replica.apply_range

    def noted(self: Replica, item: ApplyMergedRange) -> None:
        sums.append(item)
        apply_range(self, item)

    monkeypatch.setattr(Replica, "apply_range", noted)
    mesh = make_mesh(make_binary_tree_limits(), 3)
    mesh.node_limits = {"flow_limits": FlowLimits(200, 10**6, MODEL.n_params, 4 * CHUNK_PARAMS)}
    mesh.begin()
    deaf = PausableTransport(mesh.network, mesh.network.open().endpoint)
    gate, own_gate = threading.Event(), threading.Event()
    models = [GatedModel(gate), GatedModel(gate), GatedModel(own_gate)]
    add_workers_in_order(
        mesh,
        {"model": models[0]},
        {"model": models[1]},
        {"model": models[2], "opening": lambda _: deaf},
    )
    wait_until(lambda: all(model.taken == 4 for model in models))
    master = mesh.master._machine
    assert master.placement.tree.depth(3) == 2
    *others, own = master.partitions
    wait_until(lambda: own.minibatches == 3)
    # Without acknowledgements it sends another update only if none is in flight now.
    wait_until(lambda: not mesh.nodes[2]._machine.link.window.under_way)
    deaf.is_deaf = True
    gate.set()
    wait_until(lambda: all(partition.trained for partition in others))
    # A relay sends single commits until its window is full; later ones are sent as one sum.
    own_gate.set()
    wait_until(lambda: own.minibatches > 3)
    head = master.sequencer.head
    relay = mesh.nodes[master.placement.tree.parent(3) - 1]._machine
    wait_until(lambda: relay.replication.received >= head)
    deaf.is_deaf = False
    assert_fit_complete(mesh, mesh.finish())
    assert sums
    assert any(item.own for item in sums)
