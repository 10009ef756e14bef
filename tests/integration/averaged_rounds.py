"""What a fit in rounds comes to, made in one process by the same arithmetic."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.models.base import Batch, Buffered, Flat
from sparkstrom.runtime.averaging import (
    OuterStep,
    averaged,
    averaged_buffers,
    averaged_states,
    fresh_state,
)
from sparkstrom.runtime.batches import Batches
from sparkstrom.runtime.lent_state import begun_elsewhere, updater_in
from sparkstrom.runtime.round_step import Beginning, Turn, train_alone

Part = tuple[NDArray[Any], NDArray[Any]]  # a worker's features and labels


def rounds_of(each: Sequence[Batches], frequency: int, epochs: int) -> Iterator[list[list[Turn]]]:
    """The minibatches of each worker, round by round."""
    for epoch in range(epochs):
        for first in range(0, max(one.per_epoch for one in each), frequency):
            yield [
                [
                    Turn(one.get(epoch, index), one.place(epoch, index))
                    for index in range(first, min(first + frequency, one.per_epoch))
                ]
                for one in each
            ]


def in_one_process(
    model: Any,
    each: Sequence[Batches],
    epochs: int,
    *,
    frequency: int,
    save_updater: bool | str,
    outer: Any = None,
) -> Flat:
    """What a fit comes to: parameters."""
    common = model.initial()
    step, steps = OuterStep(outer), 0
    fresh = fresh_state(copy.deepcopy(model), common)
    if save_updater and (elsewhere := begun_elsewhere(model).one):
        fresh = updater_in(elsewhere)
    twin = copy.deepcopy(model)  # for all workers: it is given all that it begins with
    states = [dict(fresh) for _ in each]
    buffers = model.buffers_bytes() if isinstance(model, Buffered) else b""
    for turns in rounds_of(each, frequency, epochs):
        alone = {}
        for worker, own in enumerate(turns):
            beginning = Beginning(common.copy(), buffers, copy.deepcopy(states[worker]), steps)
            done = train_alone(twin, beginning, own)
            if done.weight:
                alone[worker] = done
        weights = [one.weight for one in alone.values()]
        mean = averaged([one.parameters for one in alone.values()], weights)
        common = step.step(common, mean)
        if buffers:
            reports = [one.buffers for one in alone.values()]
            buffers = averaged_buffers(model, reports, weights)
        if save_updater == "own":
            for worker, one in alone.items():
                states[worker] = copy.deepcopy(one.updater)
        elif save_updater:
            taken = [one.steps for one in alone.values()]
            state = averaged_states([one.updater for one in alone.values()], weights, taken)
            states = [state for _ in each]
        steps += max(one.steps for one in alone.values())
    made: Flat = np.array(common)
    return made


def batches_of(parts: Sequence[Part], master: Any) -> list[Batches]:
    """A worker's minibatches, of each worker."""
    return [
        Batches(x, y, batch_rows=master.batch_size_per_worker, seed=0, partition=index)
        for index, (x, y) in enumerate(parts)
    ]


def turns_of_fit(parts: Sequence[Part], master: Any, epochs: int) -> Iterator[list[list[Turn]]]:
    """``rounds_of`` a fit with a ParameterAveragingTrainingMaster."""
    return rounds_of(batches_of(parts, master), master.averaging_frequency, epochs)


def fitted_in_one_process(model: Any, parts: Sequence[Part], master: Any, epochs: int) -> Flat:
    """``in_one_process``, of such a fit."""
    options = {"save_updater": master.save_updater, "outer": master.outer}
    frequency = master.averaging_frequency
    return in_one_process(model, batches_of(parts, master), epochs, frequency=frequency, **options)


def joined(batches: Sequence[Batch]) -> Batch:
    """One minibatch of all rows."""
    return Batch(
        np.concatenate([one.features for one in batches]),
        np.concatenate([one.labels for one in batches]),
    )
