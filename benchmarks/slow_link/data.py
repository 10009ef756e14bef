"""The task: digits of 8 x 8 pixels, shifted sideways by up to a pixel, and a wide ReLU network.

A row depends only on its part and number, so each process makes its own rows, and none is sent. The
parts have no digit in common. Results are trained on ``train`` and measured on ``test``; learning
rates are chosen by training on ``choose`` and measuring on ``validate``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = tuple[NDArray[np.float32], NDArray[np.int64]]  # f32[n, 64], i64[n]

PIXELS, CLASSES, REACH = 8, 10, 1
DIGITS = {"train": 1150, "test": 300, "choose": 247, "validate": 100}  # 1,797 in all
ROWS = {"train": 26_112, "test": 900, "choose": 10_240, "validate": 300}
ORDER_SEED = 0
LEARNING_RATES = {  # the same small grid for every system, by optimizer
    "adam": (3e-4, 1e-3, 3e-3),
    "adamw": (3e-4, 1e-3, 3e-3),
    "rmsprop": (1e-4, 3e-4, 1e-3),
    "sgd": (0.03, 0.1, 0.3),
    "momentum": (0.01, 0.03, 0.1),
}


def digits() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return scikit-learn's digits: images f64[1797, 8, 8] with values of 0 to 16, and classes.

    They are read from its file, because importing scikit-learn takes a second and a half.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("the digits are scikit-learn's: install scikit-learn")
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    return table[:, :-1].reshape(-1, PIXELS, PIXELS), table[:, -1].astype(np.int64)


def make_rows(part: str) -> Rows:
    """Return all rows of a part in random order."""
    images, classes = digits()
    order = np.random.default_rng(ORDER_SEED).permutation(len(classes))
    first = 0
    for name, count in DIGITS.items():
        if name == part:
            break
        first += count
    mine = order[first : first + DIGITS[part]]
    random = np.random.default_rng((ORDER_SEED, first))
    chosen = mine[random.permutation(ROWS[part]) % len(mine)]
    padded = np.pad(images[chosen] / 16, ((0, 0), (0, 0), (REACH, REACH)))
    right = random.integers(0, 2 * REACH + 1, len(chosen))
    columns = right[:, None] + np.arange(PIXELS)
    shifted = np.take_along_axis(padded, columns[:, None, :], axis=2)
    features = shifted.reshape(len(chosen), PIXELS * PIXELS).astype(np.float32)
    return features, classes[chosen]


def make_worker_rows(part: str, worker: int, workers: int) -> Rows:
    """Return a worker's rows, which are every ``workers``-th row of a part."""
    features, labels = make_rows(part)
    return features[worker::workers], labels[worker::workers]


def make_spark_rows(part: str, workers: int, numbers: Iterator[int]) -> Iterator[Any]:
    """Yield the rows of the given workers as (features, label); called in Spark's executors."""
    for worker in numbers:
        yield from zip(*make_worker_rows(part, worker, workers), strict=True)


def make_module(widths: tuple[int, ...], seed: int) -> Any:
    """Return a perceptron with ReLU between its layers: 64, the widths, 10."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    sizes = (PIXELS * PIXELS, *widths, CLASSES)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_optimizer_factory(name: str, rate: float) -> Any:
    """Return an optimizer's factory; it is ``fused``, which is fastest on CPUs, if supported."""
    import torch

    makers = {
        "adam": partial(torch.optim.Adam, fused=True),
        "adamw": partial(torch.optim.AdamW, fused=True),
        "rmsprop": torch.optim.RMSprop,
        "sgd": partial(torch.optim.SGD, fused=True),
        "momentum": partial(torch.optim.SGD, momentum=0.9, fused=True),
    }
    return partial(makers[name], lr=rate)


def copy_parameters(module: Any) -> NDArray[np.float32]:
    """Return a copy of all parameters, f32[n_params], in the module's order."""
    import torch

    with torch.no_grad():
        return np.concatenate([p.detach().numpy().ravel() for p in module.parameters()])


def load_parameters(module: Any, values: NDArray[np.float32]) -> None:
    """Load parameters, f32[n_params], into a module."""
    import torch

    at = 0
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.from_numpy(values[at : at + p.numel()]).view_as(p))
            at += p.numel()


def compute_accuracy(module: Any, rows: Rows) -> float:
    """Return the share of rows whose class has the largest output."""
    import torch

    module.eval()
    with torch.inference_mode():
        guesses = module(torch.from_numpy(rows[0])).argmax(1).numpy()
    module.train()
    return float((guesses == rows[1]).mean())
