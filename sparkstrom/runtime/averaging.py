"""Averaging: what workers learnt alone as one set of parameters, and the outer step towards it.

Synchronous training in rounds, whoever drives them: all begin with the same parameters, each takes
some steps alone, and the mean of where they came to is where all go on. A worker counts by the
rows that it has trained on, so that after one step of SGD the mean is where one machine would be
with all their rows in one minibatch. Sums are float64 and made in the order in which parts are
added: give them in the workers' order, and a round is a function of what goes into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import TrainingError
from sparkstrom.models.base import Buffered, Flat, FlatModel, State, WeighedBuffers
from sparkstrom.models.updaters import Updater

LOOKED_AT = 1 << 20  # parameters at once: what says of each whether it is finite stays small
NOT_FINITE_AFTER = (
    "{} is {} after round {}: training diverges or the data hold such values; lower the learning"
    " rate, that of an outer step, too, clip gradients, or look at the features' scale"
)

Sum = NDArray[np.float64]
Scalar = float | int


class WeightedSum:
    """Of weight x values, f64[n]; ``mean`` is of those that were added."""

    def __init__(self, size: int) -> None:
        self.total: Sum = np.zeros(size, np.float64)
        self.weight = 0.0

    def add(self, values: NDArray[Any], weight: float) -> None:
        """One worker's. Of the same values from all the mean is these, bit by bit."""
        self.total += values.astype(np.float64).ravel() * weight
        self.weight += weight

    def add_sum(self, total: Sum, weight: float) -> None:
        """What is summed already, of so much weight."""
        self.total += total
        self.weight += weight

    def mean(self, dtype: Any = np.float32) -> NDArray[Any]:
        """Rounded once; there must be some weight."""
        assert self.weight > 0, "nobody has anything to average"
        return (self.total / self.weight).astype(dtype)


def is_summed(value: Any) -> bool:
    """Is it an array of which means are made? Others, as step counts, are not."""
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def averaged(vectors: Sequence[NDArray[Any]], weights: Sequence[float]) -> NDArray[Any]:
    """The mean of some workers' arrays, in their shape and dtype; in the order given."""
    total = WeightedSum(vectors[0].size)
    for values, weight in zip(vectors, weights, strict=True):
        total.add(values, weight)
    return total.mean(vectors[0].dtype).reshape(vectors[0].shape)


def averaged_states(
    states: Sequence[State], weights: Sequence[float], steps: Sequence[int]
) -> State:
    """The mean of optimizers' states: a name that not all have is of those who have it.

    ``steps`` that each has taken in the round: see ``agreed``.
    """
    summed = [{k: v for k, v in state.items() if is_summed(v)} for state in states]
    rests = [{k: v for k, v in state.items() if not is_summed(v)} for state in states]
    made = agreed(rests, weights, steps)
    for name in _names(summed):
        having = [(s[name], w) for s, w in zip(summed, weights, strict=True) if name in s]
        made[name] = averaged(*zip(*having, strict=True))
    return made


def agreed(rests: Sequence[State], weights: Sequence[float], steps: Sequence[int]) -> State:
    """One for what is no array of floats in workers' states: learning rates, counts, switches.

    Those who have taken the most steps in the round say it: a schedule that goes on from its last
    rate, as many of torch's do, would never lose what a mean of several of its places put in.
    """
    made: State = {}
    for name in _names(rests):
        having = [each for each in zip(rests, weights, steps, strict=True) if name in each[0]]
        most = max(taken for _, _, taken in having)
        ahead = [(rest[name], weight) for rest, weight, taken in having if taken == most]
        if isinstance(ahead[0][0], np.ndarray):
            arrays: list[Any] = [rest[name] for rest, _, _ in having]
            made[name] = np.maximum.reduce(arrays)
        else:
            made[name] = _one_of(*zip(*ahead, strict=True))
    return made


def _names(states: Sequence[State]) -> list[str]:
    return list(dict.fromkeys(name for state in states for name in state))


def _one_of(values: Sequence[Scalar], weights: Sequence[float]) -> Scalar:
    """What all have; of whole numbers the largest, or else the mean."""
    first = values[0]
    if all(value == first for value in values):
        return first
    if all(float(value).is_integer() for value in values):
        return max(values)
    total = sum(float(v) * w for v, w in zip(values, weights, strict=True))
    return total / sum(weights)


def averaged_buffers(model: Buffered, reports: list[bytes], weights: Sequence[float]) -> bytes:
    """One for all; a model that weighs none has all count equally."""
    if isinstance(model, WeighedBuffers):
        return model.weighed_buffers(reports, weights)
    return model.average_buffers(reports)


def need_finite(model: FlatModel, parameters: Flat, rounds: int) -> None:
    """Raise TrainingError where a parameter is infinite or none: no loss tells of a last step.

    ``rounds``: after so many.
    """
    for first in range(0, parameters.size, LOOKED_AT):
        good = np.isfinite(parameters[first : first + LOOKED_AT])
        if not good.all():
            index = first + int(good.argmin())
            where, value = model.layer_of(index), parameters[index]
            raise TrainingError(NOT_FINITE_AFTER.format(where, value, rounds))


@dataclass(slots=True)
class OuterStep:
    """From the parameters that all began a round with to those that they begin the next one with.

    Without an ``updater`` these are the mean. With one the way from the mean back to where all
    began is its gradient: ``Nesterov(0.7, 0.9)`` is DiLoCo's (Douillard et al. 2023).
    """

    updater: Updater | None = None
    state: State = field(default_factory=dict)  # {}: a fresh one is made at the first step

    def step(self, began: Flat, mean: Flat) -> Flat:
        """The next parameters, f32[n_params]; ``mean``'s memory is used up."""
        if self.updater is None:
            return mean
        if not self.state:
            self.state = self.updater.init(began.size)
        gradient = np.subtract(began, mean, out=mean)
        moved = self.updater.update(gradient, self.state)
        return np.add(moved, began, out=moved)


def fresh_state(model: FlatModel, parameters: Flat) -> State:
    """Of an optimizer that has not stepped, for these parameters; ``model`` is a copy to use up."""
    model.bind(parameters.copy())
    state = model.updater_state()
    return {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in state.items()}
