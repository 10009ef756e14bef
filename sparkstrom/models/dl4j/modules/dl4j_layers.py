"""DL4J's layers as modules: same inputs, same outputs, in DL4J's own shapes.

Images are [rows, channels, height, width], or channels last where the layer says NHWC; sequences
are [rows, features, steps]. ``place`` brings DL4J's arrays, or an updater's vectors of the same
shapes, to the module's names and shapes.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from sparkstrom.base.errors import UsageError
from sparkstrom.models.dl4j.layer_arrays import (
    LOG_STD,
    STATISTIC,
    VARIANCE,
    Arrays,
    pieces_of,
    slopes_shape,
)
from sparkstrom.models.dl4j.modules.dl4j_activations import Dl4jActivation
from sparkstrom.models.dl4j.modules.dl4j_dropout import InputDropout
from sparkstrom.models.dl4j.network_steps import Step

Tensor: TypeAlias = torch.Tensor
CHANNELS_LAST = "nhwc"
LOSSES_OF_PLACES = ("rnnlosslayer", "cnnlosslayer")  # of each step, or pixel


class Dl4jLayer(nn.Module):  # type: ignore[misc]
    """One step. ``forward(x, rows)``: activations and how many rows the minibatch has."""

    def __init__(self, step: Step, default: str = "identity") -> None:
        super().__init__()
        self.step = step
        if "nwc" in (step.word("rnndataformat", "ncw"), step.word("timedistributedformat", "ncw")):
            raise step.refuse("sequences of the format NWC")
        self.activation = Dl4jActivation(step, default=default)
        self.dropped = InputDropout(step)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Its output."""
        return self.activated(self.before_activation(x))

    def before_activation(self, x: Tensor) -> Tensor:
        """What the activation, and a loss, gets."""
        return x

    def activated(self, z: Tensor) -> Tensor:
        """The output of that."""
        return self.activation(z, self.training)

    def place(self, arrays: Arrays) -> Arrays:
        """By the module's own names."""
        return {}

    def _add(self, **arrays: tuple[int, ...]) -> None:
        """Parameters of these names and shapes."""
        for name, shape in arrays.items():
            parameter = nn.Parameter(torch.zeros(shape), requires_grad=not self.step.frozen)
            self.register_parameter(name, parameter)

    def _refuse_softmax(self) -> None:
        if self.activation.kind == "softmax":
            raise self.step.refuse("softmax inside of it: over which dimension depends on versions")


class Dense(Dl4jLayer):
    """DenseLayer, OutputLayer, RnnOutputLayer: x W + b, of sequences at each step."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._gained = any(piece.name == "g" for piece in pieces_of(step))
        shapes = {piece.name: piece.shape for piece in pieces_of(step)}
        self._add(weight=shapes["W"][::-1])
        self._add(**{n: shapes[k] for n, k in (("bias", "b"), ("gain", "g")) if k in shapes})

    def before_activation(self, x: Tensor) -> Tensor:
        x = self.dropped(x, self.training)
        if x.ndim == 3:
            return self._product(x.transpose(1, 2)).transpose(1, 2)
        return self._product(x.flatten(1) if x.ndim > 3 else x)

    def _product(self, x: Tensor) -> Tensor:
        if not self._gained:
            return nn.functional.linear(x, self.weight, getattr(self, "bias", None))
        z = normalized(nn.functional.linear(x, self.weight)) * self.gain
        return z + self.bias if hasattr(self, "bias") else z

    def place(self, arrays: Arrays) -> Arrays:
        names = {"W": "weight", "b": "bias", "g": "gain"}
        return {names[name]: array.T if name == "W" else array for name, array in arrays.items()}


def normalized(z: Tensor) -> Tensor:
    """Layer normalization of the last dimension; 0 where all values are the same."""
    z = (z - z.mean(-1, keepdim=True)) / z.std(-1, keepdim=True, unbiased=False)
    return torch.nan_to_num(z, nan=0.0, posinf=0.0, neginf=0.0)


class Embedding(Dl4jLayer):
    """EmbeddingLayer: of a whole number per row; EmbeddingSequenceLayer: of several."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._sequences = step.kind == "embeddingsequencelayer"
        if step.word("outputformat", "ncw") != "ncw":
            raise step.refuse("outputFormat NWC")
        shapes = {piece.name: piece.shape for piece in pieces_of(step)}
        self._add(weight=shapes["W"], **({"bias": shapes["b"]} if "b" in shapes else {}))

    def before_activation(self, x: Tensor) -> Tensor:
        given = x.reshape(len(x), -1)
        out = self.weight[self._indices(given if self._sequences else given[:, 0])]
        out = out + self.bias if hasattr(self, "bias") else out
        return out.transpose(1, 2) if self._sequences else out

    def _indices(self, given: Tensor) -> Tensor:
        """Whole numbers. Raise UsageError naming one that has no row: -1 is not the last."""
        index = given.long()
        bad = torch.isnan(given) | (index < 0) | (index >= len(self.weight))
        if bad.any():
            at = torch.nonzero(bad)[0].tolist()
            raise UsageError(
                f"{self.step.where}: index {given[tuple(at)].item():g} in row {at[0]} of a"
                f" minibatch: must be 0 to {len(self.weight) - 1}"
            )
        return index

    def place(self, arrays: Arrays) -> Arrays:
        return {{"W": "weight", "b": "bias"}[name]: array for name, array in arrays.items()}


class Normalization(nn.BatchNorm1d):  # type: ignore[misc]
    """BatchNormalization over channels; it has no activation, whatever its options say."""

    def __init__(self, step: Step) -> None:
        locked = step.flag("lockgammabeta", False)
        decay = step.number("decay", 0.9)
        super().__init__(
            step.whole("nout"), step.number("eps", 1e-5), momentum=1 - decay, affine=not locked
        )
        constants = step.number("gamma", 1.0), step.number("beta", 0.0)
        if locked and constants != (1.0, 0.0):
            raise step.refuse(f"lockGammaBeta with gamma={constants[0]}, beta={constants[1]}")
        self.step = step
        self._last = step.word("cnn2dformat", "nchw") == CHANNELS_LAST
        for parameter in self.parameters():
            parameter.requires_grad_(not step.frozen)

    def forward(self, x: Tensor, rows: int = 0) -> Tensor:
        if self._last and x.ndim == 4:
            return self._normalized(x.movedim(-1, 1)).movedim(1, -1)
        return self._normalized(x)

    def _normalized(self, x: Tensor) -> Tensor:
        """Also of one row; its variance is that of the minibatch, torch's that of a population."""
        if not self.training:
            return super().forward(x)
        axes = [0, *range(2, x.ndim)]
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(axes), self.momentum)
            self.running_var.lerp_(x.var(axes, unbiased=False), self.momentum)
        return torch.batch_norm(x, self.weight, self.bias, None, None, True, 0.0, self.eps, False)

    def _check_input_dim(self, input: Tensor) -> None:
        """Of any rank."""

    def place(self, arrays: Arrays) -> Arrays:
        names = {"gamma": "weight", "beta": "bias", "mean": "running_mean"}
        made = {new: arrays[old] for old, new in names.items() if old in arrays}
        if LOG_STD in arrays:
            made["running_var"] = np.square(10.0 ** arrays[LOG_STD].astype(np.float64))
        elif VARIANCE in arrays:
            made["running_var"] = arrays[VARIANCE]
        return made


class Plain(Dl4jLayer):
    """ActivationLayer, DropoutLayer, and losses that have no parameters."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        if step.word("format", "nchw") == CHANNELS_LAST:
            raise step.refuse("format NHWC")

    def forward(self, x: Tensor, rows: int) -> Tensor:
        if self.step.kind == "dropoutlayer":
            return self.dropped(x, self.training)
        if x.ndim > 2 and self.step.kind not in LOSSES_OF_PLACES:
            self._refuse_softmax()
        return self.activated(x)


class Slopes(Dl4jLayer):
    """PReLULayer: negative values times a slope that is learnt."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._add(slopes=slopes_shape(step))

    def forward(self, x: Tensor, rows: int) -> Tensor:
        x = self.dropped(x, self.training)
        return torch.where(x < 0, x * self.slopes, x)

    def place(self, arrays: Arrays) -> Arrays:
        return {"slopes": arrays["W"]} if arrays else {}


class ElementWise(Dl4jLayer):
    """ElementWiseMultiplicationLayer: x * w + b."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        width = (step.whole("nout"),)
        self._add(weight=width, bias=width)

    def before_activation(self, x: Tensor) -> Tensor:
        return self.dropped(x, self.training) * self.weight + self.bias

    def place(self, arrays: Arrays) -> Arrays:
        return {{"W": "weight", "b": "bias"}[name]: array for name, array in arrays.items()}


class Reshaping(nn.Module):  # type: ignore[misc]
    """Preprocessors between kinds of layers; sequences are folded so that steps come first."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._kind = step.kind
        if step.word("rnndataformat", "ncw") != "ncw":
            raise step.refuse("rnnDataFormat NWC")
        if step.kind in ("feedforwardtocnnpreprocessor", "rnntocnnpreprocessor"):
            size = [step.whole(name) for name in ("inputheight", "inputwidth", "numchannels")]
            last = step.word("format", "nchw") == CHANNELS_LAST
            self._shape = size if last else [size[2], *size[:2]]

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """The same values."""
        match self._kind:
            case "cnntofeedforwardpreprocessor":
                return x.flatten(1)
            case "feedforwardtocnnpreprocessor":
                return x if x.ndim == 4 else x.reshape(-1, *self._shape)
            case "rnntofeedforwardpreprocessor":
                return x.permute(2, 0, 1).flatten(0, 1)
            case "rnntocnnpreprocessor":
                return x.permute(2, 0, 1).reshape(-1, *self._shape)
        return x if x.ndim == 3 else x.flatten(1).unflatten(0, (-1, rows)).permute(1, 2, 0)


def is_statistic(step: Step, name: str) -> bool:
    """Is DL4J's array of this name no parameter here?"""
    return any(p.name == name and p.role == STATISTIC for p in pieces_of(step))
