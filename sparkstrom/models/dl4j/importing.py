"""from_dl4j: a network that Deeplearning4j saved, to go on with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.models.dl4j.data_normalizers import (
    Normalizer,
    fitted_features,
    read_normalizer,
)
from sparkstrom.models.dl4j.dense_import import dense_network
from sparkstrom.models.dl4j.dl4j_errors import NoDl4jNetwork
from sparkstrom.models.dl4j.graph_vertices import INPUT
from sparkstrom.models.dl4j.layer_arrays import Arrays, cut, parameter_count
from sparkstrom.models.dl4j.model_zip import COEFFICIENTS, NORMALIZER, UPDATER, ModelZip
from sparkstrom.models.dl4j.network_steps import RECURRENT, SavedNetwork, network_of
from sparkstrom.models.dl4j.training_rules import (
    blocks_of,
    cut_state,
    fresh_state,
    state_count,
)

TAKES_FEATURES = ("denselayer", "outputlayer", *RECURRENT)  # one for each of nIn, dimension 1


def from_dl4j(path: str | os.PathLike[str], *, training: bool = True) -> Any:
    """The model that ``ModelSerializer.writeModel`` wrote to ``path``, with its parameters.

    A network of dense layers becomes the built-in one where that computes and trains the same;
    all others a TorchModel, which needs torch. Either is trained by ``SparkNetwork`` with DL4J's
    loss, penalties and updater, and begins with the updater's saved state; ``predict`` answers
    what DL4J's ``output`` does, in its shapes; ``normalizer`` is the saved one, with
    ``transform(features)``, or None. ``training=False`` leaves out how it was trained.
    Raises NoDl4jNetwork for a file that is damaged or none of DL4J's, and NotImported, by name,
    for what sparkstrom has not, UsageError where there is no file.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"path={path!r}: give the path of a zip of DL4J's")
    with ModelZip(Path(path)) as file:
        configuration = file.configuration()
        network = network_of(file.path, configuration)
        arrays = cut(network, _parameters(file, network))
        states = _states(file, network) if training else []
        model = dense_network(network)
        if model is not None:
            model.take(arrays, states, network.iterations)
        else:
            model = _torch_model(file.path, configuration, training)
            model.load_arrays(arrays)
            model.bind(model.initial())
            if states:
                model.begin_with(states, network.iterations)
        if file.has(NORMALIZER):
            model.normalizer = file.read(NORMALIZER, lambda r: read_normalizer(file.path, r))
            _check_width(network, model.normalizer)
    return model


def _check_width(network: SavedNetwork, normalizer: Normalizer) -> None:
    """Raise NoDl4jNetwork where it is of other rows than the first layers take."""
    fitted = fitted_features(normalizer)
    for step in network.steps:
        first = INPUT in step.sources and step.kind in TAKES_FEATURES
        if first and fitted not in (None, step.whole("nin")):
            why = f"normalizer.bin is of {fitted} features, {step.where} takes {step.whole('nin')}"
            raise NoDl4jNetwork(network.path, why)


def _parameters(file: ModelZip, network: SavedNetwork) -> Any:
    count = parameter_count(network)
    if not count:
        import numpy as np

        return np.zeros(0, np.float32)
    return file.values(COEFFICIENTS, count)


def _states(file: ModelZip, network: SavedNetwork) -> list[dict[str, Arrays]]:
    """The updater's, where its updaters are known: as saved, or fresh.

    Without a saved one DL4J begins anew, but counts its steps from the network's iterations on.
    """
    count = state_count(network)
    if not count:
        return []
    if file.has(UPDATER):
        return cut_state(network, file.values(UPDATER, count))
    begins_elsewhere = network.iterations > 0 or any(
        block.updater.kind == "adagrad" for block in blocks_of(network)
    )
    return cut_state(network, fresh_state(network)) if begins_elsewhere else []


def _torch_model(path: str, configuration: dict[str, Any], training: bool) -> Any:
    try:
        from sparkstrom.models.dl4j.modules.dl4j_torch_model import Dl4jModel
    except UsageError as missing:
        raise UsageError(
            f"{path} is no network that the built-in one computes, so it becomes a TorchModel, and"
            f" {missing}"
        ) from missing
    return Dl4jModel(path, configuration, training=training)
