"""Other systems with the same rows, module and optimizer, simulated in one process.

    ddp         DistributedDataParallel: a step with the mean of k gradients; BatchNorm's running
                statistics are those of rank 0, as in torch
    powersgd    the same with matrices compressed by ``powersgd``
    diloco      H steps of each worker, then the mean drift as gradient of a step of SGD with
                Nesterov momentum, 0.7 and 0.9 (arXiv 2311.08105); float32
    rounds      rounds-averaging-H, rounds-diloco-H: ParameterAveragingTrainingMaster with the
                package's own functions (``benchmarks.averaging``)
    sparseloco  H steps of each worker, then the largest entries of the drift in two bits with error
                feedback 0.95, an outer step of 1 (arXiv 2508.15706;
                ``benchmarks.slow_link.sparse``)

Bytes are those that workers send; each message counts once, as for sparkstrom.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.convergence.powersgd import PowerSGD
from benchmarks.convergence.trial import Flat, Learner, Outcome, Trial, outcome
from benchmarks.slow_link import sparse
from benchmarks.slow_link.data import copy_parameters, load_parameters
from sparkstrom.models.base import Batch

DILOCO_RATE, DILOCO_MOMENTUM = 0.7, 0.9
SPARSELOCO_STEPS, SPARSELOCO_FEEDBACK, SPARSELOCO_RATE = 15, 0.95, 1.0

Train = Callable[[Trial], Outcome]


def add_gradient(module: Any, loss_of: Any, batch: Batch, share: float = 1.0) -> None:
    """Add ``share`` times the gradient of a minibatch's mean loss."""
    x, y = torch.from_numpy(batch.features), torch.from_numpy(batch.labels)
    (share * loss_of(module(x), y)).backward()


@contextmanager
def unchanged_buffers(module: Any) -> Iterator[None]:
    """Restore BatchNorm's statistics at the end of the block."""
    before = [buffer.clone() for buffer in module.buffers()]
    yield
    for buffer, values in zip(module.buffers(), before, strict=True):
        buffer.copy_(values)


def ddp(trial: Trial) -> Outcome:
    """Train with one step per k minibatches; with one worker this is training in one process."""
    module, loss_of = trial.task.module(trial.seed), trial.task.loss()
    learner = Learner(trial, module)
    n_params, steps = copy_parameters(module).size, 0
    for batches in trial.rounds():
        learner.forget()
        for rank, batch in enumerate(batches):
            with nullcontext() if rank == 0 else unchanged_buffers(module):
                add_gradient(module, loss_of, batch, 1 / len(batches))
        learner.step()
        steps += len(batches)
    dense = 4 * n_params * steps
    return outcome(trial, module, bytes_sent=dense, bytes_dense=dense)


def powersgd(trial: Trial, rank: int = 2) -> Outcome:
    """Train like ``ddp``, with gradients of low rank."""
    module, loss_of = trial.task.module(trial.seed), trial.task.loss()
    parameters = list(module.parameters())
    learner = Learner(trial, module)
    compress = PowerSGD([p.shape for p in parameters], trial.workers, rank, trial.seed)
    n_params, steps = copy_parameters(module).size, 0
    for batches in trial.rounds():
        gradients = []
        for batch in batches:
            module.zero_grad()
            add_gradient(module, loss_of, batch)
            gradients.append([p.grad.clone() for p in parameters])
        for p, shared in zip(parameters, compress.averaged(gradients), strict=True):
            p.grad = shared
        learner.step()
        steps += len(batches)
    dense = 4 * n_params * steps
    return outcome(trial, module, bytes_sent=compress.bytes_sent, bytes_dense=dense)


class Drifting:
    """Workers that train independently, and share their drift after every ``every`` steps."""

    def __init__(self, trial: Trial, every: int) -> None:
        self._trial, self._every = trial, every
        self._modules = [trial.task.module(trial.seed) for _ in range(trial.workers)]
        self._learners = [Learner(trial, module) for module in self._modules]
        self.common = copy_parameters(self._modules[0])
        self.bytes_sent = 0

    def outer(self, drifts: list[Flat]) -> None:
        """Move ``common`` by what workers send of their drifts (parameters before - after)."""
        raise NotImplementedError

    def run(self) -> Outcome:
        """Train to the end; the last round may be shorter."""
        loss_of, rounds = self._trial.task.loss(), 0
        for rounds, batches in enumerate(self._trial.rounds(), 1):
            for module, learner, batch in zip(self._modules, self._learners, batches, strict=True):
                learner.forget()
                add_gradient(module, loss_of, batch)
                learner.step()
            if rounds % self._every == 0:
                self._share()
        if rounds % self._every:
            self._share()
        module = self._modules[0]
        self._average_buffers(module)
        dense = 4 * self.common.size * rounds * self._trial.workers
        return outcome(self._trial, module, bytes_sent=self.bytes_sent, bytes_dense=dense)

    def _share(self) -> None:
        self.outer([self.common - copy_parameters(module) for module in self._modules])
        for module in self._modules:
            load_parameters(module, self.common)

    def _average_buffers(self, module: Any) -> None:
        columns = zip(*(each.buffers() for each in self._modules), strict=True)
        for mine, values in zip(module.buffers(), list(columns), strict=True):
            if mine.is_floating_point():
                mine.copy_(torch.stack(values).mean(0))


class DiLoCo(Drifting):
    """DiLoCo, as described above."""

    def __init__(self, trial: Trial, every: int) -> None:
        super().__init__(trial, every)
        self._velocity = np.zeros_like(self.common)

    def outer(self, drifts: list[Flat]) -> None:
        """Move the common parameters by Nesterov momentum along the mean drift of the workers."""
        drift = np.mean(drifts, axis=0, dtype=np.float32)
        self._velocity = np.float32(DILOCO_MOMENTUM) * self._velocity + drift
        nesterov = drift + np.float32(DILOCO_MOMENTUM) * self._velocity
        self.common -= np.float32(DILOCO_RATE) * nesterov
        self.bytes_sent += 4 * drift.size * len(drifts)


class SparseLoCo(Drifting):
    """SparseLoCo, as described above."""

    def __init__(self, trial: Trial, every: int, keep: int) -> None:
        super().__init__(trial, every)
        self._keep = keep
        self._unsent = [np.zeros_like(self.common) for _ in range(trial.workers)]

    def outer(self, drifts: list[Flat]) -> None:
        """Move by the mean of each worker's largest entries, with error feedback."""
        for unsent, drift in zip(self._unsent, drifts, strict=True):
            unsent *= np.float32(SPARSELOCO_FEEDBACK)
            unsent += drift
            message = sparse.encode(unsent, self._keep)
            sparse.add_decoded(message, unsent, -1.0, self._keep)
            sparse.add_decoded(message, self.common, -SPARSELOCO_RATE / len(drifts), self._keep)
            self.bytes_sent += message.size


def _sparseloco(percent: float, every: int) -> Train:
    keep = 8 * max(1, round(percent / 100 * sparse.CHUNK / 8))
    return lambda trial: SparseLoCo(trial, every, keep).run()


def rounds(name: str, trial: Trial) -> Outcome:
    """Train in rounds with the package's own functions."""
    from benchmarks.averaging.rounds_here import train

    return train(trial, name.removeprefix("rounds-"))


def baseline(name: str) -> Train:
    """Return the function that trains a baseline, with any numbers; ValueError for other names."""
    if ROUNDS.fullmatch(name):
        return partial(rounds, name)
    if not KNOWN.fullmatch(name):
        known = ", ".join(BASELINES)
        raise ValueError(f"{name!r}: known are {known}, diloco-STEPS, sparseloco-PERCENT-STEPS")
    kind, *numbers = name.split("-")
    match kind:
        case "ddp":
            return ddp
        case "powersgd":
            return powersgd
        case "diloco":
            return lambda trial: DiLoCo(trial, int(numbers[0])).run()
    every = int(numbers[1]) if numbers[1:] else SPARSELOCO_STEPS
    return _sparseloco(float(numbers[0]), every)


BASELINES = ("ddp", "powersgd", "diloco-5", "diloco-20", "sparseloco-1", "sparseloco-3")
KNOWN = re.compile(r"ddp|powersgd|diloco-[1-9]\d*|sparseloco-\d+(\.\d+)?(-[1-9]\d*)?")
ROUNDS = re.compile(r"rounds-(averaging|diloco)-[1-9]\d*")
