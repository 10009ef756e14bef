"""Replica: what steps, updates, snapshots and buffers change, with either ``train_on``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import TrainingError
from sparkstrom.codec.messages import BUFFERS, Chunk, Commit, MergedRange, Payload, Update
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.encoding.update_sum import UpdateSum
from sparkstrom.models.base import Batch, Flat
from sparkstrom.protocol.common.events_and_effects import (
    ApplyMergedRange,
    InstallSnapshot,
    SendMerged,
)
from sparkstrom.runtime.theta import Replica, Theta, snapshot_chunk_count
from sparkstrom.runtime.training_loop import MergedCommits
from tests.unit.runtime.memories import SIMULATED, as_host_array, backend, make_theta

K, N, TAU = 10, 300, 0.125
COMMITS = 20 if SIMULATED else 200  # commits while a neighbour copies chunks
BATCH = Batch(np.zeros((1, 1), np.float32), np.zeros(1, np.int64))

WAYS = pytest.mark.parametrize("train_on", ["local", "replica"])
MakeCommit = Callable[..., Commit]


@pytest.fixture
def make_replica(constant_step_model: Callable[..., Any]) -> Callable[..., Replica]:
    """A factory of replicas whose model adds ``push`` to every parameter per step."""

    def build(train_on: str, push: float = TAU / 2) -> Replica:
        encoder = Encoder(N, K, FixedThreshold(TAU), train_on=train_on, backend=backend())
        return Replica(
            constant_step_model(N, push), make_theta(N, K), encoder, local=train_on == "local"
        )

    return build


def snapshot_chunks(theta: Theta) -> tuple[Chunk, ...]:
    """Return all chunks of a snapshot."""
    return tuple(theta.chunk(index) for index in range(snapshot_chunk_count(N)))


def copy_theta(replica: Replica) -> tuple[int, Theta]:
    """Return a snapshot of this replica: its commit, and the parameters installed from it."""
    copy = make_theta(N, K)
    chunks = [replica.chunk(index) for index in range(snapshot_chunk_count(N))]
    copy.install(chunks, (), (), chunks[0].commit)
    return chunks[0].commit, copy


def constant_parameters(value: float) -> Flat:
    return np.full(N, value, np.float32)


@WAYS
def test_changes_below_tau_stay_in_residual(
    make_replica: Callable[..., Replica], train_on: str
) -> None:
    """Changes below tau stay in the residual; at tau they are published and added to theta."""
    replica = make_replica(train_on)
    assert replica.step(BATCH) == 1.0
    assert replica.publish() is None
    np.testing.assert_array_equal(replica.theta.to_host(), constant_parameters(0))
    np.testing.assert_array_equal(replica.residual(), constant_parameters(TAU / 2))
    replica.step(BATCH)
    encoded = replica.publish()
    assert isinstance(encoded, Payload)
    assert encoded.count == N
    np.testing.assert_array_equal(replica.theta.to_host(), constant_parameters(TAU))
    np.testing.assert_array_equal(replica.residual(), constant_parameters(0))
    assert replica.residual_norm() == 0.0


def test_local_step_starts_from_previous_step(make_replica: Callable[..., Replica]) -> None:
    """With ``train_on="local"``, a step starts from the parameters of the step before it."""
    replica = make_replica("local")
    replica.step(BATCH)
    replica.step(BATCH)
    assert replica.theta.local is not None
    np.testing.assert_array_equal(as_host_array(replica.theta.local), constant_parameters(TAU))


def test_replica_step_starts_from_theta(make_replica: Callable[..., Replica]) -> None:
    """With ``train_on="replica"``, each step starts from theta."""
    replica = make_replica("replica")
    for _ in range(2):
        replica.step(BATCH)
        replica.accumulate_delta()
    assert replica.theta.local is None
    np.testing.assert_array_equal(replica.model.params, constant_parameters(TAU / 2))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(replica.residual(), constant_parameters(TAU))


@WAYS
def test_accumulated_steps_equal_published_steps(
    make_replica: Callable[..., Replica], train_on: str
) -> None:
    """Four accumulated steps lead to the same theta as four published ones."""
    often, seldom = make_replica(train_on), make_replica(train_on)
    for _ in range(4):
        often.step(BATCH)
        often.publish()
        seldom.step(BATCH)
        seldom.accumulate_delta()
    seldom.model.push = 0.0  # type: ignore[attr-defined]
    for _ in range(2):
        seldom.step(BATCH)
        seldom.publish()
    np.testing.assert_array_equal(often.theta.to_host(), constant_parameters(2 * TAU))
    np.testing.assert_array_equal(seldom.theta.to_host(), often.theta.to_host())


@WAYS
def test_updates_of_other_workers_change_theta_but_not_residual(
    make_replica: Callable[..., Replica], make_commit: MakeCommit, train_on: str
) -> None:
    """Other workers' updates change theta, and ``local`` with it, but not the residual."""
    replica = make_replica(train_on)
    replica.step(BATCH)
    replica.publish()
    replica.apply(replica.theta.decode(make_commit(1, 3).payload), 1)
    replica.apply_merged(MergedCommits(UpdateSum.of_array(np.full(N, 1024, np.int32)), 5, 0))
    assert replica.theta.commit == 5
    assert replica.theta.to_host()[[2, 3]].tolist() == [1 + TAU, 1]
    np.testing.assert_array_equal(replica.residual(), constant_parameters(TAU / 2))
    replica.step(BATCH)
    model = replica.model.params  # type: ignore[attr-defined]
    expected = 1 + (TAU if train_on == "local" else TAU / 2)
    assert model[3] == expected


@WAYS
def test_installed_snapshot_replaces_theta_and_keeps_residual(
    make_replica: Callable[..., Replica], make_commit: MakeCommit, train_on: str
) -> None:
    """Installing a snapshot replaces theta and keeps the residual."""
    server = make_theta(N, K)
    server.load(constant_parameters(2))
    server.commit = 8
    replica = make_replica(train_on)
    replica.step(BATCH)
    replica.publish()
    replica.install(InstallSnapshot(snapshot_chunks(server), (make_commit(9, 1),), (), 9))
    assert replica.theta.commit == 9
    assert replica.theta.to_host()[[0, 1]].tolist() == [2 + TAU, 2]
    np.testing.assert_array_equal(replica.residual(), constant_parameters(TAU / 2))


@WAYS
def test_added_residual_adds_to_present_residual(
    make_replica: Callable[..., Replica], train_on: str
) -> None:
    """An added residual adds to the present one."""
    replica = make_replica(train_on)
    replica.step(BATCH)
    replica.publish()
    replica.add_residual(constant_parameters(TAU))
    np.testing.assert_array_equal(replica.residual(), constant_parameters(1.5 * TAU))
    assert replica.residual_norm() == pytest.approx(1.5 * TAU * N**0.5)


@WAYS
@pytest.mark.parametrize("loss", [np.nan, np.inf, -np.inf])
def test_nonfinite_loss_raises_training_error(
    make_replica: Callable[..., Replica], train_on: str, loss: float
) -> None:
    """A loss that is NaN or infinite raises TrainingError."""
    replica = make_replica(train_on)
    replica.model.losses = {2: loss}  # type: ignore[attr-defined]
    replica.step(BATCH)
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf|-inf): training diverges"):
        replica.step(BATCH)


@WAYS
def test_infinite_parameter_raises_error_before_theta_changes(
    make_replica: Callable[..., Replica], train_on: str
) -> None:
    """An infinite parameter raises TrainingError when it is published; theta is unchanged."""
    replica = make_replica(train_on, push=float("inf"))
    replica.step(BATCH)
    with pytest.raises(TrainingError, match=r"parameter 0 became inf"):
        replica.publish()
    np.testing.assert_array_equal(replica.theta.to_host(), constant_parameters(0))


# -- snapshots for neighbours ------------------------------------------------------------------


def step_and_publish(replica: Replica) -> Payload:
    """Take one step and return its update."""
    replica.step(BATCH)
    encoded = replica.publish()
    assert encoded is not None
    return encoded


def make_own_commit(payload: Payload, commit: int) -> Commit:
    """Return a commit of this worker's payload."""
    return Commit(commit=commit, origin=7, seq=1, payload=payload)


def make_own_update(payload: Payload, seq: int = 1) -> Update:
    """Return this worker's update with this payload."""
    return Update(origin=7, seq=seq, seen=0, epoch=0, batch=1, steps=1, payload=payload)


@WAYS
def test_snapshot_omits_own_updates_until_committed(
    make_replica: Callable[..., Replica], make_commit: MakeCommit, train_on: str
) -> None:
    """A snapshot omits own updates until they are committed."""
    replica, server = make_replica(train_on, push=TAU), make_theta(N, K)
    mine = [step_and_publish(replica) for _ in range(2)]
    replica.apply(replica.theta.decode(make_commit(1, 3).payload), 1)
    server.add(server.decode(make_commit(1, 3).payload))
    for commit in (1, 2, 3):
        at, copy = copy_theta(replica)
        assert at == commit
        assert copy.digest() == server.digest()
        if commit < 3:
            replica.mark_committed(commit + 1)
            server.add(server.decode(mine[commit - 1]))
    assert copy.digest() == replica.theta.digest()


@WAYS
@pytest.mark.parametrize("kind", ["merged here", "merged above"])
def test_sum_with_own_updates_adds_only_other_updates(
    make_replica: Callable[..., Replica], make_commit: MakeCommit, train_on: str, kind: str
) -> None:
    """A sum that contains own updates adds only the others' and marks its own as committed."""
    replica, server = make_replica(train_on, push=TAU), make_theta(N, K)
    mine = [step_and_publish(replica) for _ in range(3)]
    log = (make_commit(1, 5, -9), make_own_commit(mine[0], 2), make_own_commit(mine[1], 3))
    for commit in log:
        server.add(server.decode(commit.payload))
    if kind == "merged here":
        total = UpdateSum(N)
        total.add((np.array([4, 8], np.int32), np.array([128, -128], np.int32)))
        replica.apply_merged(MergedCommits(total, 3, 2))
    else:
        merged: MergedRange = server.merge(SendMerged(7, 0, 3, [(7, 2), (9, 1)], 5, log))
        own = tuple(make_own_update(encoded, seq) for seq, encoded in enumerate(mine[:2], 1))
        replica.apply_range(ApplyMergedRange(merged, own))
    at, copy = copy_theta(replica)
    assert (at, copy.digest()) == (3, server.digest())
    replica.mark_committed(4)
    server.add(server.decode(mine[2]))
    assert replica.theta.digest() == server.digest()
    np.testing.assert_array_equal(replica.residual(), constant_parameters(0))


def test_updates_missing_from_snapshot_stay_uncommitted(
    make_replica: Callable[..., Replica],
) -> None:
    """After a snapshot is installed, only updates that it lacks count as uncommitted."""
    replica, server = make_replica("local", push=TAU), make_theta(N, K)
    mine = [step_and_publish(replica) for _ in range(2)]
    server.add(server.decode(mine[0]))
    server.commit = 5
    replica.install(InstallSnapshot(snapshot_chunks(server), (), (make_own_update(mine[1], 2),), 5))
    assert copy_theta(replica)[1].digest() == server.digest()
    np.testing.assert_array_equal(replica.theta.to_host(), constant_parameters(2 * TAU))
    np.testing.assert_array_equal(replica.residual(), constant_parameters(0))
    assert replica.uncommitted_mass() == N * TAU
    replica.mark_committed(6)
    assert copy_theta(replica)[1].digest() == replica.theta.digest()
    assert replica.uncommitted_mass() == 0


def test_chunk_read_concurrently_has_exactly_its_commits(
    make_replica: Callable[..., Replica], make_commit: MakeCommit
) -> None:
    """A chunk read at any time by another thread has exactly the commits up to its number."""
    replica = make_replica("local", push=TAU)
    read: list[Chunk] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            read.append(replica.chunk(0))

    neighbour = threading.Thread(target=look)
    neighbour.start()
    theta, expected = make_theta(N, K), [bytes(4 * N)]
    for commit in range(1, COMMITS, 2):
        for one in (make_own_commit(step_and_publish(replica), commit), make_commit(commit + 1, 3)):
            theta.add(theta.decode(one.payload))
            expected.append(theta.to_host().tobytes())
        replica.mark_committed(commit)
        replica.apply(replica.theta.decode(make_commit(commit + 1, 3).payload), commit + 1)
    ended.set()
    neighbour.join()
    assert read
    assert all(chunk.payload == expected[chunk.commit] for chunk in read)


# -- buffers -----------------------------------------------------------------------------------


class BuffersMixin:
    """The methods of a model with buffers."""

    buffers = b"mine"

    def buffers_bytes(self) -> bytes:
        return self.buffers

    def load_buffers_bytes(self, buffers: bytes) -> None:
        self.buffers = buffers

    def average_buffers(self, reports: list[bytes]) -> bytes:
        return max(reports)


@pytest.fixture
def buffered_replica(make_replica: Callable[..., Replica]) -> Replica:
    """A replica whose model has buffers and adds tau per step."""
    replica = make_replica("local", push=TAU)
    model = type("Model", (BuffersMixin, type(replica.model)), {})(N, TAU)
    return Replica(model, replica.theta, replica.encoder, local=True)


def test_published_buffers_are_own_update_without_parameters(buffered_replica: Replica) -> None:
    """Reported buffers are an own update without parameters; the average replaces theta's only."""
    assert buffered_replica.publish_buffers() == b"mine"
    encoded = step_and_publish(buffered_replica)
    buffered_replica.take_buffers(b"average", 1)
    buffered_replica.mark_committed(1)
    at, copy = copy_theta(buffered_replica)
    assert (at, copy.buffers) == (1, b"average")
    np.testing.assert_array_equal(copy.to_host(), constant_parameters(0))
    buffered_replica.mark_committed(2)
    assert copy_theta(buffered_replica)[1].digest() == buffered_replica.theta.digest()
    assert encoded.count == N
    assert buffered_replica.model.buffers_bytes() == b"mine"  # type: ignore[attr-defined]


def test_model_without_buffers_publishes_none(make_replica: Callable[..., Replica]) -> None:
    """A model without buffers reports none, and no own update is recorded for them."""
    replica = make_replica("local", push=TAU)
    assert replica.publish_buffers() == b""
    step_and_publish(replica)
    replica.mark_committed(1)
    np.testing.assert_array_equal(copy_theta(replica)[1].to_host(), constant_parameters(TAU))


def test_only_first_snapshot_sets_model_buffers(buffered_replica: Replica) -> None:
    """The first snapshot sets the model's buffers; later ones set only those of theta."""
    server = make_theta(N, K)
    server.buffers = b"average"
    buffered_replica.install(InstallSnapshot(snapshot_chunks(server), (), (), 1))
    assert buffered_replica.model.buffers_bytes() == b"average"  # type: ignore[attr-defined]
    server.buffers = b"a newer one"
    pending = Update(
        origin=7, seq=1, seen=0, epoch=0, batch=0, steps=0,
        payload=Payload(BUFFERS, 0, 0, b"mine"),
    )  # fmt: skip
    buffered_replica.install(InstallSnapshot(snapshot_chunks(server), (), (pending,), 2))
    assert buffered_replica.model.buffers_bytes() == b"average"  # type: ignore[attr-defined]
    assert buffered_replica.theta.buffers == b"a newer one"
    buffered_replica.mark_committed(3)
    assert buffered_replica.uncommitted_mass() == 0


def test_worker_with_initial_replica_loads_only_its_buffers(buffered_replica: Replica) -> None:
    """A worker that begins with the initial replica loads its buffers, and no later ones."""
    buffered_replica.theta.buffers = b"initial"
    buffered_replica.begin()
    assert buffered_replica.model.buffers_bytes() == b"initial"  # type: ignore[attr-defined]
    server = make_theta(N, K)
    server.buffers = b"a newer one"
    buffered_replica.install(InstallSnapshot(snapshot_chunks(server), (), (), 1))
    assert buffered_replica.model.buffers_bytes() == b"initial"  # type: ignore[attr-defined]
