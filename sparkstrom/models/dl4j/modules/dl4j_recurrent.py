"""Recurrent layers over sequences [rows, features, steps], forwards or both ways; without masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from sparkstrom.models.dl4j.layer_arrays import Arrays, pieces_of
from sparkstrom.models.dl4j.modules.dl4j_activations import Dl4jActivation
from sparkstrom.models.dl4j.modules.dl4j_dropout import InputDropout
from sparkstrom.models.dl4j.modules.dl4j_layers import Dl4jLayer, normalized
from sparkstrom.models.dl4j.network_steps import Step

Tensor: TypeAlias = torch.Tensor


class Recurrent(Dl4jLayer):
    """One whose state goes on, with ``carries``, where the last call ended; gradients do not."""

    def __init__(self, step: Step) -> None:
        super().__init__(step, default="tanh")
        self._refuse_softmax()
        self._width = step.whole("nout")
        self._carries, self._state = False, ()

    def carry(self, carries: bool) -> None:
        """From zeros, and from there on, or not."""
        self._carries, self._state = carries, ()

    def _begun(self, wide: Tensor, many: int) -> list[Tensor]:
        """States of [rows, nOut], of products [steps, rows, ...]."""
        zeros = wide.new_zeros(wide.shape[1], self._width)
        return list(self._state) or [zeros] * many

    def _ended(self, *state: Tensor) -> None:
        if self._carries:
            self._state = tuple(one.detach() for one in state)


class Lstm(Recurrent):
    """LSTM, and GravesLSTM with its peepholes; gates lie in the order candidate, f, o, input."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.gate = Dl4jActivation(step, "gateactivationfn", default="sigmoid")
        w, rw, b = (piece.shape for piece in pieces_of(step))
        self._add(weight=w, recurrent=(rw[0], 4 * rw[0]), bias=b)
        if rw[1] > 4 * rw[0]:
            self._add(peepholes=(3, rw[0]))

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """[rows, nOut, steps] of [rows, nIn, steps]."""
        x = self.dropped(x, self.training)
        x = x.unsqueeze(2) if x.ndim == 2 else x
        wide = x.permute(2, 0, 1) @ self.weight + self.bias
        hidden, cell = self._begun(wide, 2)
        out = []
        for step in wide:
            hidden, cell = self._cell(step + hidden @ self.recurrent, cell)
            out.append(hidden)
        self._ended(hidden, cell)
        return torch.stack(out, dim=2)

    def _cell(self, z: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        candidate, forget, output, inputs = z.split(self._width, dim=1)
        peeps = getattr(self, "peepholes", None)
        if peeps is not None:
            forget, inputs = forget + cell * peeps[0], inputs + cell * peeps[2]
        kept = self.gate(forget, self.training) * cell
        cell = kept + self.gate(inputs, self.training) * self.activated(candidate)
        output = output if peeps is None else output + cell * peeps[1]
        return self.gate(output, self.training) * self.activated(cell), cell

    def place(self, arrays: Arrays) -> Arrays:
        width = 4 * self._width
        made = {{"W": "weight", "b": "bias"}[n]: a for n, a in arrays.items() if n != "RW"}
        if "RW" in arrays:
            made["recurrent"] = arrays["RW"][:, :width]
            if arrays["RW"].shape[1] > width:
                made["peepholes"] = arrays["RW"][:, width:].T
        return made


class SimpleRnn(Recurrent):
    """h = act(x W + b + h RW), with layer normalization of both products where DL4J has it."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._add(**{NAMES[piece.name]: piece.shape for piece in pieces_of(step)})

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """[rows, nOut, steps] of [rows, nIn, steps]."""
        wide = self._gained(self.dropped(x, self.training).permute(2, 0, 1) @ self.weight, 0)
        (hidden,), out = self._begun(wide, 1), []
        for z in wide + self.bias:
            hidden = self.activated(z + self._gained(hidden @ self.recurrent, 1))
            out.append(hidden)
        self._ended(hidden)
        return torch.stack(out, dim=2)

    def _gained(self, z: Tensor, half: int) -> Tensor:
        gain = getattr(self, "gain", None)
        return z if gain is None else normalized(z) * gain.split(self._width)[half]

    def place(self, arrays: Arrays) -> Arrays:
        return {NAMES[name]: array for name, array in arrays.items()}


NAMES = {"W": "weight", "RW": "recurrent", "b": "bias", "g": "gain"}
INNER: dict[str, Any] = {"lstm": Lstm, "graveslstm": Lstm, "simplernn": SimpleRnn}
MODES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "average": lambda a, b: (a + b) / 2,
    "concat": lambda a, b: torch.cat((a, b), dim=1),
}


class BothWays(nn.Module):  # type: ignore[misc]
    """Bidirectional, and GravesBidirectionalLSTM, which adds: one layer more, from end to start."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        graves = step.kind == "gravesbidirectionallstm"
        kind = "graveslstm" if graves else str(step.fields["within"])
        self.step, self._graves = step, graves
        self._mode = "add" if graves else step.word("mode", "concat")
        if self._mode not in MODES:
            raise step.refuse(f"mode {self._mode}")
        inner = replace(step, kind=kind)
        if graves:  # DL4J's looks at no dropout
            inner = replace(inner, fields=step.fields | {"idropout": None, "dropout": None})
        self.forwards, self.backwards = INNER[kind](inner), INNER[kind](inner)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """[rows, nOut, steps], or twice as many where they are put side by side."""
        back = self.backwards(x.flip(2), rows).flip(2)
        return MODES[self._mode](self.forwards(x, rows), back)

    def place(self, arrays: Arrays) -> Arrays:
        made: Arrays = {}
        for way, layer in (("f", self.forwards), ("b", self.backwards)):
            mine = {
                name[:-1] if self._graves else name[1:]: array
                for name, array in arrays.items()
                if (name[-1].lower() if self._graves else name[0]) == way
            }
            prefix = "forwards" if way == "f" else "backwards"
            made |= {f"{prefix}.{name}": array for name, array in layer.place(mine).items()}
        return made


class LastStep(nn.Module):  # type: ignore[misc]
    """LastTimeStep, without masks."""

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """[rows, features] of [rows, features, steps]."""
        return x[:, :, -1]


class Repeated(nn.Module):  # type: ignore[misc]
    """RepeatVector: a row becomes a sequence of n equal steps."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        if step.word("dataformat", "ncw") != "ncw":
            raise step.refuse("dataFormat NWC")
        self._steps, self.dropped = step.whole("n", 1), InputDropout(step)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """[rows, features, n] of [rows, features]."""
        return self.dropped(x, self.training).unsqueeze(2).expand(-1, -1, self._steps)
