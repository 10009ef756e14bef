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

    ``steps`` of each in this round.
    """
    made: State = {}
    for name in dict.fromkeys(name for state in states for name in state):
        counts = zip(states, weights, steps, strict=True)
        having = [(s[name], weight, taken) for s, weight, taken in counts if name in s]
        values, of, taken = zip(*having, strict=True)
        made[name] = averaged(values, of) if is_summed(values[0]) else agreed(values, of, taken)
    return made


def agreed(values: Sequence[Any], weights: Sequence[float], steps: Sequence[int]) -> Any:
    """One for what is no array of floats; of other arrays the largest, element by element.

    Of numbers what those have who took the most steps: a schedule is at one place, and makes its
    next rate of this one. Where they differ, of whole numbers the largest, or else the mean.
    """
    if isinstance(values[0], np.ndarray):
        return np.maximum.reduce(values)
    most = max(steps)
    furthest = [(v, w) for v, w, n in zip(values, weights, steps, strict=True) if n == most]
    first = furthest[0][0]
    if all(value == first for value, _ in furthest):
        return first
    if all(float(value).is_integer() for value, _ in furthest):
        return max(value for value, _ in furthest)
    total = sum(float(value) * weight for value, weight in furthest)
    return total / sum(weight for _, weight in furthest)


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
