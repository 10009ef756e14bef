"""Build a DL4J network as one torch module, and define its graph vertices and some of its layers.

``Dl4jModule`` is the network. The layers defined here are those for sequences and images, whereas
``layers`` has dense, embedding, normalization and activation layers. Recurrent layers take
sequences [rows, features, steps]. Masks are not supported. ``forward(x, rows)`` also gets the
minibatch's number of rows, because x can have a row for each step of a sequence; most layers ignore
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn import functional as fn

from sparkstrom.models.dl4j.configuration import (
    LAST_TIME_STEP,
    LOSS_LAYERS,
    NETWORK_INPUT,
    RESHAPING_PREPROCESSORS,
    LayerSpec,
    SavedNetwork,
)
from sparkstrom.models.dl4j.modules.layers import (
    ARRAY_NAMES,
    CHANNELS_LAST,
    BatchNormalization,
    Dense,
    Dl4jActivation,
    Dl4jLayer,
    ElementWiseMultiplication,
    Embedding,
    InputDropout,
    ParameterlessLayer,
    PRelu,
    ReshapePreprocessor,
    layer_normalize,
)
from sparkstrom.models.dl4j.parameters import Arrays, get_array_shapes, list_array_specs

Tensor: TypeAlias = torch.Tensor


class RecurrentLayer(Dl4jLayer):
    """Base class of recurrent layers.

    While the state is carried, a call starts with the final state of the previous call; gradients
    do not flow back into that call. Otherwise it starts with zeros.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec, default="tanh")
        self._refuse_softmax()
        self._width = spec.get_int("nout")
        self._carries_state, self._state = False, ()

    def set_carry_state(self, carries: bool) -> None:
        """Reset the state to zeros, and start or stop carrying it from call to call."""
        self._carries_state, self._state = carries, ()

    def _get_initial_state(self, projected: Tensor, count: int) -> list[Tensor]:
        """Return the ``count`` states [rows, nOut] to start with: carried ones, or zeros.

        ``projected`` are the transformed inputs [steps, rows, ...].
        """
        zeros = projected.new_zeros(projected.shape[1], self._width)
        return list(self._state) or [zeros] * count

    def _keep_state(self, *state: Tensor) -> None:
        """Store the state for the next call, if state is carried."""
        if self._carries_state:
            self._state = tuple(one.detach() for one in state)


class Lstm(RecurrentLayer):
    """LSTM and GravesLSTM. Gates are stored in the order candidate, forget, output, input."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.gate = Dl4jActivation(spec, "gateactivationfn", default="sigmoid")
        w, rw, b = (piece.shape for piece in list_array_specs(spec))
        self._add_parameters(weight=w, recurrent=(rw[0], 4 * rw[0]), bias=b)
        if rw[1] > 4 * rw[0]:
            self._add_parameters(peepholes=(3, rw[0]))

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return outputs [rows, nOut, steps] for x [rows, nIn, steps] or [rows, nIn]."""
        x = self.input_dropout(x, self.training)
        x = x.unsqueeze(2) if x.ndim == 2 else x
        projected = x.permute(2, 0, 1) @ self.weight + self.bias
        hidden, cell = self._get_initial_state(projected, 2)
        outputs = []
        for z in projected:
            hidden, cell = self._advance_cell(z + hidden @ self.recurrent, cell)
            outputs.append(hidden)
        self._keep_state(hidden, cell)
        return torch.stack(outputs, dim=2)

    def _advance_cell(self, z: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Return (hidden state, cell) after one time step; z are the values before the gates."""
        candidate, forget, output, input_gate = z.split(self._width, dim=1)
        peepholes = getattr(self, "peepholes", None)
        if peepholes is not None:
            forget, input_gate = forget + cell * peepholes[0], input_gate + cell * peepholes[2]
        retained = self.gate(forget, self.training) * cell
        cell = retained + self.gate(input_gate, self.training) * self.activate(candidate)
        output = output if peepholes is None else output + cell * peepholes[1]
        return self.gate(output, self.training) * self.activate(cell), cell

    def map_arrays(self, arrays: Arrays) -> Arrays:
        """Convert DL4J's arrays to the module's names; peepholes are the last columns of RW."""
        mapped, width = super().map_arrays(arrays), 4 * self._width
        if "RW" in arrays:
            mapped["recurrent"] = arrays["RW"][:, :width]
            if arrays["RW"].shape[1] > width:
                mapped["peepholes"] = arrays["RW"][:, width:].T
        return mapped


class SimpleRnn(RecurrentLayer):
    """SimpleRnn: h = act(x W + b + h RW), with optional layer normalization of both products."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        shapes = get_array_shapes(spec)
        self._add_parameters(**{ARRAY_NAMES[name]: shape for name, shape in shapes.items()})

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return outputs [rows, nOut, steps] for x [rows, nIn, steps]."""
        projected = self._apply_gain(
            self.input_dropout(x, self.training).permute(2, 0, 1) @ self.weight, 0
        )
        (hidden,), outputs = self._get_initial_state(projected, 1), []
        for z in projected + self.bias:
            hidden = self.activate(z + self._apply_gain(hidden @ self.recurrent, 1))
            outputs.append(hidden)
        self._keep_state(hidden)
        return torch.stack(outputs, dim=2)

    def _apply_gain(self, z: Tensor, index: int) -> Tensor:
        """If the layer has gains, return z layer-normalized, times a gain; otherwise return z.

        ``index`` selects the gain: 0 if z is the input's product x W, 1 if it is the state's, h RW.
        """
        gain = getattr(self, "gain", None)
        return z if gain is None else layer_normalize(z) * gain.split(self._width)[index]


DIRECTIONAL_LAYERS: dict[str, Any] = {"lstm": Lstm, "graveslstm": Lstm, "simplernn": SimpleRnn}
MERGE_MODES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "average": lambda a, b: (a + b) / 2,
    "concat": lambda a, b: torch.cat((a, b), dim=1),
}


class Bidirectional(nn.Module):  # type: ignore[misc]
    """DL4J's layers Bidirectional and GravesBidirectionalLSTM.

    Bidirectional merges the outputs of both directions as its mode specifies;
    GravesBidirectionalLSTM adds them.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        graves = spec.kind == "gravesbidirectionallstm"
        kind = "graveslstm" if graves else str(spec.fields["within"])
        self.spec, self._is_graves = spec, graves
        self._mode = "add" if graves else spec.get_word("mode", "concat")
        if self._mode not in MERGE_MODES:
            raise spec.unsupported(f"mode {self._mode}")
        inner = replace(spec, kind=kind)
        if graves:  # in DL4J, this layer ignores dropout
            inner = replace(inner, fields=spec.fields | {"idropout": None, "dropout": None})
        self.forwards = DIRECTIONAL_LAYERS[kind](inner)
        self.backwards = DIRECTIONAL_LAYERS[kind](inner)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Run a layer over x [rows, nIn, steps], another over the reversed steps; merge outputs.

        Return [rows, nOut, steps], or [rows, 2 nOut, steps] in the mode concat.
        """
        back = self.backwards(x.flip(2), rows).flip(2)
        return MERGE_MODES[self._mode](self.forwards(x, rows), back)

    def map_arrays(self, arrays: Arrays) -> Arrays:
        """Convert DL4J's arrays of both directions to the module's names."""
        mapped: Arrays = {}
        for direction, layer in (("f", self.forwards), ("b", self.backwards)):
            own_arrays = {
                name[:-1] if self._is_graves else name[1:]: array
                for name, array in arrays.items()
                if (name[-1].lower() if self._is_graves else name[0]) == direction
            }
            prefix = "forwards" if direction == "f" else "backwards"
            mapped |= {
                f"{prefix}.{name}": array for name, array in layer.map_arrays(own_arrays).items()
            }
        return mapped


class LastTimeStep(nn.Module):  # type: ignore[misc]
    """LastTimeStep: selects the last step of a sequence."""

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return the last step, [rows, features], of x [rows, features, steps]."""
        return x[:, :, -1]


class RepeatVector(nn.Module):  # type: ignore[misc]
    """RepeatVector: turns each row into a sequence of n equal steps."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        if spec.get_word("dataformat", "ncw") != "ncw":
            raise spec.unsupported("dataFormat NWC")
        self._steps, self.input_dropout = spec.get_int("n", 1), InputDropout(spec)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return sequences [rows, features, n] for x [rows, features]."""
        return self.input_dropout(x, self.training).unsqueeze(2).expand(-1, -1, self._steps)


Sizes = tuple[int, int]
CONVOLUTION_MODES = ("truncate", "strict", "same")
SEQUENCE_LAYERS = ("convolution1dlayer", "subsampling1dlayer")  # computed as images of width 1


class SlidingWindow:
    """Kernel, stride, padding and dilation, as (height, width), of a convolution or pooling layer.

    ``default`` and ``stride`` are the kernel's size and the stride if DL4J wrote none.
    """

    def __init__(self, spec: LayerSpec, default: int, stride: int) -> None:
        self.spec = spec
        self.is_sequence = spec.kind in SEQUENCE_LAYERS
        self.kernel = self._get_pair("kernelsize", default)
        self.stride = self._get_pair("stride", stride)
        self.padding = self._get_pair("padding", 0, minimum=0)
        self.dilation = self._get_pair("dilation", 1)
        if spec.get_word("rnndataformat", "ncw") != "ncw":
            raise spec.unsupported("rnnDataFormat NWC")
        self.channels_last = spec.get_word("cnn2ddataformat", "nchw") == CHANNELS_LAST
        self.mode = spec.get_word("convolutionmode", "truncate")
        if self.mode not in CONVOLUTION_MODES and not (self.mode == "causal" and self.is_sequence):
            raise spec.unsupported(f"convolutionMode {self.mode}")

    def _get_pair(self, name: str, default: int, minimum: int = 1) -> Sizes:
        """Return the option ``name`` as (height, width); for sequences, the width is 1."""
        if not self.is_sequence:
            return self.spec.get_pair(name, default, minimum)
        given = self.spec.fields.get(name)
        first = default if given is None else self.spec.get_sizes(name, minimum)[0]
        return first, 0 if name == "padding" else 1

    def to_nchw(self, x: Tensor) -> Tensor:
        """Convert the layer's input to images [rows, channels, height, width]."""
        x = x.unsqueeze(3) if self.is_sequence else x
        return x.movedim(-1, 1) if self.channels_last else x

    def from_images(self, z: Tensor) -> Tensor:
        """Convert images [rows, channels, height, width] to the layout of the layer's input."""
        z = z.movedim(1, -1) if self.channels_last else z
        return z.squeeze(3) if self.is_sequence else z

    def compute_padding(self, size: torch.Size) -> tuple[int, int, int, int]:
        """Return the (left, right, top, bottom) padding for images of shape ``size``."""
        sides = [self._compute_axis_padding(axis, int(size[2 + axis])) for axis in (1, 0)]
        return (*sides[0], *sides[1])

    def _compute_axis_padding(self, axis: int, size: int) -> tuple[int, int]:
        """Return the padding (before, after) along axis 0 (height) or 1 (width)."""
        extent = self.dilation[axis] * (self.kernel[axis] - 1) + 1
        if self.mode == "causal":
            return extent - 1, 0
        if self.mode != "same":
            return self.padding[axis], self.padding[axis]
        steps = -(-size // self.stride[axis])
        total = max((steps - 1) * self.stride[axis] + extent - size, 0)
        return total // 2, total - total // 2


class Convolution(Dl4jLayer):
    """ConvolutionLayer, with channels first or last, and Convolution1DLayer."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._refuse_softmax()
        self._window = SlidingWindow(spec, 0, 1)
        shapes = get_array_shapes(spec)
        kernels = shapes["W"] if len(shapes["W"]) == 4 else (*shapes["W"][::-1], 1)
        self._add_parameters(weight=kernels, bias=shapes.get("b"))

    def before_activation(self, x: Tensor) -> Tensor:
        """Return the convolution of x after input dropout."""
        window, x = self._window, self._window.to_nchw(self.input_dropout(x, self.training))
        x = fn.pad(x, window.compute_padding(x.shape))
        bias = getattr(self, "bias", None)
        z = fn.conv2d(x, self.weight, bias, window.stride, dilation=window.dilation)
        return window.from_images(z)

    def map_arrays(self, arrays: Arrays) -> Arrays:
        """Convert DL4J's arrays to the module's names; 1D kernels become 2D with width 1."""
        mapped = super().map_arrays(arrays)
        if "weight" in mapped and mapped["weight"].ndim == 3:  # [size, inputs, outputs]
            mapped["weight"] = mapped["weight"].T[..., None]
        return mapped


class Subsampling(nn.Module):  # type: ignore[misc]
    """SubsamplingLayer and Subsampling1DLayer: maximum, average or p-norm over windows."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self._window = SlidingWindow(spec, 1, 2)
        self._kind = spec.get_word("poolingtype", "max")
        self._power = spec.get_float("pnorm", 0.0)
        # DL4J before 1.0.0-beta5 lacks this option and divides by the size of the whole window.
        self._divides_by_window = spec.get_bool("avgpoolincludepadindivisor", True)
        if self._kind not in ("max", "avg", "pnorm") or (self._kind == "pnorm" and not self._power):
            raise spec.unsupported(f"poolingType {self._kind} with pnorm={self._power:g}")

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Pool the images or sequences x over windows; padding does not affect the maximum."""
        window = self._window
        x = window.to_nchw(x)
        padding = window.compute_padding(x.shape)
        if self._kind == "max":
            filled = fn.pad(x, padding, value=float("-inf"))
            out = fn.max_pool2d(filled, window.kernel, window.stride, 0, window.dilation)
        elif self._kind == "avg":
            size = window.kernel[0] * window.kernel[1]
            present = torch.ones_like(x[:1, :1])
            count = size if self._divides_by_window else self._sum_windows(present, padding)
            out = self._sum_windows(x, padding) / count
        else:
            out = self._sum_windows(x.abs() ** self._power, padding) ** (1 / self._power)
        return window.from_images(out)

    def _sum_windows(self, x: Tensor, padding: tuple[int, int, int, int]) -> Tensor:
        """Return the sums over windows of x after padding with zeros (left, right, top, bottom)."""
        window, channels = self._window, x.shape[1]
        ones = x.new_ones(channels, 1, *window.kernel)
        x = fn.pad(x, padding)
        return fn.conv2d(x, ones, None, window.stride, 0, window.dilation, groups=channels)


class GlobalPooling(nn.Module):  # type: ignore[misc]
    """GlobalPoolingLayer: pools over steps, or over height and width."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self._kind = spec.get_word("poolingtype", "max")
        self._power = spec.get_float("pnorm", 2.0)
        self._collapses = spec.get_bool("collapsedimensions", True)
        given = spec.fields.get("poolingdimensions")
        self._axes = None if given in (None, []) else spec.get_sizes("poolingdimensions", 1)
        if self._axes and not set(self._axes) <= {1, 2, 3}:
            raise spec.unsupported(f"poolingDimensions {given}")
        if self._kind not in ("max", "avg", "sum", "pnorm"):
            raise spec.unsupported(f"poolingType {self._kind}")

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Pool x [rows, channels, ...] over the layer's axes, by default all after the channels.

        Return what remains, by default [rows, channels]. Pooled axes are removed or, if the layer
        does not collapse dimensions, have size 1. ``rows`` is ignored.
        """
        axes = self._axes or tuple(range(2, x.ndim))
        keepdim = not self._collapses
        if self._kind == "max":
            return x.amax(axes, keepdim=keepdim)
        if self._kind == "avg":
            return x.mean(axes, keepdim=keepdim)
        if self._kind == "sum":
            return x.sum(axes, keepdim=keepdim)
        return (x.abs() ** self._power).sum(axes, keepdim=keepdim) ** (1 / self._power)


class ChannelwiseConvolution(Dl4jLayer):
    """DepthwiseConvolution2D, and SeparableConvolution2D, which then mixes the channels."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._refuse_softmax()
        self._window = SlidingWindow(spec, 0, 1)
        shapes = get_array_shapes(spec)
        self._is_separable = "pW" in shapes
        self._channels = spec.get_int("nin")
        output_channels = self._channels * spec.get_int("depthmultiplier", 1)
        kernels = (output_channels, 1, *spec.get_pair("kernelsize", 0))
        self._add_parameters(weight=kernels, mixed=shapes.get("pW"), bias=shapes.get("b"))

    def before_activation(self, x: Tensor) -> Tensor:
        """Return the convolution of each channel; mix the channels if the layer is separable."""
        window, x = self._window, self._window.to_nchw(self.input_dropout(x, self.training))
        bias = getattr(self, "bias", None)
        z = fn.conv2d(
            fn.pad(x, window.compute_padding(x.shape)),
            self.weight,
            None if self._is_separable else bias,
            window.stride,
            dilation=window.dilation,
            groups=self._channels,
        )
        z = fn.conv2d(z, self.mixed, bias) if self._is_separable else z
        return window.from_images(z)

    def map_arrays(self, arrays: Arrays) -> Arrays:
        """Return DL4J's arrays under the module's names, with W in torch's axis order."""
        mapped = super().map_arrays(arrays)
        if "W" in arrays:  # [times, channels, h, w], or [h, w, channels, times]
            order = (1, 0, 2, 3) if self._is_separable else (2, 3, 0, 1)
            mapped["weight"] = arrays["W"].transpose(order).reshape(self.weight.shape)
        return mapped


class Deconvolution(Convolution):
    """Deconvolution2D. In the mode Same, the output has the size of the input times the stride."""

    def before_activation(self, x: Tensor) -> Tensor:
        """Return the transposed convolution of x, with the padding cropped off."""
        window, x = self._window, self._window.to_nchw(self.input_dropout(x, self.training))
        z = fn.conv_transpose2d(x, self.weight, None, window.stride, dilation=window.dilation)
        for axis in (0, 1):
            size, stride = int(z.shape[2 + axis]), window.stride[axis]
            if window.mode == "same":
                wanted = int(x.shape[2 + axis]) * stride
                first = (size - wanted) // 2
                if first < 0:
                    raise self.spec.unsupported(
                        f"mode Same with a stride of {stride} above the kernel's size"
                    )
            else:
                first = window.padding[axis]
                wanted = size - 2 * first
            z = z.narrow(2 + axis, first, wanted)
        z = z + self.bias[:, None, None] if hasattr(self, "bias") else z
        return window.from_images(z)


class Resize(nn.Module):  # type: ignore[misc]
    """Upsampling, zero padding and cropping of images and sequences."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.input_dropout = InputDropout(spec)
        name = {"u": "size", "z": "padding", "c": "cropping"}[spec.kind[0]]
        self._sizes, self._kind = spec.get_sizes(name, 1 if name == "size" else 0), name
        self._is_sequence = "1d" in spec.kind
        self._channels_last = CHANNELS_LAST in (
            spec.get_word("format", ""),
            spec.get_word("dataformat", ""),
        )
        count = len(self._sizes)
        needed = (1, 2) if self._is_sequence or name == "size" else (4, 2)
        if count not in needed:
            raise spec.unsupported(f"{name} {list(self._sizes)}")
        if count == 2 and not self._is_sequence and name != "size":  # the same size on both sides
            self._sizes = tuple(size for size in self._sizes for _ in range(2))
        if count == 1:
            self._sizes = (*self._sizes, *self._sizes)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return x enlarged, padded or cropped."""
        x = x.movedim(-1, 1) if self._channels_last else x
        if self._kind == "size":
            x = self.input_dropout(x, self.training)
            for axis in range(2, x.ndim):
                x = x.repeat_interleave(self._sizes[axis - 2], dim=axis)
        else:  # torch's padding starts with the last dimension
            sizes = self._sizes if self._is_sequence else (*self._sizes[2:], *self._sizes[:2])
            x = fn.pad(x, [size if self._kind == "padding" else -size for size in sizes])
        return x.movedim(1, -1) if self._channels_last else x


class LocalResponseNormalization(nn.Module):  # type: ignore[misc]
    """LocalResponseNormalization: divides by a power of neighbouring channels' sum of squares."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self._reach = int(spec.get_float("n", 5.0)) // 2
        self._k, self._alpha = spec.get_float("k", 2.0), spec.get_float("alpha", 1e-4)
        self._beta = spec.get_float("beta", 0.75)
        self._axis = 3 if spec.get_word("dataformat", "nchw") == CHANNELS_LAST else 1

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return x / (k + alpha * sum of squares over n neighbouring channels) ** beta."""
        x = x.movedim(self._axis, -1)
        neighbours = fn.pad(x * x, (self._reach, self._reach)).unfold(-1, 2 * self._reach + 1, 1)
        normalized = x * (self._k + self._alpha * neighbours.sum(-1)) ** -self._beta
        return normalized.movedim(-1, self._axis)


L2_NORM_EPS = 1e-8  # default of L2NormalizeVertex


class UnaryVertex(nn.Module):  # type: ignore[misc]
    """A graph vertex with one input, such as ScaleVertex."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        if spec.kind not in VERTEX_FUNCTIONS:
            raise spec.unsupported("sparkstrom has no such vertex")
        if spec.kind == "reshapevertex" and spec.get_word("reshapeorder", "c") != "c":
            raise spec.unsupported("reshapeOrder f")

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return the result of the vertex's function for x."""
        return VERTEX_FUNCTIONS[self.spec.kind](x, self.spec)


class JoinVertex(nn.Module):  # type: ignore[misc]
    """MergeVertex or ElementWiseVertex, which join several inputs."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self._axis = spec.get_int("mergeaxis", 1)
        self._op = "merge" if spec.kind == "mergevertex" else spec.get_word("op", "add")
        known = self._op in JOIN_FUNCTIONS and (self._op != "subtract" or len(spec.sources) == 2)
        if self._op != "merge" and not known:
            raise spec.unsupported(f"op {self._op} of {len(spec.sources)} inputs")

    def forward(self, inputs: list[Tensor], rows: int) -> Tensor:
        """Join the inputs, given in DL4J's order, to one tensor."""
        if self._op == "merge":
            return torch.cat(inputs, dim=self._axis)
        joined = reduce(JOIN_FUNCTIONS[self._op], inputs)
        return joined / len(inputs) if self._op == "average" else joined


JOIN_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "average": torch.add,
    "subtract": torch.sub,
    "product": torch.mul,
    "max": torch.maximum,
}


def _l2_normalize(x: Tensor, spec: LayerSpec) -> Tensor:
    """Divide x by its L2 norm over the vertex's dimensions; by default, all except the rows."""
    given = spec.fields.get("dimension")
    axes = spec.get_sizes("dimension") if given else tuple(range(1, x.ndim))
    norms = torch.linalg.vector_norm(x, dim=axes, keepdim=True)
    return x / norms.clamp_min(spec.get_float("eps", L2_NORM_EPS))


# Kind of a vertex with one input -> (input, spec of the vertex) -> output.
VERTEX_FUNCTIONS: dict[str, Callable[[Tensor, LayerSpec], Tensor]] = {
    "scalevertex": lambda x, spec: x * spec.get_float("scalefactor", 1.0),
    "shiftvertex": lambda x, spec: x + spec.get_float("shiftfactor", 0.0),
    # The columns ``from`` to ``to``, inclusive.
    "subsetvertex": lambda x, spec: x[:, spec.get_int("from", 0, 0) : spec.get_int("to", 0, 0) + 1],
    "l2normalizevertex": _l2_normalize,
    # The new shape; the rows are unchanged.
    "reshapevertex": lambda x, spec: x.reshape(len(x), *spec.get_sizes("newshape", -1)[1:]),
    "reversetimeseriesvertex": lambda x, _: x.flip(2),
    "poolhelpervertex": lambda x, _: x[:, :, 1:, 1:],
}


FOLDING_PREPROCESSORS = ("rnntofeedforwardpreprocessor", "rnntocnnpreprocessor")
UNFOLDING_PREPROCESSORS = ("feedforwardtornnpreprocessor", "cnntornnpreprocessor")


class Dl4jModule(nn.Module):  # type: ignore[misc]
    """A saved network as a torch module; in evaluation mode, it computes DL4J's ``output(x)``."""

    def __init__(self, network: SavedNetwork) -> None:
        super().__init__()
        _refuse_folded_output(network)
        named = {
            f"{i}_{_make_module_key(s.name)}": make_module(s) for i, s in enumerate(network.specs)
        }
        self.layers = nn.ModuleDict(named)
        self._sources = [spec.sources for spec in network.specs]
        self._frozen = [spec.frozen for spec in network.specs]
        self._ends_training = [spec.stops_gradients for spec in network.specs]
        self.tbptt_length, self.epochs = network.tbptt_length, network.epochs
        self.train()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs for a minibatch, after the last activation."""
        return self._run_layers(x, len(self.layers))

    def before_activation(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's values before its activation, from which the loss is computed."""
        last: Any = self.last_layer
        before = self._run_layers(x, len(self.layers) - 1)
        return last.before_activation(before)

    @property
    def last_layer(self) -> nn.Module:
        """The network's last layer."""
        return list(self.layers.values())[-1]

    def train(self, mode: bool = True) -> Dl4jModule:
        """Set training or evaluation mode; frozen layers stay in evaluation mode."""
        super().train(mode)
        for layer, frozen in zip(self.layers.values(), self._frozen, strict=True):
            if frozen:
                layer.train(False)
        return self

    def _run_layers(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Run the first ``count`` layers; return the next layer's input, or the final output."""
        rows, outputs = len(x), {NETWORK_INPUT: x}
        for number, layer in enumerate(list(self.layers.values())[:count]):
            inputs = [outputs[source] for source in self._sources[number]]
            if self._ends_training[number]:
                inputs = [each.detach() for each in inputs]
            outputs[number] = layer(inputs if isinstance(layer, JoinVertex) else inputs[0], rows)
        last = count - 1 if count == len(self.layers) else self._sources[count][0]
        return outputs[last]

    @contextlib.contextmanager
    def carrying_state(self) -> Iterator[None]:
        """Make recurrent layers carry their state from call to call within the context."""
        layers = [layer for layer in self.modules() if isinstance(layer, RecurrentLayer)]
        for layer in layers:
            layer.set_carry_state(True)
        try:
            yield
        finally:
            for layer in layers:
                layer.set_carry_state(False)

    def load_arrays(self, arrays: list[Arrays]) -> None:
        """Set parameters and statistics to DL4J's arrays, given for each layer."""
        state = self.state_dict()  # tensors that share the module's memory
        for name, values in self.map_arrays(arrays).items():
            state[name].copy_(torch.from_numpy(values))

    def map_arrays(self, arrays: list[Arrays]) -> dict[str, np.ndarray[Any, Any]]:
        """Convert DL4J's arrays of each layer to this module's names and shapes, as float32."""
        mapped: dict[str, np.ndarray[Any, Any]] = {}
        for (key, layer), layer_arrays in zip(self.layers.items(), arrays, strict=True):
            if layer_arrays:
                module: Any = layer
                for name, values in module.map_arrays(layer_arrays).items():
                    mapped[f"layers.{key}.{name}"] = np.ascontiguousarray(values, np.float32)
        return mapped


def make_module(spec: LayerSpec) -> nn.Module:
    """Make the torch module for a layer or vertex. Raise NotImported if it is unsupported."""
    if spec.kind in RESHAPING_PREPROCESSORS:
        return ReshapePreprocessor(spec)
    if spec.kind == LAST_TIME_STEP:
        return LastTimeStep()
    return MODULES_BY_KIND.get(spec.kind, UnaryVertex)(spec)


MODULES_BY_KIND: dict[str, Any] = {
    "denselayer": Dense,
    "outputlayer": Dense,
    "rnnoutputlayer": Dense,
    "losslayer": ParameterlessLayer,
    "rnnlosslayer": ParameterlessLayer,
    "activationlayer": ParameterlessLayer,
    "dropoutlayer": ParameterlessLayer,
    "batchnormalization": BatchNormalization,
    "embeddinglayer": Embedding,
    "embeddingsequencelayer": Embedding,
    "convolutionlayer": Convolution,
    "subsamplinglayer": Subsampling,
    "globalpoolinglayer": GlobalPooling,
    "lstm": Lstm,
    "graveslstm": Lstm,
    "simplernn": SimpleRnn,
    "bidirectional": Bidirectional,
    "gravesbidirectionallstm": Bidirectional,
    "repeatvector": RepeatVector,
    "convolution1dlayer": Convolution,
    "subsampling1dlayer": Subsampling,
    "deconvolution2d": Deconvolution,
    "separableconvolution2d": ChannelwiseConvolution,
    "depthwiseconvolution2d": ChannelwiseConvolution,
    "upsampling1d": Resize,
    "upsampling2d": Resize,
    "zeropadding1dlayer": Resize,
    "zeropaddinglayer": Resize,
    "cropping1d": Resize,
    "cropping2d": Resize,
    "localresponsenormalization": LocalResponseNormalization,
    "cnnlosslayer": ParameterlessLayer,
    "prelulayer": PRelu,
    "elementwisemultiplicationlayer": ElementWiseMultiplication,
    "mergevertex": JoinVertex,
    "elementwisevertex": JoinVertex,
}


def _make_module_key(name: str) -> str:
    """Replace the characters of a name that torch does not allow in a module's name."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)


def _refuse_folded_output(network: SavedNetwork) -> None:
    """Raise NotImported if each step of a sequence would reach the loss as a separate row."""
    folded_by: dict[int, LayerSpec | None] = {NETWORK_INPUT: None}
    for number, spec in enumerate(network.specs):
        if spec.kind in FOLDING_PREPROCESSORS:
            folded_by[number] = spec
        elif spec.kind in UNFOLDING_PREPROCESSORS:
            folded_by[number] = None
        else:
            before = (folded_by[source] for source in spec.sources)
            folded_by[number] = next((each for each in before if each is not None), None)
    folded = folded_by[len(network.specs) - 1]
    if folded is not None and network.specs[-1].kind in LOSS_LAYERS:
        raise folded.unsupported(
            "it turns each step of a sequence into a row",
            "end the network with an RnnOutputLayer, or with LastTimeStep",
        )
