"""DL4J's losses, which are summed over a row's outputs and time steps, and averaged over rows.

Losses get the values before the last activation, so that softmax and sigmoid lose no precision.
DL4J's word for the value of a loss is score. DL4J clips the values from which it computes scores,
but not always those from which it computes gradients. Scores and gradients here equal DL4J's, even
where the gradients are not the derivative of the clipped score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.nn import functional as fn

from sparkstrom.models.dl4j.configuration import PREDICT_REMEDY, LayerSpec, TypedObject, read_float
from sparkstrom.models.dl4j.modules.layers import Dl4jActivation

Tensor: TypeAlias = torch.Tensor
POSITIVE_MIN = 1e-10  # lower bound for divisors and for arguments of log
CLIP_EPS = 1e-5  # ND4J's EPS_THRESHOLD
SPARSE_CROSS_ENTROPY = "sparsemcxent"
CLASS_LOSSES = ("mcxent", "negativeloglikelihood", SPARSE_CROSS_ENTROPY)


class Dl4jLoss:
    """A loss function of DL4J, called as ``loss(z, target, weights)``. It can be pickled.

    ``z`` are the values before the last activation. Targets have the shape of DL4J's labels,
    [rows, outputs] or [rows, outputs, steps]; losses for classes also take class indices, [rows] or
    [rows, steps].
    """

    def __init__(self, spec: LayerSpec) -> None:
        parsed = spec.parse_loss() or TypedObject("mcxent", {})
        if parsed.kind not in (*CLASS_LOSSES, "binaryxent", *SCORE_FUNCTIONS):
            raise spec.unsupported(f"loss {parsed.kind}", PREDICT_REMEDY)
        self.kind = parsed.kind
        self.activation = Dl4jActivation(spec)
        self._output_weights = _read_weights(spec, parsed.fields.get("weights"))
        name = "clipeps" if self.kind == "binaryxent" else "softmaxclipeps"
        self._clip_eps = read_float(spec.path, f"loss of {spec.label}", parsed.fields, name, 0.0)

    def __call__(self, z: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean loss of the rows, weighted if ``weights`` f32[rows] are given."""
        scores = self.compute_row_scores(z, target)
        if weights is None:
            return scores.mean()
        return (scores * weights).sum() / weights.sum().clamp_min(POSITIVE_MIN)

    def compute_row_scores(self, z: Tensor, target: Tensor) -> Tensor:
        """Return the loss of each row, [rows]."""
        expected = self._expand_target(z, target)
        scores = self._compute_output_scores(z, expected)
        if self._output_weights is not None:
            weights = z.new_tensor(self._output_weights)
            scores = scores * weights.reshape(1, -1, *[1] * (z.ndim - 2))
        return scores.flatten(1).sum(dim=1)

    @property
    def per_label(self) -> bool:
        """Whether each output is a separate label that is true or false (DL4J's XENT)."""
        return self.kind == "binaryxent"

    def _expand_target(self, z: Tensor, target: Tensor) -> Tensor:
        """Return the target in the shape of z; class indices become one-hot vectors."""
        if (
            self.kind == SPARSE_CROSS_ENTROPY
            and target.ndim == z.ndim
            and target.shape[1] == 1 < z.shape[1]
        ):
            target = target[:, 0]  # the shape of DL4J's labels for this loss
        if self.kind in CLASS_LOSSES and z.shape[1] > 1 and target.ndim == z.ndim - 1:
            hot = fn.one_hot(target.long(), z.shape[1]).to(z.dtype)
            return hot.movedim(-1, 1)
        return target.to(z.dtype).reshape(z.shape)

    def _compute_output_scores(self, z: Tensor, expected: Tensor) -> Tensor:
        """Return the loss of each output, in the shape of z, before applying output weights."""
        if self.kind in CLASS_LOSSES:
            return self._cross_entropy(z, expected)
        if self.kind == "binaryxent":
            return self._binary_cross_entropy(z, expected)
        out = self.activation(z, True)
        if self.kind == "kld":
            surrogate = out * (-expected / out.clamp_min(POSITIVE_MIN)).detach()
            return _with_gradient(SCORE_FUNCTIONS[self.kind](out, expected), surrogate)
        return SCORE_FUNCTIONS[self.kind](out, expected)

    def _cross_entropy(self, z: Tensor, expected: Tensor) -> Tensor:
        """Return the cross-entropy of each output, clipped and with gradients as in DL4J.

        ``z`` are the values before the activation, ``expected`` the labels.
        """
        if self.activation.kind != "softmax":
            return -expected * self.activation(z, True).clamp_min(POSITIVE_MIN).log()
        logs = torch.log_softmax(z, dim=1)
        clipped = logs
        if self._clip_eps:
            clipped = logs.clamp(math.log(self._clip_eps), math.log1p(-self._clip_eps))
        surrogate = -expected * logs
        if self._output_weights is None:  # exact although labels need not sum to 1
            surrogate = z * (logs.exp() - expected).detach()
        return _with_gradient(-expected * clipped, surrogate)

    def _binary_cross_entropy(self, z: Tensor, expected: Tensor) -> Tensor:
        """Return the binary cross-entropy of each output, clipped and with gradients as in DL4J.

        ``z`` are the values before the activation, ``expected`` the labels t. After a softmax, the
        score is only -t log p, without the term of 1 - t.
        """
        if self.activation.kind == "sigmoid" and not self._clip_eps:
            return fn.binary_cross_entropy_with_logits(z, expected, reduction="none")
        out, eps = self.activation(z, True), self._clip_eps or CLIP_EPS
        p = out.detach().clamp(eps, 1 - eps)
        if self.activation.kind == "softmax":
            score = -expected * torch.log_softmax(z, dim=1)
        else:
            score = -(expected * p.log() + (1 - expected) * (1 - p).log())
        return _with_gradient(score, out * ((p - expected) / (p * (1 - p))))


def _with_gradient(score: Tensor, surrogate: Tensor) -> Tensor:
    """Return a tensor with the values of ``score`` and the gradients of ``surrogate``."""
    return score.detach() + (surrogate - surrogate.detach())


def _read_weights(spec: LayerSpec, value: Any) -> list[float] | None:
    """Return the weights of outputs in the loss from a JSON ``value``, or None.

    The value is a list, the text of one, or an object with the key ``data``.
    """
    if value is None:
        return None
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        parsed = parsed["data"] if isinstance(parsed, dict) else parsed
        return [float(each) for each in parsed]
    except (ValueError, TypeError, KeyError):
        raise spec.unsupported(f"loss with weights {str(value)[:40]!r}", PREDICT_REMEDY) from None


def _clip(values: Tensor) -> Tensor:
    """Return the values limited to [CLIP_EPS, 1]."""
    return values.clamp(CLIP_EPS, 1)


# (outputs after the activation, labels y) -> score of each output, in the same shape.
SCORE_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": lambda out, y: (out - y).abs(),
    "l2": lambda out, y: (out - y) ** 2,
    "mae": lambda out, y: (out - y).abs() / out.shape[1],
    "mse": lambda out, y: (out - y) ** 2 / out.shape[1],
    "mape": lambda out, y: 100 * ((out - y) / y).abs() / out.shape[1],
    "msle": lambda out, y: ((out + 1) / (y + 1)).log() ** 2 / out.shape[1],
    "kld": lambda out, y: _clip(y) * (_clip(y) / _clip(out)).log(),
    "poisson": lambda out, y: out - y * out.clamp_min(POSITIVE_MIN).log(),
    "hinge": lambda out, y: (1 - y * out).clamp_min(0),
    "squaredhinge": lambda out, y: (1 - y * out).clamp_min(0) ** 2,
    "cosineproximity": lambda out, y: -fn.normalize(out, dim=1) * fn.normalize(y, dim=1),
    "wasserstein": lambda out, y: out * y / out.shape[1],
}
