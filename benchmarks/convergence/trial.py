"""A trial, which is one training of a task by k workers, and its outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from benchmarks.convergence.tasks import BATCH_ROWS, TASKS, Rows, Task
from sparkstrom.data.row_store import Batches
from sparkstrom.models.base import Batch

Flat = NDArray[np.float32]

MOMENTUM, BETAS = 0.9, (0.9, 0.999)


@dataclass(frozen=True, slots=True)
class Trial:
    """One training of a task, by any system."""

    task_name: str
    optimizer: str
    workers: int
    seed: int
    rate: float
    options: tuple[tuple[str, Any], ...] = ()  # of the optimizer, such as ("nesterov", True)
    epochs: int | None = None  # None: the task's

    @property
    def task(self) -> Task:
        """The task, by its name."""
        return TASKS[self.task_name]

    @property
    def epoch_count(self) -> int:
        """Epochs of the fit: ``epochs`` if given, or else those of the task."""
        return self.task.epochs if self.epochs is None else self.epochs

    @property
    def minibatches(self) -> int:
        """Minibatches of all workers together."""
        return self.epoch_count * (len(self.task.split().train.labels) // BATCH_ROWS)

    @property
    def alone(self) -> Self:
        """The same trial with one worker."""
        return replace(self, workers=1)

    def batches(self) -> list[Batches]:
        """Return each worker's rows: shuffled by seed and dealt out in turn, as in a fit."""
        features, labels = self.task.split().train
        order = np.random.default_rng((self.seed, 1)).permutation(len(labels))
        return [
            Batches(
                features[order[number :: self.workers]],
                labels[order[number :: self.workers]],
                batch_rows=BATCH_ROWS,
                seed=self.seed,
                partition=number,
            )
            for number in range(self.workers)
        ]

    def rounds(self) -> Iterator[list[Batch]]:
        """Yield the minibatches of all workers at each step of a synchronous system."""
        batches = self.batches()
        for epoch in range(self.epoch_count):
            for index in range(min(each.batches_per_epoch for each in batches)):
                yield [each.get(epoch, index) for each in batches]

    def optimizer_of(self, beta2_power: int = 1) -> Any:
        """Return an optimizer's factory; its second beta is raised to ``beta2_power``."""
        import torch

        betas = (BETAS[0], BETAS[1] ** beta2_power)
        makers: dict[str, Any] = {
            "sgd": torch.optim.SGD,
            "momentum": partial(torch.optim.SGD, momentum=MOMENTUM),
            "adam": partial(torch.optim.Adam, betas=betas),
            "adamw": partial(torch.optim.AdamW, betas=betas),
        }
        return partial(makers[self.optimizer], lr=self.rate, **dict(self.options))


class Learner:
    """A module's optimizer and schedule, as in a training loop of torch."""

    def __init__(self, trial: Trial, module: Any) -> None:
        self._optimizer = trial.optimizer_of()(module.parameters())
        factory = trial.task.scheduler()
        self._scheduler = None if factory is None else factory(self._optimizer)

    def forget(self) -> None:
        """Reset the gradients."""
        self._optimizer.zero_grad()

    def step(self) -> None:
        """Make a step of the optimizer, then of the schedule."""
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a training, with measures on the rows of ``Measures``."""

    test: dict[str, float]  # loss, and accuracy where there are classes
    validate: dict[str, float]
    bytes_sent: int = 0  # by all workers, each message once
    bytes_dense: int = 0  # if each worker sent a float32 gradient at each step
    figures: dict[str, float] = field(default_factory=dict)  # of this system alone
    units: Flat | None = None  # the metric of each independent part of ``test``; None: diverged

    def worse_than(self, other: Outcome, metric: str) -> tuple[float, float]:
        """Return the gap to another outcome on the same rows, and the gap's standard error.

        The gap is positive if this outcome is worse. The error is that over the test rows, which
        are paired; it does not include differences between seeds.
        """
        sign = -1 if metric == "accuracy" else 1
        gap = sign * (self.test[metric] - other.test[metric])
        if self.units is None or other.units is None:
            return gap, math.nan
        differences = self.units.astype(np.float64) - other.units
        return gap, float(differences.std(ddof=1) / math.sqrt(differences.size))

    @property
    def factor(self) -> float | None:
        """How many times fewer bytes than dense ones were sent; None: not counted."""
        return self.bytes_dense / self.bytes_sent if self.bytes_sent else None


def measured(module: Any, task: Task, rows: Rows) -> dict[str, float]:
    """Return loss and accuracy in evaluation mode; the loss is inf if the module diverged."""
    return means(measure_rows(module, task, rows))


def means(rows: dict[str, NDArray[np.float64]]) -> dict[str, float]:
    """Return the means of what ``measure_rows`` returns; a loss that is not finite is inf."""
    found = {name: float(values.mean()) for name, values in rows.items()}
    return found | {"loss": found["loss"] if math.isfinite(found["loss"]) else math.inf}


def measure_rows(module: Any, task: Task, rows: Rows) -> dict[str, NDArray[np.float64]]:
    """Return the loss of each row and, if there are classes, whether its class is right."""
    import torch

    module.eval()
    loss_of, losses, hits = task.loss(), [], []
    loss_of.reduction = "none"
    with torch.inference_mode():
        for first in range(0, len(rows.labels), 512):
            x = torch.from_numpy(rows.features[first : first + 512])
            y = torch.from_numpy(rows.labels[first : first + 512])
            output = module(x)
            losses.append(loss_of(output, y).reshape(len(y), -1).mean(1))
            if task.metric == "accuracy":
                hits.append(output.argmax(1) == y)
    module.train()
    found = {"loss": losses} | ({"accuracy": hits} if hits else {})
    return {name: torch.cat(parts).numpy().astype(np.float64) for name, parts in found.items()}


def outcome(trial: Trial, module: Any, **values: Any) -> Outcome:
    """Measure the module at the end of a training."""
    task, split = trial.task, trial.task.split()
    rows = measure_rows(module, task, split.test)
    test, validate = means(rows), measured(module, task, split.validate)
    if math.isfinite(test["loss"]):
        values["units"] = rows[task.metric].reshape(-1, task.copies).mean(1)
    return Outcome(test, validate, **values)


def scores(
    trials: Sequence[Trial], train: Callable[[Trial], Outcome], rates: Sequence[float]
) -> dict[float, float]:
    """Return the mean loss on ``validate`` of each learning rate, the best rate first.

    The loss counts even if the metric is accuracy, which depends on chance if few rows are wrong.
    """
    means = {}
    for rate in rates:
        outcomes = [train(replace(trial, rate=rate)) for trial in trials]
        means[rate] = float(np.mean([outcome.validate["loss"] for outcome in outcomes]))
    return dict(sorted(means.items(), key=lambda item: item[1]))
