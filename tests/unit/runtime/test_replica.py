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
from tests.unit.runtime.memories import SIMULATED, backend, make_theta, seen

K, N, TAU = 10, 300, 0.125
COMMITS = 20 if SIMULATED else 200  # commits while a neighbour copies chunks
BATCH = Batch(np.zeros((1, 1), np.float32), np.zeros(1, np.int64))

WAYS = pytest.mark.parametrize("train_on", ["local", "replica"])
MakeCommit = Callable[..., Commit]


@pytest.fixture
def make(pushing: Callable[..., Any]) -> Callable[..., Replica]:
    """A factory of replicas whose model adds ``push`` to every parameter per step."""

    def build(train_on: str, push: float = TAU / 2) -> Replica:
        encoder = Encoder(N, K, FixedThreshold(TAU), train_on=train_on, backend=backend())
        return Replica(pushing(N, push), make_theta(N, K), encoder, local=train_on == "local")

    return build


def whole(theta: Theta) -> tuple[Chunk, ...]:
    """Return all chunks of a snapshot."""
    return tuple(theta.chunk(index) for index in range(snapshot_chunk_count(N)))


def copied(replica: Replica) -> tuple[int, Theta]:
    """Return a snapshot of this replica: its commit, and the parameters installed from it."""
    copy = make_theta(N, K)
    chunks = [replica.chunk(index) for index in range(snapshot_chunk_count(N))]
    copy.install(chunks, (), (), chunks[0].commit)
    return chunks[0].commit, copy


def all_at(value: float) -> Flat:
    return np.full(N, value, np.float32)


@WAYS
def test_what_is_learnt_stays_residual_until_it_reaches_tau(
    make: Callable[..., Replica], train_on: str
) -> None:
    """Changes below tau stay in the residual; at tau they are published and added to theta."""
    replica = make(train_on)
    assert replica.step(BATCH) == 1.0
    assert replica.publish() is None
    np.testing.assert_array_equal(replica.theta.to_host(), all_at(0))
    np.testing.assert_array_equal(replica.residual(), all_at(TAU / 2))
    replica.step(BATCH)
    encoded = replica.publish()
    assert isinstance(encoded, Payload)
    assert encoded.count == N
    np.testing.assert_array_equal(replica.theta.to_host(), all_at(TAU))
    np.testing.assert_array_equal(replica.residual(), all_at(0))
    assert replica.residual_norm() == 0.0


def test_a_local_model_goes_on_from_its_own_steps(make: Callable[..., Replica]) -> None:
    """With ``train_on="local"``, a step starts from the parameters of the step before it."""
    replica = make("local")
    replica.step(BATCH)
    replica.step(BATCH)
    assert replica.theta.local is not None
    np.testing.assert_array_equal(seen(replica.theta.local), all_at(TAU))


def test_the_replica_rule_takes_every_gradient_at_theta(make: Callable[..., Replica]) -> None:
    """With ``train_on="replica"``, each step starts from theta."""
    replica = make("replica")
    for _ in range(2):
        replica.step(BATCH)
        replica.accumulate_delta()
    assert replica.theta.local is None
    np.testing.assert_array_equal(replica.model.params, all_at(TAU / 2))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(replica.residual(), all_at(TAU))


@WAYS
def test_holding_back_loses_nothing(make: Callable[..., Replica], train_on: str) -> None:
    """Four accumulated steps lead to the same theta as four published ones."""
    often, seldom = make(train_on), make(train_on)
    for _ in range(4):
        often.step(BATCH)
        often.publish()
        seldom.step(BATCH)
        seldom.accumulate_delta()
    seldom.model.push = 0.0  # type: ignore[attr-defined]
    for _ in range(2):
        seldom.step(BATCH)
        seldom.publish()
    np.testing.assert_array_equal(often.theta.to_host(), all_at(2 * TAU))
    np.testing.assert_array_equal(seldom.theta.to_host(), often.theta.to_host())


@WAYS
def test_updates_of_others_move_theta_and_leave_the_residual(
    make: Callable[..., Replica], make_commit: MakeCommit, train_on: str
) -> None:
    """Other workers' updates change theta, and ``local`` with it, but not the residual."""
    replica = make(train_on)
    replica.step(BATCH)
    replica.publish()
    replica.apply(replica.theta.decode(make_commit(1, 3).payload), 1)
    replica.apply_merged(MergedCommits(UpdateSum.of_array(np.full(N, 1024, np.int32)), 5, 0))
    assert replica.theta.commit == 5
    assert replica.theta.to_host()[[2, 3]].tolist() == [1 + TAU, 1]
    np.testing.assert_array_equal(replica.residual(), all_at(TAU / 2))
    replica.step(BATCH)
    model = replica.model.params  # type: ignore[attr-defined]
    expected = 1 + (TAU if train_on == "local" else TAU / 2)
    assert model[3] == expected


@WAYS
def test_another_theta_leaves_the_residual(
    make: Callable[..., Replica], make_commit: MakeCommit, train_on: str
) -> None:
    """Installing a snapshot replaces theta and keeps the residual."""
    server = make_theta(N, K)
    server.load(all_at(2))
    server.commit = 8
    replica = make(train_on)
    replica.step(BATCH)
    replica.publish()
    replica.install(InstallSnapshot(whole(server), (make_commit(9, 1),), (), 9))
    assert replica.theta.commit == 9
    assert replica.theta.to_host()[[0, 1]].tolist() == [2 + TAU, 2]
    np.testing.assert_array_equal(replica.residual(), all_at(TAU / 2))


@WAYS
def test_residuals_add(make: Callable[..., Replica], train_on: str) -> None:
    """An added residual adds to the present one."""
    replica = make(train_on)
    replica.step(BATCH)
    replica.publish()
    replica.add_residual(all_at(TAU))
    np.testing.assert_array_equal(replica.residual(), all_at(1.5 * TAU))
    assert replica.residual_norm() == pytest.approx(1.5 * TAU * N**0.5)


@WAYS
@pytest.mark.parametrize("loss", [np.nan, np.inf, -np.inf])
def test_a_loss_that_is_no_number_ends_training(
    make: Callable[..., Replica], train_on: str, loss: float
) -> None:
    """A loss that is NaN or infinite raises TrainingError."""
    replica = make(train_on)
    replica.model.losses = {2: loss}  # type: ignore[attr-defined]
    replica.step(BATCH)
    with pytest.raises(TrainingError, match=r"the loss is (nan|inf|-inf): training diverges"):
        replica.step(BATCH)


@WAYS
def test_a_parameter_that_is_no_number_ends_training_before_theta_moves(
    make: Callable[..., Replica], train_on: str
) -> None:
    """An infinite parameter raises TrainingError when it is published; theta is unchanged."""
    replica = make(train_on, push=float("inf"))
    replica.step(BATCH)
    with pytest.raises(TrainingError, match=r"parameter 0 became inf"):
        replica.publish()
    np.testing.assert_array_equal(replica.theta.to_host(), all_at(0))


# -- snapshots for neighbours ------------------------------------------------------------------


def published(replica: Replica) -> Payload:
    """Take one step and return its update."""
    replica.step(BATCH)
    encoded = replica.publish()
    assert encoded is not None
    return encoded


def committed_of(payload: Payload, commit: int) -> Commit:
    """Return a commit of this worker's payload."""
    return Commit(commit=commit, origin=7, seq=1, payload=payload)


def update_of(payload: Payload, seq: int = 1) -> Update:
    """Return this worker's update with this payload."""
    return Update(origin=7, seq=seq, seen=0, epoch=0, batch=1, steps=1, payload=payload)


@WAYS
def test_a_copy_has_own_updates_once_they_are_committed(
    make: Callable[..., Replica], make_commit: MakeCommit, train_on: str
) -> None:
    """A snapshot omits own updates until they are committed."""
    replica, server = make(train_on, push=TAU), make_theta(N, K)
    mine = [published(replica) for _ in range(2)]
    replica.apply(replica.theta.decode(make_commit(1, 3).payload), 1)
    server.add(server.decode(make_commit(1, 3).payload))
    for commit in (1, 2, 3):
        at, copy = copied(replica)
        assert at == commit
        assert copy.digest() == server.digest()
        if commit < 3:
            replica.mark_committed(commit + 1)
            server.add(server.decode(mine[commit - 1]))
    assert copy.digest() == replica.theta.digest()


@WAYS
@pytest.mark.parametrize("kind", ["merged here", "merged above"])
def test_a_sum_with_own_updates_in_it_adds_only_the_others(
    make: Callable[..., Replica], make_commit: MakeCommit, train_on: str, kind: str
) -> None:
    """A sum that contains own updates adds only the others' and marks its own as committed."""
    replica, server = make(train_on, push=TAU), make_theta(N, K)
    mine = [published(replica) for _ in range(3)]
    log = (make_commit(1, 5, -9), committed_of(mine[0], 2), committed_of(mine[1], 3))
    for commit in log:
        server.add(server.decode(commit.payload))
    if kind == "merged here":
        total = UpdateSum(N)
        total.add((np.array([4, 8], np.int32), np.array([128, -128], np.int32)))
        replica.apply_merged(MergedCommits(total, 3, 2))
    else:
        merged: MergedRange = server.merge(SendMerged(7, 0, 3, [(7, 2), (9, 1)], 5, log))
        own = tuple(update_of(encoded, seq) for seq, encoded in enumerate(mine[:2], 1))
        replica.apply_range(ApplyMergedRange(merged, own))
    at, copy = copied(replica)
    assert (at, copy.digest()) == (3, server.digest())
    replica.mark_committed(4)
    server.add(server.decode(mine[2]))
    assert replica.theta.digest() == server.digest()
    np.testing.assert_array_equal(replica.residual(), all_at(0))


def test_after_a_snapshot_own_updates_are_those_that_it_lacks(
    make: Callable[..., Replica],
) -> None:
    """After a snapshot is installed, only updates that it lacks count as uncommitted."""
    replica, server = make("local", push=TAU), make_theta(N, K)
    mine = [published(replica) for _ in range(2)]
    server.add(server.decode(mine[0]))
    server.commit = 5
    replica.install(InstallSnapshot(whole(server), (), (update_of(mine[1], 2),), 5))
    assert copied(replica)[1].digest() == server.digest()
    np.testing.assert_array_equal(replica.theta.to_host(), all_at(2 * TAU))
    np.testing.assert_array_equal(replica.residual(), all_at(0))
    assert replica.uncommitted_mass() == N * TAU
    replica.mark_committed(6)
    assert copied(replica)[1].digest() == replica.theta.digest()
    assert replica.uncommitted_mass() == 0


def test_a_neighbour_copies_while_the_trainer_works(
    make: Callable[..., Replica], make_commit: MakeCommit
) -> None:
    """A chunk read at any time by another thread has exactly the commits up to its number."""
    replica = make("local", push=TAU)
    read: list[Chunk] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            read.append(replica.chunk(0))

    neighbour = threading.Thread(target=look)
    neighbour.start()
    theta, expected = make_theta(N, K), [bytes(4 * N)]
    for commit in range(1, COMMITS, 2):
        for one in (committed_of(published(replica), commit), make_commit(commit + 1, 3)):
            theta.add(theta.decode(one.payload))
            expected.append(theta.to_host().tobytes())
        replica.mark_committed(commit)
        replica.apply(replica.theta.decode(make_commit(commit + 1, 3).payload), commit + 1)
    ended.set()
    neighbour.join()
    assert read
    assert all(chunk.payload == expected[chunk.commit] for chunk in read)


# -- buffers -----------------------------------------------------------------------------------


class Buffered:
    """The methods of a model with buffers."""

    buffers = b"mine"

    def buffers_bytes(self) -> bytes:
        return self.buffers

    def load_buffers_bytes(self, buffers: bytes) -> None:
        self.buffers = buffers

    def average_buffers(self, reports: list[bytes]) -> bytes:
        return max(reports)


@pytest.fixture
def buffered(make: Callable[..., Replica]) -> Replica:
    """A replica whose model has buffers and adds tau per step."""
    replica = make("local", push=TAU)
    model = type("Model", (Buffered, type(replica.model)), {})(N, TAU)
    return Replica(model, replica.theta, replica.encoder, local=True)


def test_reported_buffers_are_an_own_update_that_adds_nothing(buffered: Replica) -> None:
    """Reported buffers are an own update without parameters; the average replaces theta's only."""
    assert buffered.publish_buffers() == b"mine"
    encoded = published(buffered)
    buffered.take_buffers(b"average", 1)
    buffered.mark_committed(1)
    at, copy = copied(buffered)
    assert (at, copy.buffers) == (1, b"average")
    np.testing.assert_array_equal(copy.to_host(), all_at(0))
    buffered.mark_committed(2)
    assert copied(buffered)[1].digest() == buffered.theta.digest()
    assert encoded.count == N
    assert buffered.model.buffers_bytes() == b"mine"  # type: ignore[attr-defined]


def test_a_model_without_buffers_reports_none(make: Callable[..., Replica]) -> None:
    """A model without buffers reports none, and no own update is recorded for them."""
    replica = make("local", push=TAU)
    assert replica.publish_buffers() == b""
    published(replica)
    replica.mark_committed(1)
    np.testing.assert_array_equal(copied(replica)[1].to_host(), all_at(TAU))


def test_only_the_first_snapshot_sets_the_models_buffers(buffered: Replica) -> None:
    """The first snapshot sets the model's buffers; later ones set only those of theta."""
    server = make_theta(N, K)
    server.buffers = b"average"
    buffered.install(InstallSnapshot(whole(server), (), (), 1))
    assert buffered.model.buffers_bytes() == b"average"  # type: ignore[attr-defined]
    server.buffers = b"a newer one"
    pending = Update(
        origin=7, seq=1, seen=0, epoch=0, batch=0, steps=0,
        payload=Payload(BUFFERS, 0, 0, b"mine"),
    )  # fmt: skip
    buffered.install(InstallSnapshot(whole(server), (), (pending,), 2))
    assert buffered.model.buffers_bytes() == b"average"  # type: ignore[attr-defined]
    assert buffered.theta.buffers == b"a newer one"
    buffered.mark_committed(3)
    assert buffered.uncommitted_mass() == 0


def test_who_begins_with_a_replica_takes_the_buffers_that_came_with_it(buffered: Replica) -> None:
    """A worker that begins with the initial replica loads its buffers, and no later ones."""
    buffered.theta.buffers = b"initial"
    buffered.begin()
    assert buffered.model.buffers_bytes() == b"initial"  # type: ignore[attr-defined]
    server = make_theta(N, K)
    server.buffers = b"a newer one"
    buffered.install(InstallSnapshot(whole(server), (), (), 1))
    assert buffered.model.buffers_bytes() == b"initial"  # type: ignore[attr-defined]
