"""Vertices of a ComputationGraph that are no layers: they join activations, or change them."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TypeAlias

import torch
from torch import nn

from sparkstrom.models.dl4j.network_steps import Step

Tensor: TypeAlias = torch.Tensor
EPS = 1e-8  # of L2NormalizeVertex


class Vertex(nn.Module):  # type: ignore[misc]
    """One that joins nothing."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        if step.kind not in FORMULAS:
            raise step.refuse("sparkstrom has no such vertex")
        if step.kind == "reshapevertex" and step.word("reshapeorder", "c") != "c":
            raise step.refuse("reshapeOrder f")

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Of its one input."""
        return FORMULAS[self.step.kind](x, self.step)


class JoinVertex(nn.Module):  # type: ignore[misc]
    """MergeVertex and ElementWiseVertex."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._axis = step.whole("mergeaxis", 1)
        self._op = "merge" if step.kind == "mergevertex" else step.word("op", "add")
        known = self._op in OPERATIONS and (self._op != "subtract" or len(step.sources) == 2)
        if self._op != "merge" and not known:
            raise step.refuse(f"op {self._op} of {len(step.sources)} inputs")

    def forward(self, given: list[Tensor], rows: int) -> Tensor:
        """Of its inputs, in DL4J's order."""
        if self._op == "merge":
            return torch.cat(given, dim=self._axis)
        made = reduce(OPERATIONS[self._op], given)
        return made / len(given) if self._op == "average" else made


OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "average": torch.add,
    "subtract": torch.sub,
    "product": torch.mul,
    "max": torch.maximum,
}


def _scaled(x: Tensor, step: Step) -> Tensor:
    return x * step.number("scalefactor", 1.0)


def _shifted(x: Tensor, step: Step) -> Tensor:
    return x + step.number("shiftfactor", 0.0)


def _subset(x: Tensor, step: Step) -> Tensor:
    return x[:, step.whole("from", 0, 0) : step.whole("to", 0, 0) + 1]


def _normalized(x: Tensor, step: Step) -> Tensor:
    given = step.fields.get("dimension")
    axes = step.sizes("dimension") if given else tuple(range(1, x.ndim))
    norms = torch.linalg.vector_norm(x, dim=axes, keepdim=True)
    return x / norms.clamp_min(step.number("eps", EPS))


def _reshaped(x: Tensor, step: Step) -> Tensor:
    return x.reshape(len(x), *step.sizes("newshape", -1)[1:])


FORMULAS: dict[str, Callable[[Tensor, Step], Tensor]] = {
    "scalevertex": _scaled,
    "shiftvertex": _shifted,
    "subsetvertex": _subset,
    "l2normalizevertex": _normalized,
    "reshapevertex": _reshaped,
    "reversetimeseriesvertex": lambda x, _: x.flip(2),
    "poolhelpervertex": lambda x, _: x[:, :, 1:, 1:],
}
