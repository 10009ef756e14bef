"""Which arrays a layer has, in which shape and order they lie in coefficients.bin.

From DL4J's ParamInitializers, which cut one row vector into pieces, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.models.dl4j.network_steps import SavedNetwork, Step

WEIGHT, BIAS, GAIN, STATISTIC = ROLES = ("weight", "bias", "gain", "statistic")
LOG_STD, VARIANCE = "log10stdev", "var"
Arrays = dict[str, NDArray[np.float32]]


class Piece(NamedTuple):
    """One array: DL4J's name of it, its shape and order there, and what it is for training."""

    name: str
    shape: tuple[int, ...]
    order: Literal["C", "F"]  # "F" for most, "C" for convolutions
    role: str

    @property
    def size(self) -> int:
        """How many values."""
        return prod(self.shape)


def pieces_of(step: Step) -> list[Piece]:
    """In the order of the file."""
    match step.kind:
        case "denselayer" | "outputlayer" | "rnnoutputlayer":
            return list(_dense(step, bias=True))
        case "embeddinglayer":
            return list(_dense(step, bias=True))
        case "embeddingsequencelayer":
            return list(_dense(step, bias=False))
        case "convolutionlayer":
            return list(_convolution(step, step.pair("kernelsize", 0)))
        case "lstm":
            return list(_lstm(step, peepholes=0))
        case "graveslstm":
            return list(_lstm(step, peepholes=3))
        case "simplernn":
            return list(_simple(step))
        case "bidirectional":
            return list(_both_ways(step))
        case "gravesbidirectionallstm":
            return list(_graves_both_ways(step))
        case "batchnormalization":
            return list(_batch_normalization(step))
        case "convolution1dlayer":
            return list(_convolution_of_sequences(step))
        case "deconvolution2d":
            return list(_convolution(step, step.pair("kernelsize", 0), turned=True))
        case "separableconvolution2d" | "depthwiseconvolution2d":
            return list(_by_channel(step))
        case "prelulayer":
            return [Piece("W", slopes_shape(step), "F", WEIGHT)]
        case "elementwisemultiplicationlayer":
            width = (step.whole("nout"),)
            return [Piece("W", width, "C", WEIGHT), Piece("b", width, "C", BIAS)]
    return []


def _dense(step: Step, *, bias: bool) -> Iterator[Piece]:
    n_in, n_out = step.whole("nin"), step.whole("nout")
    yield Piece("W", (n_in, n_out), "F", WEIGHT)
    if step.flag("hasbias", bias):
        yield Piece("b", (n_out,), "C", BIAS)
    if step.kind == "denselayer" and step.flag("haslayernorm", False):
        yield Piece("g", (n_out,), "C", WEIGHT)  # penalized as weights are


def _convolution(step: Step, kernel: tuple[int, int], *, turned: bool = False) -> Iterator[Piece]:
    """``turned``: of a deconvolution, inputs come first."""
    n_in, n_out = step.whole("nin"), step.whole("nout")
    if step.flag("hasbias", True):
        yield Piece("b", (n_out,), "C", BIAS)
    channels = (n_in, n_out) if turned else (n_out, n_in)
    yield Piece("W", (*channels, *kernel), "C", WEIGHT)


def _convolution_of_sequences(step: Step) -> Iterator[Piece]:
    """Up to 1.0.0-beta7 kernels lie as those of images, from 1.0.0-M1 on as [size, nIn, nOut].

    Nothing in a file tells beta7 from M1, so ``rnnDataFormat``, which beta7 brought, stands for M1.
    """
    size = step.sizes("kernelsize", 1)[0]
    for piece in _convolution(step, (size, 1)):
        if piece.name == "W" and "rnndataformat" in step.fields:
            piece = piece._replace(shape=(size, step.whole("nin"), step.whole("nout")))
        yield piece


def _by_channel(step: Step) -> Iterator[Piece]:
    """Each channel has kernels of its own; a separable convolution mixes channels afterwards."""
    n_in, n_out = step.whole("nin"), step.whole("nout")
    kernel, times = step.pair("kernelsize", 0), step.whole("depthmultiplier", 1)
    separable = step.kind == "separableconvolution2d"
    if step.flag("hasbias", True):
        yield Piece("b", (n_out,), "C", BIAS)
    shape = (times, n_in, *kernel) if separable else (*kernel, n_in, times)
    yield Piece("W", shape, "C", WEIGHT)
    if separable:
        yield Piece("pW", (n_out, n_in * times, 1, 1), "C", WEIGHT)


def slopes_shape(step: Step) -> tuple[int, ...]:
    """Of PReLU, without rows: one slope for all along a shared dimension; these count from 1."""
    shape = list(step.sizes("inputshape", 1))
    for axis in step.sizes("sharedaxes", 1) if step.fields.get("sharedaxes") else ():
        if axis > len(shape):
            raise step.refuse(f"sharedAxes {step.fields['sharedaxes']} of shape {shape}")
        shape[axis - 1] = 1
    return tuple(shape)


def _lstm(step: Step, *, peepholes: int) -> Iterator[Piece]:
    n_in, n_out = step.whole("nin"), step.whole("nout")
    yield Piece("W", (n_in, 4 * n_out), "F", WEIGHT)
    yield Piece("RW", (n_out, 4 * n_out + peepholes), "F", WEIGHT)
    yield Piece("b", (4 * n_out,), "C", BIAS)


def _simple(step: Step) -> Iterator[Piece]:
    n_in, n_out = step.whole("nin"), step.whole("nout")
    yield Piece("W", (n_in, n_out), "F", WEIGHT)
    yield Piece("RW", (n_out, n_out), "F", WEIGHT)
    yield Piece("b", (n_out,), "C", BIAS)
    if step.flag("haslayernorm", False):
        yield Piece("g", (2 * n_out,), "C", WEIGHT)


def _both_ways(step: Step) -> Iterator[Piece]:
    pieces = pieces_of(replace(step, kind=str(step.fields["within"])))
    for way in "fb":
        yield from (piece._replace(name=f"{way}{piece.name}") for piece in pieces)


def _graves_both_ways(step: Step) -> Iterator[Piece]:
    pieces = list(_lstm(step, peepholes=3))
    for way in "FB":
        yield from (piece._replace(name=f"{piece.name}{way}") for piece in pieces)


def _batch_normalization(step: Step) -> Iterator[Piece]:
    n_out = step.whole("nout")
    if not step.flag("lockgammabeta", False):
        yield Piece("gamma", (n_out,), "C", GAIN)
        yield Piece("beta", (n_out,), "C", GAIN)
    yield Piece("mean", (n_out,), "C", STATISTIC)
    yield Piece(LOG_STD if keeps_log_std(step) else VARIANCE, (n_out,), "C", STATISTIC)


def keeps_log_std(step: Step) -> bool:
    """What it has as its second statistic: versions before 1.0.0-beta4 have the variance."""
    if step.variables:
        return VARIANCE not in step.variables
    return step.flag("uselogstd", False)


def parameter_count(network: SavedNetwork) -> int:
    """How many values coefficients.bin must have."""
    return sum(piece.size for step in network.steps for piece in pieces_of(step))


def cut(network: SavedNetwork, flat: NDArray[np.float32]) -> list[Arrays]:
    """The arrays of each step, in DL4J's shapes."""
    at, made = 0, []
    for step in network.steps:
        arrays: Arrays = {}
        for piece in pieces_of(step):
            values = flat[at : at + piece.size]
            arrays[piece.name] = values.reshape(piece.shape, order=piece.order)
            at += piece.size
        made.append(arrays)
    return made
