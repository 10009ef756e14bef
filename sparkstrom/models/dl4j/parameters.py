"""Describe the arrays of DL4J's layers: shape, order in coefficients.bin, and how each is trained.

DL4J's ParamInitializers divide one row vector into arrays, layer by layer. An updater is DL4J's
name for an optimizer; each array has one. The state in updaterState.bin consists of blocks.
Neighbouring arrays with equal updaters share a block, and a block contains the updater's state
vectors one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.models.dl4j.configuration import (
    PREDICT_REMEDY,
    LayerSpec,
    SavedNetwork,
    TypedObject,
    parse_typed,
    read_float,
)
from sparkstrom.models.dl4j.files import NoDl4jNetwork

WEIGHT, BIAS, GAIN, STATISTIC = ROLES = ("weight", "bias", "gain", "statistic")
LOG_STD, VARIANCE = "log10stdev", "var"
Arrays = dict[str, NDArray[np.float32]]


class ArraySpec(NamedTuple):
    """One array of a layer."""

    name: str  # DL4J's name of the array
    shape: tuple[int, ...]  # the array's sizes
    order: Literal["C", "F"]  # in the file: "C" row-major (convolutions, vectors), "F" column-major
    role: str  # one of ``ROLES``; determines how the array is trained

    @property
    def size(self) -> int:
        """The number of values."""
        return prod(self.shape)


def list_array_specs(spec: LayerSpec) -> list[ArraySpec]:
    """Return the arrays of a layer in the order of coefficients.bin."""
    match spec.kind:
        case "denselayer" | "outputlayer" | "rnnoutputlayer" | "embeddinglayer":
            return list(_dense_arrays(spec, bias=True))
        case "embeddingsequencelayer":
            return list(_dense_arrays(spec, bias=False))
        case "convolutionlayer":
            return list(_convolution_arrays(spec, spec.get_pair("kernelsize", 0)))
        case "lstm":
            return list(_lstm_arrays(spec, peepholes=0))
        case "graveslstm":
            return list(_lstm_arrays(spec, peepholes=3))
        case "simplernn":
            return list(_simple_rnn_arrays(spec))
        case "bidirectional":
            return list(_bidirectional_arrays(spec))
        case "gravesbidirectionallstm":
            return list(_graves_bidirectional_arrays(spec))
        case "batchnormalization":
            return list(_batch_norm_arrays(spec))
        case "convolution1dlayer":
            return list(_convolution1d_arrays(spec))
        case "deconvolution2d":
            return list(_convolution_arrays(spec, spec.get_pair("kernelsize", 0), transposed=True))
        case "separableconvolution2d" | "depthwiseconvolution2d":
            return list(_channelwise_arrays(spec))
        case "prelulayer":
            return [ArraySpec("W", get_prelu_shape(spec), "F", WEIGHT)]
        case "elementwisemultiplicationlayer":
            width = (spec.get_int("nout"),)
            return [ArraySpec("W", width, "C", WEIGHT), ArraySpec("b", width, "C", BIAS)]
    return []


def get_array_shapes(spec: LayerSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's arrays, by DL4J's names of the arrays."""
    return {piece.name: piece.shape for piece in list_array_specs(spec)}


def _dense_arrays(spec: LayerSpec, *, bias: bool) -> Iterator[ArraySpec]:
    """Yield the arrays of a dense layer; ``bias`` is whether it has a bias by default."""
    n_in, n_out = spec.get_int("nin"), spec.get_int("nout")
    yield ArraySpec("W", (n_in, n_out), "F", WEIGHT)
    if spec.get_bool("hasbias", bias):
        yield ArraySpec("b", (n_out,), "C", BIAS)
    if spec.kind == "denselayer" and spec.get_bool("haslayernorm", False):
        yield ArraySpec("g", (n_out,), "C", WEIGHT)  # penalized as weights are


def _convolution_arrays(
    spec: LayerSpec, kernel: tuple[int, int], *, transposed: bool = False
) -> Iterator[ArraySpec]:
    """Yield the arrays of a convolution; the kernel has output channels first unless transposed."""
    n_in, n_out = spec.get_int("nin"), spec.get_int("nout")
    if spec.get_bool("hasbias", True):
        yield ArraySpec("b", (n_out,), "C", BIAS)
    channels = (n_in, n_out) if transposed else (n_out, n_in)
    yield ArraySpec("W", (*channels, *kernel), "C", WEIGHT)


def _convolution1d_arrays(spec: LayerSpec) -> Iterator[ArraySpec]:
    """Yield the arrays of a 1D convolution.

    Kernels are stored like those for images up to 1.0.0-beta7, and as [size, nIn, nOut] from
    1.0.0-M1 on. A file does not show which of the two wrote it, because both write
    ``rnnDataFormat``; its presence is assumed to mean M1.
    """
    size = spec.get_sizes("kernelsize", 1)[0]
    for piece in _convolution_arrays(spec, (size, 1)):
        if piece.name == "W" and "rnndataformat" in spec.fields:
            piece = piece._replace(shape=(size, spec.get_int("nin"), spec.get_int("nout")))
        yield piece


def _channelwise_arrays(spec: LayerSpec) -> Iterator[ArraySpec]:
    """Yield the arrays of a depthwise or separable convolution."""
    n_in, n_out = spec.get_int("nin"), spec.get_int("nout")
    kernel, times = spec.get_pair("kernelsize", 0), spec.get_int("depthmultiplier", 1)
    separable = spec.kind == "separableconvolution2d"
    if spec.get_bool("hasbias", True):
        yield ArraySpec("b", (n_out,), "C", BIAS)
    shape = (times, n_in, *kernel) if separable else (*kernel, n_in, times)
    yield ArraySpec("W", shape, "C", WEIGHT)
    if separable:
        yield ArraySpec("pW", (n_out, n_in * times, 1, 1), "C", WEIGHT)


def get_prelu_shape(spec: LayerSpec) -> tuple[int, ...]:
    """Return the shape of PReLU's slopes, without a dimension for the rows of a minibatch.

    Axes along which slopes are shared have size 1. DL4J counts these axes from 1. Raise
    NotImported for an axis that does not exist.
    """
    shape = list(spec.get_sizes("inputshape", 1))
    for axis in spec.get_sizes("sharedaxes", 1) if spec.fields.get("sharedaxes") else ():
        if axis > len(shape):
            raise spec.unsupported(f"sharedAxes {spec.fields['sharedaxes']} of shape {shape}")
        shape[axis - 1] = 1
    return tuple(shape)


def _lstm_arrays(spec: LayerSpec, *, peepholes: int) -> Iterator[ArraySpec]:
    """Yield the arrays of an LSTM; ``peepholes`` is their column count in the recurrent weights."""
    n_in, n_out = spec.get_int("nin"), spec.get_int("nout")
    yield ArraySpec("W", (n_in, 4 * n_out), "F", WEIGHT)
    yield ArraySpec("RW", (n_out, 4 * n_out + peepholes), "F", WEIGHT)
    yield ArraySpec("b", (4 * n_out,), "C", BIAS)


def _simple_rnn_arrays(spec: LayerSpec) -> Iterator[ArraySpec]:
    """Yield the arrays of a SimpleRnn."""
    n_in, n_out = spec.get_int("nin"), spec.get_int("nout")
    yield ArraySpec("W", (n_in, n_out), "F", WEIGHT)
    yield ArraySpec("RW", (n_out, n_out), "F", WEIGHT)
    yield ArraySpec("b", (n_out,), "C", BIAS)
    if spec.get_bool("haslayernorm", False):
        yield ArraySpec("g", (2 * n_out,), "C", WEIGHT)


def _bidirectional_arrays(spec: LayerSpec) -> Iterator[ArraySpec]:
    """Yield the inner layer's arrays for both directions, with the prefix f or b."""
    pieces = list_array_specs(replace(spec, kind=str(spec.fields["within"])))
    for direction in "fb":
        yield from (piece._replace(name=f"{direction}{piece.name}") for piece in pieces)


def _graves_bidirectional_arrays(spec: LayerSpec) -> Iterator[ArraySpec]:
    """Yield the arrays of both directions, with the suffix F or B."""
    pieces = list(_lstm_arrays(spec, peepholes=3))
    for direction in "FB":
        yield from (piece._replace(name=f"{piece.name}{direction}") for piece in pieces)


def _batch_norm_arrays(spec: LayerSpec) -> Iterator[ArraySpec]:
    """Yield the arrays of BatchNormalization: gamma and beta unless locked, then the statistics."""
    n_out = spec.get_int("nout")
    if not spec.get_bool("lockgammabeta", False):
        yield ArraySpec("gamma", (n_out,), "C", GAIN)
        yield ArraySpec("beta", (n_out,), "C", GAIN)
    yield ArraySpec("mean", (n_out,), "C", STATISTIC)
    yield ArraySpec(LOG_STD if has_log_std(spec) else VARIANCE, (n_out,), "C", STATISTIC)


def has_log_std(spec: LayerSpec) -> bool:
    """Return whether BatchNormalization stores log10 of the standard deviation, not the variance.

    DL4J before 1.0.0-beta4 always stored the variance.
    """
    if spec.variables:
        return VARIANCE not in spec.variables
    return spec.get_bool("uselogstd", False)


def count_parameters(network: SavedNetwork) -> int:
    """Return the number of values in coefficients.bin."""
    return sum(piece.size for spec in network.specs for piece in list_array_specs(spec))


def split_parameters(network: SavedNetwork, flat: NDArray[np.float32]) -> list[Arrays]:
    """Divide the content of coefficients.bin into the arrays of each layer, in DL4J's shapes."""
    offset, layers = 0, []
    for spec in network.specs:
        arrays: Arrays = {}
        for piece in list_array_specs(spec):
            values = flat[offset : offset + piece.size]
            arrays[piece.name] = values.reshape(piece.shape, order=piece.order)
            offset += piece.size
        layers.append(arrays)
    return layers


NO_OP = "noop"
# State vectors of each updater, in their order within a block.
STATE_VECTORS: dict[str, tuple[str, ...]] = {
    NO_OP: (),
    "none": (),
    "sgd": (),
    "nesterovs": ("velocity",),
    "adam": ("mean", "square"),
    "adabelief": ("mean", "square"),
    "amsgrad": ("mean", "square", "largest"),
    "adamax": ("mean", "largest"),
    "nadam": ("mean", "square"),
    "adadelta": ("square", "change"),
    "adagrad": ("square",),
    "rmsprop": ("square",),
}
OPTIMIZER_DEFAULTS: dict[str, dict[str, float]] = {  # org.nd4j.linalg.learning.config
    "sgd": {"learningrate": 1e-3},
    "nesterovs": {"learningrate": 0.1, "momentum": 0.9},
    "adam": {"learningrate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "adabelief": {"learningrate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-14},
    "amsgrad": {"learningrate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "adamax": {"learningrate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "nadam": {"learningrate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "adadelta": {"rho": 0.95, "epsilon": 1e-6},
    "adagrad": {"learningrate": 0.1, "epsilon": 1e-6},
    "rmsprop": {"learningrate": 0.1, "rmsdecay": 0.95, "epsilon": 1e-8},
}
ADAGRAD_INITIAL = 1e-6  # does not depend on AdaGrad's epsilon
# Options that DL4J 0.8 and earlier wrote next to the updater's name -> their current names.
LEGACY_OPTION_NAMES = {
    "adammeandecay": "beta1",
    "adamvardecay": "beta2",
    **{name: name for name in ("learningrate", "momentum", "rho", "rmsdecay", "epsilon")},
}


def get_initial_vector_value(kind: str, options: Mapping[str, Any]) -> float:
    """Return the initial value of the state vectors of an updater of this kind and options."""
    if kind == "adagrad":
        return ADAGRAD_INITIAL
    return float(options["epsilon"]) if kind == "rmsprop" else 0.0


@dataclass(frozen=True, slots=True)
class OptimizerConf:
    """An updater's class and options. Neighbouring arrays with equal confs share a state block.

    Attributes:
        kind: the short name of its class, in lower case.
        options: its numeric options, by DL4J's name in lower case.
        schedules: its schedules by option, as JSON text.
    """

    kind: str
    options: dict[str, float] = field(default_factory=dict)
    schedules: str = "{}"

    @property
    def vectors(self) -> tuple[str, ...] | None:
        """The names of the updater's state vectors; None if its class is unknown."""
        return STATE_VECTORS.get(self.kind)


@dataclass(frozen=True, slots=True)
class TrainingRule:
    """How one array is trained."""

    optimizer: OptimizerConf  # the updater
    l1: float = 0.0  # weight of the sum of absolute values
    l2: float = 0.0  # weight of half the sum of squares
    decay: float = 0.0  # weight decay per step
    decay_by_rate: bool = True  # whether ``decay`` is multiplied by the learning rate
    normalization: str = "none"  # gradient normalization: DL4J's constant in lower case
    threshold: float = 1.0  # limit for gradient clipping


def get_training_rule(spec: LayerSpec, piece: ArraySpec) -> TrainingRule:
    """Return how the array ``piece`` of a layer is trained: not at all if frozen or a statistic."""
    if spec.frozen or piece.role == STATISTIC:
        return TrainingRule(OptimizerConf(NO_OP))
    bias = piece.role == BIAS
    conf = _read_optimizer(spec, "biasupdater") if bias else None
    penalties = _read_penalties(spec, bias) if piece.role in (WEIGHT, BIAS) else {}
    return TrainingRule(
        conf or _read_optimizer(spec, "iupdater") or _read_legacy_optimizer(spec),
        normalization=spec.get_word("gradientnormalization", "none"),
        threshold=spec.get_float("gradientnormalizationthreshold", 1.0),
        **penalties,
    )


def _read_optimizer(spec: LayerSpec, name: str) -> OptimizerConf | None:
    """Return the updater in the layer's field ``name``, or None."""
    parsed = parse_typed(spec.fields.get(name))
    return None if parsed is None else _make_optimizer_conf(spec, parsed)


def _read_legacy_optimizer(spec: LayerSpec) -> OptimizerConf:
    """Return the updater as DL4J 0.8 and earlier wrote it; kind "none" if the layer has none."""
    name = spec.fields.get("updater")
    if not isinstance(name, str):
        return OptimizerConf("none")
    options = {
        new: spec.fields[old] for old, new in LEGACY_OPTION_NAMES.items() if old in spec.fields
    }
    return _make_optimizer_conf(spec, TypedObject(name.lower(), options))


def _make_optimizer_conf(spec: LayerSpec, parsed: TypedObject) -> OptimizerConf:
    """Return an updater with its options, completed by DL4J's defaults, and its schedules."""
    where, fields = f"{parsed.kind} of {spec.label}", parsed.fields
    options = {
        name: read_float(spec.path, where, fields, name, default)
        for name, default in OPTIMIZER_DEFAULTS.get(parsed.kind, {}).items()
    }
    schedules = {k: v for k, v in fields.items() if k.endswith("schedule") and v}
    return OptimizerConf(parsed.kind, options, json.dumps(schedules, sort_keys=True))


def _read_penalties(spec: LayerSpec, bias: bool) -> dict[str, Any]:
    """Return l1, l2 and weight decay of a layer's weights or biases, as fields of TrainingRule."""
    listed = spec.fields.get("regularizationbias" if bias else "regularization")
    end = "bias" if bias else ""
    if not isinstance(listed, list):  # before 1.0.0-beta4, l2 meant what is now weight decay
        return {
            "l1": spec.get_float(f"l1{end}", 0.0),
            "decay": spec.get_float(f"l2{end}", 0.0),
            "decay_by_rate": False,
        }
    made: dict[str, Any] = {}
    for parsed in filter(None, map(parse_typed, listed)):
        if parsed.kind == "l1regularization":
            made["l1"] = _read_constant(spec, parsed.fields.get("l1"))
        elif parsed.kind == "l2regularization":
            made["l2"] = _read_constant(spec, parsed.fields.get("l2"))
        elif parsed.kind == "weightdecay":
            made["decay"] = _read_constant(spec, parsed.fields.get("coeff"))
            made["decay_by_rate"] = bool(parsed.fields.get("applylr", True))
        else:
            raise spec.unsupported(f"regularization {parsed.kind}", PREDICT_REMEDY)
    return made


def _read_constant(spec: LayerSpec, value: Any) -> float:
    """Return a number, or the value of a constant schedule; raise NotImported for others."""
    parsed = parse_typed(value)
    if parsed is not None and parsed.kind == "fixedschedule":
        value = parsed.fields.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise spec.unsupported("regularization that follows a schedule", PREDICT_REMEDY)
    return float(value)


@dataclass(slots=True)
class StateBlock:
    """Neighbouring arrays with equal updaters, whose state is stored together."""

    optimizer: OptimizerConf  # the updater
    pieces: list[tuple[int, ArraySpec]]  # (layer number, spec) of each array

    @property
    def size(self) -> int:
        """The number of values in one state vector."""
        return sum(piece.size for _, piece in self.pieces)


def list_state_blocks(network: SavedNetwork) -> list[StateBlock]:
    """Return the blocks of updaterState.bin in order."""
    blocks: list[StateBlock] = []
    for number, spec in enumerate(network.specs):
        for piece in list_array_specs(spec):
            updater = get_training_rule(spec, piece).optimizer
            if not blocks or blocks[-1].optimizer != updater:
                blocks.append(StateBlock(updater, []))
            blocks[-1].pieces.append((number, piece))
    return blocks


def count_state_values(network: SavedNetwork) -> int | None:
    """Return the number of values in updaterState.bin; None if an updater is unknown."""
    total = 0
    for block in list_state_blocks(network):
        if block.optimizer.vectors is None:
            return None
        total += len(block.optimizer.vectors) * block.size
    return total


def split_state(network: SavedNetwork, flat: NDArray[np.float32]) -> list[dict[str, Arrays]]:
    """Return each layer's state, in DL4J's shapes, as vector name -> array name -> values."""
    layers: list[dict[str, Arrays]] = [{} for _ in network.specs]
    offset = 0
    for block in list_state_blocks(network):
        for vector in block.optimizer.vectors or ():
            for number, piece in block.pieces:
                values = flat[offset : offset + piece.size]
                shaped = values.reshape(piece.shape, order=piece.order)
                layers[number].setdefault(vector, {})[piece.name] = shaped
                offset += piece.size
    if offset != flat.size:
        raise NoDl4jNetwork(network.path, f"updaterState.bin has {flat.size} values, not {offset}")
    return layers


def make_initial_state(network: SavedNetwork) -> NDArray[np.float32]:
    """Return the content of updaterState.bin before the first step, as one flat array."""
    parts = [
        np.full(
            len(block.optimizer.vectors or ()) * block.size,
            get_initial_vector_value(block.optimizer.kind, block.optimizer.options),
            np.float32,
        )
        for block in list_state_blocks(network)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def find_untrainable_options(network: SavedNetwork) -> Iterator[str]:
    """Yield the network's options that training here does not support."""
    yield from network.untrainable
    for spec in network.specs:
        for name, word in (("weightnoise", "weightNoise"), ("constraints", "constraints")):
            if spec.fields.get(name):
                yield f"{word} of {spec.label}"
        for piece in list_array_specs(spec):
            updater = get_training_rule(spec, piece).optimizer
            if updater.vectors is None:
                yield f"updater {updater.kind} of {spec.label}"
            if "momentum" in updater.schedules:  # momentumISchedule, or 0.9's momentumSchedule
                yield f"momentumSchedule of {spec.label}"
            rate = updater.options.get("learningrate", 1.0)  # DL4J <= 0.9 has another for biases
            if piece.role == BIAS and spec.get_float("biaslearningrate", rate) != rate:
                yield f"biasLearningRate of {spec.label}"
