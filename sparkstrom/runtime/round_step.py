"""Round step: what one worker does in a round of averaging: some minibatches alone.

A pure function of what goes in: the model is given all that it begins with, whatever it did
before, so that a task that is tried again comes to the same bits. It knows nothing of Spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparkstrom.base.errors import TrainingError
from sparkstrom.models.base import Batch, Buffered, Epochal, Flat, FlatModel, Paced, State

NOT_FINITE_ALONE = (
    "the loss is {} in minibatch {} of its round: training diverges or the data hold such values; "
    "lower the learning rate, clip gradients, or look at the features' scale"
)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a worker's round begins with."""

    parameters: Flat  # of the worker alone: they are trained in place
    buffers: bytes  # b"": the model has none
    updater: State  # used up
    steps_before: int  # that each worker has taken in all: schedules stand there


class Turn(NamedTuple):
    """A minibatch, and where in its worker's epoch it is."""

    batch: Batch
    place: tuple[int, int, int]  # epoch, minibatch, minibatches in the epoch


@dataclass(frozen=True, slots=True)
class Alone:
    """What a worker came to."""

    parameters: Flat
    buffers: bytes
    updater: State  # the live one
    weight: float  # of the rows: by it the worker counts in the mean
    steps: int
    examples: int
    loss_sum: float  # examples x mean loss


def train_alone(model: FlatModel, beginning: Beginning, turns: Iterable[Turn]) -> Alone:
    """Train on these minibatches. Raise TrainingError where a loss is none."""
    model.bind(beginning.parameters)
    if isinstance(model, Buffered) and beginning.buffers:
        model.load_buffers_bytes(beginning.buffers)
    model.load_updater_state(beginning.updater)
    beginning.updater.clear()  # the model has copies: the memory is needed
    weight, steps, examples, loss_sum = 0.0, 0, 0, 0.0
    for turn in turns:
        if isinstance(model, Epochal):
            model.stand_at(*turn.place)
        if isinstance(model, Paced):
            done = beginning.steps_before + steps
            model.keep_pace(1, done, done)
        loss = model.step(turn.batch)
        if not np.isfinite(loss):
            raise TrainingError(NOT_FINITE_ALONE.format(loss, steps))
        weight += weight_of(turn.batch)
        steps += 1
        examples += turn.batch.rows
        loss_sum += turn.batch.rows * loss
    buffers = model.buffers_bytes() if isinstance(model, Buffered) else b""
    state = model.updater_state()
    return Alone(beginning.parameters, buffers, state, weight, steps, examples, loss_sum)


def weight_of(batch: Batch) -> float:
    """What a minibatch counts: its rows, or the sum of their weights, of which its loss is mean."""
    if batch.weights is None:
        return float(batch.rows)
    return float(batch.weights.sum(dtype=np.float64))
