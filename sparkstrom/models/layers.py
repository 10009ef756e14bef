"""Activations and losses of the built-in network: each a value and its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

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


class Loss(NamedTuple):
    """``gradient(outputs, labels)`` -> (mean loss, d loss / d outputs); ``output`` for predict."""

    gradient: Callable[[F32, NDArray[Any]], tuple[float, F32]]
    output: Callable[[F32], F32]


def softmax(z: F32) -> F32:
    """Rows to probabilities, in place."""
    z -= z.max(axis=1, keepdims=True)
    np.exp(z, out=z)
    z /= z.sum(axis=1, keepdims=True)
    return z


def _cross_entropy(z: F32, labels: NDArray[Any]) -> tuple[float, F32]:
    """Softmax cross-entropy from logits; labels [rows] of classes or [rows, outputs] of shares."""
    rows = len(z)
    z -= z.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(z).sum(axis=1, keepdims=True))
    log_p = z - log_sum
    gradient = np.exp(log_p)
    if labels.ndim == 1:
        index = np.arange(rows), labels
        loss = -float(log_p[index].mean(dtype=np.float64))
        gradient[index] -= 1
    else:
        loss = -float((labels * log_p).sum(dtype=np.float64)) / rows
        gradient *= labels.sum(axis=1, keepdims=True)
        gradient -= labels
    gradient /= np.float32(rows)
    return loss, gradient


def _squared_error(z: F32, labels: NDArray[Any]) -> tuple[float, F32]:
    """Mean over rows of the summed squared error; labels [rows] or [rows, outputs]."""
    gradient = z - labels.reshape(z.shape).astype(np.float32)
    loss = float(np.square(gradient).sum(dtype=np.float64)) / len(z)
    gradient *= np.float32(2 / len(z))
    return loss, gradient


LOSSES = {
    "cross_entropy": Loss(_cross_entropy, softmax),
    "squared_error": Loss(_squared_error, _identity),
}
