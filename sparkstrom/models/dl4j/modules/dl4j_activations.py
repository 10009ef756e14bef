"""Activations, with ND4J's formulas where they are not torch's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.nn import functional as fn

from sparkstrom.models.dl4j.java_names import Typed, activation
from sparkstrom.models.dl4j.network_steps import Step

Tensor: TypeAlias = torch.Tensor


class Dl4jActivation:
    """One of them, by its name in lower case and its options; a value that travels."""

    def __init__(self, step: Step, field: str = "activationfn", default: str = "identity") -> None:
        found = activation(step.fields.get(field, step.fields.get("activationfunction")))
        found = found or Typed(default, {})
        if found.kind not in ACTIVATIONS:
            raise step.refuse(f"activation {found.kind}")
        self.kind = found.kind
        self._options = {
            name: float(value) for name, value in found.fields.items() if _is_number(value)
        }
        self._precise = found.fields.get("precise") is True

    def __call__(self, z: Tensor, training: bool) -> Tensor:
        """Of [rows, channels, ...]; ``training`` matters to RReLU.

        Outside of training DL4J's RReLU answers max(z, (l + u) / 2), which is none; so does this.
        """
        if self.kind == "rrelu":
            low, high = self._options.get("l", 1 / 8), self._options.get("u", 1 / 3)
            return fn.rrelu(z, low, high, True) if training else z.clamp(min=(low + high) / 2)
        if self.kind == "gelu" and self._precise:
            cubed = z + (0.044715 * z) ** 3  # as libnd4j has it
            return z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * cubed))
        return ACTIVATIONS[self.kind](z, self._options)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rational_tanh(z: Tensor, _: dict[str, float]) -> Tensor:
    y = (2 / 3 * z).abs()
    return 1.7159 * torch.sign(z) * (1 - 1 / (1 + y + y**2 + 1.41645 * y**4))


def _relu(z: Tensor, options: dict[str, float]) -> Tensor:
    """With Keras' options, where they are given."""
    if not options:
        return fn.relu(z)
    threshold, slope = options.get("threshold", 0.0), options.get("negativeslope", 0.0)
    above = z.clamp(max=options["max"]) if options.get("max") else z
    return torch.where(z >= threshold, above, slope * (z - threshold))


ACTIVATIONS: dict[str, Callable[[Tensor, dict[str, float]], Tensor]] = {
    "identity": lambda z, _: z,
    "relu": _relu,
    "relu6": lambda z, _: fn.relu6(z),
    "lrelu": lambda z, o: fn.leaky_relu(z, o.get("alpha", 0.01)),
    "rrelu": lambda z, _: z,
    "elu": lambda z, o: fn.elu(z, o.get("alpha", 1.0)),
    "selu": lambda z, _: fn.selu(z),
    "gelu": lambda z, _: z * torch.sigmoid(1.702 * z),
    "mish": lambda z, _: fn.mish(z),
    "swish": lambda z, _: fn.silu(z),
    "sigmoid": lambda z, _: torch.sigmoid(z),
    "hardsigmoid": lambda z, _: (0.2 * z + 0.5).clamp(0, 1),
    "tanh": lambda z, _: torch.tanh(z),
    "hardtanh": lambda z, _: fn.hardtanh(z),
    "rationaltanh": _rational_tanh,
    "rectifiedtanh": lambda z, _: torch.tanh(z).clamp(min=0),
    "softmax": lambda z, _: torch.softmax(z, dim=1),
    "softplus": lambda z, _: fn.softplus(z),
    "softsign": lambda z, _: fn.softsign(z),
    "cube": lambda z, _: z**3,
    "thresholdedrelu": lambda z, o: fn.threshold(z, o.get("theta", 1.0), 0.0),
}
