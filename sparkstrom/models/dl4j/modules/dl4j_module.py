"""Dl4jModule: a network of DL4J's as one torch module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkstrom.models.dl4j.graph_vertices import INPUT
from sparkstrom.models.dl4j.layer_arrays import Arrays
from sparkstrom.models.dl4j.modules.dl4j_image_layers import (
    ByChannel,
    Deconvolution,
    LocalResponse,
    Resized,
)
from sparkstrom.models.dl4j.modules.dl4j_images import Convolution, GlobalPooling, Subsampling
from sparkstrom.models.dl4j.modules.dl4j_layers import (
    Dense,
    ElementWise,
    Embedding,
    Normalization,
    Plain,
    Reshaping,
    Slopes,
)
from sparkstrom.models.dl4j.modules.dl4j_recurrent import (
    BothWays,
    LastStep,
    Lstm,
    Recurrent,
    Repeated,
    SimpleRnn,
)
from sparkstrom.models.dl4j.modules.dl4j_vertices import JoinVertex, Vertex
from sparkstrom.models.dl4j.network_steps import ENDS, LAST_STEP, RESHAPING, SavedNetwork, Step

FOLDED = ("rnntofeedforwardpreprocessor", "rnntocnnpreprocessor")
UNFOLDED = ("feedforwardtornnpreprocessor", "cnntornnpreprocessor")


class Dl4jModule(nn.Module):  # type: ignore[misc]
    """Steps in their order. ``module(x)`` is what DL4J's ``output(x)`` answers."""

    def __init__(self, network: SavedNetwork) -> None:
        super().__init__()
        _refuse_folded(network)
        named = {f"{i}_{_word(s.name)}": made(s) for i, s in enumerate(network.steps)}
        self.layers = nn.ModuleDict(named)
        self._sources = [step.sources for step in network.steps]
        self._frozen = [step.frozen for step in network.steps]
        self._ends_training = [step.ends_training for step in network.steps]
        self.segment, self.epochs = network.segment, network.epochs
        self.train()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs of a minibatch, after the last activation."""
        return self._run(x, len(self.layers))

    def before_activation(self, x: torch.Tensor) -> torch.Tensor:
        """What the loss gets: the last layer's values before its activation."""
        last: Any = self.last
        before = self._run(x, len(self.layers) - 1)
        return last.before_activation(before)

    @property
    def last(self) -> nn.Module:
        """The last step."""
        return list(self.layers.values())[-1]

    def train(self, mode: bool = True) -> Dl4jModule:
        """But for frozen layers: without dropout, and with the statistics that they have."""
        super().train(mode)
        for layer, frozen in zip(self.layers.values(), self._frozen, strict=True):
            if frozen:
                layer.train(False)
        return self

    def _run(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        """The input of the step of this number; the output, behind all of them."""
        rows, made = len(x), {INPUT: x}
        for number, layer in enumerate(list(self.layers.values())[:steps]):
            given = [made[source] for source in self._sources[number]]
            if self._ends_training[number]:
                given = [one.detach() for one in given]
            made[number] = layer(given if isinstance(layer, JoinVertex) else given[0], rows)
        at = steps - 1 if steps == len(self.layers) else self._sources[steps][0]
        return made[at]

    @contextlib.contextmanager
    def carrying(self) -> Iterator[None]:
        """Recurrent layers go on where they ended: for sequences in segments."""
        layers = [layer for layer in self.modules() if isinstance(layer, Recurrent)]
        for layer in layers:
            layer.carry(True)
        try:
            yield
        finally:
            for layer in layers:
                layer.carry(False)

    def load_arrays(self, arrays: list[Arrays]) -> None:
        """Parameters and statistics, as ``layer_arrays.cut`` has them."""
        with torch.no_grad():
            for name, values in self.placed(arrays).items():
                self.get_parameter_or_buffer(name).copy_(torch.from_numpy(values))

    def placed(self, arrays: list[Arrays]) -> dict[str, np.ndarray[Any, Any]]:
        """DL4J's arrays of each step by the module's own names."""
        made: dict[str, np.ndarray[Any, Any]] = {}
        for (key, layer), given in zip(self.layers.items(), arrays, strict=True):
            if given:
                part: Any = layer
                for name, values in part.place(given).items():
                    made[f"layers.{key}.{name}"] = np.ascontiguousarray(values, np.float32)
        return made

    def get_parameter_or_buffer(self, name: str) -> torch.Tensor:
        """By its name in a state_dict."""
        found = dict(self.named_parameters()).get(name)
        return self.get_buffer(name) if found is None else found


def made(step: Step) -> nn.Module:
    """The module of one step."""
    if step.kind in RESHAPING:
        return Reshaping(step)
    if step.kind == LAST_STEP:
        return LastStep()
    return MODULES.get(step.kind, Vertex)(step)


MODULES: dict[str, Any] = {
    "denselayer": Dense,
    "outputlayer": Dense,
    "rnnoutputlayer": Dense,
    "losslayer": Plain,
    "rnnlosslayer": Plain,
    "activationlayer": Plain,
    "dropoutlayer": Plain,
    "batchnormalization": Normalization,
    "embeddinglayer": Embedding,
    "embeddingsequencelayer": Embedding,
    "convolutionlayer": Convolution,
    "subsamplinglayer": Subsampling,
    "globalpoolinglayer": GlobalPooling,
    "lstm": Lstm,
    "graveslstm": Lstm,
    "simplernn": SimpleRnn,
    "bidirectional": BothWays,
    "gravesbidirectionallstm": BothWays,
    "repeatvector": Repeated,
    "convolution1dlayer": Convolution,
    "subsampling1dlayer": Subsampling,
    "deconvolution2d": Deconvolution,
    "separableconvolution2d": ByChannel,
    "depthwiseconvolution2d": ByChannel,
    "upsampling1d": Resized,
    "upsampling2d": Resized,
    "zeropadding1dlayer": Resized,
    "zeropaddinglayer": Resized,
    "cropping1d": Resized,
    "cropping2d": Resized,
    "localresponsenormalization": LocalResponse,
    "cnnlosslayer": Plain,
    "prelulayer": Slopes,
    "elementwisemultiplicationlayer": ElementWise,
    "mergevertex": JoinVertex,
    "elementwisevertex": JoinVertex,
}


def _word(name: str) -> str:
    """Without what a module's name may not have."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name)


def _refuse_folded(network: SavedNetwork) -> None:
    """Outputs are one for each row of a minibatch."""
    folds: dict[int, Step | None] = {INPUT: None}
    for number, step in enumerate(network.steps):
        before = next((folds[s] for s in step.sources if folds[s] is not None), None)
        folds[number] = step if step.kind in FOLDED else None if step.kind in UNFOLDED else before
    folded = folds[len(network.steps) - 1]
    if folded is not None and network.steps[-1].kind in ENDS:
        raise folded.refuse(
            "after it each step of a sequence is a row of its own",
            "end the network with an RnnOutputLayer, or with LastTimeStep",
        )
