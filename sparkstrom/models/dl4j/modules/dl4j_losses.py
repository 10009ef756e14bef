"""DL4J's losses: a row's score is the sum over its outputs, and its steps; a minibatch's the mean.

They get what stands before the last activation, so that softmax and sigmoid cost no precision.
Where DL4J's gradients are not those of its scores, which it clips, they are DL4J's here, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.nn import functional as fn

from sparkstrom.models.dl4j.java_names import Typed, loss
from sparkstrom.models.dl4j.modules.dl4j_activations import Dl4jActivation
from sparkstrom.models.dl4j.network_steps import TO_PREDICT, Step, number_in

Tensor: TypeAlias = torch.Tensor
TINY = 1e-10
CLIPPED = 1e-5  # ND4J's EPS_THRESHOLD
SPARSE = "sparsemcxent"
OF_CLASSES = ("mcxent", "negativeloglikelihood", SPARSE)


class Dl4jLoss:
    """``loss(z, target, weights)``: the rows' mean; a value that travels.

    Targets are as DL4J's labels, [rows, outputs] or [rows, outputs, steps], or for losses of
    classes their indices, [rows] or [rows, steps].
    """

    def __init__(self, step: Step) -> None:
        found = loss(step.fields.get("lossfn", step.fields.get("lossfunction")))
        found = found or Typed("mcxent", {})
        if found.kind not in (*OF_CLASSES, "binaryxent", *SCORES):
            raise step.refuse(f"loss {found.kind}", TO_PREDICT)
        self.kind = found.kind
        self.activation = Dl4jActivation(step)
        self._weights = _weights(step, found.fields.get("weights"))
        name = "clipeps" if self.kind == "binaryxent" else "softmaxclipeps"
        self._clip = number_in(step.path, f"loss of {step.where}", found.fields, name, 0.0)

    def __call__(self, z: Tensor, target: Tensor, weights: Tensor | None = None) -> Tensor:
        """One number; a row of weight w counts w times."""
        scores = self.scores(z, target)
        if weights is None:
            return scores.mean()
        return (scores * weights).sum() / weights.sum().clamp_min(TINY)

    def scores(self, z: Tensor, target: Tensor) -> Tensor:
        """Of each row."""
        wanted = self._wanted(z, target)
        each = self._each(z, wanted)
        if self._weights is not None:
            of_outputs = z.new_tensor(self._weights)
            each = each * of_outputs.reshape(1, -1, *[1] * (z.ndim - 2))
        return each.flatten(1).sum(dim=1)

    @property
    def per_label(self) -> bool:
        """Each output is a label that is true or false (XENT)."""
        return self.kind == "binaryxent"

    def _wanted(self, z: Tensor, target: Tensor) -> Tensor:
        """Labels in the shape of the outputs."""
        if self.kind == SPARSE and target.ndim == z.ndim and target.shape[1] == 1 < z.shape[1]:
            target = target[:, 0]  # as DL4J's labels of it are
        if self.kind in OF_CLASSES and z.shape[1] > 1 and target.ndim == z.ndim - 1:
            hot = fn.one_hot(target.long(), z.shape[1]).to(z.dtype)
            return hot.movedim(-1, 1)
        return target.to(z.dtype).reshape(z.shape)

    def _each(self, z: Tensor, wanted: Tensor) -> Tensor:
        if self.kind in OF_CLASSES:
            return self._of_classes(z, wanted)
        if self.kind == "binaryxent":
            return self._of_two(z, wanted)
        out = self.activation(z, True)
        if self.kind == "kld":
            pull = out * (-wanted / out.clamp_min(TINY)).detach()
            return _with_gradient(SCORES[self.kind](out, wanted), pull)
        return SCORES[self.kind](out, wanted)

    def _of_classes(self, z: Tensor, wanted: Tensor) -> Tensor:
        if self.activation.kind != "softmax":
            return -wanted * self.activation(z, True).clamp_min(TINY).log()
        logs = torch.log_softmax(z, dim=1)
        clipped = logs
        if self._clip:
            clipped = logs.clamp(math.log(self._clip), math.log1p(-self._clip))
        pull = -wanted * logs
        if self._weights is None:  # labels need not add up to 1
            pull = z * (logs.exp() - wanted).detach()
        return _with_gradient(-wanted * clipped, pull)

    def _of_two(self, z: Tensor, wanted: Tensor) -> Tensor:
        if self.activation.kind == "sigmoid" and not self._clip:
            return fn.binary_cross_entropy_with_logits(z, wanted, reduction="none")
        out, least = self.activation(z, True), self._clip or CLIPPED
        p = out.detach().clamp(least, 1 - least)
        if self.activation.kind == "softmax":
            score = -wanted * torch.log_softmax(z, dim=1)
        else:
            score = -(wanted * p.log() + (1 - wanted) * (1 - p).log())
        return _with_gradient(score, out * ((p - wanted) / (p * (1 - p))))


def _with_gradient(score: Tensor, pull: Tensor) -> Tensor:
    """The value of one, the gradients of the other."""
    return score.detach() + (pull - pull.detach())


def _weights(step: Step, value: Any) -> list[float] | None:
    """Of each output; a list before 1.0.0-beta4, or its text, and an object with shape and data."""
    if value is None:
        return None
    try:
        found = json.loads(value) if isinstance(value, str) else value
        found = found["data"] if isinstance(found, dict) else found
        return [float(one) for one in found]
    except (ValueError, TypeError, KeyError):
        raise step.refuse(f"loss with weights {str(value)[:40]!r}", TO_PREDICT) from None


def _cosine(out: Tensor, wanted: Tensor) -> Tensor:
    return -fn.normalize(out, dim=1) * fn.normalize(wanted, dim=1)


def _clipped(values: Tensor) -> Tensor:
    return values.clamp(CLIPPED, 1)


SCORES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": lambda out, y: (out - y).abs(),
    "l2": lambda out, y: (out - y) ** 2,
    "mae": lambda out, y: (out - y).abs() / out.shape[1],
    "mse": lambda out, y: (out - y) ** 2 / out.shape[1],
    "mape": lambda out, y: 100 * ((out - y) / y).abs() / out.shape[1],
    "msle": lambda out, y: ((out + 1) / (y + 1)).log() ** 2 / out.shape[1],
    "kld": lambda out, y: _clipped(y) * (_clipped(y) / _clipped(out)).log(),
    "poisson": lambda out, y: out - y * out.clamp_min(TINY).log(),
    "hinge": lambda out, y: (1 - y * out).clamp_min(0),
    "squaredhinge": lambda out, y: (1 - y * out).clamp_min(0) ** 2,
    "cosineproximity": _cosine,
    "wasserstein": lambda out, y: out * y / out.shape[1],
}
