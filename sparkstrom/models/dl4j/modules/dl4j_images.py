"""Convolution and pooling, with DL4J's ways to pad."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional as fn

from sparkstrom.models.dl4j.layer_arrays import Arrays, pieces_of
from sparkstrom.models.dl4j.modules.dl4j_layers import CHANNELS_LAST, Dl4jLayer
from sparkstrom.models.dl4j.network_steps import Step

Tensor: TypeAlias = torch.Tensor
Sizes = tuple[int, int]
MODES = ("truncate", "strict", "same")
FLAT = ("convolution1dlayer", "subsampling1dlayer")  # sequences are images of width 1


class Window:
    """Kernel, stride, padding and dilation of a layer, height first."""

    def __init__(self, step: Step, default: int, stride: int) -> None:
        self.step = step
        self.flat = step.kind in FLAT
        self.kernel = self._pair("kernelsize", default)
        self.stride = self._pair("stride", stride)
        self.padding = self._pair("padding", 0, least=0)
        self.dilation = self._pair("dilation", 1)
        if step.word("rnndataformat", "ncw") != "ncw":
            raise step.refuse("rnnDataFormat NWC")
        self.last = step.word("cnn2ddataformat", "nchw") == CHANNELS_LAST
        self.mode = step.word("convolutionmode", "truncate")
        if self.mode not in MODES and not (self.mode == "causal" and self.flat):
            raise step.refuse(f"convolutionMode {self.mode}")

    def _pair(self, name: str, default: int, least: int = 1) -> Sizes:
        if not self.flat:
            return self.step.pair(name, default, least)
        given = self.step.fields.get(name)
        first = default if given is None else self.step.sizes(name, least)[0]
        return first, 0 if name == "padding" else 1

    def opened(self, x: Tensor) -> Tensor:
        """As images of channels first."""
        x = x.unsqueeze(3) if self.flat else x
        return x.movedim(-1, 1) if self.last else x

    def closed(self, z: Tensor) -> Tensor:
        """In the shape that came."""
        z = z.movedim(1, -1) if self.last else z
        return z.squeeze(3) if self.flat else z

    def padded(self, size: torch.Size) -> tuple[int, int, int, int]:
        """Around images of this size, as torch pads: left, right, top, bottom."""
        sides = [self._around(axis, int(size[2 + axis])) for axis in (1, 0)]
        return (*sides[0], *sides[1])

    def _around(self, axis: int, size: int) -> tuple[int, int]:
        wide = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        if self.mode == "causal":
            return wide - 1, 0
        if self.mode != "same":
            return self.padding[axis], self.padding[axis]
        steps = -(-size // self.stride[axis])
        total = max((steps - 1) * self.stride[axis] + wide - size, 0)
        return total // 2, total - total // 2


class Convolution(Dl4jLayer):
    """ConvolutionLayer, of channels first or last, and Convolution1DLayer."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._refuse_softmax()
        self._window = Window(step, 0, 1)
        shapes = {piece.name: piece.shape for piece in pieces_of(step)}
        kernels = shapes["W"] if len(shapes["W"]) == 4 else (*shapes["W"][::-1], 1)
        self._add(weight=kernels, **({"bias": shapes["b"]} if "b" in shapes else {}))

    def before_activation(self, x: Tensor) -> Tensor:
        window, x = self._window, self._window.opened(self.dropped(x, self.training))
        x = fn.pad(x, window.padded(x.shape))
        bias = getattr(self, "bias", None)
        z = fn.conv2d(x, self.weight, bias, window.stride, dilation=window.dilation)
        return window.closed(z)

    def place(self, arrays: Arrays) -> Arrays:
        placed = {{"W": "weight", "b": "bias"}[name]: array for name, array in arrays.items()}
        if "weight" in placed and placed["weight"].ndim == 3:  # [size, inputs, outputs]
            placed["weight"] = placed["weight"].T[..., None]
        return placed


class Subsampling(nn.Module):  # type: ignore[misc]
    """Of images or sequences: max, average or p-norm of windows; padding is no value, for max."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._window = Window(step, 1, 2)
        self._kind = step.word("poolingtype", "max")
        self._power = step.number("pnorm", 0.0)
        # Versions before 1.0.0-beta5 did not say, and divided by the whole window.
        self._whole = step.flag("avgpoolincludepadindivisor", True)
        if self._kind not in ("max", "avg", "pnorm") or (self._kind == "pnorm" and not self._power):
            raise step.refuse(f"poolingType {self._kind} with pnorm={self._power:g}")

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Smaller images."""
        window = self._window
        x = window.opened(x)
        around = window.padded(x.shape)
        if self._kind == "max":
            filled = fn.pad(x, around, value=float("-inf"))
            out = fn.max_pool2d(filled, window.kernel, window.stride, 0, window.dilation)
        elif self._kind == "avg":
            size = window.kernel[0] * window.kernel[1]
            present = torch.ones_like(x[:1, :1])
            count = size if self._whole else self._sums(present, around)
            out = self._sums(x, around) / count
        else:
            out = self._sums(x.abs() ** self._power, around) ** (1 / self._power)
        return window.closed(out)

    def _sums(self, x: Tensor, around: tuple[int, int, int, int]) -> Tensor:
        """Over each window."""
        window, channels = self._window, x.shape[1]
        ones = x.new_ones(channels, 1, *window.kernel)
        x = fn.pad(x, around)
        return fn.conv2d(x, ones, None, window.stride, 0, window.dilation, groups=channels)


class GlobalPooling(nn.Module):  # type: ignore[misc]
    """GlobalPoolingLayer: over steps, or over height and width; without masks."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._kind = step.word("poolingtype", "max")
        self._power = step.number("pnorm", 2.0)
        self._collapses = step.flag("collapsedimensions", True)
        given = step.fields.get("poolingdimensions")
        self._axes = None if given in (None, []) else step.sizes("poolingdimensions", 1)
        if self._axes and not set(self._axes) <= {1, 2, 3}:
            raise step.refuse(f"poolingDimensions {given}")
        if self._kind not in ("max", "avg", "sum", "pnorm"):
            raise step.refuse(f"poolingType {self._kind}")

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """[rows, channels], or with dimensions of size 1."""
        axes = self._axes or tuple(range(2, x.ndim))
        kept = not self._collapses
        if self._kind == "max":
            return x.amax(axes, keepdim=kept)
        if self._kind == "avg":
            return x.mean(axes, keepdim=kept)
        if self._kind == "sum":
            return x.sum(axes, keepdim=kept)
        return (x.abs() ** self._power).sum(axes, keepdim=kept) ** (1 / self._power)
