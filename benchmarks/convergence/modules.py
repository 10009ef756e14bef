"""The torch modules of the tasks; the same seed gives the same parameters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.convergence.texts import CONTEXT, SYMBOLS

HEADS = 4


def perceptron(sizes: tuple[int, ...], seed: int) -> nn.Module:
    """Return linear layers with ReLU between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convolution(seed: int) -> nn.Module:
    """Return two convolutions with BatchNorm, for 8 x 8 pixels and 10 classes."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)),
        *(nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10)),
    )


class Block(nn.Module):
    """A transformer block: causal attention and a perceptron, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return activations f32[rows, length, width] after attention and feed-forward."""
        rows, length, width = x.shape
        joint = self.joint(self.before(x)).view(rows, length, 3, HEADS, width // HEADS)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


class Transformer(nn.Module):
    """Predicts the next character; logits are [rows, symbols, length], as for CrossEntropyLoss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS)

    def forward(self, x: torch.Tensor) -> Any:
        """Return the logits f32[rows, symbols, length] of the symbols that follow."""
        hidden = self.symbols(x) + self.places.weight[: x.shape[1]]
        return self.head(self.last(self.blocks(hidden))).transpose(1, 2)


def transformer(width: int, depth: int, seed: int) -> nn.Module:
    """Return a transformer whose embeddings start as small as the other layers' parameters."""
    torch.manual_seed(seed)
    module = Transformer(width, depth)
    for table in (module.symbols, module.places):
        nn.init.normal_(table.weight, std=0.02)
    return module
