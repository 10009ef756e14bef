"""The expected result of a fit in rounds: the same arithmetic in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.data.row_store import Batches
from sparkstrom.models.base import Batch, Buffered, FitLength, Flat
from sparkstrom.rounds.averaging import (
    OuterStep,
    apply_accumulator,
    average_buffers,
    average_states,
    fresh_state,
    weighted_mean,
)
from sparkstrom.rounds.worker_round import RoundBatch, RoundPace, RoundStart, train_locally
from sparkstrom.runtime.optimizer_states import decode_optimizer_state, pretrained_optimizer_states

Part = tuple[NDArray[Any], NDArray[Any]]  # a worker's features and labels


def rounds_of(
    each: Sequence[Batches], frequency: int, epochs: int
) -> Iterator[list[list[RoundBatch]]]:
    """Yield each round's minibatches, as one list per worker."""
    for epoch in range(epochs):
        for first in range(0, max(one.batches_per_epoch for one in each), frequency):
            yield [
                [
                    RoundBatch(one.get(epoch, index), one.place(epoch, index))
                    for index in range(first, min(first + frequency, one.batches_per_epoch))
                ]
                for one in each
            ]


def train_in_one_process(
    model: Any,
    each: Sequence[Batches],
    epochs: int,
    *,
    frequency: int,
    save_updater: bool | str,
    outer: Any = None,
    accumulator: Any = None,
) -> Flat:
    """Train in rounds in this process; return the parameters that a fit should have."""
    common = model.initial()
    step, steps, minibatches = OuterStep(outer), 0, 0
    length = FitLength(epochs, epochs * sum(one.batches_per_epoch for one in each))
    fresh = fresh_state(copy.deepcopy(model), common)
    if save_updater and (elsewhere := pretrained_optimizer_states(model).one):
        fresh = decode_optimizer_state(elsewhere)
    twin = copy.deepcopy(model)  # trains for all workers: each round sets its whole state
    states = [dict(fresh) for _ in each]
    buffers = model.buffers_bytes() if isinstance(model, Buffered) else b""
    for turns in rounds_of(each, frequency, epochs):
        alone, counts = {}, [len(own) for own in turns if own]
        pace = RoundPace(minibatches, len(counts), sum(counts), length) if len(each) > 1 else None
        minibatches += sum(counts)
        for worker, own in enumerate(turns):
            state = copy.deepcopy(states[worker])
            beginning = RoundStart(common.copy(), buffers, state, steps, pace)
            done = train_locally(twin, beginning, own)
            if done.weight:
                alone[worker] = done
        weights = [one.weight for one in alone.values()]
        after = [one.parameters for one in alone.values()]
        mean = weighted_mean(after, weights)
        if accumulator is not None:
            rows = [one.examples for one in alone.values()]
            mean = apply_accumulator(accumulator, common, np.stack(after), rows)
        common = step.step(common, mean)
        if buffers:
            reports = [one.buffers for one in alone.values()]
            buffers = average_buffers(model, reports, weights)
        if save_updater == "own":
            for worker, one in alone.items():
                states[worker] = copy.deepcopy(one.updater)
        elif save_updater:
            taken = [one.steps for one in alone.values()]
            state = average_states([one.updater for one in alone.values()], weights, taken)
            states = [state for _ in each]
        steps += max(one.steps for one in alone.values())
    made: Flat = np.array(common)
    return made


def batches_of(parts: Sequence[Part], master: Any) -> list[Batches]:
    """Return the minibatches of each worker."""
    return [
        Batches(x, y, batch_rows=master.batch_size_per_worker, seed=0, partition=index)
        for index, (x, y) in enumerate(parts)
    ]


def rounds_of_fit(
    parts: Sequence[Part], master: Any, epochs: int
) -> Iterator[list[list[RoundBatch]]]:
    """Yield the rounds of a fit with a ParameterAveragingTrainingMaster, as ``rounds_of`` does."""
    return rounds_of(batches_of(parts, master), master.averaging_frequency, epochs)


def fit_in_one_process(model: Any, parts: Sequence[Part], master: Any, epochs: int) -> Flat:
    """Return what ``train_in_one_process`` computes for a fit with ``master`` (rounds)."""
    names = ("save_updater", "outer", "accumulator")
    options = {name: getattr(master, name) for name in names}
    frequency = master.averaging_frequency
    return train_in_one_process(
        model, batches_of(parts, master), epochs, frequency=frequency, **options
    )


def join_batches(batches: Sequence[Batch]) -> Batch:
    """Return one minibatch with the rows of all ``batches``."""
    return Batch(
        np.concatenate([one.features for one in batches]),
        np.concatenate([one.labels for one in batches]),
    )
