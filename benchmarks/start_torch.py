"""A torch model with recorded times for ``benchmarks.start``; its other modules need no torch."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks.start_models import Stamped
from sparkstrom.models.torch import TorchModel


class StampedTorch(Stamped, TorchModel):
    """A small perceptron in torch, with recorded times."""

    @classmethod
    def create_small(cls) -> StampedTorch:
        """Return a perceptron with the widths of the dense network."""
        layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
        optimizer = partial(torch.optim.SGD, lr=0.1)
        return cls(nn.Sequential(*layers), nn.CrossEntropyLoss(), optimizer)
