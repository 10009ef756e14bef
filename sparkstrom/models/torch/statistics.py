"""Statistics: running means and variances that follow the fit's minibatches, as momentum does.

A worker's BatchNorm sees its own minibatches only. With torch's momentum of 0.1 it remembers ten of
them, in which the parameters move 10 k times where k workers train: its statistics are those of
parameters long gone. Measured (a convolution with BatchNorm on digits, SGD with momentum, 16
workers): 1 - (1 - m) ** k brings the loss's distance to one machine's from 0.146 to 0.051.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from sparkstrom.models.horizons import raised


def following(module: nn.Module) -> list[Any]:
    """Parts whose statistics have a momentum; those without average over everything."""
    parts = [part for part in module.modules() if isinstance(part, _NormBase)]
    return [part for part in parts if part.track_running_stats and part.momentum]


def followed(momentum: float, workers: int) -> float:
    """The share that a minibatch has in the statistics where so many train."""
    return float(1 - raised(1 - momentum, workers))


@contextlib.contextmanager
def paced(module: nn.Module, workers: int) -> Iterator[None]:
    """While this lasts, statistics are those of a worker among so many."""
    if workers == 1:
        yield
        return
    own = [(part, part.momentum) for part in following(module)]
    try:
        for part, momentum in own:
            part.momentum = followed(momentum, workers)
        yield
    finally:
        for part, momentum in own:
            part.momentum = momentum


def told(module: nn.Module, workers: int) -> dict[str, str]:
    """What is changed where so many train, for people."""
    momenta = sorted({part.momentum for part in following(module)})
    texts = [f"{m:g} -> {followed(m, workers):.4g}" for m in momenta]
    return {"statistics": "; ".join(texts)} if texts else {}
