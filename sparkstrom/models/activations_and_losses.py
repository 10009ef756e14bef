"""Activations and losses of the built-in NumPy network.

Each loss comes with a check of labels. ``loss_name`` returns the name of any loss, including those
of PyTorch, JAX and Keras. Models recognize kinds of losses by this name, and use it in messages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.row_checks import LABELS, refuse_non_finite, refuse_unknown_classes

F32 = NDArray[np.float32]


class Activation(NamedTuple):
    """An activation function a = f(z), and the multiplication of a gradient by its derivative."""

    forward: Callable[[F32], F32]  # called with z: replaces z in place by f(z), and returns z
    # Called with the output a and the gradient of the loss by a: multiplies the latter in place by
    # the derivative f'(z), which is computed from a.
    backward: Callable[[F32, F32], None]


def _relu(z: F32) -> F32:
    """Compute max(z, 0) in place; return z."""
    return np.maximum(z, 0, out=z)


def _relu_backward(a: F32, upstream: F32) -> None:
    """Multiply the gradient ``upstream`` in place by 1 where the output a is above 0, else by 0."""
    upstream *= a > 0


def _tanh(z: F32) -> F32:
    """Compute tanh(z) in place; return z."""
    return np.tanh(z, out=z)


def _tanh_backward(a: F32, upstream: F32) -> None:
    """Multiply the gradient ``upstream`` in place by tanh's derivative, 1 - a**2."""
    upstream *= 1 - a * a


def _sigmoid(z: F32) -> F32:
    """Compute the sigmoid in place, as (1 + tanh(z / 2)) / 2, which cannot overflow; return z."""
    z *= np.float32(0.5)
    np.tanh(z, out=z)
    z += np.float32(1)
    z *= np.float32(0.5)
    return z


def _sigmoid_backward(a: F32, upstream: F32) -> None:
    """Multiply the gradient ``upstream`` in place by the sigmoid's derivative, a * (1 - a)."""
    upstream *= a * (1 - a)


def _identity(z: F32) -> F32:
    """Return z unchanged."""
    return z


def _identity_backward(a: F32, upstream: F32) -> None:
    """Do nothing: the derivative is 1."""


ACTIVATIONS = {
    "relu": Activation(_relu, _relu_backward),
    "tanh": Activation(_tanh, _tanh_backward),
    "sigmoid": Activation(_sigmoid, _sigmoid_backward),
    "identity": Activation(_identity, _identity_backward),
}


Labels = NDArray[Any]  # class indices [rows], or numbers [rows, outputs]
Weights = F32 | None  # [rows], the weight of each row; None: all rows weigh the same


class Loss(NamedTuple):
    """A loss function together with its output activation and its check of labels.

    Attributes:
        gradient: (outputs, labels, weights) -> mean loss and its gradient with respect to the
            outputs; with weights, the mean is sum(weight * loss) / sum(weight).
        output: converts the last layer's values to predictions, in place.
        check: (labels, number of outputs); raises UsageError for labels that do not fit.
    """

    gradient: Callable[[F32, Labels, Weights], tuple[float, F32]]
    output: Callable[[F32], F32]
    check: Callable[[Labels, int], None]


def softmax(z: NDArray[Any]) -> NDArray[Any]:
    """Convert rows of logits to probabilities in place; return z."""
    z -= z.max(axis=1, keepdims=True)
    np.exp(z, out=z)
    z /= z.sum(axis=1, keepdims=True)
    return z


def cross_entropy(z: F32, labels: Labels, weights: Weights = None) -> tuple[float, F32]:
    """Return the softmax cross-entropy of the logits ``z`` [rows, outputs], and its gradient.

    Labels are class indices [rows], or a share for each class [rows, outputs]. The result is the
    mean over rows, with ``weights`` if given. ``z`` is overwritten: each row's largest logit is
    subtracted first, to avoid overflow.
    """
    z -= z.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(z).sum(axis=1, keepdims=True))
    log_p = z - log_sum
    gradient = np.exp(log_p)
    if labels.ndim == 1:
        index = np.arange(len(z)), labels.astype(np.intp, copy=False)
        losses = -log_p[index]
        gradient[index] -= 1
    else:
        losses = -(labels * log_p).sum(axis=1, dtype=np.float64)
        gradient *= labels.sum(axis=1, keepdims=True, dtype=np.float32)
        gradient -= labels
    return _average_loss(losses, gradient, weights)


def squared_error(z: F32, labels: Labels, weights: Weights = None) -> tuple[float, F32]:
    """Return the squared error of the outputs ``z`` [rows, outputs], and its gradient.

    The error is summed over outputs and averaged over rows, with ``weights`` if given.
    """
    gradient = z - labels.reshape(z.shape).astype(np.float32)
    losses = np.square(gradient).sum(axis=1, dtype=np.float64)
    gradient *= np.float32(2)
    return _average_loss(losses, gradient, weights)


def _average_loss(losses: NDArray[Any], gradient: F32, weights: Weights) -> tuple[float, F32]:
    """Return the mean of the rows' ``losses``, weighted if ``weights`` are given, and its gradient.

    ``gradient`` contains the gradient of each row's loss. It is scaled in place, and returned.
    """
    if weights is None:
        gradient /= np.float32(len(losses))
        return float(losses.mean(dtype=np.float64)), gradient
    total = float(weights.sum(dtype=np.float64)) or 1.0  # all weights 0: the gradient is 0
    gradient *= (weights / np.float32(total))[:, None]
    return float(weights.astype(np.float64) @ losses) / total, gradient


def loss_name(loss: Any) -> str:
    """Return the name of any library's loss; for a functools.partial, the name of its function."""
    loss = getattr(loss, "func", loss)
    return str(getattr(loss, "__name__", type(loss).__name__))


def _check_class_labels(labels: Labels, outputs: int) -> None:
    """Raise UsageError unless labels are class indices [rows], or class shares [rows, outputs]."""
    if labels.ndim != 1:
        _check_numeric_labels(labels, outputs)
        return
    refuse_unknown_classes(labels, outputs)


def _check_numeric_labels(labels: Labels, outputs: int) -> None:
    """Raise UsageError unless labels are finite numbers, one per row and output."""
    if labels.size != len(labels) * outputs:
        raise UsageError(
            f"labels have shape {list(labels.shape)}, the network has {outputs} outputs:"
            " change the last of its widths or the labels"
        )
    refuse_non_finite(LABELS, labels)


LOSSES = {
    "cross_entropy": Loss(cross_entropy, softmax, _check_class_labels),
    "squared_error": Loss(squared_error, _identity, _check_numeric_labels),
}
