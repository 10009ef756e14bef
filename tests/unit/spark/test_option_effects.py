"""Tests of options that act in a worker's training: each is set, and its effect is checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.memory_transport import MemoryNetwork, MemoryTransport
from sparkstrom.base.clock import SystemClock
from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import (
    Address,
    Chunk,
)
from sparkstrom.data.packed_rows import format_from_batch
from sparkstrom.data.row_blocks import Block, read_row_blocks
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.fit.fit_context import TaskSlots
from sparkstrom.fit.master_setup import make_master_plan
from sparkstrom.models.base import Batch
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.models.updaters import Adam, Nesterov, Updater
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command, Directive
from sparkstrom.runtime.optimizer_states import OptimizerStateServer
from sparkstrom.runtime.theta import Replica, Theta
from sparkstrom.runtime.trainer_thread import Trainer, TrainerChannel
from sparkstrom.runtime.training_loop import TrainerInbox, TrainerItem
from sparkstrom.spark.executor_slots import count_workers
from sparkstrom.spark.fit_strategies import strategy_for
from sparkstrom.worker import training_task as tasks
from sparkstrom.worker.training_job import TrainingJob
from sparkstrom.worker.training_task import (
    TaskEnvironment,
    load_batches,
    make_node_limits,
    make_replica,
    make_trainer_options,
)

K, WORKERS = 20, 4
CHANCE = np.random.default_rng(0)
FEATURES = CHANCE.normal(size=(20, 6)).astype(np.float32)
LABELS = CHANCE.integers(0, 3, 20)
BATCH = Batch(FEATURES, LABELS)
PLACE = TaskEnvironment(1, 5, "host", "jvm", Path("/nowhere"))


def all_rows() -> Iterator[Block]:
    """Yield all 20 rows as blocks of partition 1."""
    return read_row_blocks(1, zip(FEATURES, LABELS, strict=True))


ROWS = np.arange(400_000)
FORM = format_from_batch(BATCH)
MakeJob = Callable[..., TrainingJob]


@pytest.fixture
def replica_of(job_of: MakeJob) -> Callable[..., Replica]:
    """Return a function that makes a worker's replica with given options."""

    def make(**options: Any) -> Replica:
        job = job_of(**options)
        return make_replica(job, Theta(job.spec.n_params, job.k))

    return make


@pytest.mark.flips("SharedTrainingMaster.train_on")
def test_train_on(replica_of: Callable[..., Replica]) -> None:
    """Without a publication theta stays constant, and only a local model improves by its steps."""
    losses = {
        way: [made.step(BATCH) for _ in range(3)]
        for way in ("local", "replica")
        if (made := replica_of(train_on=way))
    }
    assert len(set(losses["replica"])) == 1
    assert losses["local"] == sorted(set(losses["local"]), reverse=True)


@pytest.mark.flips("SharedTrainingMaster.threshold")
@pytest.mark.parametrize(("tau", "sends"), [(1e-4, True), (10.0, False)])
def test_threshold(replica_of: Callable[..., Replica], tau: float, sends: bool) -> None:
    replica = replica_of(threshold=FixedThreshold(tau))
    replica.step(BATCH)
    assert (replica.publish() is not None) is sends


@pytest.mark.flips("SharedTrainingMaster.residual_post_processor", "ResidualClipping.multiple")
@pytest.mark.parametrize(
    ("clipping", "clips"),
    [(None, False), (ResidualClipping(1.0, 1), True), (ResidualClipping(1e6, 1), False)],
)
def test_residual_post_processor(
    replica_of: Callable[..., Replica], clipping: ResidualClipping | None, clips: bool
) -> None:
    replica = replica_of(threshold=FixedThreshold(1e-4), residual_post_processor=clipping)
    replica.step(BATCH)
    replica.publish()
    assert (replica.encoder.counters.mass_clipped > 0) is clips


@pytest.mark.flips("SharedTrainingMaster.aggregation")
@pytest.mark.parametrize(("aggregation", "weight"), [("sum", 1), ("mean", 1 / 4), ("sqrt", 1 / 2)])
def test_aggregation(replica_of: Callable[..., Replica], aggregation: str, weight: float) -> None:
    replica = replica_of(aggregation=aggregation, threshold=FixedThreshold(2**-10))
    replica.step(BATCH)
    replica.publish()
    assert np.abs(replica.theta.to_host()).max() == weight * 2**-10


@pytest.mark.flips("SharedTrainingMaster.batch_size_per_worker")
@pytest.mark.parametrize(("rows", "batches"), [(1, 20), (8, 3), (32, 1)])
def test_batch_size_per_worker(job_of: MakeJob, rows: int, batches: int) -> None:
    made = load_batches(job_of(batch_size_per_worker=rows), PLACE, all_rows())
    assert made.batches_per_epoch == batches
    assert len(made.get(0, 0)[0]) == min(rows, 20)


@pytest.mark.flips("SharedTrainingMaster.batch_memory_bytes")
@pytest.mark.parametrize(("limit_bytes", "spills"), [(16 << 20, True), (64 << 20, False)])
def test_batch_memory_bytes(
    job_of: MakeJob, tmp_path: Path, limit_bytes: int, spills: bool
) -> None:
    """Rows that exceed half of the limit are spilled to an unnamed file in the scratch folder."""
    wide = np.zeros((20, 6), np.float32).repeat(20_000, axis=0)
    wide[:, 0] = np.arange(len(wide))
    rows = iter([Block(FORM, FORM.pack([wide, np.zeros(len(wide), np.int64)]), ROWS, "here")])
    made = load_batches(
        job_of(batch_memory_bytes=limit_bytes), replace(PLACE, scratch=tmp_path), rows
    )
    assert made.rows == len(wide)
    assert (made.spilled_bytes > 0) is spills
    assert list(tmp_path.iterdir()) == []
    made.close()


@pytest.mark.flips("SharedTrainingMaster.rng_seed")
def test_rng_seed(job_of: MakeJob) -> None:
    first = [
        load_batches(job_of(rng_seed=seed), PLACE, all_rows()).get(0, 0).features.tolist()
        for seed in (0, 0, 1)
    ]
    assert first[0] == first[1] != first[2]


class Playing(TrainerChannel):
    """A channel that commands TRAIN ``steps`` times, AUDIT and END, and records all events."""

    def __init__(self, steps: int) -> None:
        super().__init__(TrainerInbox(0, Theta(21, K).new_sum), wake=lambda: None)
        commands = [Directive(Command.TRAIN)] * steps
        self.script = iter([*commands, Directive(Command.AUDIT), Directive(Command.END, "done")])
        self.said: list[ev.Event] = []

    def take(self) -> tuple[list[TrainerItem], Directive]:
        return [], next(self.script)

    def wait(self, seconds: float, known: Directive) -> None:
        """Return at once, because a command is always available."""

    def post(self, event: ev.Event) -> None:
        self.said.append(event)


@pytest.fixture
def train(job_of: MakeJob) -> Callable[..., Playing]:
    """Return a function that trains six steps with given options and returns the channel."""

    def run(**options: Any) -> Playing:
        job = job_of(batch_size_per_worker=4, threshold=FixedThreshold(1e-4), **options)
        channel = Playing(6)
        Trainer(
            channel,
            make_replica(job, Theta(job.spec.n_params, job.k)),
            load_batches(job, PLACE, all_rows()),
            make_trainer_options(job),
            save_residual=lambda replica: None,
            add_residuals=lambda replica, paths: None,
            optimizer_server=OptimizerStateServer(SystemClock()),
        ).run()
        return channel

    return run


@pytest.mark.flips("SharedTrainingMaster.publish_every")
@pytest.mark.parametrize(("publish_every", "published"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6])])
def test_publish_every(
    train: Callable[..., Playing], publish_every: int, published: list[int]
) -> None:
    said = train(publish_every=publish_every).said
    assert [event.steps for event in said if isinstance(event, ev.UpdatePublished)] == published


@pytest.mark.flips("SharedTrainingMaster.publish_every")
@pytest.mark.parametrize(("options", "most"), [({}, 1), ({"publish_every": 4}, None)])
def test_by_default_a_publication_waits_for_the_one_before(
    job_of: MakeJob, options: dict[str, int], most: int | None
) -> None:
    """By default one publication is in flight at most; with publish_every there is no limit."""
    job = job_of(**options)
    assert make_node_limits(job).publications_max == most
    assert make_trainer_options(job).publish_every == options.get("publish_every")


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 4),
        ({"max_lead": None, "max_staleness": None}, 4),
        ({"max_lead": 1}, 1),
        ({"max_staleness": 0}, 1),
    ],
)
def test_updates_have_several_steps_unless_a_number_limits_how_late_they_are(
    job_of: MakeJob, options: dict[str, Any], most: int
) -> None:
    """An update has up to 4 minibatches unless max_lead or max_staleness is a number."""
    assert make_trainer_options(job_of(**options)).minibatches_per_update_max == most


@pytest.mark.flips("SharedTrainingMaster.horizon")
@pytest.mark.parametrize(("horizon", "before"), [("fit", 70), ("worker", None)])
def test_horizon(job_of: MakeJob, horizon: str, before: int | None) -> None:
    job = job_of(horizon=horizon)
    job = replace(job, spec=replace(job.spec, minibatches_before=70))
    assert make_trainer_options(job).minibatches_before == before


@pytest.mark.flips("SharedTrainingMaster.scaling")
@pytest.mark.parametrize(
    ("scaling", "before", "workers_max", "weight"),
    [
        (None, 70, None, 1),
        ("limited", 70, 8, 1 / 2),
        ("sequential", 70, None, 1),
        ("ddp", None, None, 1 / 16),
    ],
)
def test_a_scaling_rule_sets_whose_momentum_and_which_weight(
    job_of: MakeJob, scaling: str | None, before: int | None, workers_max: int | None, weight: float
) -> None:
    """``scaling`` sets the momentum horizon, the summed workers and the weight of updates."""
    job = job_of(scaling=scaling)
    job = replace(job, spec=replace(job.spec, minibatches_before=70, workers=16))
    theta = Theta(job.spec.n_params, job.k)
    plan = make_master_plan(job.spec, theta, job.model, job.master, {})
    assert make_trainer_options(job).minibatches_before == before
    assert plan.summed_workers_max == workers_max
    assert plan.limits_overshoot == (scaling != "ddp")
    encoder = make_replica(job, theta).encoder
    encoder.set_workers(16, workers_max)
    assert encoder.scale == weight


@pytest.mark.parametrize(("updater", "weight"), [(Nesterov(0.1, 0.9), 1 / 16), (Adam(), 1 / 4)])
def test_with_the_rule_of_ddp_updates_of_adaptive_optimizers_weigh_more(
    job_of: MakeJob, updater: Updater, weight: float
) -> None:
    """With scaling="ddp" and 16 workers, updates weigh 1/16, or 1/4 with Adam."""
    job = job_of(scaling="ddp")
    model = DenseNetwork([6, 3], updater=updater)
    job = replace(job, model=model, spec=replace(job.spec, workers=16))
    assert make_replica(job, Theta(job.spec.n_params, job.k)).encoder.scale == weight


@pytest.mark.flips("SharedTrainingMaster.limit_overshoot")
def test_a_fit_may_go_on_summing_all_workers(job_of: MakeJob) -> None:
    """With limit_overshoot=False, the master's plan does not limit the weight of updates."""
    job = job_of(limit_overshoot=False)
    theta = Theta(job.spec.n_params, job.k)
    assert not make_master_plan(job.spec, theta, job.model, job.master, {}).limits_overshoot


def test_publish_auto_goes_by_the_command(train: Callable[..., Playing]) -> None:
    """By default every step publishes here, because the previous publication is committed."""
    said = train().said
    assert [event.steps for event in said if isinstance(event, ev.UpdatePublished)] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]


@pytest.mark.flips("SharedTrainingMaster.debug_longer_iterations")
def test_debug_longer_iterations(
    train: Callable[..., Playing], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    train()
    assert slept == []
    train(debug_longer_iterations=30)
    assert slept == [0.03] * 6


@pytest.mark.flips("SharedTrainingMaster.encoding_debug_mode")
def test_encoding_debug_mode(train: Callable[..., Playing]) -> None:
    assert train().stats.residual is None
    assert train(encoding_debug_mode=True).stats.residual.max > 0


@pytest.mark.flips("SharedTrainingMaster.workers_per_node")
def test_workers_per_node() -> None:
    slots = TaskSlots(executors=3, per_executor=4)
    assert count_workers(slots, strategy_for(SharedTrainingMaster())) == 12
    assert count_workers(slots, strategy_for(SharedTrainingMaster(workers_per_node=2))) == 6


def test_a_task_that_gets_no_thread_closes_its_transport(
    job_of: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task whose node thread cannot start closes its transport, which would outlive the task."""
    memory, opened = MemoryNetwork(), list[MemoryTransport]()

    def open_transport(before: object) -> MemoryTransport:
        opened.append(memory.open())
        return opened[-1]

    def start(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(tasks, "transport_opener", lambda *_, **__: open_transport)
    monkeypatch.setattr(tasks.NodeThread, "start", start)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        tasks.run_training_task(job_of(), PLACE, all_rows())
    assert [transport._is_closed for transport in opened] == [True]


@pytest.mark.flips("VoidConfiguration.max_chunk_size")
@pytest.mark.parametrize(("max_chunk_size", "frames"), [(1024, 10), (5000, 2), (65_536, 1)])
def test_max_chunk_size(
    job_of: MakeJob, monkeypatch: pytest.MonkeyPatch, max_chunk_size: int, frames: int
) -> None:
    """A worker sends a message of 10,000 bytes in frames of at most max_chunk_size bytes."""
    memory = MemoryNetwork()
    monkeypatch.setattr(tasks, "transport_opener", lambda *_, **__: lambda before: memory.open())
    monkeypatch.setattr(tasks.NodeThread, "start", lambda self: None)
    job = job_of(void=VoidConfiguration(max_chunk_size=max_chunk_size))
    session = tasks.TrainingSession(job, PLACE, load_batches(job, PLACE, all_rows()))
    mail = session.thread._message_endpoint
    mail.open_edge(MASTER, 1, Address("127.0.0.1", 1, 21, 22), Address("127.0.0.1", 2, 11, 12))
    mail.send(MASTER, Chunk(index=0, commit=0, payload=bytes(10_000 - 16)))
    assert mail.waiting == frames
