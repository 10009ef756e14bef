"""Layers of images and sequences beside convolution: by channel, turned round, cut, padded."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn
from torch.nn import functional as fn

from sparkstrom.models.dl4j.layer_arrays import Arrays, pieces_of
from sparkstrom.models.dl4j.modules.dl4j_dropout import InputDropout
from sparkstrom.models.dl4j.modules.dl4j_images import Convolution, Window
from sparkstrom.models.dl4j.modules.dl4j_layers import CHANNELS_LAST, Dl4jLayer
from sparkstrom.models.dl4j.network_steps import Step

Tensor: TypeAlias = torch.Tensor


class ByChannel(Dl4jLayer):
    """DepthwiseConvolution2D, and SeparableConvolution2D, which mixes the channels afterwards."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._refuse_softmax()
        self._window = Window(step, 0, 1)
        shapes = {piece.name: piece.shape for piece in pieces_of(step)}
        self._separable = "pW" in shapes
        self._channels = step.whole("nin")
        many = self._channels * step.whole("depthmultiplier", 1)
        self._add(weight=(many, 1, *step.pair("kernelsize", 0)))
        self._add(**{n: shapes[k] for k, n in (("pW", "mixed"), ("b", "bias")) if k in shapes})

    def before_activation(self, x: Tensor) -> Tensor:
        window, x = self._window, self._window.opened(self.dropped(x, self.training))
        bias = getattr(self, "bias", None)
        z = fn.conv2d(
            fn.pad(x, window.padded(x.shape)),
            self.weight,
            None if self._separable else bias,
            window.stride,
            dilation=window.dilation,
            groups=self._channels,
        )
        z = fn.conv2d(z, self.mixed, bias) if self._separable else z
        return window.closed(z)

    def place(self, arrays: Arrays) -> Arrays:
        made = {{"pW": "mixed", "b": "bias"}[n]: a for n, a in arrays.items() if n != "W"}
        if "W" in arrays:  # [times, channels, h, w], or [h, w, channels, times]
            order = (1, 0, 2, 3) if self._separable else (2, 3, 0, 1)
            made["weight"] = arrays["W"].transpose(order).reshape(self.weight.shape)
        return made


class Deconvolution(Convolution):
    """Deconvolution2D: of Same, the outputs are as many as inputs times the stride."""

    def before_activation(self, x: Tensor) -> Tensor:
        window, x = self._window, self._window.opened(self.dropped(x, self.training))
        z = fn.conv_transpose2d(x, self.weight, None, window.stride, dilation=window.dilation)
        for axis in (0, 1):
            size, stride = int(z.shape[2 + axis]), window.stride[axis]
            if window.mode == "same":
                wanted = int(x.shape[2 + axis]) * stride
                first = (size - wanted) // 2
                if first < 0:
                    raise self.step.refuse(f"Same with a stride of {stride} beyond the kernel")
            else:
                first = window.padding[axis]
                wanted = size - 2 * first
            z = z.narrow(2 + axis, first, wanted)
        z = z + self.bias[:, None, None] if hasattr(self, "bias") else z
        return window.closed(z)


class Resized(nn.Module):  # type: ignore[misc]
    """Upsampling, zero padding and cropping, of images and of sequences; the first has dropout."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.dropped = InputDropout(step)
        name = {"u": "size", "z": "padding", "c": "cropping"}[step.kind[0]]
        self._sizes, self._kind = step.sizes(name, 1 if name == "size" else 0), name
        self._flat = "1d" in step.kind
        self._last = CHANNELS_LAST in (step.word("format", ""), step.word("dataformat", ""))
        many = len(self._sizes)
        needed = (1, 2) if self._flat or name == "size" else (4, 2)
        if many not in needed:
            raise step.refuse(f"{name} {list(self._sizes)}")
        if many == 2 and not self._flat and name != "size":  # of both sides
            self._sizes = tuple(size for size in self._sizes for _ in range(2))
        if many == 1:
            self._sizes = (*self._sizes, *self._sizes)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Images or sequences of another size."""
        x = x.movedim(-1, 1) if self._last else x
        if self._kind == "size":
            x = self.dropped(x, self.training)
            for axis in range(2, x.ndim):
                x = x.repeat_interleave(self._sizes[axis - 2], dim=axis)
        else:  # torch begins with the last dimension
            sizes = self._sizes if self._flat else (*self._sizes[2:], *self._sizes[:2])
            x = fn.pad(x, [size if self._kind == "padding" else -size for size in sizes])
        return x.movedim(1, -1) if self._last else x


class LocalResponse(nn.Module):  # type: ignore[misc]
    """LocalResponseNormalization: x / (k + alpha * squares of n neighbouring channels) ** beta."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._reach = int(step.number("n", 5.0)) // 2
        self._k, self._alpha = step.number("k", 2.0), step.number("alpha", 1e-4)
        self._beta = step.number("beta", 0.75)
        self._axis = 3 if step.word("dataformat", "nchw") == CHANNELS_LAST else 1

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Of the same shape."""
        x = x.movedim(self._axis, -1)
        around = fn.pad(x * x, (self._reach, self._reach)).unfold(-1, 2 * self._reach + 1, 1)
        made = x * (self._k + self._alpha * around.sum(-1)) ** -self._beta
        return made.movedim(-1, self._axis)
