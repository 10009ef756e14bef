"""Simulate with the replicas, parameters and encoders of real fits, for a small model.

A replica is a process's copy of the shared parameters. A commit is an update that the master has
numbered; all replicas add it. A residual is what a worker has learned and not sent yet. The
controller is the process that runs the master.

The checks trust neither replica nor encoder. They record by how much each step of the model changes
the parameters, decode the messages to know which changes were sent, and add up the commits again
with NumPy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.identity import CommitNo
from sparkstrom.codec.messages import BUFFERS, Commit, MergedRange, Payload
from sparkstrom.codec.payload import decode_update_untrusted
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.grid import first_exponent, quantum, round_to_grid
from sparkstrom.encoding.thresholds import (
    AdaptiveThreshold,
    AutoThreshold,
    FixedThreshold,
    ThresholdAlgorithm,
)
from sparkstrom.models.base import Batch, Flat, FlatModel
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.models.updaters import Sgd
from sparkstrom.protocol.common.events_and_effects import SendMerged
from sparkstrom.protocol.master.master import Master
from sparkstrom.protocol.worker.node import Identity, NodeLimits
from sparkstrom.runtime.theta import Replica, Theta, snapshot_chunk_count
from sparkstrom.runtime.training_loop import CommitSum
from sparkstrom.simulation.component_factory import ComponentFactory, MasterReplica, make_master
from sparkstrom.simulation.invariants import InvariantChecker
from sparkstrom.simulation.process import PublishedUpdate, SimProcess
from sparkstrom.simulation.run_options import RunSize
from sparkstrom.simulation.virtual_clock import VirtualClock

INPUTS, HIDDEN, CLASSES, ROWS = 6, 5, 3, 4
LEARNING_RATE, TAU = 0.5, 0.02  # a step moves some parameters by more than tau, some by less
KEPT_UNIT = 1 / 64  # of residual files, so that float32 sums of them are exact
MASS_TOLERANCE = 1e-3  # parameter units; above float32 rounding, far below tau

ModelFactory = Callable[[], FlatModel]


def make_small_network() -> FlatModel:
    """Return sparkstrom's dense neural network, with 53 parameters."""
    return DenseNetwork(
        [INPUTS, HIDDEN, CLASSES], hidden="tanh", updater=Sgd(LEARNING_RATE), seed=1
    )


@dataclass(frozen=True, slots=True)
class FitSetup:
    """The model, initial parameters and options that all workers of one fit share."""

    make: ModelFactory  # makes a model
    initial: Flat  # f32[n_params], on the grid
    k: int  # parameters are multiples of 2^-k, the grid
    threshold: ThresholdAlgorithm  # decides which changes are sent
    train_on: str  # "local" (parameters + residual) or "replica" (a copy of the parameters)

    @property
    def n_params(self) -> int:
        """Number of parameters."""
        return self.initial.size

    def create_theta(self, *, whole: bool) -> Theta:
        """Return the initial parameters; if not ``whole``, zeros until a snapshot is installed."""
        theta = Theta(self.n_params, self.k)
        if whole:
            theta.load(self.initial)
        return theta

    def create_replica(self, model: Any, *, whole: bool) -> Replica:
        """Return a worker's replica, built as in a real fit; see ``create_theta`` for ``whole``."""
        encoder = Encoder(self.n_params, self.k, self.threshold, train_on=self.train_on)
        theta = self.create_theta(whole=whole)
        return Replica(model, theta, encoder, local=self.train_on == "local")

    def decode_update(self, update: Payload) -> NDArray[np.float64]:
        """Return by how much an update moves each parameter, f64[n_params]."""
        indices, quanta = decode_update_untrusted(
            update.data, update.form, update.count, update.tau_quanta, self.n_params, None
        )
        steps = np.zeros(self.n_params)
        np.add.at(steps, indices, quanta * quantum(self.k))
        return steps


class RealComponentFactory(ComponentFactory):
    """Makes the components of a simulated fit of a real model, with options drawn from ``seed``.

    ``make`` returns a model with ``INPUTS`` inputs and ``CLASSES`` outputs.
    """

    def __init__(self, size: RunSize, seed: int, make: ModelFactory = make_small_network) -> None:
        super().__init__(size)
        rng, initial = random.Random(f"models of {seed}"), make().initial()
        k = first_exponent(initial)
        thresholds = FixedThreshold(TAU), AdaptiveThreshold(TAU), AutoThreshold()
        self.job = FitSetup(
            make,
            round_to_grid(initial, k),
            k,
            rng.choice(thresholds),
            rng.choice(("local", "replica")),
        )
        self._sum_theta = self.job.create_theta(whole=False)

    def create_replica(self) -> MasterReplica:
        """Return the controller's replica."""
        return ControllerReplica(self.job.create_theta(whole=True))

    def create_master(self, time: VirtualClock, scratch: dict[str, Any]) -> Master:
        """Return the protocol's master; write residual files of an earlier fit to ``scratch``."""
        n_params = self.job.n_params
        chunks = snapshot_chunk_count(n_params)
        return make_master(
            self.size, time, scratch, chunks=chunks, n_params=n_params, unit=KEPT_UNIT
        )

    def create_checker(self, kept: dict[str, float]) -> InvariantChecker:
        """Return the invariant checker; ``kept``: residual file -> sum of absolute values in it."""
        return RealInvariantChecker(kept, self.job)

    def create_process(
        self, name: str, identity: Identity, limits: NodeLimits, **given: Any
    ) -> SimProcess:
        """Return a new worker process; ``given`` has the other arguments of SimProcess."""
        return RealProcess(name, identity, limits, job=self.job, **given)

    def merge_commits(self, effect: SendMerged) -> MergedRange:
        """Return the message that answers ``effect``: the sum of a range of commits."""
        return self._sum_theta.merge(effect)


class ControllerReplica:
    """The simulated controller's parameters, updated like those in ``runtime.master_thread``."""

    def __init__(self, theta: Theta) -> None:
        self.theta, self.chunk, self.digest = theta, theta.chunk, theta.digest

    @property
    def buffers(self) -> bytes:
        """The combined buffers of all workers."""
        return self.theta.buffers

    def apply_update(self, update: Commit) -> None:
        """Add the next commit to the parameters."""
        self.theta.add(self.theta.read(update.payload))
        self.theta.commit = update.commit

    def take_buffers(self, buffers: bytes, commit: CommitNo) -> None:
        """Apply the next commit, which contains the combined buffers."""
        self.theta.buffers, self.theta.commit = buffers, commit


class RecordingModel:
    """Wraps a model and records by how much its steps change the parameters."""

    def __init__(self, model: FlatModel) -> None:
        self._model = model
        self._params: Flat = np.zeros(0, np.float32)
        self.learnt = np.zeros(model.n_params)  # sum of the changes made by steps

    def bind(self, params: Flat) -> None:
        """Bind the model to parameters, f32[n_params]."""
        self._params = params
        self._model.bind(params)

    def step(self, batch: Batch) -> float:
        """Train on a batch, record the change of the parameters, and return the loss."""
        before = self._params.astype(np.float64)
        loss = self._model.step(batch)
        self.learnt += self._params - before
        return loss


class RealLearner:
    """Performs a trainer's steps and publications, and adds up what it sends, by parameter."""

    def __init__(self, replica: Replica, model: RecordingModel, job: FitSetup, seed: int) -> None:
        self._replica, self._model, self._job = replica, model, job
        self._rng = np.random.default_rng(seed)
        self.sent = np.zeros(job.n_params)  # sum of the published updates
        self.granted = np.zeros(job.n_params)  # sum of the added residuals of earlier fits

    @property
    def residual(self) -> Flat:
        """The replica's residual, f32[n_params]."""
        return self._replica.residual()

    def step(self) -> None:
        """Train on a random minibatch; the class is the index of the largest of three features."""
        features = self._rng.normal(size=(ROWS, INPUTS)).astype(np.float32)
        self._replica.step(Batch(features, features[:, :CLASSES].argmax(axis=1)))

    def publish(self) -> Payload | None:
        """Publish an update; count what it sends. Return None if no entry reached tau."""
        payload = self._replica.publish()
        if payload is not None:
            self.sent += self._job.decode_update(payload)
        return payload

    def add(self, residual: Flat) -> None:
        """Add the residual of an earlier fit."""
        self._replica.add_residual(residual)
        self.granted += residual

    def is_mass_conserved(self) -> bool:
        """Return whether all changes were sent or are in the residual (invariant I1).

        The changes are those learned by steps, and residuals of earlier fits that were added. The
        encoder's counters must also show that nothing was clipped or scaled away, and must count at
        least what was sent.
        """
        counters = self._replica.encoder.counters
        came_in, left = self._model.learnt + self.granted, self.sent + self.residual
        gone = counters.mass_clipped + counters.mass_scaled_away
        counted = counters.mass_sent >= np.abs(self.sent).sum() - MASS_TOLERANCE and gone == 0
        return counted and bool(np.abs(came_in - left).max() < MASS_TOLERANCE)


@dataclass(slots=True)
class RealPublishedUpdate(PublishedUpdate):
    """A published update, with its effect on the parameters."""

    steps: NDArray[np.float64] | None = None  # f64[n_params]


class RealProcess(SimProcess):
    """A ``SimProcess`` that trains a real model; its optimizer state stays simulated."""

    replica: Any  # a ``runtime.theta.Replica``
    learner: Any  # a ``RealLearner``

    def __init__(
        self, name: str, identity: Identity, limits: NodeLimits, *, job: FitSetup, **given: Any
    ):
        self._job = job
        super().__init__(name, identity, limits, **given)

    def _create_trainer(self, seed: int) -> None:
        """Create the process's model, replica and learner."""
        model = RecordingModel(self._job.make())
        self.replica = self._job.create_replica(model, whole=self.identity.whole)
        self.learner = RealLearner(self.replica, model, self._job, seed)

    def _new_sum(self) -> CommitSum:
        """Return an empty sum, for commits that wait for the trainer."""
        total: CommitSum = self.replica.theta.new_sum()
        return total

    def publish(self, commit_latency_s: float) -> Payload | None:
        """Return an update, or None if no entry reached tau, the threshold."""
        first = self._minibatch_number(self.loop.sent)
        last = self._minibatch_number(self.loop.position)
        payload: Payload | None = self.learner.publish()
        if payload is None:
            self.quiet |= set(range(first + 1, last + 1))
            return None
        self.made.append(
            RealPublishedUpdate(first, last, payload.data, steps=self._job.decode_update(payload))
        )
        return payload

    def publish_buffers(self) -> bytes:
        """Return no buffers, because these models have none."""
        return b""

    def _add_kept_residual(self, residual: Any) -> None:
        """Add one residual of an earlier fit."""
        self.learner.add(np.asarray(residual, np.float32))


class RealInvariantChecker(InvariantChecker):
    """An ``InvariantChecker`` that sums theta, f32[n_params], by NumPy alone."""

    def __init__(self, kept: dict[str, float], job: FitSetup) -> None:
        super().__init__(kept)
        self._job = job
        self._sums: list[Any] = [job.initial]

    def _with_commit(self, theta: Any, update: Commit) -> Any:
        """Return theta with one more commit added."""
        if update.payload.form == BUFFERS:
            return theta
        return (theta + self._job.decode_update(update.payload)).astype(np.float32)

    def _matches(self, replica: Any, theta: Any) -> bool:
        """Return True if a replica equals theta bit by bit."""
        values: Flat = replica.theta.to_host()
        return bool(values.tobytes() == theta.tobytes())

    def _with_uncommitted(self, theta: Any, made: list[PublishedUpdate]) -> Any:
        """Return theta with the given uncommitted updates added."""
        for update in made:
            assert isinstance(update, RealPublishedUpdate)
            assert update.steps is not None
            theta = (theta + update.steps).astype(np.float32)
        return theta
