"""Updaters: two pure functions over flat vectors, as frozen values.

``init(n)`` makes the state, ``update(gradient, state)`` writes the step to *add* to the
parameters into ``gradient``'s own memory and changes the state in place. Defaults are DL4J's
(org.nd4j.linalg.learning.config) where it has them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from sparkstrom.base.option_types import check_options, number
from sparkstrom.models.base import Flat, State
from sparkstrom.models.horizons import DENSE, raised

POSITIVE = number(above=0)
SHARE = number(least=0, below=1)


class Updater(Protocol):
    """An optimizer over one flat vector."""

    name: ClassVar[str]

    def init(self, n_params: int) -> State:
        """Fresh state: arrays f32[n_params] and scalars."""

    def update(self, gradient: Flat, state: State) -> Flat:
        """Turn the mean gradient f32[n_params], in place, into the step to add."""


@dataclass(frozen=True, slots=True)
class Sgd:
    """Plain gradient descent: step = -learning_rate * gradient.

    Raises UsageError for a learning rate that is not above 0.
    """

    name: ClassVar[str] = "sgd"
    learning_rate: float = field(default=1e-3, metadata=POSITIVE)

    def __post_init__(self) -> None:
        check_options(self, type(self).__name__)

    def init(self, n_params: int) -> State:
        return {}

    def update(self, gradient: Flat, state: State) -> Flat:
        gradient *= np.float32(-self.learning_rate)
        return gradient


@dataclass(frozen=True, slots=True)
class Nesterov:
    """Momentum looked up ahead (Nesterov 1983, in the form of Sutskever et al. 2013).

    ``momentum``: per minibatch, in [0, 1). Raises UsageError for values out of range.
    """

    name: ClassVar[str] = "nesterov"
    learning_rate: float = field(default=0.1, metadata=POSITIVE)
    momentum: float = field(default=0.9, metadata=SHARE)

    def __post_init__(self) -> None:
        check_options(self, type(self).__name__)

    def init(self, n_params: int) -> State:
        return {"velocity": np.zeros(n_params, np.float32)}

    def update(self, gradient: Flat, state: State) -> Flat:
        velocity, mu = _array(state, "velocity"), np.float32(self.momentum)
        gradient *= np.float32(-self.learning_rate)
        velocity *= mu
        velocity += gradient
        gradient += mu * velocity
        return gradient


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam (Kingma and Ba 2015, algorithm 1), with bias correction.

    ``beta1``, ``beta2``: decays per minibatch, in [0, 1); ``epsilon``: in gradient units. Raises
    UsageError for values out of range.
    """

    name: ClassVar[str] = "adam"
    learning_rate: float = field(default=1e-3, metadata=POSITIVE)
    beta1: float = field(default=0.9, metadata=SHARE)
    beta2: float = field(default=0.999, metadata=SHARE)
    epsilon: float = field(default=1e-8, metadata=POSITIVE)

    def __post_init__(self) -> None:
        check_options(self, type(self).__name__)

    def init(self, n_params: int) -> State:
        return {
            "mean": np.zeros(n_params, np.float32),
            "square": np.zeros(n_params, np.float32),
            "steps": 0,
        }

    def update(self, gradient: Flat, state: State) -> Flat:
        mean, square = _array(state, "mean"), _array(state, "square")
        steps = state["steps"] = int(_scalar(state, "steps")) + 1
        mean += np.float32(1 - self.beta1) * (gradient - mean)
        square += np.float32(1 - self.beta2) * (gradient * gradient - square)
        unbiased = math.sqrt(1 - self.beta2**steps)
        rate = self.learning_rate * unbiased / (1 - self.beta1**steps)
        np.sqrt(square, out=gradient)
        gradient += np.float32(self.epsilon * unbiased)
        np.divide(mean, gradient, out=gradient)
        gradient *= np.float32(-rate)
        return gradient


@dataclass(frozen=True, slots=True)
class RmsProp:
    """RMSProp (Tieleman and Hinton 2012, lecture 6.5).

    ``decay``: per minibatch, in [0, 1); ``epsilon``: in gradient units. Raises UsageError for
    values out of range.
    """

    name: ClassVar[str] = "rmsprop"
    learning_rate: float = field(default=0.1, metadata=POSITIVE)
    decay: float = field(default=0.95, metadata=SHARE)
    epsilon: float = field(default=1e-8, metadata=POSITIVE)

    def __post_init__(self) -> None:
        check_options(self, type(self).__name__)

    def init(self, n_params: int) -> State:
        return {"square": np.zeros(n_params, np.float32)}

    def update(self, gradient: Flat, state: State) -> Flat:
        square = _array(state, "square")
        square += np.float32(1 - self.decay) * (gradient * gradient - square)
        gradient /= np.sqrt(square + np.float32(self.epsilon))
        gradient *= np.float32(-self.learning_rate)
        return gradient


@dataclass(frozen=True, slots=True)
class AdaGrad:
    """AdaGrad (Duchi, Hazan and Singer 2011).

    ``epsilon``: in gradient units. Raises UsageError for values that are not above 0.
    """

    name: ClassVar[str] = "adagrad"
    learning_rate: float = field(default=0.1, metadata=POSITIVE)
    epsilon: float = field(default=1e-6, metadata=POSITIVE)

    def __post_init__(self) -> None:
        check_options(self, type(self).__name__)

    def init(self, n_params: int) -> State:
        return {"square": np.zeros(n_params, np.float32)}

    def update(self, gradient: Flat, state: State) -> Flat:
        square = _array(state, "square")
        square += gradient * gradient
        gradient /= np.sqrt(square) + np.float32(self.epsilon)
        gradient *= np.float32(-self.learning_rate)
        return gradient


UPDATERS: dict[str, type[Any]] = {u.name: u for u in (Sgd, Nesterov, Adam, RmsProp, AdaGrad)}


def following(updater: Updater) -> dict[str, float]:
    """Of its hyperparameters those that count steps, but 0."""
    values = {name: getattr(updater, name, 0.0) for name in DENSE}
    return {name: value for name, value in values.items() if value}


def paced(updater: Updater, workers: int) -> Updater:
    """The same where so many train: what counts steps counts those of all."""
    changes = {name: raised(value, workers) for name, value in following(updater).items()}
    return replace(updater, **changes) if changes else updater  # type: ignore[type-var]


def _array(state: State, name: str) -> Flat:
    value = state[name]
    assert isinstance(value, np.ndarray)
    return value


def _scalar(state: State, name: str) -> float:
    value = state[name]
    assert not isinstance(value, np.ndarray)
    return value
