"""Options that act inside a worker or the master: each is flipped on the class users hold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.identity import MASTER, Endpoint
from sparkstrom.codec.frames import KEY_BYTES
from sparkstrom.codec.messages import (
    Activity,
    Address,
    Chunk,
    Join,
    Phase,
    Report,
    State,
    Update,
    Welcome,
)
from sparkstrom.encoding.residuals import ResidualClipping
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.events import Command, Order
from sparkstrom.protocol.master import Master
from sparkstrom.protocol.node import Node
from sparkstrom.runtime.inbox import Inbox, Item
from sparkstrom.runtime.replica import Replica
from sparkstrom.runtime.station import Station
from sparkstrom.runtime.theta import Theta
from sparkstrom.runtime.trainer import Trainer
from sparkstrom.spark import executor, network
from sparkstrom.spark.cluster import Slots, workers_for
from sparkstrom.spark.executor import (
    Place,
    batches_of,
    identity_of,
    limits_of,
    make_replica,
    schedule_of,
)
from sparkstrom.spark.job import TrainingJob
from sparkstrom.spark.shared import SharedTrainingMaster
from sparkstrom.spark.void import VoidConfiguration
from sparkstrom.transport.memory import MemoryNetwork

K, WORKERS = 20, 4
CHANCE = np.random.default_rng(0)
FEATURES = CHANCE.normal(size=(20, 6)).astype(np.float32)
LABELS = CHANCE.integers(0, 3, 20)
BATCH = (FEATURES, LABELS)
PLACE = Place(1, 5, "host", "jvm", Path("/nowhere"))


def job_of(**options: Any) -> TrainingJob:
    """A job with these options of SharedTrainingMaster."""
    model = DenseNetwork([6, 3], updater=Sgd(0.5))
    return TrainingJob(
        job=1,
        key=bytes(KEY_BYTES),
        version="1",
        model=model,
        master=SharedTrainingMaster(**options),
        epochs=2,
        first_epoch=0,
        workers=WORKERS,
        k=K,
        n_params=model.n_params,
        endpoint=Endpoint("127.0.0.1", 1),
        lobby=1,
        network="n",
    )


def replica_of(**options: Any) -> Replica:
    job = job_of(**options)
    return make_replica(job, Theta(job.n_params, job.k))


# -- what a worker does ----------------------------------------------------------------------------


@pytest.mark.flips("SharedTrainingMaster.train_on")
def test_train_on() -> None:
    """Without a publication theta stands still, and only a local model goes on from its steps."""
    losses = {
        way: [made.step(BATCH) for _ in range(3)]
        for way in ("local", "replica")
        if (made := replica_of(train_on=way))
    }
    assert len(set(losses["replica"])) == 1
    assert losses["local"] == sorted(set(losses["local"]), reverse=True)


@pytest.mark.flips("SharedTrainingMaster.threshold")
@pytest.mark.parametrize(("tau", "sends"), [(1e-4, True), (10.0, False)])
def test_threshold(tau: float, sends: bool) -> None:
    replica = replica_of(threshold=FixedThreshold(tau))
    replica.step(BATCH)
    assert (replica.publish() is not None) is sends


@pytest.mark.flips("SharedTrainingMaster.residual_post_processor", "ResidualClipping.multiple")
@pytest.mark.parametrize(
    ("clipping", "clips"),
    [(None, False), (ResidualClipping(1.0, 1), True), (ResidualClipping(1e6, 1), False)],
)
def test_residual_post_processor(clipping: ResidualClipping | None, clips: bool) -> None:
    replica = replica_of(threshold=FixedThreshold(1e-4), residual_post_processor=clipping)
    replica.step(BATCH)
    replica.publish()
    assert (replica.encoder.counters.mass_clipped > 0) is clips


@pytest.mark.flips("SharedTrainingMaster.aggregation")
@pytest.mark.parametrize(("aggregation", "weight"), [("sum", 1), ("mean", 1 / 4), ("sqrt", 1 / 2)])
def test_aggregation(aggregation: str, weight: float) -> None:
    replica = replica_of(aggregation=aggregation, threshold=FixedThreshold(2**-10))
    replica.step(BATCH)
    replica.publish()
    assert np.abs(replica.theta.values).max() == weight * 2**-10


@pytest.mark.flips("SharedTrainingMaster.batch_size_per_worker")
@pytest.mark.parametrize(("rows", "batches"), [(1, 20), (8, 3), (32, 1)])
def test_batch_size_per_worker(rows: int, batches: int) -> None:
    made = batches_of(job_of(batch_size_per_worker=rows), PLACE, FEATURES, LABELS)
    assert made.per_epoch == batches
    assert len(made.get(0, 0)[0]) == min(rows, 20)


@pytest.mark.flips("SharedTrainingMaster.rng_seed")
def test_rng_seed() -> None:
    first = [
        batches_of(job_of(rng_seed=seed), PLACE, FEATURES, LABELS).get(0, 0)[0].tolist()
        for seed in (0, 0, 1)
    ]
    assert first[0] == first[1] != first[2]


class Playing(Station):
    """Says TRAIN so often, then AUDIT, then END; keeps what the trainer says."""

    def __init__(self, steps: int) -> None:
        super().__init__(Inbox(21, 0, Theta(21, K).decode))
        commands = [Command(Order.TRAIN)] * steps
        self.script = iter([*commands, Command(Order.AUDIT), Command(Order.END, "done")])
        self.said: list[ev.Event] = []

    def take(self) -> tuple[list[Item], Command]:
        return [], next(self.script)

    def wait(self, seconds: float, known: Command) -> None:
        """There is always something to do."""

    def post(self, event: ev.Event) -> None:
        self.said.append(event)


def train(**options: Any) -> Playing:
    """Six steps under these options."""
    job = job_of(batch_size_per_worker=4, threshold=FixedThreshold(1e-4), **options)
    station = Playing(6)
    Trainer(
        station,
        make_replica(job, Theta(job.n_params, job.k)),
        batches_of(job, PLACE, FEATURES, LABELS),
        schedule_of(job),
        keep=lambda replica: None,
        grant=lambda replica, paths: None,
    ).run()
    return station


@pytest.mark.flips("SharedTrainingMaster.publish_every")
@pytest.mark.parametrize(("publish_every", "published"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_publish_every(publish_every: int, published: list[int]) -> None:
    said = train(publish_every=publish_every).said
    assert [event.steps for event in said if isinstance(event, ev.Published)] == published


@pytest.mark.flips("SharedTrainingMaster.debug_longer_iterations")
def test_debug_longer_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    train()
    assert slept == []
    train(debug_longer_iterations=30)
    assert slept == [0.03] * 6


@pytest.mark.flips("SharedTrainingMaster.encoding_debug_mode")
def test_encoding_debug_mode() -> None:
    assert not [name for name in train().stats if name.startswith("r_")]
    assert train(encoding_debug_mode=True).stats["r_max"] > 0


@pytest.mark.flips("SharedTrainingMaster.workers_per_node")
def test_workers_per_node() -> None:
    slots = Slots(executors=3, per_executor=4)
    assert workers_for(slots, SharedTrainingMaster()) == 12
    assert workers_for(slots, SharedTrainingMaster(workers_per_node=2)) == 6


# -- a node's machine ------------------------------------------------------------------------------

HERE = Address("127.0.0.1", 2, 11, 12)


def running_node(**options: Any) -> Node:
    """A node at time 0 with a replica, in a fit that runs, whose slowest has taken no step."""
    job = job_of(**options)
    batches = batches_of(job, PLACE, FEATURES, LABELS)
    node = Node(identity_of(job, PLACE, batches), limits_of(job), 0.0)
    welcome = Welcome(
        token=node.standing.identity.token,
        count=1,
        edge=1,
        node=4,
        up=Address("127.0.0.1", 1, 1, 2),
        base=0,
        snapshot=True,
        chunks=1,
        last=[],
        closed=[],
        epoch=0,
        batch=0,
        steps=0,
        grants=[],
    )
    state = State(phase=Phase.RUNNING, head=0, final=0, slowest=0, last_seq=0)
    node.step(ev.Opened(HERE), 0.0)
    for message in (welcome, state, Chunk(index=0, commit=0, payload=b"")):
        node.step(ev.Received(MASTER, message), 0.0)
    node.step(ev.Paused(node.command.number), 0.0)
    node.step(ev.Tick(), 0.0)
    node.step(ev.Installed(), 0.0)
    node.step(ev.Busy(Activity.WAITING), 0.0)
    assert node.command.order is Order.TRAIN
    return node


def published(payload_bytes: int, steps: int = 1) -> ev.Published:
    return ev.Published(1, 2, 1, bytes(payload_bytes), 0, 0, 0, steps)


@pytest.mark.flips("VoidConfiguration.window_bytes")
@pytest.mark.parametrize(("window_bytes", "order"), [(1000, Order.WAIT), (5000, Order.TRAIN)])
def test_window_bytes(window_bytes: int, order: Order) -> None:
    node = running_node(void=VoidConfiguration(window_bytes=window_bytes))
    node.step(published(2000), 0.0)
    assert node.command.order is order


@pytest.mark.flips("SharedTrainingMaster.max_lead")
@pytest.mark.parametrize("max_lead", [3, 16, None])
def test_max_lead(max_lead: int | None) -> None:
    assert running_node(max_lead=max_lead).command.steps_max == max_lead


def seconds_until(node: Node, wanted: Any, *, heard: bool) -> int:
    """Tick each second until an effect or the command is ``wanted``."""
    state = State(phase=Phase.RUNNING, head=0, final=0, slowest=0, last_seq=0)
    for second in range(1, 1000):
        if heard:
            node.step(ev.Received(MASTER, state), second)
        if wanted(node.step(ev.Tick(), second), node.command):
            return second
    raise AssertionError("it never happened")


@pytest.mark.flips("SharedTrainingMaster.step_timeout")
@pytest.mark.parametrize("step_timeout", [50.0, 600.0])
def test_step_timeout(step_timeout: float) -> None:
    node = running_node(step_timeout=step_timeout)
    node.step(ev.Busy(Activity.STEPPING), 0.0)
    failed = seconds_until(node, lambda _, command: command.order is Order.FAIL, heard=True)
    assert failed == step_timeout + 1
    assert "raise step_timeout" in node.command.reason


@pytest.mark.flips("VoidConfiguration.lease_s")
@pytest.mark.parametrize("lease_s", [8.0, 20.0])
def test_lease_s_on_the_workers_side(lease_s: float) -> None:
    node = running_node(void=VoidConfiguration(lease_s=lease_s))
    reopens = seconds_until(node, lambda effects, _: ev.Reopen() in effects, heard=False)
    assert reopens == lease_s / 2 + 1


# -- the master's machine --------------------------------------------------------------------------


def master_of(**options: Any) -> Master:
    """A master for two partitions at time 0; the first one's worker has joined and waits."""
    master = Master(
        version="1",
        partitions=2,
        epochs=1,
        chunks=1,
        host="127.0.0.1",
        port=1,
        limits=network.limits_of(SharedTrainingMaster(**options), 2),
        now_s=0.0,
    )
    join = Join(
        token=1,
        count=1,
        edge=1,
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
        have=0,
        has_replica=False,
    )
    master.step(ev.Received(-1, join), 0.0)
    report(master, 0.0)
    return master


def report(master: Master, now_s: float) -> list[ev.Effect]:
    waits = Report(
        edge=1, received=0, after_seq=0, epoch=0, batch=0, steps=0, activity=Activity.WAITING
    )  # fmt: skip
    return master.step(ev.Received(min(master.fit.members.live), waits), now_s)


def play(master: Master, seconds: int, *, reports: bool = True) -> Iterator[list[ev.Effect]]:
    """A tick each second, and a report if it is still a member."""
    for second in range(1, seconds):
        told = report(master, second) if reports and master.fit.members.live else []
        yield told + master.step(ev.Tick(), second)


@pytest.mark.flips("SharedTrainingMaster.start_timeout")
@pytest.mark.parametrize("start_timeout", [20.0, 60.0])
def test_start_timeout(start_timeout: float) -> None:
    master = master_of(start_timeout=start_timeout)
    for _ in play(master, 100):
        pass
    assert start_timeout < master.fit.phases.began_s[Phase.RUNNING] <= start_timeout + 1


@pytest.mark.flips("SharedTrainingMaster.min_workers")
@pytest.mark.parametrize(("min_workers", "aborts"), [(1, False), (2, True)])
def test_min_workers(min_workers: int, aborts: bool) -> None:
    effects = [effect for tick in play(master_of(min_workers=min_workers), 70) for effect in tick]
    reasons = [effect.reason for effect in effects if isinstance(effect, ev.Abort)]
    assert bool(reasons) is aborts
    assert all("1 workers joined within" in reason for reason in reasons)


@pytest.mark.flips("VoidConfiguration.lease_s")
@pytest.mark.parametrize("lease_s", [8.0, 20.0])
def test_lease_s_on_the_masters_side(lease_s: float) -> None:
    master = master_of(void=VoidConfiguration(lease_s=lease_s))
    left = [
        second
        for second, effects in enumerate(play(master, 40, reports=False), 1)
        if any(isinstance(effect, ev.CloseEdge) for effect in effects)
    ]
    assert left == [lease_s + 1]


@pytest.mark.flips("VoidConfiguration.log_bytes")
@pytest.mark.parametrize(("log_bytes", "reaches"), [(2000, False), (100_000, True)])
def test_log_bytes(log_bytes: int, reaches: bool) -> None:
    master = master_of(void=VoidConfiguration(log_bytes=log_bytes, window_bytes=2000))
    node = min(master.fit.members.live)
    for seq in range(1, 21):
        update = Update(
            origin=node,
            seq=seq,
            seen=0,
            epoch=0,
            batch=0,
            steps=seq,
            form=1,
            tau_quanta=2,
            count=1,
            payload=bytes(1000),
        )
        master.step(ev.Received(node, update), 0.0)
    assert master.fit.sequencer.head == 20
    assert master.fit.sequencer.log.reaches(0) is reaches


# -- frames ----------------------------------------------------------------------------------------


@pytest.mark.flips("VoidConfiguration.max_chunk_size")
@pytest.mark.parametrize(("max_chunk_size", "frames"), [(1024, 10), (5000, 2), (65_536, 1)])
def test_max_chunk_size(monkeypatch: pytest.MonkeyPatch, max_chunk_size: int, frames: int) -> None:
    """What a worker of this job would send for a message of 10,000 bytes."""
    memory = MemoryNetwork()
    monkeypatch.setattr(executor, "opener", lambda *_, **__: lambda before: memory.open())
    monkeypatch.setattr(executor.NodeThread, "start", lambda self: None)
    job = job_of(void=VoidConfiguration(max_chunk_size=max_chunk_size))
    session = executor.Session(job, PLACE, batches_of(job, PLACE, FEATURES, LABELS))
    mail = session.thread._mail
    mail.connect(MASTER, 1, HERE)
    mail.send(MASTER, Chunk(index=0, commit=0, payload=bytes(10_000 - 16)))
    assert mail.waiting == frames
