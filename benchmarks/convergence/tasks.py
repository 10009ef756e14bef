"""The tasks: small enough for minutes, different enough that no setting suits them by luck.

    digits          64-128-10 ReLU perceptron on sklearn's digits            accuracy    9,610
    conv            two convolutions with BatchNorm on the same digits       accuracy    9,994
    transformer     characters of Python's own reference (``texts``)         loss       38,848
    transformer-1m  the same, wider and deeper                               loss    1,007,168
    regression      Friedman's function of 10 columns with noise, 10-64-64-1 loss        4,929

Every split is the same for all runs; a seed chooses the initial parameters, who has which rows, and
their order. Numbers of rows are powers of two times the minibatch, or nearly: with any k of the
benchmark every worker has whole minibatches, and as many as the others. Learning rates are those
with which one process is best on ``validate``, the mean of two seeds, out of GRIDS, as

    python -m benchmarks.convergence --choose --seeds 2

prints them; no result is measured on these rows. Of the transformers only AdamW's 4e-3 was chosen
so, with one seed and without its warm-up; their other rates are what is usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.convergence import modules, texts

BATCH_ROWS = 32  # of each worker, and of the one process
SPLIT_SEED = 0

GRIDS = {
    "sgd": (0.03, 0.1, 0.3),
    "momentum": (0.005, 0.01, 0.02, 0.05, 0.1),
    "adam": (1e-3, 2e-3, 4e-3, 8e-3),
    "adamw": (1e-3, 2e-3, 4e-3, 8e-3),
}
OPTIMIZERS = tuple(GRIDS)


class Rows(NamedTuple):
    """Rows first in both."""

    features: NDArray[Any]
    labels: NDArray[Any]


class Split(NamedTuple):
    """Rows to train on, to choose learning rates with, and to measure results with."""

    train: Rows
    validate: Rows
    test: Rows


@dataclass(frozen=True, slots=True)
class Task:
    """What is learnt. ``rates``: the learning rate of each optimizer, for every system alike."""

    name: str
    metric: str  # "accuracy" or "loss"
    epochs: int
    split: Callable[[], Split]
    module: Callable[[int], Any]  # by seed
    loss: Callable[[], Any]
    rates: dict[str, float]
    warm_up: int = 0  # minibatches over which the learning rate rises in a line from a fiftieth

    def scheduler(self) -> Any:
        """A factory of torch's scheduler; None: the learning rate stays as it is."""
        from torch.optim.lr_scheduler import LinearLR

        if not self.warm_up:
            return None
        return partial(LinearLR, start_factor=1 / 50, total_iters=self.warm_up)


def _cut(features: NDArray[Any], labels: NDArray[Any], train: int, validate: int) -> Split:
    order = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    parts = np.split(order, (train, train + validate))
    return Split(*(Rows(features[part], labels[part]) for part in parts))


@cache
def digits() -> Split:
    """1,024 of 8 x 8 pixels to train on, 193 and 580 beside."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return _cut((data.data / 16).astype(np.float32), data.target.astype(np.int64), 1024, 193)


@cache
def friedman() -> Split:
    """4,096 rows to train on; of the standardised labels' variance, noise makes 4 %."""
    from sklearn.datasets import make_friedman1

    features, labels = make_friedman1(8192, noise=1.0, random_state=SPLIT_SEED)
    labels = (labels - labels[:4096].mean()) / labels[:4096].std()
    return _cut((features - 0.5).astype(np.float32), labels[:, None].astype(np.float32), 4096, 2048)


@cache
def characters() -> Split:
    """3,072 rows of 64 characters to train on, 512 of other pages each beside."""
    return Split(*(Rows(*rows) for rows in texts.rows((3072, 512, 512), SPLIT_SEED)))


def cross_entropy() -> Any:
    """Of classes."""
    from torch import nn

    return nn.CrossEntropyLoss()


def squares() -> Any:
    """Mean squared error."""
    from torch import nn

    return nn.MSELoss()


TASKS = {
    task.name: task
    for task in (
        Task(
            *("digits", "accuracy", 28, digits, partial(modules.perceptron, (64, 128, 10))),
            cross_entropy,
            {"sgd": 0.3, "momentum": 0.1, "adam": 8e-3, "adamw": 8e-3},
        ),
        Task(
            *("conv", "accuracy", 14, digits, modules.convolution),
            cross_entropy,
            {"sgd": 0.1, "momentum": 0.02, "adam": 4e-3, "adamw": 4e-3},
        ),
        Task(
            *("transformer", "loss", 10, characters, partial(modules.transformer, 36, 2)),
            cross_entropy,
            {"sgd": 0.3, "momentum": 0.1, "adam": 4e-3, "adamw": 4e-3},
            warm_up=50,
        ),
        Task(
            *("transformer-1m", "loss", 4, characters, partial(modules.transformer, 144, 4)),
            cross_entropy,
            {"sgd": 0.3, "momentum": 0.1, "adam": 1e-3, "adamw": 1e-3},
            warm_up=50,
        ),
        Task(
            *("regression", "loss", 8, friedman, partial(modules.perceptron, (10, 64, 64, 1))),
            squares,
            {"sgd": 0.1, "momentum": 0.05, "adam": 2e-3, "adamw": 2e-3},
        ),
    )
}
