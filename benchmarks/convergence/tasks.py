"""The tasks: small ones that train in minutes, of different kinds. With metric and parameters:

    digits          64-128-10 ReLU perceptron on sklearn's digits            accuracy    9,610
    conv            two convolutions with BatchNorm on the same digits       accuracy    9,994
    transformer     characters of Python's own reference (``texts``)         loss       38,848
    transformer-1m  the same, wider and deeper                               loss    1,007,168
    regression      Friedman's function of 10 columns with noise, 10-64-64-1 loss        4,929
    shifted         the perceptron of digits; images shifted by a pixel      accuracy    9,610
    shifted-conv    the convolutions of conv on these                        accuracy    9,994
    teacher         32-128-10 perceptron; classes are a random network's     accuracy    5,514

All runs have the same split; a seed chooses the initial parameters, each worker's rows, and their
order. Numbers of training rows are powers of two times the minibatch, or nearly, so that all
workers have the same number of whole minibatches. Learning rates are those of GRIDS with which one
process is best on ``validate``, mean of two seeds:

    python -m benchmarks.convergence --choose --seeds 2

No result is measured on these rows. The rates of the last three tasks were chosen with
``--minibatches 4096``, those of shifted-conv with one seed and momentum only. Of the transformers'
rates only AdamW's 4e-3 was chosen like this, with one seed and without warm-up. Other rates are
common values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
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
    """Features and labels, both with one row per example."""

    features: NDArray[Any]
    labels: NDArray[Any]


class Split(NamedTuple):
    """Rows to train on, to choose learning rates with, and to measure results with."""

    train: Rows
    validate: Rows
    test: Rows


@dataclass(frozen=True, slots=True)
class Task:
    """A task; ``rates`` has each optimizer's learning rate, the same for all systems."""

    name: str
    metric: str  # "accuracy" or "loss"
    epochs: int
    split: Callable[[], Split]
    module: Callable[[int], Any]  # by seed
    loss: Callable[[], Any]
    rates: dict[str, float]
    copies: int = 1  # number of successive test rows that are variants of one image
    warm_up: int = 0  # minibatches in which the learning rate rises linearly from 1 / 50

    def scheduler(self) -> Any:
        """Return a factory of torch's scheduler; None if the learning rate is constant."""
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
    """Return 1,024 images of 8 x 8 pixels to train on, 193 to validate and 580 to test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return _cut((data.data / 16).astype(np.float32), data.target.astype(np.int64), 1024, 193)


SHIFTS = tuple(product((-1, -0.5, 0, 0.5, 1), repeat=2))  # pixels down and to the right


@cache
def shifted() -> Split:
    """Return shifted images of ``digits``: four of each to train on, all shifts of each to test."""
    train, validate, test = digits()
    random = np.random.default_rng(SPLIT_SEED)
    some = [random.integers(0, len(SHIFTS), (len(rows.labels), 4)) for rows in (train, validate)]
    every = np.tile(np.arange(len(SHIFTS)), (len(test.labels), 1))
    return Split(_shift(train, some[0]), _shift(validate, some[1]), _shift(test, every))


def _shift(rows: Rows, ways: NDArray[np.int64]) -> Rows:
    """Return each row with its shifts, one after another; half a pixel is a mean of two shifts.

    ways  [rows, times]  indices of SHIFTS
    """
    images = np.pad(rows.features.reshape(-1, 8, 8), ((0, 0), (2, 2), (2, 2)))

    def cut(image: NDArray[np.float32], down: float, right: float) -> NDArray[np.float32]:
        rows, columns = ({math.floor(by), math.ceil(by)} for by in (down, right))
        parts = [image[2 - y : 10 - y, 2 - x : 10 - x] for y, x in product(rows, columns)]
        return np.asarray(np.mean(parts, axis=0), np.float32)

    made = [cut(images[row], *SHIFTS[way]) for row, its in enumerate(ways) for way in its]
    return Rows(np.stack(made).reshape(-1, 64), rows.labels.repeat(ways.shape[1]))


@cache
def taught() -> Split:
    """Return 16,384 random rows to train on, 20,480 to test; a random network gives the labels."""
    random = np.random.default_rng(SPLIT_SEED)
    features = random.standard_normal((16384 + 4096 + 20480, 32), np.float32)
    hidden = np.maximum(features @ random.standard_normal((32, 32), np.float32), 0)
    labels = (hidden @ random.standard_normal((32, 10), np.float32)).argmax(1)
    return _cut(features, labels, 16384, 4096)


@cache
def friedman() -> Split:
    """Return 4,096 rows to train on, 12,288 to test; noise is 4 % of the labels' variance."""
    from sklearn.datasets import make_friedman1

    features, labels = make_friedman1(8192, noise=1.0, random_state=SPLIT_SEED)
    more, answers = make_friedman1(12288, noise=1.0, random_state=SPLIT_SEED + 1)
    mean, spread = labels[:4096].mean(), labels[:4096].std()

    def scaled(features: NDArray[Any], labels: NDArray[Any]) -> Rows:
        labels = ((labels - mean) / spread)[:, None]
        return Rows((features - 0.5).astype(np.float32), labels.astype(np.float32))

    return _cut(*scaled(features, labels), 4096, 2048)._replace(test=scaled(more, answers))


@cache
def characters() -> Split:
    """Return 3,072 rows of 64 characters to train on, 512 to validate, 512 to test."""
    return Split(*(Rows(*rows) for rows in texts.rows((3072, 512, 512), SPLIT_SEED)))


def cross_entropy() -> Any:
    """Return the loss of tasks with classes."""
    from torch import nn

    return nn.CrossEntropyLoss()


def squares() -> Any:
    """Return the mean squared error, the loss of regression."""
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
            *("shifted", "accuracy", 8, shifted, partial(modules.perceptron, (64, 128, 10))),
            cross_entropy,
            {"sgd": 0.3, "momentum": 0.1, "adam": 4e-3, "adamw": 4e-3},
            copies=len(SHIFTS),
        ),
        Task(
            *("shifted-conv", "accuracy", 8, shifted, modules.convolution),
            cross_entropy,
            {"sgd": 0.1, "momentum": 0.01, "adam": 4e-3, "adamw": 4e-3},
            copies=len(SHIFTS),
        ),
        Task(
            *("teacher", "accuracy", 2, taught, partial(modules.perceptron, (32, 128, 10))),
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
