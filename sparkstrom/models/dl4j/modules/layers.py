"""DL4J's activations, dropout and layers as torch modules, which keep DL4J's shapes.

Images are [rows, channels, height, width], or channels last if the layer says NHWC; sequences are
[rows, features, steps]. If ND4J's formulas differ from torch's, ND4J's are used. Dropout is applied
to a layer's input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn import functional as fn

from sparkstrom.base.errors import UsageError
from sparkstrom.models.dl4j.configuration import LayerSpec, TypedObject, parse_typed, read_float
from sparkstrom.models.dl4j.parameters import (
    LOG_STD,
    STATISTIC,
    VARIANCE,
    Arrays,
    get_array_shapes,
    get_prelu_shape,
    list_array_specs,
)

Tensor: TypeAlias = torch.Tensor


class Dl4jActivation:
    """The activation in a layer's option ``field``, or ``default`` if absent. It can be pickled."""

    def __init__(
        self, spec: LayerSpec, field: str = "activationfn", default: str = "identity"
    ) -> None:
        parsed = spec.parse_activation(field) or TypedObject(default, {})
        if parsed.kind not in ACTIVATIONS:
            raise spec.unsupported(f"activation {parsed.kind}")
        self.kind = parsed.kind
        self._options = {
            name: float(value) for name, value in parsed.fields.items() if _is_number(value)
        }
        self._is_precise = parsed.fields.get("precise") is True

    def __call__(self, z: Tensor, training: bool) -> Tensor:
        """Return the activations of z [rows, channels, ...].

        ``training`` only affects RReLU. In evaluation, DL4J's RReLU returns max(z, (l + u) / 2),
        which is not a leaky ReLU; this implementation does the same.
        """
        if self.kind == "rrelu":
            low, high = self._options.get("l", 1 / 8), self._options.get("u", 1 / 3)
            return fn.rrelu(z, low, high, True) if training else z.clamp(min=(low + high) / 2)
        if self.kind == "gelu" and self._is_precise:
            cubed = z + (0.044715 * z) ** 3  # libnd4j's formula
            return z / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * cubed))
        return ACTIVATIONS[self.kind](z, self._options)


def _is_number(value: Any) -> bool:
    """Return whether a JSON value is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rational_tanh(z: Tensor, _: dict[str, float]) -> Tensor:
    """Return ND4J's activation RationalTanh: 1.7159 times a rational approximation of tanh."""
    y = (2 / 3 * z).abs()
    return 1.7159 * torch.sign(z) * (1 - 1 / (1 + y + y**2 + 1.41645 * y**4))


def _relu(z: Tensor, options: dict[str, float]) -> Tensor:
    """Return ReLU(z), with the options threshold, negativeslope and max of Keras' ReLU layer."""
    if not options:
        return fn.relu(z)
    threshold, slope = options.get("threshold", 0.0), options.get("negativeslope", 0.0)
    above = z.clamp(max=options["max"]) if options.get("max") else z
    return torch.where(z >= threshold, above, slope * (z - threshold))


# DL4J's name in lower case -> (z, options by name) -> activations.
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


DROPOUT_KINDS = ("dropout", "spatialdropout", "gaussiandropout", "gaussiannoise", "alphadropout")
SELU_ALPHA, SELU_LAMBDA = 1.6732632423543772, 1.0507009873554804  # Klambauer et al. 2017


class InputDropout:
    """The dropout or noise that a layer applies to its input in training. It can be pickled.

    It does nothing for a dropout that ``find_untrainable_dropout`` reports.
    """

    def __init__(self, spec: LayerSpec) -> None:
        parsed, self.kind, self._retain = _parse_dropout(spec), "", 1.0
        if parsed is None or find_untrainable_dropout(spec) is not None:
            return
        self.kind, self._retain = parsed.kind, _get_dropout_parameter(spec, parsed)
        scale = read_float(spec.path, spec.label, parsed.fields, "lambda", SELU_LAMBDA)
        self._dropped_value = -scale * read_float(
            spec.path, spec.label, parsed.fields, "alpha", SELU_ALPHA
        )

    def __call__(self, x: Tensor, training: bool) -> Tensor:
        """Return the input, with values dropped or noise added in training."""
        if not training or not self.kind:
            return x
        if self.kind == "dropout":
            return fn.dropout(x, 1 - self._retain)
        if self.kind == "spatialdropout":
            mask = torch.ones_like(x[(..., *[slice(0, 1)] * (x.ndim - 2))])
            return x * fn.dropout(mask, 1 - self._retain)
        if self.kind == "gaussiandropout":
            return x * (1 + math.sqrt(self._retain / (1 - self._retain)) * torch.randn_like(x))
        if self.kind == "alphadropout":  # preserves mean and variance of SELU's outputs
            p, off = self._retain, self._dropped_value
            gain = 1 / math.sqrt(p + off**2 * p * (1 - p))
            mask = torch.rand_like(x) < p
            return gain * torch.where(mask, x, off) - gain * (1 - p) * off
        return x + self._retain * torch.randn_like(x)


def find_untrainable_dropout(spec: LayerSpec) -> str | None:
    """Return a text about a layer's dropout if training here does not support it, else None."""
    parsed = _parse_dropout(spec)
    if parsed is None:
        return None
    if _is_scheduled(parsed):
        return f"dropout by schedule ({parsed.kind}) of {spec.label}"
    if parsed.kind not in DROPOUT_KINDS:
        return f"dropout {parsed.kind} of {spec.label}"
    if parsed.kind != "gaussiannoise" and not 0 < _get_dropout_parameter(spec, parsed) < 1:
        return f"dropout {parsed.kind} of {_get_dropout_parameter(spec, parsed):g} of {spec.label}"
    return None


def _parse_dropout(spec: LayerSpec) -> TypedObject | None:
    """Return the layer's dropout; None if the layer has none or if it changes nothing."""
    parsed = parse_typed(spec.fields.get("idropout"))
    if parsed is None:  # DL4J 0.9 and earlier wrote a number
        p = spec.get_float("dropout", 0.0)
        parsed = TypedObject("dropout", {"p": p}) if p else None
    if parsed is None or parsed.kind != "dropout" or _is_scheduled(parsed):
        return parsed
    return None if _get_dropout_parameter(spec, parsed) in (0.0, 1.0) else parsed


def _is_scheduled(parsed: TypedObject) -> bool:
    """Return whether an option of the dropout follows a schedule."""
    return any(name.endswith("schedule") and value for name, value in parsed.fields.items())


def _get_dropout_parameter(spec: LayerSpec, parsed: TypedObject) -> float:
    """Return the probability of keeping a value, or for noise its rate or standard deviation."""
    name = {"gaussiandropout": "rate", "gaussiannoise": "stddev"}.get(parsed.kind, "p")
    return read_float(spec.path, f"dropout of {spec.label}", parsed.fields, name, 0.0)


CHANNELS_LAST = "nhwc"
# DL4J's names of arrays -> names of the modules' parameters.
ARRAY_NAMES = {"W": "weight", "b": "bias", "g": "gain", "RW": "recurrent", "pW": "mixed"}
PER_POSITION_LOSSES = ("rnnlosslayer", "cnnlosslayer")  # a loss for each step or pixel


class Dl4jLayer(nn.Module):  # type: ignore[misc]
    """Base class of layers; ``default`` is the activation if DL4J wrote none.

    ``forward(x, rows)`` also gets the minibatch's number of rows, for preprocessors: after some of
    them, each step of a sequence is a row of x, so that x has more rows than the minibatch.
    """

    def __init__(self, spec: LayerSpec, default: str = "identity") -> None:
        super().__init__()
        self.spec = spec
        if "nwc" in (
            spec.get_word("rnndataformat", "ncw"),
            spec.get_word("timedistributedformat", "ncw"),
        ):
            raise spec.unsupported("sequences of the format NWC")
        self.activation = Dl4jActivation(spec, default=default)
        self.input_dropout = InputDropout(spec)

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return the layer's output for the input x. ``rows`` is ignored; see the class."""
        return self.activate(self.before_activation(x))

    def before_activation(self, x: Tensor) -> Tensor:
        """Return the values before the activation, from which a last layer's loss is computed."""
        return x

    def activate(self, z: Tensor) -> Tensor:
        """Return the activations of z."""
        return self.activation(z, self.training)

    def map_arrays(self, arrays: Arrays) -> Arrays:
        """Convert DL4J's parameters or state vectors to the module's names and shapes."""
        return {ARRAY_NAMES[name]: array for name, array in arrays.items()}

    def _add_parameters(self, **arrays: tuple[int, ...] | None) -> None:
        """Register a parameter of zeros for each name, with the given shape; None: no parameter."""
        for name, shape in arrays.items():
            if shape is not None:
                parameter = nn.Parameter(torch.zeros(shape), requires_grad=not self.spec.frozen)
                self.register_parameter(name, parameter)

    def _refuse_softmax(self) -> None:
        """Raise NotImported if the activation is softmax."""
        if self.activation.kind == "softmax":
            raise self.spec.unsupported(
                "its softmax is over a dimension that depends on the version"
            )


class Dense(Dl4jLayer):
    """DenseLayer, OutputLayer and RnnOutputLayer: x W + b, for sequences at each step."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        shapes = get_array_shapes(spec)
        self._has_gain = "g" in shapes
        weight = shapes["W"][::-1]
        self._add_parameters(weight=weight, bias=shapes.get("b"), gain=shapes.get("g"))

    def before_activation(self, x: Tensor) -> Tensor:
        """Return x W + b after input dropout; images are flattened."""
        x = self.input_dropout(x, self.training)
        if x.ndim == 3:
            return self._compute_linear(x.transpose(1, 2)).transpose(1, 2)
        return self._compute_linear(x.flatten(1) if x.ndim > 3 else x)

    def _compute_linear(self, x: Tensor) -> Tensor:
        """Return x W + b over the last dimension, layer-normalized if the layer has a gain."""
        if not self._has_gain:
            return nn.functional.linear(x, self.weight, getattr(self, "bias", None))
        z = layer_normalize(nn.functional.linear(x, self.weight)) * self.gain
        return z + self.bias if hasattr(self, "bias") else z

    def map_arrays(self, arrays: Arrays) -> Arrays:
        """Convert DL4J's arrays to the names of torch's Linear; W is transposed."""
        mapped = super().map_arrays(arrays)
        return {name: array.T if name == "weight" else array for name, array in mapped.items()}


def layer_normalize(z: Tensor) -> Tensor:
    """Return z with mean 0 and variance 1 in its last dimension; 0 if all its values are equal."""
    z = (z - z.mean(-1, keepdim=True)) / z.std(-1, keepdim=True, unbiased=False)
    return torch.nan_to_num(z, nan=0.0, posinf=0.0, neginf=0.0)


class Embedding(Dl4jLayer):
    """EmbeddingLayer (one index per row) and EmbeddingSequenceLayer (several indices per row)."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._has_sequences = spec.kind == "embeddingsequencelayer"
        if spec.get_word("outputformat", "ncw") != "ncw":
            raise spec.unsupported("outputFormat NWC")
        shapes = get_array_shapes(spec)
        self._add_parameters(weight=shapes["W"], bias=shapes.get("b"))

    def before_activation(self, x: Tensor) -> Tensor:
        """Return the vectors for the indices x: [rows, nOut], or [rows, nOut, steps]."""
        values = x.reshape(len(x), -1)
        out = self.weight[self._to_indices(values if self._has_sequences else values[:, 0])]
        out = out + self.bias if hasattr(self, "bias") else out
        return out.transpose(1, 2) if self._has_sequences else out

    def _to_indices(self, values: Tensor) -> Tensor:
        """Convert values to integer indices. Raise UsageError for an index outside [0, nIn)."""
        index = values.long()
        bad = torch.isnan(values) | (index < 0) | (index >= len(self.weight))
        if bad.any():
            at = torch.nonzero(bad)[0].tolist()
            raise UsageError(
                f"{self.spec.label}: index {values[tuple(at)].item():g} in row {at[0]} of a"
                f" minibatch: must be 0 to {len(self.weight) - 1}"
            )
        return index


class BatchNormalization(nn.BatchNorm1d):  # type: ignore[misc]
    """BatchNormalization over channels. Its option ``activation`` is ignored, as in DL4J."""

    def __init__(self, spec: LayerSpec) -> None:
        locked = spec.get_bool("lockgammabeta", False)
        decay = spec.get_float("decay", 0.9)
        super().__init__(
            spec.get_int("nout"), spec.get_float("eps", 1e-5), momentum=1 - decay, affine=not locked
        )
        constants = spec.get_float("gamma", 1.0), spec.get_float("beta", 0.0)
        if locked and constants != (1.0, 0.0):
            raise spec.unsupported(f"lockGammaBeta with gamma={constants[0]}, beta={constants[1]}")
        self.spec = spec
        self._channels_last = spec.get_word("cnn2dformat", "nchw") == CHANNELS_LAST
        for parameter in self.parameters():
            parameter.requires_grad_(not spec.frozen)

    def forward(self, x: Tensor, rows: int = 0) -> Tensor:
        """Return normalized x, in which channels are dimension 1, or the last with NHWC."""
        if self._channels_last and x.ndim == 4:
            return self._batch_normalize(x.movedim(-1, 1)).movedim(1, -1)
        return self._batch_normalize(x)

    def _batch_normalize(self, x: Tensor) -> Tensor:
        """Return normalized x; in training, update running statistics with the biased variance."""
        if not self.training:
            return super().forward(x)
        axes = [0, *range(2, x.ndim)]
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(axes), self.momentum)
            self.running_var.lerp_(x.var(axes, unbiased=False), self.momentum)
        return torch.batch_norm(x, self.weight, self.bias, None, None, True, 0.0, self.eps, False)

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any rank; torch's own check would reject images."""

    def map_arrays(self, arrays: Arrays) -> Arrays:
        """Convert DL4J's arrays to torch's names; log10 of the std becomes the variance."""
        names = {"gamma": "weight", "beta": "bias", "mean": "running_mean"}
        made = {new: arrays[old] for old, new in names.items() if old in arrays}
        if LOG_STD in arrays:
            made["running_var"] = np.square(10.0 ** arrays[LOG_STD].astype(np.float64))
        elif VARIANCE in arrays:
            made["running_var"] = arrays[VARIANCE]
        return made


class ParameterlessLayer(Dl4jLayer):
    """ActivationLayer, DropoutLayer, and the loss layers that have no parameters."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        if spec.get_word("format", "nchw") == CHANNELS_LAST:
            raise spec.unsupported("format NHWC")

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return x after dropout for a DropoutLayer, otherwise the activations of x."""
        if self.spec.kind == "dropoutlayer":
            return self.input_dropout(x, self.training)
        if x.ndim > 2 and self.spec.kind not in PER_POSITION_LOSSES:
            self._refuse_softmax()
        return self.activate(x)


class PRelu(Dl4jLayer):
    """PReLULayer: multiplies negative values by learned slopes."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self._add_parameters(slopes=get_prelu_shape(spec))

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return x after input dropout, with negative values multiplied by the slopes.

        ``rows`` is ignored; see ``Dl4jLayer``.
        """
        x = self.input_dropout(x, self.training)
        return torch.where(x < 0, x * self.slopes, x)

    def map_arrays(self, arrays: Arrays) -> Arrays:
        """Convert DL4J's array W to ``slopes``."""
        return {"slopes": arrays["W"]} if arrays else {}


class ElementWiseMultiplication(Dl4jLayer):
    """ElementWiseMultiplicationLayer: x * w + b for each feature."""

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        width = (spec.get_int("nout"),)
        self._add_parameters(weight=width, bias=width)

    def before_activation(self, x: Tensor) -> Tensor:
        """Return x * w + b after input dropout."""
        return self.input_dropout(x, self.training) * self.weight + self.bias


class ReshapePreprocessor(nn.Module):  # type: ignore[misc]
    """Preprocessor that reshapes the output of a layer for a layer with inputs of another layout.

    The layouts are rows [rows, features], sequences [rows, features, steps] and images [rows,
    channels, height, width] (or channels last). Each step of a sequence becomes a row or image of
    its own, all those of the first step before those of the second, and the other way round. Raise
    NotImported for sequences in the layout NWC.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self._kind = spec.kind
        if spec.get_word("rnndataformat", "ncw") != "ncw":
            raise spec.unsupported("rnnDataFormat NWC")
        if spec.kind in ("feedforwardtocnnpreprocessor", "rnntocnnpreprocessor"):
            size = [spec.get_int(name) for name in ("inputheight", "inputwidth", "numchannels")]
            last = spec.get_word("format", "nchw") == CHANNELS_LAST
            self._shape = size if last else [size[2], *size[:2]]

    def forward(self, x: Tensor, rows: int) -> Tensor:
        """Return x in the next layer's layout, unchanged if it already has that many dimensions.

        ``rows`` is the number of rows of the minibatch, by which rows are regrouped to sequences.
        """
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


def is_statistic(spec: LayerSpec, name: str) -> bool:
    """Return whether DL4J's array of this name is a running statistic, not a parameter."""
    return any(p.name == name and p.role == STATISTIC for p in list_array_specs(spec))
