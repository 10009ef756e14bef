"""Dropout as DL4J has it: on a layer's input, by the probability to retain a value."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch.nn import functional as fn

from sparkstrom.models.dl4j.java_names import Typed, typed
from sparkstrom.models.dl4j.network_steps import Step, number_in

Tensor: TypeAlias = torch.Tensor
KINDS = ("dropout", "spatialdropout", "gaussiandropout", "gaussiannoise", "alphadropout")
ALPHA, LAMBDA = 1.6732632423543772, 1.0507009873554804  # of SELU


class InputDropout:
    """What a layer's input goes through in training; a value that travels."""

    def __init__(self, step: Step) -> None:
        found, self.kind, self._p = _said(step), "", 1.0
        if found is None or untrainable_dropout(step) is not None:
            return
        self.kind, self._p = found.kind, _rate(step, found)
        scale = number_in(step.path, step.where, found.fields, "lambda", LAMBDA)
        self._off = -scale * number_in(step.path, step.where, found.fields, "alpha", ALPHA)

    def __call__(self, x: Tensor, training: bool) -> Tensor:
        """The input itself, but in training."""
        if not training or not self.kind:
            return x
        if self.kind == "dropout":
            return fn.dropout(x, 1 - self._p)
        if self.kind == "spatialdropout":
            kept = torch.ones_like(x[(..., *[slice(0, 1)] * (x.ndim - 2))])
            return x * fn.dropout(kept, 1 - self._p)
        if self.kind == "gaussiandropout":
            return x * (1 + math.sqrt(self._p / (1 - self._p)) * torch.randn_like(x))
        if self.kind == "alphadropout":  # keeps mean and variance of what SELU makes
            p, off = self._p, self._off
            gain = 1 / math.sqrt(p + off**2 * p * (1 - p))
            kept = torch.rand_like(x) < p
            return gain * torch.where(kept, x, off) - gain * (1 - p) * off
        return x + self._p * torch.randn_like(x)


def untrainable_dropout(step: Step) -> str | None:
    """What of it is not done here in training, by name."""
    found = _said(step)
    if found is None:
        return None
    if _is_scheduled(found):
        return f"dropout by schedule ({found.kind}) of {step.where}"
    if found.kind not in KINDS:
        return f"dropout {found.kind} of {step.where}"
    if found.kind != "gaussiannoise" and not 0 < _rate(step, found) < 1:
        return f"dropout {found.kind} of {_rate(step, found):g} of {step.where}"
    return None


def _said(step: Step) -> Typed | None:
    """None, too, where everything is retained."""
    found = typed(step.fields.get("idropout"))
    if found is None:  # of 0.9 and earlier: a number
        p = step.number("dropout", 0.0)
        found = Typed("dropout", {"p": p}) if p else None
    if found is None or (found.kind == "dropout" and not _is_scheduled(found)):
        return None if found is None or _rate(step, found) in (0.0, 1.0) else found
    return found


def _is_scheduled(found: Typed) -> bool:
    return any(name.endswith("schedule") and value for name, value in found.fields.items())


def _rate(step: Step, found: Typed) -> float:
    name = {"gaussiandropout": "rate", "gaussiannoise": "stddev"}.get(found.kind, "p")
    return number_in(step.path, f"dropout of {step.where}", found.fields, name, 0.0)
