"""A torch model that says when it begins, for ``benchmarks.start``; nothing else imports torch."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from benchmarks.start_models import Stamped
from sparkstrom.models.torch import TorchModel


class StampedTorch(Stamped, TorchModel):
    """A small perceptron."""

    @classmethod
    def small(cls) -> StampedTorch:
        """Of the same widths as the dense one."""
        layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
        optimizer = partial(torch.optim.SGD, lr=0.1)
        return cls(nn.Sequential(*layers), nn.CrossEntropyLoss(), optimizer)
