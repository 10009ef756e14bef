"""Ours in virtual time: k real replicas, encoders and models, and the one order of commits.

A step takes 1, give or take: workers differ by up to ``jitter``, and so do their steps. What a
worker publishes has its commit number and has reached everybody ``latency`` later; it is added at
the next batch boundary. With a latency of 0 the others' updates are still one round old, k - 1
commits: that many end while a step is under way. Who publishes when is as in ``runtime.trainer``:
when the last publication is committed (or every so many steps), and at the end; who must wait, as
``max_staleness`` and ``max_lead`` have it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.convergence.settings import Settings
from benchmarks.convergence.trial import Flat, Outcome, Trial, outcome
from benchmarks.convergence.tricks import Stepping
from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import Payload
from sparkstrom.data.row_store import Batches
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.grid import first_exponent, round_to_grid
from sparkstrom.models.base import Paced
from sparkstrom.models.torch import TorchModel
from sparkstrom.protocol.common.events import Command, Directive
from sparkstrom.runtime.theta import Replica, Theta
from sparkstrom.runtime.trainer import GlobalStepEstimator


@dataclass(frozen=True, slots=True)
class Commit:
    """An update under its number, which is its place in the log, from 1."""

    origin: int
    update: Payload | None  # None: nothing reached tau; it only says how far the origin is
    steps: int  # of the origin, this update's among them
    seen: int  # commits that the origin had when it published
    at: float  # when everybody has it


class Worker:
    """One replica, its minibatches and how far it is."""

    def __init__(
        self, number: int, replica: Replica, batches: Batches, epochs: int, stepping: Stepping
    ) -> None:
        self.number, self.replica, self.batches, self._epochs = number, replica, batches, epochs
        self.stepping, model = stepping, replica.model
        self.pacemaker = GlobalStepEstimator(model, 0) if isinstance(model, Paced) else None
        self.position = Position(0, 0)
        self.steps = self.published = 0  # steps taken, and how many of them are published
        self.received = 0  # of the log
        self.heard: dict[int, int] = defaultdict(int)  # steps of others whose learning is here
        self.under_way = 0.0  # until when its last publication is

    @property
    def steps_max(self) -> int:
        return self._epochs * self.batches.batches_per_epoch

    @property
    def finished(self) -> bool:
        return self.position >= Position(self._epochs, 0)

    def step(self, training: int | None) -> None:
        """Train on the next minibatch; so many train now, or None: momentum counts own steps."""
        if training is not None and self.pacemaker is not None:
            command = Directive(
                Command.TRAIN, workers=training, minibatches=sum(self.heard.values())
            )
            self.pacemaker.update(command, self.steps)
        self.stepping.step(self.batches.get(*self.position))
        epoch, batch = self.position
        at_end = batch + 1 == self.batches.batches_per_epoch
        self.position = Position(epoch + 1, 0) if at_end else Position(epoch, batch + 1)
        self.steps += 1


class Fit:
    """All workers of a trial."""

    def __init__(self, trial: Trial, settings: Settings) -> None:
        self._trial, self._settings = trial, settings
        models = [self._model() for _ in range(trial.workers)]
        initial = models[0].initial()
        k = first_exponent(initial)
        self.n_params, self._initial = initial.size, round_to_grid(initial, k)
        self._random = np.random.default_rng((trial.seed, 2))
        self._pace = 1 + settings.jitter * self._random.uniform(-1, 1, trial.workers)
        self.workers = [
            self._worker(number, self._replica(model, k), batches)
            for number, (model, batches) in enumerate(zip(models, trial.batches(), strict=True))
        ]
        self.log: list[Commit] = []
        self.staleness: list[int] = []  # of each commit: others' commits that it had not seen
        self.ended_at = 0.0
        self.average_sum, self.average_count = np.zeros(self.n_params), 0
        self._known = [0] * trial.workers  # steps of each, as everybody knows by now
        self._numbers = itertools.count()  # of events: equal times keep their order
        self._events: list[tuple[float, int, str, int]] = []
        self._waiting: set[int] = set()

    def _model(self) -> TorchModel:
        beta2_power = self._settings.beta2_power(self._trial.workers)
        return TorchModel(
            self._trial.task.module(self._trial.seed),
            self._trial.task.loss(),
            self._trial.optimizer_of(beta2_power),
            scheduler=self._trial.task.scheduler(),
            clip_norm=self._settings.clip_norm,
        )

    def _worker(self, number: int, replica: Replica, batches: Batches) -> Worker:
        stepping = Stepping(replica, self._settings, self._trial.workers)
        return Worker(number, replica, batches, self._trial.epoch_count, stepping)

    def _replica(self, model: TorchModel, k: int) -> Replica:
        settings = self._settings
        theta = Theta(self.n_params, k)
        theta.load(self._initial)
        encoder = Encoder(
            self.n_params,
            k,
            settings.threshold(),
            settings.clipping(),
            train_on=settings.train_on,
            aggregation="mean" if settings.aggregation == "gain" else settings.aggregation,
            workers=self._trial.workers,
            warm_up=settings.warm_up(),
        )
        return Replica(model, theta, encoder, local=settings.train_on == "local")

    # -- virtual time ----------------------------------------------------------------------------

    def run(self) -> None:
        """Train to the end; afterwards all replicas are at the last commit."""
        for worker in self.workers:
            self._plan(float(self._random.uniform(0, 1)), "begin", worker.number)
        while self._events:
            at, _, what, number = heapq.heappop(self._events)
            worker = self.workers[number]
            if what == "end":
                self._end_step(worker, at)
            elif what == "news":
                self._known[number] += 1
            if what in ("begin", "end"):
                self._begin(worker, at)
            for waiting in sorted(self._waiting):
                self._begin(self.workers[waiting], at)
        for worker in self.workers:
            assert worker.finished, f"worker {worker.number} waits at {worker.position} for ever"
            self._receive(worker, np.inf)
        digests = {worker.replica.theta.digest() for worker in self.workers}
        assert len(digests) == 1, "replicas differ"

    def _plan(self, at: float, what: str, number: int) -> None:
        heapq.heappush(self._events, (at, next(self._numbers), what, number))

    def _begin(self, worker: Worker, at: float) -> None:
        """A batch boundary: add what has come, and take the next step unless it must wait."""
        self._receive(worker, at)
        self._waiting.discard(worker.number)
        if worker.finished:
            self.ended_at = max(self.ended_at, at)
        elif self._must_wait(worker, at):
            self._waiting.add(worker.number)
        else:
            if self._goes_on(worker):
                worker.replica.add_residual(-worker.replica.residual())
            training = sum(not each.finished for each in self.workers)
            worker.step(training if self._settings.horizon == "fit" else None)
            took = self._pace[worker.number]
            took += self._settings.jitter * self._random.uniform(-1, 1)
            self._plan(at + took, "end", worker.number)

    def _goes_on(self, worker: Worker) -> bool:
        """Is it where a checkpoint was? They are evenly spread over the fit."""
        parts = self._settings.resumed + 1
        places = {worker.steps_max * part // parts for part in range(1, parts)}
        return worker.steps in places

    def _must_wait(self, worker: Worker, at: float) -> bool:
        """As ``protocol.orders`` has it."""
        others = [each for each in self.workers if each is not worker and not each.finished]
        training = len(others) + 1
        lead, beside = self._settings.lead(), self._settings.beside(training)
        if lead is not None and others:
            slowest = min(self._known[each.number] for each in others)
            if worker.steps >= slowest + lead:
                return True
        if beside is None or not others or worker.under_way <= at:
            return False
        return worker.steps >= worker.published + beside

    def _receive(self, worker: Worker, at: float) -> None:
        before = worker.replica.theta.to_host() if worker.stepping.executor_monitors else None
        updates = self._receive_all(worker, at)
        if before is not None and updates:
            worker.stepping.others_moved(worker.replica.theta.to_host() - before, updates)
        if self._settings.average and worker is self.workers[0]:
            self._average()

    def _average(self) -> None:
        """One worker's theta at its boundaries, in the last share of its steps."""
        worker = self.workers[0]
        if worker.steps >= (1 - self._settings.average) * worker.steps_max:
            self.average_sum += worker.replica.theta.to_host()
            self.average_count += 1

    def _receive_all(self, worker: Worker, at: float) -> int:
        """Add what has come; return how many updates of others."""
        updates = 0
        while worker.received < len(self.log) and self.log[worker.received].at <= at:
            commit = self.log[worker.received]
            worker.received += 1
            worker.heard[commit.origin] = commit.steps
            if commit.update is None:
                continue
            if commit.origin == worker.number:
                worker.replica.mark_committed(worker.received)
            else:
                hits = worker.replica.theta.read(commit.update)
                worker.replica.apply(hits, worker.received)
                updates += 1
        return updates

    def _end_step(self, worker: Worker, at: float) -> None:
        self._plan(at + self._settings.latency, "news", worker.number)
        if self._is_due(worker, at) or worker.finished:
            self._publish(worker, at)
        else:
            worker.replica.accumulate_delta()

    def _is_due(self, worker: Worker, at: float) -> bool:
        every = self._settings.publish_every
        if isinstance(every, str):
            return worker.under_way <= at
        return worker.steps - worker.published >= every

    def _publish(self, worker: Worker, at: float) -> None:
        encoder, settings = worker.replica.encoder, self._settings
        if worker.published:
            encoder.follow_link(settings.latency * settings.step_s, settings.step_s)
        seen, update = worker.received, worker.replica.publish()
        worker.published = worker.steps
        until = at + settings.latency
        if update is not None:
            worker.under_way = until
            unseen = sum(commit.origin != worker.number for commit in self.log[seen:])
            self.staleness.append(unseen)
        self.log.append(Commit(worker.number, update, worker.steps, seen, until))
        self._plan(until, "arrived", worker.number)

    def delivered(self) -> Flat:
        """theta, or its average."""
        if self.average_count:
            return (self.average_sum / self.average_count).astype(np.float32)
        return self.workers[0].replica.theta.to_host()


def train(trial: Trial, settings: Settings) -> Outcome:
    """Train, and measure theta."""
    fit = Fit(trial, settings)
    fit.run()
    replicas = [worker.replica for worker in fit.workers]
    model: Any = replicas[0].model
    reports = [replica.model.buffers_bytes() for replica in replicas]  # type: ignore[attr-defined]
    model.bind(fit.delivered())
    if reports[0]:
        model.load_buffers_bytes(model.average_buffers(reports))
    steps = sum(worker.steps for worker in fit.workers)
    counters = [replica.encoder.counters for replica in replicas]
    publications = sum(each.publications for each in counters)
    staleness = float(np.mean(fit.staleness)) if fit.staleness else 0.0
    residuals = [replica.residual_norm() for replica in replicas]
    return outcome(
        trial,
        model.module,
        bytes_sent=sum(each.payload_bytes for each in counters),
        bytes_dense=4 * fit.n_params * steps,
        figures={
            "staleness_mean": staleness,
            "staleness_rounds": staleness * steps / max(1, publications) / trial.workers,
            "sent_fraction": sum(each.hits for each in counters) / fit.n_params / publications,
            "mass_clipped": sum(each.mass_clipped for each in counters)
            / max(1e-30, sum(each.mass_sent for each in counters)),
            "residual_norm": float(np.mean(residuals)),
            "publications": publications,
            "time": fit.ended_at / (steps / trial.workers),
        },
    )
