"""Averaging in rounds, simulated in this process with the package's own functions."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.convergence.trial import Outcome, Trial, measured, outcome
from sparkstrom.models import Nesterov
from sparkstrom.models.base import Flat, State
from sparkstrom.models.torch import TorchModel
from sparkstrom.rounds.averaging import (
    OuterStep,
    average_buffers,
    average_states,
    fresh_state,
    weighted_mean,
)
from sparkstrom.rounds.worker_round import LocalRoundResult, RoundBatch, RoundStart, train_locally

KNOWN = re.compile(r"(averaging|diloco)-([1-9]\d*)")
DILOCO = Nesterov(0.7, 0.9)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The options of rounds."""

    each: int  # steps in a round
    is_diloco: bool  # outer Nesterov step, optimizers not averaged

    @classmethod
    def parse(cls, name: str) -> Recipe:
        """Return the options of ``averaging-H`` or ``diloco-H``; ValueError for another name."""
        found = KNOWN.fullmatch(name)
        if found is None:
            raise ValueError(f"{name!r}: known are averaging-STEPS, diloco-STEPS")
        return cls(int(found[2]), found[1] == "diloco")


class Rounds:
    """The training of one trial in rounds."""

    def __init__(self, trial: Trial, recipe: Recipe) -> None:
        self._trial, self._recipe = trial, recipe
        self.model = TorchModel(
            trial.task.module(trial.seed),
            trial.task.loss(),
            trial.optimizer_of(),
            scheduler=trial.task.scheduler(),
        )
        self.common: Flat = self.model.initial()
        self._outer = OuterStep(DILOCO if recipe.is_diloco else None)
        self._batches = trial.batches()
        self._workers = [copy.deepcopy(self.model) for _ in self._batches]
        fresh = fresh_state(copy.deepcopy(self.model), self.common)
        self._states: list[State] = [dict(fresh) for _ in self._batches]
        self._buffers, self._steps = self.model.buffers_bytes(), 0

    @property
    def state_vectors(self) -> int:
        """How many arrays of the parameters' size the optimizer's state has."""
        arrays = [a for a in self._states[0].values() if isinstance(a, np.ndarray)]
        return round(sum(array.size for array in arrays) / self.common.size)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of each worker in an epoch."""
        return max(each.batches_per_epoch for each in self._batches)

    def epochs(self) -> Iterator[Any]:
        """Train; yield the module after each epoch. Each epoch's last round may be shorter."""
        for epoch in range(self._trial.epoch_count):
            for first in range(0, self.steps_per_epoch, self._recipe.each):
                self._round(epoch, first)
            self.model.bind(self.common.copy())
            self.model.load_buffers_bytes(self._buffers)
            yield self.model.module

    def _round(self, epoch: int, first: int) -> None:
        done: list[LocalRoundResult] = []
        for number, (model, batches) in enumerate(zip(self._workers, self._batches, strict=True)):
            wanted = range(first, min(first + self._recipe.each, batches.batches_per_epoch))
            turns = [RoundBatch(batches.get(epoch, i), batches.place(epoch, i)) for i in wanted]
            state = dict(self._states[number])
            beginning = RoundStart(self.common.copy(), self._buffers, state, self._steps)
            done.append(train_locally(model, beginning, turns))
        weights = [one.weight for one in done]
        mean = weighted_mean([one.parameters for one in done], weights)
        self.common = self._outer.step(self.common, mean)
        if self._buffers:
            reports = [one.buffers for one in done]
            self._buffers = average_buffers(self.model, reports, weights)
        self._steps += done[0].steps
        if self._recipe.is_diloco:
            self._states = [copy.deepcopy(one.updater) for one in done]
        else:
            states, taken = [one.updater for one in done], [one.steps for one in done]
            self._states = [average_states(states, weights, taken)] * len(done)


def train(trial: Trial, name: str) -> Outcome:
    """Train as a baseline of ``benchmarks.convergence``; bytes are the workers' parameters."""
    recipe = Recipe.parse(name)
    rounds = Rounds(trial, recipe)
    *_, module = rounds.epochs()
    steps = trial.epoch_count * rounds.steps_per_epoch
    sent = trial.epoch_count * -(-rounds.steps_per_epoch // recipe.each)
    vector = 4 * rounds.common.size * trial.workers
    return outcome(trial, module, bytes_sent=sent * vector, bytes_dense=steps * vector)


def measure_epochs(trial: Trial, rounds: Rounds) -> list[dict[str, float]]:
    """Train; return the measures on ``test`` at each epoch's end."""
    test = trial.task.split().test
    return [measured(module, trial.task, test) for module in rounds.epochs()]
