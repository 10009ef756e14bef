"""How much training a checkpoint file contains, read with plain NumPy."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CheckpointProgress:
    """The training that a checkpoint file contains."""

    fit: int  # the fit's number
    minibatches: int
    examples: int  # trained rows, counted once per epoch
    is_finished: bool  # whether it is the fit's result, written at its end


def read_checkpoint_progress(path: str, batch: int) -> CheckpointProgress:
    """Return the training in a checkpoint file; ``batch`` is the number of rows in a minibatch."""
    with np.load(path) as file:
        said = json.loads(file["description.json"])["description"]
    parts = [(epoch * n, at, rows, epoch) for epoch, at, rows, _, n in said["partitions"]]
    return CheckpointProgress(
        fit=said["key"]["number"],
        minibatches=sum(whole + at for whole, at, _, _ in parts),
        examples=sum(epoch * rows + min(rows, at * batch) for _, at, rows, epoch in parts),
        is_finished=said["epochs_done"] is not None,
    )
