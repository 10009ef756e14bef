"""Master, nodes and trainers as real threads over memory: a whole fit without Spark or Aeron."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import DriverLost, TrainingError, UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.frames import KEY_BYTES, Seal
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.grid import round_to_grid
from sparkstrom.encoding.thresholds import AdaptiveThreshold
from sparkstrom.models.networks import DenseNetwork
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.fit import MasterLimits
from sparkstrom.protocol.node import Identity, NodeLimits
from sparkstrom.runtime.batches import Batches
from sparkstrom.runtime.inbox import Inbox
from sparkstrom.runtime.master import MasterThread, Outcome, Plan
from sparkstrom.runtime.lending import Lender
from sparkstrom.runtime.node import Copying, Meeting, NodeThread
from sparkstrom.runtime.replica import Replica
from sparkstrom.runtime.station import Station
from sparkstrom.runtime.theta import Theta
from sparkstrom.runtime.trainer import Schedule, Trainer
from sparkstrom.transport.base import Arrival
from sparkstrom.transport.memory import MemoryNetwork, MemoryTransport

K, WORKERS, EPOCHS, ROWS = 20, 2, 3, 37
MODEL = DenseNetwork([5, 8, 3], seed=3)
LONG = MasterLimits(lease_s=30.0)


class Mortal(MemoryTransport):
    """Its media driver dies with the n-th frame that comes in; that poll's frames are lost."""

    frames_left = -1

    def poll(self, wait_s: float) -> list[Arrival]:
        arrivals = super().poll(wait_s)
        if 0 < self.frames_left <= len(arrivals):
            raise DriverLost("polling", -1000, "driver died on purpose")
        self.frames_left -= len(arrivals)
        return arrivals


class Opening:
    """Opens transports in a network; the first may die. Keeps a former endpoint if asked for."""

    def __init__(self, network: MemoryNetwork, dies_at_frame: int = -1) -> None:
        self._network, self._dies_at_frame = network, dies_at_frame
        self.opened: list[Endpoint | None] = []

    def __call__(self, before: Endpoint | None) -> MemoryTransport:
        self.opened.append(before)
        transport = Mortal(self._network, before or self._network.open().endpoint)
        if before is None:
            transport.frames_left = self._dies_at_frame
        return transport


class Mesh:
    """A master and its workers, each on threads of its own."""

    def __init__(self, limits: MasterLimits = LONG, partitions: int = WORKERS) -> None:
        self.network = MemoryNetwork()
        self.seal = Seal(secrets.token_bytes(KEY_BYTES), 1)
        self.theta = Theta(MODEL.n_params, K)
        self.theta.values[:] = round_to_grid(MODEL.initial(), K)
        self.opening = Opening(self.network)
        self.limits, self.partitions = limits, partitions
        self.nodes: list[NodeThread] = []
        self.stations: list[Station] = []
        self.threads: list[threading.Thread] = []
        self.replicas: list[Replica] = []
        self.trainers: list[Trainer] = []
        self.errors: list[BaseException] = []

    def begin(self, **plan: Any) -> None:
        self.master = MasterThread(
            Plan(
                **{
                    "version": "1",
                    "partitions": self.partitions,
                    "epochs": EPOCHS,
                    "message_bytes_max": 1 << 20,
                    "chunk_bytes_max": 1024,
                    "kept": {},
                    **plan,
                }
            ),
            self.limits,
            self.theta,
            open_transport=self.opening,
            seal=self.seal,
            clock=SystemClock(),
        )
        self.master.start()

    def add_worker(
        self,
        partition: int,
        *,
        model: Any = None,
        opening: Opening | None = None,
        rows: int = ROWS,
        executor: str = "",
        **schedule: Any,
    ) -> None:
        chance = np.random.default_rng(partition)
        features = chance.normal(size=(rows, 5)).astype(np.float32)
        labels = chance.integers(0, 3, rows)
        batches = Batches(features, labels, batch_rows=8, seed=0, partition=partition)
        theta = Theta(MODEL.n_params, K)
        encoder = Encoder(MODEL.n_params, K, AdaptiveThreshold(1e-3))
        replica = Replica(model or DenseNetwork([5, 8, 3]), theta, encoder, local=True)
        station, lender = Station(Inbox(MODEL.n_params, 1 << 20, theta.decode)), Lender()
        node = NodeThread(
            Identity(
                token=secrets.randbits(63),
                partition=partition,
                attempt=partition,
                rows=batches.rows,
                checksum=batches.checksum,
                batches=batches.per_epoch,
                host="here",
                executor=executor or f"e{partition}",
                pid=1,
                version="1",
            ),
            NodeLimits(lease_s=self.limits.lease_s, borrow_s=30.0),
            open_transport=opening or Opening(self.network),
            seal=self.seal,
            meeting=Meeting(self.master.endpoint, self.master.lobby),
            station=station,
            copying=Copying(replica.chunk, theta.merge, lender.chunk),
            message_bytes_max=1 << 20,
            chunk_bytes_max=1024,
            clock=SystemClock(),
        )
        trainer = Trainer(
            station,
            replica,
            batches,
            Schedule(**{"epochs": EPOCHS, "publish_every": 1, **schedule}),
            keep=lambda replica: None,
            grant=lambda replica, paths: None,
            lender=lender,
        )
        self.nodes.append(node)
        self.stations.append(station)
        self.replicas.append(replica)
        self.trainers.append(trainer)
        node.start()
        self.threads.append(threading.Thread(target=self._train, args=(node, station, trainer)))
        self.threads[-1].start()

    def _train(self, node: NodeThread, station: Station, trainer: Trainer) -> None:
        """As a task does: what goes wrong is told to the master and stays here to be looked at."""
        try:
            trainer.run()
        except Exception as error:
            self.errors.append(error)
            station.post(ev.TrainerFailed(repr(error), ""))
        node.stop()

    def finish(self, seconds: float = 60.0) -> Outcome:
        assert self.master.finished.wait(seconds), self.master.progress
        if self.master.failure is not None:
            raise self.master.failure
        for thread in self.threads:
            thread.join(seconds)
        return self.master.outcome()

    def close(self) -> None:
        for node, station in zip(self.nodes, self.stations, strict=True):
            node.stop()
            station.fail(RuntimeError("the test is over"))
        for thread in self.threads:
            thread.join(10)
        self.master.end()


@pytest.fixture
def make_mesh() -> Iterator[Callable[..., Mesh]]:
    made: list[Mesh] = []

    def make(*args: Any, **keywords: Any) -> Mesh:
        made.append(Mesh(*args, **keywords))
        return made[-1]

    yield make
    for mesh in made:
        mesh.close()


def check_whole(mesh: Mesh, outcome: Outcome) -> None:
    assert len(set(outcome.hashes.values())) == 1
    assert outcome.hashes["driver"] == mesh.theta.digest()
    assert {replica.theta.digest() for replica in mesh.replicas} == {mesh.theta.digest()}
    assert outcome.minibatches == outcome.minibatches_expected > 0
    assert mesh.errors == []


def test_a_fit_ends_with_equal_replicas(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    before = mesh.theta.digest()
    mesh.begin()
    for partition in range(WORKERS):
        mesh.add_worker(partition)
    outcome = mesh.finish()
    check_whole(mesh, outcome)
    assert outcome.minibatches == WORKERS * EPOCHS * 5
    assert mesh.theta.digest() != before
    assert len(outcome.hashes) == 3
    assert outcome.commits == sum(outcome.staleness.values()) > 0
    assert sum(values["examples"] for values in outcome.stats.values()) == WORKERS * EPOCHS * ROWS
    assert all(values["update_bytes"] > 0 for values in outcome.stats.values())
    assert outcome.traffic.rejected.total() == 0


@pytest.mark.parametrize("dies_at_frame", [1, 5, 25])
def test_a_worker_whose_media_driver_dies_goes_on(
    make_mesh: Callable[..., Mesh], dies_at_frame: int
) -> None:
    mesh = make_mesh()
    opening = Opening(mesh.network, dies_at_frame)
    mesh.begin()
    mesh.add_worker(0, opening=opening)
    mesh.add_worker(1)
    check_whole(mesh, mesh.finish())
    assert len(opening.opened) == 2
    assert opening.opened[1] is not None


@pytest.mark.parametrize("dies_at_frame", [1, 10, 30])
def test_a_master_whose_media_driver_dies_goes_on(
    make_mesh: Callable[..., Mesh], dies_at_frame: int
) -> None:
    mesh = make_mesh(MasterLimits(lease_s=2.0))
    mesh.opening = Opening(mesh.network, dies_at_frame)
    mesh.begin()
    for partition in range(WORKERS):
        mesh.add_worker(partition)
    check_whole(mesh, mesh.finish())
    assert mesh.opening.opened[1] == mesh.master.endpoint


def test_an_empty_partition_is_no_obstacle(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    mesh.begin()
    mesh.add_worker(0)
    mesh.add_worker(1, rows=0)
    outcome = mesh.finish()
    check_whole(mesh, outcome)
    assert outcome.minibatches == EPOCHS * 5


def test_no_rows_at_all_are_refused(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    mesh.begin()
    for partition in range(WORKERS):
        mesh.add_worker(partition, rows=0)
    with pytest.raises(UsageError, match="all 2 partitions are empty"):
        mesh.finish()


class Exploding(DenseNetwork):
    """Raises in its third step."""

    taken = 0

    def step(self, batch: Any) -> float:
        self.taken += 1
        if self.taken == 3:
            raise ZeroDivisionError("on purpose")
        return super().step(batch)


def test_what_a_trainer_raises_ends_the_fit(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    mesh.begin()
    mesh.add_worker(0)
    mesh.add_worker(1, model=Exploding([5, 8, 3]))
    with pytest.raises(TrainingError, match="on purpose") as raised:
        mesh.finish()
    assert raised.value.partition == 1


def test_a_stop_ends_in_order(make_mesh: Callable[..., Mesh]) -> None:
    mesh = make_mesh()
    mesh.begin(epochs=EPOCHS)
    mesh.master.request_stop("enough")
    for partition in range(WORKERS):
        mesh.add_worker(partition)
    outcome = mesh.finish()
    assert outcome.stop_reason == "enough"
    assert len(set(outcome.hashes.values())) == 1


def test_a_stranger_without_the_key_is_counted_and_changes_nothing(
    make_mesh: Callable[..., Mesh],
) -> None:
    mesh = make_mesh()
    mesh.begin()
    stranger = mesh.network.open()
    lobby = stranger.open_sender(mesh.master.endpoint, mesh.master.lobby, control=True)
    for partition in range(WORKERS):
        mesh.add_worker(partition)
    lobby.offer([secrets.token_bytes(200)] * 5)
    outcome = mesh.finish()
    check_whole(mesh, outcome)
    assert outcome.traffic.rejected.total() == 5
