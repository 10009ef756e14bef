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
def create_replica(make_job: MakeJob) -> Callable[..., Replica]:
    """Return a function that makes a worker's replica with given options."""

    def make(**options: Any) -> Replica:
        job = make_job(**options)
        return make_replica(job, Theta(job.spec.n_params, job.k))

    return make


@pytest.mark.flips("SharedTrainingMaster.train_on")
def test_train_on_local_improves_loss_without_publication(
    create_replica: Callable[..., Replica],
) -> None:
    """Without a publication theta stays constant, and only a local model improves by its steps."""
    losses = {
        way: [made.step(BATCH) for _ in range(3)]
        for way in ("local", "replica")
        if (made := create_replica(train_on=way))
    }
    assert len(set(losses["replica"])) == 1
    assert losses["local"] == sorted(set(losses["local"]), reverse=True)


@pytest.mark.flips("SharedTrainingMaster.threshold")
@pytest.mark.parametrize(("tau", "sends"), [(1e-4, True), (10.0, False)])
def test_threshold_above_gradients_publishes_nothing(
    create_replica: Callable[..., Replica], tau: float, sends: bool
) -> None:
    replica = create_replica(threshold=FixedThreshold(tau))
    replica.step(BATCH)
    assert (replica.publish() is not None) is sends


@pytest.mark.flips("SharedTrainingMaster.residual_post_processor", "ResidualClipping.multiple")
@pytest.mark.parametrize(
    ("clipping", "clips"),
    [(None, False), (ResidualClipping(1.0, 1), True), (ResidualClipping(1e6, 1), False)],
)
def test_residual_post_processor_clips_residual(
    create_replica: Callable[..., Replica], clipping: ResidualClipping | None, clips: bool
) -> None:
    replica = create_replica(threshold=FixedThreshold(1e-4), residual_post_processor=clipping)
    replica.step(BATCH)
    replica.publish()
    assert (replica.encoder.counters.mass_clipped > 0) is clips


@pytest.mark.flips("SharedTrainingMaster.aggregation")
@pytest.mark.parametrize(("aggregation", "weight"), [("sum", 1), ("mean", 1 / 4), ("sqrt", 1 / 2)])
def test_aggregation_sets_weight_of_updates(
    create_replica: Callable[..., Replica], aggregation: str, weight: float
) -> None:
    replica = create_replica(aggregation=aggregation, threshold=FixedThreshold(2**-10))
    replica.step(BATCH)
    replica.publish()
    assert np.abs(replica.theta.to_host()).max() == weight * 2**-10


@pytest.mark.flips("SharedTrainingMaster.batch_size_per_worker")
@pytest.mark.parametrize(("rows", "batches"), [(1, 20), (8, 3), (32, 1)])
def test_batch_size_per_worker_sets_rows_per_minibatch(
    make_job: MakeJob, rows: int, batches: int
) -> None:
    made = load_batches(make_job(batch_size_per_worker=rows), PLACE, all_rows())
    assert made.batches_per_epoch == batches
    assert len(made.get(0, 0)[0]) == min(rows, 20)


@pytest.mark.flips("SharedTrainingMaster.batch_memory_bytes")
@pytest.mark.parametrize(("limit_bytes", "spills"), [(16 << 20, True), (64 << 20, False)])
def test_rows_beyond_batch_memory_bytes_are_spilled(
    make_job: MakeJob, tmp_path: Path, limit_bytes: int, spills: bool
) -> None:
    """Rows that exceed half of the limit are spilled to an unnamed file in the scratch folder."""
    wide = np.zeros((20, 6), np.float32).repeat(20_000, axis=0)
    wide[:, 0] = np.arange(len(wide))
    rows = iter([Block(FORM, FORM.pack([wide, np.zeros(len(wide), np.int64)]), ROWS, "here")])
    made = load_batches(
        make_job(batch_memory_bytes=limit_bytes), replace(PLACE, scratch=tmp_path), rows
    )
    assert made.rows == len(wide)
    assert (made.spilled_bytes > 0) is spills
    assert list(tmp_path.iterdir()) == []
    made.close()


@pytest.mark.flips("SharedTrainingMaster.rng_seed")
def test_rng_seed_determines_order_of_rows(make_job: MakeJob) -> None:
    first = [
        load_batches(make_job(rng_seed=seed), PLACE, all_rows()).get(0, 0).features.tolist()
        for seed in (0, 0, 1)
    ]
    assert first[0] == first[1] != first[2]


class ScriptedChannel(TrainerChannel):
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
def train(make_job: MakeJob) -> Callable[..., ScriptedChannel]:
    """Return a function that trains six steps with given options and returns the channel."""

    def run(**options: Any) -> ScriptedChannel:
        job = make_job(batch_size_per_worker=4, threshold=FixedThreshold(1e-4), **options)
        channel = ScriptedChannel(6)
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
def test_publish_every_sets_steps_between_publications(
    train: Callable[..., ScriptedChannel], publish_every: int, published: list[int]
) -> None:
    said = train(publish_every=publish_every).said
    assert [event.steps for event in said if isinstance(event, ev.UpdatePublished)] == published


@pytest.mark.flips("SharedTrainingMaster.publish_every")
@pytest.mark.parametrize(("options", "most"), [({}, 1), ({"publish_every": 4}, None)])
def test_default_limits_publications_in_flight_to_one(
    make_job: MakeJob, options: dict[str, int], most: int | None
) -> None:
    """By default one publication is in flight at most; with publish_every there is no limit."""
    job = make_job(**options)
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
def test_update_has_up_to_4_minibatches_unless_lead_is_limited(
    make_job: MakeJob, options: dict[str, Any], most: int
) -> None:
    """An update has up to 4 minibatches unless max_lead or max_staleness is a number."""
    assert make_trainer_options(make_job(**options)).minibatches_per_update_max == most


@pytest.mark.flips("SharedTrainingMaster.horizon")
@pytest.mark.parametrize(("horizon", "before"), [("fit", 70), ("worker", None)])
def test_horizon_worker_ignores_minibatches_before(
    make_job: MakeJob, horizon: str, before: int | None
) -> None:
    job = make_job(horizon=horizon)
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
def test_scaling_sets_momentum_horizon_and_update_weight(
    make_job: MakeJob,
    scaling: str | None,
    before: int | None,
    workers_max: int | None,
    weight: float,
) -> None:
    """``scaling`` sets the momentum horizon, the summed workers and the weight of updates."""
    job = make_job(scaling=scaling)
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
def test_ddp_scaling_gives_adam_updates_more_weight(
    make_job: MakeJob, updater: Updater, weight: float
) -> None:
    """With scaling="ddp" and 16 workers, updates weigh 1/16, or 1/4 with Adam."""
    job = make_job(scaling="ddp")
    model = DenseNetwork([6, 3], updater=updater)
    job = replace(job, model=model, spec=replace(job.spec, workers=16))
    assert make_replica(job, Theta(job.spec.n_params, job.k)).encoder.scale == weight


@pytest.mark.flips("SharedTrainingMaster.limit_overshoot")
def test_limit_overshoot_false_keeps_summing_all_workers(make_job: MakeJob) -> None:
    """With limit_overshoot=False, the master's plan does not limit the weight of updates."""
    job = make_job(limit_overshoot=False)
    theta = Theta(job.spec.n_params, job.k)
    assert not make_master_plan(job.spec, theta, job.model, job.master, {}).limits_overshoot


def test_default_publishes_every_step_if_previous_is_committed(
    train: Callable[..., ScriptedChannel],
) -> None:
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
def test_debug_longer_iterations_sleeps_in_each_step(
    train: Callable[..., ScriptedChannel], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    train()
    assert slept == []
    train(debug_longer_iterations=30)
    assert slept == [0.03] * 6


@pytest.mark.flips("SharedTrainingMaster.encoding_debug_mode")
def test_encoding_debug_mode_reports_residual(train: Callable[..., ScriptedChannel]) -> None:
    assert train().stats.residual is None
    assert train(encoding_debug_mode=True).stats.residual.max > 0


@pytest.mark.flips("SharedTrainingMaster.workers_per_node")
def test_workers_per_node_sets_workers_per_executor() -> None:
    slots = TaskSlots(executors=3, per_executor=4)
    assert count_workers(slots, strategy_for(SharedTrainingMaster())) == 12
    assert count_workers(slots, strategy_for(SharedTrainingMaster(workers_per_node=2))) == 6


def test_failed_start_of_node_thread_closes_transport(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
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
        tasks.run_training_task(make_job(), PLACE, all_rows())
    assert [transport._is_closed for transport in opened] == [True]


@pytest.mark.flips("VoidConfiguration.max_chunk_size")
@pytest.mark.parametrize(("max_chunk_size", "frames"), [(1024, 10), (5000, 2), (65_536, 1)])
def test_max_chunk_size_limits_frame_size(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, max_chunk_size: int, frames: int
) -> None:
    """A worker sends a message of 10,000 bytes in frames of at most max_chunk_size bytes."""
    memory = MemoryNetwork()
    monkeypatch.setattr(tasks, "transport_opener", lambda *_, **__: lambda before: memory.open())
    monkeypatch.setattr(tasks.NodeThread, "start", lambda self: None)
    job = make_job(void=VoidConfiguration(max_chunk_size=max_chunk_size))
    session = tasks.TrainingSession(job, PLACE, load_batches(job, PLACE, all_rows()))
    mail = session.thread._message_endpoint
    mail.open_edge(MASTER, 1, Address("127.0.0.1", 1, 21, 22), Address("127.0.0.1", 2, 11, 12))
    mail.send(MASTER, Chunk(index=0, commit=0, payload=bytes(10_000 - 16)))
    assert mail.waiting == frames
