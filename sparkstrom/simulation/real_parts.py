"""Real parts: replicas, parameters and encoders as in a real fit, each with a small model.

What was learnt is taken down where the model's step ends, and what is sent is read again from the
messages: neither the replica's nor the encoder's own word. Commits are summed once more by NumPy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.identity import CommitNo
from sparkstrom.codec.messages import BUFFERS, Committed, MergedRange, Payload
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
from sparkstrom.models.networks import DenseNetwork
from sparkstrom.models.updaters import Sgd
from sparkstrom.protocol.common.events import SendMerged
from sparkstrom.protocol.master.master import Master
from sparkstrom.protocol.worker.node import Identity, NodeLimits
from sparkstrom.runtime.replica import Replica
from sparkstrom.runtime.theta import Theta, chunk_count
from sparkstrom.runtime.trainer_inbox import CommitSum
from sparkstrom.simulation.beginnings import new_master
from sparkstrom.simulation.checks import Checks
from sparkstrom.simulation.run_sizes import Size
from sparkstrom.simulation.sim_parts import MasterReplica, Parts
from sparkstrom.simulation.sim_process import Made, SimProcess
from sparkstrom.simulation.timeline import Timeline

INPUTS, HIDDEN, CLASSES, ROWS = 6, 5, 3, 4
RATE, TAU = 0.5, 0.02  # so that a step moves some parameters by tau and some by less
KEPT_UNIT = 1 / 64  # of what an earlier fit has left: sums of these are exact
LOST = 1e-3  # parameter units: far above what float32 rounds away, far below a tau

Make = Callable[[], FlatModel]


def small_network() -> FlatModel:
    """The built-in kind, with 53 parameters."""
    return DenseNetwork([INPUTS, HIDDEN, CLASSES], hidden="tanh", updater=Sgd(RATE), seed=1)


@dataclass(frozen=True, slots=True)
class Job:
    """What all workers of one fit have in common."""

    make: Make
    initial: Flat
    k: int
    threshold: ThresholdAlgorithm
    train_on: str

    @property
    def n_params(self) -> int:
        return self.initial.size

    def theta(self, *, whole: bool) -> Theta:
        """At the beginning; not ``whole``: zeros, until a snapshot is there."""
        theta = Theta(self.n_params, self.k)
        if whole:
            theta.load(self.initial)
        return theta

    def replica(self, model: Any, *, whole: bool) -> Replica:
        """As ``spark.executor.tasks.make_replica`` puts it together."""
        encoder = Encoder(self.n_params, self.k, self.threshold, train_on=self.train_on)
        theta = self.theta(whole=whole)
        return Replica(model, theta, encoder, local=self.train_on == "local")

    def steps_of(self, update: Payload) -> NDArray[np.float64]:
        """By how much an update moves each parameter, f64[n_params]."""
        indices, quanta = decode_update_untrusted(
            update.data, update.form, update.count, update.tau_quanta, self.n_params, None
        )
        steps = np.zeros(self.n_params)
        np.add.at(steps, indices, quanta * quantum(self.k))
        return steps


class RealParts(Parts):
    """Of one world. ``make``: a model with ``INPUTS`` inputs and ``CLASSES`` outputs."""

    def __init__(self, size: Size, seed: int, make: Make = small_network) -> None:
        super().__init__(size)
        chance, initial = random.Random(f"models of {seed}"), make().initial()
        k = first_exponent(initial)
        thresholds = FixedThreshold(TAU), AdaptiveThreshold(TAU), AutoThreshold()
        self.job = Job(
            make,
            round_to_grid(initial, k),
            k,
            chance.choice(thresholds),
            chance.choice(("local", "replica")),
        )
        self._summing = self.job.theta(whole=False)

    def replica(self) -> MasterReplica:
        return DriversTheta(self.job.theta(whole=True))

    def master(self, time: Timeline, scratch: dict[str, Any]) -> Master:
        n_params = self.job.n_params
        chunks = chunk_count(n_params)
        return new_master(
            self.size, time, scratch, chunks=chunks, n_params=n_params, unit=KEPT_UNIT
        )

    def checks(self, kept: dict[str, float]) -> Checks:
        return RealChecks(kept, self.job)

    def process(
        self, name: str, identity: Identity, limits: NodeLimits, **given: Any
    ) -> SimProcess:
        return RealProcess(name, identity, limits, job=self.job, **given)

    def merged(self, effect: SendMerged) -> MergedRange:
        return self._summing.merge(effect)


class DriversTheta:
    """The driver's parameters, as ``runtime.master_thread`` keeps them."""

    def __init__(self, theta: Theta) -> None:
        self.theta, self.chunk, self.digest = theta, theta.chunk, theta.digest

    @property
    def buffers(self) -> bytes:
        return self.theta.buffers

    def apply_update(self, update: Committed) -> None:
        self.theta.add(self.theta.read(update.payload))
        self.theta.commit = update.commit

    def take_buffers(self, buffers: bytes, commit: CommitNo) -> None:
        self.theta.buffers, self.theta.commit = buffers, commit


class WatchedModel:
    """A model whose steps are taken down."""

    def __init__(self, model: FlatModel) -> None:
        self._model = model
        self._params: Flat = np.zeros(0, np.float32)
        self.learnt = np.zeros(model.n_params)

    def bind(self, params: Flat) -> None:
        self._params = params
        self._model.bind(params)

    def step(self, batch: Batch) -> float:
        before = self._params.astype(np.float64)
        loss = self._model.step(batch)
        self.learnt += self._params - before
        return loss


class RealLearner:
    """What a trainer does to its replica between two looks of its loop."""

    def __init__(self, replica: Replica, model: WatchedModel, job: Job, seed: int) -> None:
        self._replica, self._model, self._job = replica, model, job
        self._chance = np.random.default_rng(seed)
        self.sent = np.zeros(job.n_params)
        self.granted = np.zeros(job.n_params)

    @property
    def residual(self) -> Flat:
        return self._replica.residual()

    def step(self) -> None:
        """On a batch of chance: its classes follow from its features."""
        features = self._chance.normal(size=(ROWS, INPUTS)).astype(np.float32)
        self._replica.step(Batch(features, features[:, :CLASSES].argmax(axis=1)))

    def publish(self) -> Payload | None:
        payload = self._replica.publish()
        if payload is not None:
            self.sent += self._job.steps_of(payload)
        return payload

    def add(self, residual: Flat) -> None:
        """What another fit left."""
        self._replica.add_residual(residual)
        self.granted += residual

    def conserves(self) -> bool:
        """I1: all that came in was sent or is still here; and the encoder counts what it sent."""
        counters = self._replica.encoder.counters
        came_in, left = self._model.learnt + self.granted, self.sent + self.residual
        gone = counters.mass_clipped + counters.mass_scaled_away
        counted = counters.mass_sent >= np.abs(self.sent).sum() - LOST and gone == 0
        return counted and bool(np.abs(came_in - left).max() < LOST)


@dataclass(slots=True)
class RealMade(Made):
    """An update, and by how much it moves parameters."""

    steps: NDArray[np.float64] | None = None


class RealProcess(SimProcess):
    """See ``SimProcess``; its optimizer's state stays a word that says whose it is."""

    replica: Any  # a ``runtime.replica.Replica``
    learner: Any  # a ``RealLearner``

    def __init__(
        self, name: str, identity: Identity, limits: NodeLimits, *, job: Job, **given: Any
    ):
        self._job = job
        super().__init__(name, identity, limits, **given)

    def _train_with(self, seed: int) -> Callable[[], CommitSum]:
        model = WatchedModel(self._job.make())
        self.replica = self._job.replica(model, whole=self.identity.whole)
        self.learner = RealLearner(self.replica, model, self._job, seed)
        begin_sum: Callable[[], CommitSum] = self.replica.theta.begin_sum
        return begin_sum

    def publish(self, round_s: float) -> Payload | None:
        first, last = self._ordinal(self.loop.sent), self._ordinal(self.loop.position)
        payload: Payload | None = self.learner.publish()
        if payload is None:
            self.quiet |= set(range(first + 1, last + 1))
            return None
        self.made.append(RealMade(first, last, payload.data, steps=self._job.steps_of(payload)))
        return payload

    def report_buffers(self) -> bytes:
        """The models here have none."""
        return b""

    def _grant_one(self, residual: Any) -> None:
        self.learner.add(np.asarray(residual, np.float32))


class RealChecks(Checks):
    """The same, with theta as f32[n_params] by NumPy alone."""

    def __init__(self, kept: dict[str, float], job: Job) -> None:
        super().__init__(kept)
        self._job = job
        self._sums: list[Any] = [job.initial]

    def _plus(self, theta: Any, update: Committed) -> Any:
        if update.payload.form == BUFFERS:
            return theta
        return (theta + self._job.steps_of(update.payload)).astype(np.float32)

    def _holds(self, replica: Any, theta: Any) -> bool:
        values: Flat = replica.theta.to_host()
        return bool(values.tobytes() == theta.tobytes())

    def _with_own(self, theta: Any, made: list[Made]) -> Any:
        for update in made:
            assert isinstance(update, RealMade)
            assert update.steps is not None
            theta = (theta + update.steps).astype(np.float32)
        return theta
