"""Fits without Spark or Aeron: master, nodes and trainers on threads, over memory transports."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.memory_transport import MemoryNetwork, MemoryTransport
from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import DriverLost
from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.sealed_frames import KEY_BYTES, Seal
from sparkstrom.data.row_store import Batches
from sparkstrom.encoding.backends import Backend
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.grid import round_to_grid
from sparkstrom.encoding.thresholds import AdaptiveThreshold
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import MasterLimits
from sparkstrom.protocol.worker.node import Identity, NodeLimits
from sparkstrom.runtime.master_control import FitOutcome
from sparkstrom.runtime.master_thread import MasterPlan, MasterThread
from sparkstrom.runtime.node_thread import (
    JoinAddress,
    NodePlan,
    NodeThread,
    OpenTransport,
    SnapshotSource,
)
from sparkstrom.runtime.optimizer_states import OptimizerStateServer
from sparkstrom.runtime.theta import Replica, Theta
from sparkstrom.runtime.trainer_thread import Trainer, TrainerChannel, TrainerOptions, no_output
from sparkstrom.runtime.training_loop import TrainerInbox
from sparkstrom.transport.base import ReceivedFrame

K, WORKERS, EPOCHS, ROWS = 20, 2, 3, 37
MODEL = DenseNetwork([5, 8, 3], seed=3)
LONG = MasterLimits(lease_s=30.0)


class DyingTransport(MemoryTransport):
    """A transport whose driver dies at the n-th received frame; that poll's frames are lost."""

    frames_left = -1

    def poll(self, wait_s: float) -> list[ReceivedFrame]:
        arrivals = super().poll(wait_s)
        if 0 < self.frames_left <= len(arrivals):
            raise DriverLost("polling", -1000, "driver died on purpose")
        self.frames_left -= len(arrivals)
        return arrivals


class TransportFactory:
    """A function that opens transports, at the given endpoint if any; the first one may die."""

    def __init__(self, network: MemoryNetwork, dies_at_frame: int = -1) -> None:
        self._network, self._dies_at_frame = network, dies_at_frame
        self.opened: list[Endpoint | None] = []

    def __call__(self, before: Endpoint | None) -> MemoryTransport:
        self.opened.append(before)
        transport = DyingTransport(self._network, before or self._network.open().endpoint)
        if before is None:
            transport.frames_left = self._dies_at_frame
        return transport


def _schedule(partition: int) -> dict[str, Any]:
    """Return the default options of the trainer of a partition."""
    place = {"partition": partition, "attempt": partition}
    return {"epochs": EPOCHS, "publish_every": 1, **place}


class Mesh:
    """A master and its workers, with a thread for each machine and trainer."""

    def __init__(self, limits: MasterLimits = LONG, partitions: int = WORKERS) -> None:
        self.network = MemoryNetwork()
        self.seal = Seal(secrets.token_bytes(KEY_BYTES), 1)
        self.theta = Theta(MODEL.n_params, K)
        self.theta.load(round_to_grid(MODEL.initial(), K))
        self.opening = TransportFactory(self.network)
        self.limits, self.partitions = limits, partitions
        self.nodes: list[NodeThread] = []
        self.stations: list[TrainerChannel] = []
        self.threads: list[threading.Thread] = []
        self.replicas: list[Replica] = []
        self.trainers: list[Trainer] = []
        self.errors: list[BaseException] = []
        self.node_limits: dict[str, Any] = {}

    def begin(self, **plan: Any) -> None:
        """Start the master; ``plan`` replaces fields of its plan."""
        self.master = MasterThread(
            MasterPlan(
                **{
                    "spec": FitSpec(self.partitions, EPOCHS, MODEL.n_params, "1"),
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
        opening: OpenTransport | None = None,
        rows: int = ROWS,
        executor: str = "",
        fraction: float = 0.0,
        backend: Backend | None = None,
        said: Callable[[], ev.OutputPrinted | None] = no_output,
        **schedule: Any,
    ) -> None:
        """Start a worker, whose node joins the master; ``schedule`` replaces trainer options."""
        chance = np.random.default_rng(partition)
        features = chance.normal(size=(rows, 5)).astype(np.float32)
        labels = chance.integers(0, 3, rows)
        batches = Batches(
            features, labels, batch_rows=8, seed=0, partition=partition, fraction=fraction
        )
        theta = Theta(MODEL.n_params, K, backend=backend)
        encoder = Encoder(MODEL.n_params, K, AdaptiveThreshold(1e-3), backend=backend)
        replica = Replica(model or DenseNetwork([5, 8, 3]), theta, encoder, local=True)
        lender = OptimizerStateServer(SystemClock())
        identity = Identity(
            token=secrets.randbits(63),
            partition=partition,
            attempt=partition,
            rows=batches.rows,
            checksum=batches.checksum,
            batches=batches.batches_per_epoch,
            host="here",
            executor=executor or f"e{partition}",
            pid=1,
            version="1",
        )
        limits = NodeLimits(lease_s=self.limits.lease_s, optimizer_wait_s=30.0, **self.node_limits)
        meeting = JoinAddress(self.master.endpoint, self.master.join_stream)
        node = NodeThread(
            NodePlan(identity, limits, meeting, 1 << 20, 1024),
            open_transport=opening or TransportFactory(self.network),
            seal=self.seal,
            inbox=TrainerInbox(1 << 20, theta.new_sum),
            read_output=said,
            snapshots=SnapshotSource(replica.chunk, theta.merge, lender),
            clock=SystemClock(),
        )
        channel = node.channel
        trainer = Trainer(
            channel,
            replica,
            batches,
            TrainerOptions(**(_schedule(partition) | schedule)),
            save_residual=lambda replica: None,
            add_residuals=lambda replica, paths: None,
            optimizer_server=lender,
        )
        self.nodes.append(node)
        self.stations.append(channel)
        self.replicas.append(replica)
        self.trainers.append(trainer)
        node.start()
        self.threads.append(threading.Thread(target=self._train, args=(node, channel, trainer)))
        self.threads[-1].start()

    def _train(self, node: NodeThread, channel: TrainerChannel, trainer: Trainer) -> None:
        """Train as a Spark task does; report an exception to the master, and record it."""
        try:
            trainer.run()
        except Exception as error:
            self.errors.append(error)
            channel.post(ev.TrainerFailed(repr(error), ""))
        node.stop()

    def finish(self, seconds: float = 60.0) -> FitOutcome:
        """Wait for the end of the fit; return its outcome, or raise the master's error."""
        assert self.master.finished.wait(seconds), self.master.progress
        if self.master.failure is not None:
            raise self.master.failure
        for thread in self.threads:
            thread.join(seconds)
        return self.master.outcome()

    def close(self) -> None:
        for node, channel in zip(self.nodes, self.stations, strict=True):
            node.stop()
            channel.fail(RuntimeError("the test is over"))
        for thread in self.threads:
            thread.join(10)
        self.master.end()


def assert_fit_complete(mesh: Mesh, outcome: FitOutcome) -> None:
    """Assert that all replicas are equal, all minibatches are trained and no worker failed."""
    assert len(set(outcome.hashes.values())) == 1
    assert outcome.hashes["driver"] == mesh.theta.digest()
    assert {replica.theta.digest() for replica in mesh.replicas} == {mesh.theta.digest()}
    assert outcome.minibatches == outcome.minibatches_expected > 0
    assert mesh.errors == []


def wait_until(is_so: Callable[[], bool], seconds: float = 60.0) -> None:
    """Poll until ``is_so`` returns True; fail after ``seconds``."""
    until_s, pause = time.monotonic() + seconds, threading.Event()
    while not is_so():
        assert time.monotonic() < until_s, "it never happened"
        pause.wait(0.002)
