"""Fits in PLAIN mode (all workers are the master's children), over memory transports."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.observe.epoch_history import EpochHistory
from sparkstrom.protocol.master.members import MasterLimits
from sparkstrom.runtime import output_capture
from sparkstrom.runtime.output_capture import WorkerOutput
from tests.unit.runtime.fits import (
    EPOCHS,
    ROWS,
    WORKERS,
    Mesh,
    TransportFactory,
    assert_fit_complete,
    wait_until,
)


def test_fit_ends_with_equal_replicas_and_complete_counters(make_mesh: Callable[..., Mesh]) -> None:
    """A fit trains all minibatches, ends with equal replicas and has complete counters."""
    mesh = make_mesh()
    before = mesh.theta.digest()
    mesh.begin()
    for partition in range(WORKERS):
        mesh.add_worker(partition)
    outcome = mesh.finish()
    assert_fit_complete(mesh, outcome)
    assert outcome.minibatches == WORKERS * EPOCHS * 5
    assert mesh.theta.digest() != before
    assert len(outcome.hashes) == 3
    assert outcome.commits == sum(outcome.staleness.values()) > 0
    assert sum(told.training.examples for told in outcome.stats.values()) == WORKERS * EPOCHS * ROWS
    assert all(told.node.update_bytes > 0 for told in outcome.stats.values())
    assert all(told.unknown == () for told in outcome.stats.values())
    assert outcome.traffic.rejected.total() == 0


def test_worker_output_until_drain_is_delivered_or_counted(
    make_mesh: Callable[..., Mesh],
) -> None:
    """When the fit is done, the master has every line that workers printed, or has counted it."""
    mesh = make_mesh()
    mesh.begin()
    for partition in range(WORKERS):
        output = WorkerOutput(SystemClock())
        mesh.add_worker(partition, model=PrintingModel(output), said=output.take)
    mesh.finish()
    progress = mesh.master.progress
    steps = mesh.master.outcome().minibatches
    assert len(progress.heard) + progress.worker_lines_skipped == steps
    assert len(progress.heard) == WORKERS * output_capture.LINES_BURST
    assert {(line.host, line.phase) for line in progress.heard} == {("here", "starting")}
    assert {line.partition for line in progress.heard} == set(range(WORKERS))


class PrintingModel(DenseNetwork):
    """A model that prints a line in every step."""

    def __init__(self, output: WorkerOutput) -> None:
        super().__init__([5, 8, 3])
        self._output = output

    def step(self, batch: Any) -> float:
        self._output.add("step")
        return super().step(batch)


@pytest.mark.parametrize("dies_at_frame", [1, 5, 25])
def test_worker_continues_on_same_endpoint_after_media_driver_death(
    make_mesh: Callable[..., Mesh], dies_at_frame: int
) -> None:
    """A worker continues over a second transport, on its former endpoint, if its driver dies."""
    mesh = make_mesh()
    opening = TransportFactory(mesh.network, dies_at_frame)
    mesh.begin()
    mesh.add_worker(0, opening=opening)
    mesh.add_worker(1)
    assert_fit_complete(mesh, mesh.finish())
    assert len(opening.opened) == 2
    assert opening.opened[1] is not None


@pytest.mark.parametrize("dies_at_frame", [1, 10, 30])
def test_master_continues_on_same_endpoint_after_media_driver_death(
    make_mesh: Callable[..., Mesh], dies_at_frame: int
) -> None:
    """The master continues over a second transport, on its former endpoint, if its driver dies."""
    mesh = make_mesh(MasterLimits(lease_s=2.0))
    mesh.opening = TransportFactory(mesh.network, dies_at_frame)
    mesh.begin()
    for partition in range(WORKERS):
        mesh.add_worker(partition)
    assert_fit_complete(mesh, mesh.finish())
    assert mesh.opening.opened[1] == mesh.master.endpoint


def test_fit_succeeds_with_one_empty_partition(make_mesh: Callable[..., Mesh]) -> None:
    """A fit succeeds if one partition is empty."""
    mesh = make_mesh()
    mesh.begin()
    mesh.add_worker(0)
    mesh.add_worker(1, rows=0)
    outcome = mesh.finish()
    assert_fit_complete(mesh, outcome)
    assert outcome.minibatches == EPOCHS * 5


ALL_ROWS = float(np.nextafter(1, 0))


def test_partition_with_only_held_out_rows_is_evaluated(
    make_mesh: Callable[..., Mesh],
) -> None:
    """A worker without rows to train measures its held-out rows when other workers end an epoch."""
    mesh = make_mesh()
    mesh.begin()
    mesh.add_worker(0)
    mesh.add_worker(1, fraction=ALL_ROWS)
    outcome = mesh.finish()
    assert_fit_complete(mesh, outcome)
    live, whole = EpochHistory(), EpochHistory()
    live.add_counters(outcome.stats.values())
    whole.add_reports([trainer.epochs.report() for trainer in mesh.trainers])
    assert [one.held_weight for one in whole.history()] == [ROWS] * EPOCHS
    assert live.history() == whole.history()
    held, weight = mesh.replicas[1].measure(mesh.trainers[1]._batches.held_out, "loss")
    assert whole.epoch(EPOCHS - 1).validation == held / weight  # as the fit delivers it


def test_progress_names_partitions_with_only_held_out_rows(make_mesh: Callable[..., Mesh]) -> None:
    """``progress.evaluating`` has partitions whose rows are all held out, but not empty ones."""
    mesh = make_mesh(partitions=3)
    mesh.begin()
    mesh.add_worker(1, fraction=ALL_ROWS)
    mesh.add_worker(2, rows=0)
    wait_until(lambda: len(mesh.master.progress.stats) == 2)
    wait_until(lambda: mesh.master.progress.evaluating == {1})
    mesh.add_worker(0)
    assert_fit_complete(mesh, mesh.finish())


def test_fit_with_all_partitions_empty_raises_usage_error(make_mesh: Callable[..., Mesh]) -> None:
    """A fit fails with a UsageError if all partitions are empty."""
    mesh = make_mesh()
    mesh.begin()
    for partition in range(WORKERS):
        mesh.add_worker(partition, rows=0)
    with pytest.raises(UsageError, match="all 2 partitions are empty"):
        mesh.finish()


class FailingModel(DenseNetwork):
    """A model that raises in its third step."""

    taken = 0

    def step(self, batch: Any) -> float:
        self.taken += 1
        if self.taken == 3:
            raise ZeroDivisionError("on purpose")
        return super().step(batch)


def test_trainer_exception_ends_fit_and_names_partition(make_mesh: Callable[..., Mesh]) -> None:
    """An exception in a trainer ends the fit with an error that names the partition."""
    mesh = make_mesh()
    mesh.begin()
    mesh.add_worker(0)
    mesh.add_worker(1, model=FailingModel([5, 8, 3]))
    with pytest.raises(TrainingError, match="on purpose") as raised:
        mesh.finish()
    assert raised.value.partition == 1


def test_stop_requested_before_joins_ends_fit_with_equal_replicas(
    make_mesh: Callable[..., Mesh],
) -> None:
    """A stop requested before any worker joined ends the fit with its reason and equal replicas."""
    mesh = make_mesh()
    mesh.begin()
    mesh.master.request_stop("enough")
    for partition in range(WORKERS):
        mesh.add_worker(partition)
    outcome = mesh.finish()
    assert outcome.stop_reason == "enough"
    assert len(set(outcome.hashes.values())) == 1


def test_random_frames_on_join_stream_are_rejected_and_counted(
    make_mesh: Callable[..., Mesh],
) -> None:
    """Random frames on the join stream are rejected and counted, and the fit succeeds."""
    mesh = make_mesh()
    mesh.begin()
    stranger = mesh.network.open()
    join_stream = stranger.open_sender(mesh.master.endpoint, mesh.master.join_stream, control=True)
    for partition in range(WORKERS):
        mesh.add_worker(partition)
    join_stream.offer([secrets.token_bytes(200)] * 5)
    outcome = mesh.finish()
    assert_fit_complete(mesh, outcome)
    assert outcome.traffic.rejected.total() == 5
