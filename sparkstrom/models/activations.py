"""Activations of the built-in network: each a function and its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


class Activation(NamedTuple):
    """``forward(z)`` in place; ``backward(a, upstream)``: upstream *= f'(z), from a = f(z)."""

    forward: Callable[[F32], F32]
    backward: Callable[[F32, F32], None]


def _relu(z: F32) -> F32:
    return np.maximum(z, 0, out=z)


def _relu_backward(a: F32, upstream: F32) -> None:
    upstream *= a > 0


def _tanh(z: F32) -> F32:
    return np.tanh(z, out=z)


def _tanh_backward(a: F32, upstream: F32) -> None:
    upstream *= 1 - a * a


def _sigmoid(z: F32) -> F32:
    """1 / (1 + exp(-z)) = (1 + tanh(z / 2)) / 2, which overflows nowhere."""
    z *= np.float32(0.5)
    np.tanh(z, out=z)
    z += np.float32(1)
    z *= np.float32(0.5)
    return z


def _sigmoid_backward(a: F32, upstream: F32) -> None:
    upstream *= a * (1 - a)


def _identity(z: F32) -> F32:
    return z


def _identity_backward(a: F32, upstream: F32) -> None:
    """Its derivative is 1."""


ACTIVATIONS = {
    "relu": Activation(_relu, _relu_backward),
    "tanh": Activation(_tanh, _tanh_backward),
    "sigmoid": Activation(_sigmoid, _sigmoid_backward),
    "identity": Activation(_identity, _identity_backward),
}
