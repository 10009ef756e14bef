"""Optimizers of the built-in NumPy network, named after DL4J's updaters.

``scale_optimizer`` adapts an optimizer's momenta to the number of workers that train at the same
time; ``momentum_scaling`` explains why.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from sparkstrom.base.option_types import check_options, number
from sparkstrom.models.base import Flat, State
from sparkstrom.models.momentum_scaling import scale_momentum

# Fields of the optimizers below that are momenta.
BUILTIN_MOMENTA = ("momentum", "beta1")
POSITIVE = number(above=0)
DECAY = number(least=0, below=1)


class Updater(Protocol):
    """Interface of an optimizer for one flat vector.

    An optimizer is an immutable value; the caller owns its state. Default options are those of
    DL4J (org.nd4j.linalg.learning.config) where DL4J has them.
    """

    name: ClassVar[str]

    def init(self, n_params: int) -> State:
        """Return a new state by name: arrays f32[n_params] and scalars."""

    def update(self, gradient: Flat, state: State) -> Flat:
        """Convert the mean gradient f32[n_params], in place, to the step to add to the parameters.

        Return that array. ``state`` is also updated in place.
        """


class _CheckedOptions:
    """Base class of the optimizers below, which checks their options."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raise UsageError if an option is out of range."""
        check_options(self, type(self).__name__)


@dataclass(frozen=True, slots=True)
class Sgd(_CheckedOptions):
    """Plain gradient descent: step = -learning_rate * gradient.

    Raises:
        UsageError: the learning rate is not above 0.
    """

    name: ClassVar[str] = "sgd"
    learning_rate: float = field(default=1e-3, metadata=POSITIVE)

    def init(self, n_params: int) -> State:
        """Return an empty state."""
        return {}

    def update(self, gradient: Flat, state: State) -> Flat:
        """Return -learning_rate * gradient, computed in the gradient's memory."""
        gradient *= np.float32(-self.learning_rate)
        return gradient


@dataclass(frozen=True, slots=True)
class Nesterov(_CheckedOptions):
    """Nesterov momentum (Nesterov 1983, in the form of Sutskever et al. 2013).

    Args:
        learning_rate: step size, above 0.
        momentum: decay of the velocity per minibatch, in [0, 1).

    Raises:
        UsageError: a value is out of range.
    """

    name: ClassVar[str] = "nesterov"
    learning_rate: float = field(default=0.1, metadata=POSITIVE)
    momentum: float = field(default=0.9, metadata=DECAY)

    def init(self, n_params: int) -> State:
        """Return the state: the velocity."""
        return {"velocity": np.zeros(n_params, np.float32)}

    def update(self, gradient: Flat, state: State) -> Flat:
        """Return the step to add, computed in the gradient's memory; update the velocity."""
        velocity, mu = _get_array(state, "velocity"), np.float32(self.momentum)
        gradient *= np.float32(-self.learning_rate)
        velocity *= mu
        velocity += gradient
        gradient += mu * velocity
        return gradient


@dataclass(frozen=True, slots=True)
class Adam(_CheckedOptions):
    """Adam (Kingma and Ba 2015, algorithm 1), with bias correction.

    Args:
        learning_rate: step size, above 0.
        beta1: decay of the mean gradient per minibatch, in [0, 1).
        beta2: decay of the mean square per minibatch, in [0, 1).
        epsilon: added to the root of the mean square, in gradient units.

    Raises:
        UsageError: a value is out of range.
    """

    name: ClassVar[str] = "adam"
    learning_rate: float = field(default=1e-3, metadata=POSITIVE)
    beta1: float = field(default=0.9, metadata=DECAY)
    beta2: float = field(default=0.999, metadata=DECAY)
    epsilon: float = field(default=1e-8, metadata=POSITIVE)

    def init(self, n_params: int) -> State:
        """Return the state: running means of gradient and squared gradient, and a step count."""
        return {
            "mean": np.zeros(n_params, np.float32),
            "square": np.zeros(n_params, np.float32),
            "steps": 0,
        }

    def update(self, gradient: Flat, state: State) -> Flat:
        """Return the step, computed in the gradient's memory; update the state."""
        mean, square = _get_array(state, "mean"), _get_array(state, "square")
        steps = state["steps"] = int(state["steps"]) + 1
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
class RmsProp(_CheckedOptions):
    """RMSProp (Tieleman and Hinton 2012, lecture 6.5).

    Args:
        learning_rate: step size, above 0.
        decay: decay of the mean square per minibatch, in [0, 1).
        epsilon: added to the mean square, above 0.

    Raises:
        UsageError: a value is out of range.
    """

    name: ClassVar[str] = "rmsprop"
    learning_rate: float = field(default=0.1, metadata=POSITIVE)
    decay: float = field(default=0.95, metadata=DECAY)
    epsilon: float = field(default=1e-8, metadata=POSITIVE)

    def init(self, n_params: int) -> State:
        """Return the state: the running mean of squared gradients."""
        return {"square": np.zeros(n_params, np.float32)}

    def update(self, gradient: Flat, state: State) -> Flat:
        """Return the step, computed in the gradient's memory; update the mean square."""
        square = _get_array(state, "square")
        square += np.float32(1 - self.decay) * (gradient * gradient - square)
        gradient /= np.sqrt(square + np.float32(self.epsilon))
        gradient *= np.float32(-self.learning_rate)
        return gradient


@dataclass(frozen=True, slots=True)
class AdaGrad(_CheckedOptions):
    """AdaGrad (Duchi, Hazan and Singer 2011).

    Args:
        learning_rate: step size, above 0.
        epsilon: added to the root of the summed squares, in gradient units.

    Raises:
        UsageError: a value is not above 0.
    """

    name: ClassVar[str] = "adagrad"
    learning_rate: float = field(default=0.1, metadata=POSITIVE)
    epsilon: float = field(default=1e-6, metadata=POSITIVE)

    def init(self, n_params: int) -> State:
        """Return the state: the sum of squared gradients."""
        return {"square": np.zeros(n_params, np.float32)}

    def update(self, gradient: Flat, state: State) -> Flat:
        """Return the step, computed in the gradient's memory; update the sum of squares."""
        square = _get_array(state, "square")
        square += gradient * gradient
        gradient /= np.sqrt(square) + np.float32(self.epsilon)
        gradient *= np.float32(-self.learning_rate)
        return gradient


UPDATERS: dict[str, type[Any]] = {u.name: u for u in (Sgd, Nesterov, Adam, RmsProp, AdaGrad)}


def get_momenta(optimizer: Updater) -> dict[str, float]:
    """Return the optimizer's momenta by field name, without those that are 0."""
    values = {name: getattr(optimizer, name, 0.0) for name in BUILTIN_MOMENTA}
    return {name: value for name, value in values.items() if value}


def scale_optimizer(optimizer: Updater, workers: int) -> Updater:
    """Return an equal optimizer, but with all momenta scaled to ``workers`` workers."""
    changes = {
        name: scale_momentum(value, workers) for name, value in get_momenta(optimizer).items()
    }
    return replace(optimizer, **changes) if changes else optimizer  # type: ignore[type-var]


def _get_array(state: State, name: str) -> Flat:
    """Return the named array of a state."""
    value = state[name]
    assert isinstance(value, np.ndarray)
    return value
