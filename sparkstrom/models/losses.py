"""Losses of the built-in network: value, gradient, and which labels they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.activations import F32
from sparkstrom.models.row_checks import LABELS, refuse_not_finite, refuse_strange_classes

Labels = NDArray[Any]  # whole numbers [rows], or numbers [rows, outputs]


Weights = F32 | None  # [rows], how much each row counts; None: all the same


class Loss(NamedTuple):
    """``gradient(outputs, labels, weights)`` -> (mean loss, d loss / d outputs).

    ``output`` is for predict. ``check(labels, outputs)`` raises UsageError naming row and value
    of a label that does not fit. With weights the mean is sum(weight * loss) / sum(weight).
    """

    gradient: Callable[[F32, Labels, Weights], tuple[float, F32]]
    output: Callable[[F32], F32]
    check: Callable[[Labels, int], None]


def softmax(z: F32) -> F32:
    """Rows to probabilities, in place."""
    z -= z.max(axis=1, keepdims=True)
    np.exp(z, out=z)
    z /= z.sum(axis=1, keepdims=True)
    return z


def cross_entropy(z: F32, labels: Labels, weights: Weights = None) -> tuple[float, F32]:
    """Softmax cross-entropy from logits; labels [rows] of classes or [rows, outputs] of shares.

    The largest logit is taken out of each row first, so that nothing overflows.
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
    return _mean(losses, gradient, weights)


def squared_error(z: F32, labels: Labels, weights: Weights = None) -> tuple[float, F32]:
    """Mean over rows of the summed squared error; labels [rows] or [rows, outputs]."""
    gradient = z - labels.reshape(z.shape).astype(np.float32)
    losses = np.square(gradient).sum(axis=1, dtype=np.float64)
    gradient *= np.float32(2)
    return _mean(losses, gradient, weights)


def _mean(losses: NDArray[Any], gradient: F32, weights: Weights) -> tuple[float, F32]:
    """The rows' mean loss, and its gradient in the rows' gradients' place."""
    if weights is None:
        gradient /= np.float32(len(losses))
        return float(losses.mean(dtype=np.float64)), gradient
    total = float(weights.sum(dtype=np.float64)) or 1.0  # rows of no weight teach nothing
    gradient *= (weights / np.float32(total))[:, None]
    return float(weights.astype(np.float64) @ losses) / total, gradient


def loss_name(loss: Any) -> str:
    """Return the name of a loss of any library; for a functools.partial, that of its function."""
    loss = getattr(loss, "func", loss)
    return str(getattr(loss, "__name__", type(loss).__name__))


def _unchanged(z: F32) -> F32:
    return z


def _check_classes(labels: Labels, outputs: int) -> None:
    if labels.ndim != 1:
        _check_numbers(labels, outputs)
        return
    refuse_strange_classes(labels, outputs)


def _check_numbers(labels: Labels, outputs: int) -> None:
    if labels.size != len(labels) * outputs:
        raise UsageError(
            f"labels have shape {list(labels.shape)}, the network has {outputs} outputs:"
            " change the last of its widths or the labels"
        )
    refuse_not_finite(LABELS, labels)


LOSSES = {
    "cross_entropy": Loss(cross_entropy, softmax, _check_classes),
    "squared_error": Loss(squared_error, _unchanged, _check_numbers),
}
