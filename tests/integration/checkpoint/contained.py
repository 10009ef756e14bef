"""What a checkpoint says that it holds, read by plain NumPy."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Contained:
    """Of the fit that the file is of."""

    fit: int  # its number
    minibatches: int
    examples: int  # trainings of rows


def contained(path: str, batch: int) -> Contained:
    """``batch``: rows in a minibatch."""
    with np.load(path) as file:
        said = json.loads(file["description.json"])["description"]
    parts = [(epoch * n, at, rows, epoch) for epoch, at, rows, _, n in said["partitions"]]
    return Contained(
        fit=said["key"]["number"],
        minibatches=sum(whole + at for whole, at, _, _ in parts),
        examples=sum(epoch * rows + min(rows, at * batch) for _, at, rows, epoch in parts),
    )
