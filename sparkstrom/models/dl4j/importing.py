"""``from_dl4j``, which imports networks that Deeplearning4j (DL4J) saved.

A network of dense layers becomes a DenseNetwork if that class computes and trains it identically;
all other networks become a Dl4jModel on torch.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Flat, State, check_bindable
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.models.dl4j.configuration import (
    NETWORK_INPUT,
    RECURRENT_LAYERS,
    LayerSpec,
    SavedNetwork,
    parse_network,
)
from sparkstrom.models.dl4j.files import (
    COEFFICIENTS_ENTRY,
    NORMALIZER_ENTRY,
    UPDATER_ENTRY,
    ModelZip,
    NoDl4jNetwork,
    NotImported,
)
from sparkstrom.models.dl4j.normalizers import (
    Normalizer,
    count_normalized_features,
    describe_normalizer,
    normalizer_from_description,
    read_normalizer,
)
from sparkstrom.models.dl4j.parameters import (
    BIAS,
    Arrays,
    TrainingRule,
    count_parameters,
    count_state_values,
    find_untrainable_options,
    get_training_rule,
    list_array_specs,
    list_state_blocks,
    make_initial_state,
    split_parameters,
    split_state,
)
from sparkstrom.models.updaters import AdaGrad, Adam, Nesterov, Sgd, Updater

BUILTIN_ACTIVATIONS = ("relu", "tanh", "sigmoid", "identity")
CLASS_LOSSES = ("mcxent", "negativeloglikelihood")
KIND = "dl4j-dense"  # of descriptions; earlier versions wrote "dense" if there is no normalizer


class ImportedDenseNetwork(DenseNetwork):
    """A DenseNetwork that starts with DL4J's parameters and updater (optimizer) state."""

    normalizer: Normalizer | None = None  # the saved normalizer of the data, or None
    _imported_params: Flat | None = None
    _resume_state: State | None = None

    def load_imported(
        self, arrays: list[Arrays], states: list[dict[str, Arrays]], steps: int
    ) -> None:
        """Start from DL4J's parameters and its updater's state.

        Args:
            arrays: weights and biases of each layer.
            states: each layer's state as vector name -> array name -> values; [] for a new state.
            steps: number of minibatches that DL4J trained.
        """
        self.start_from(_flatten_arrays(arrays))
        self.bind(self.initial())
        if not states:
            return
        state = copy.deepcopy(self.updater_state())
        for vector in {vector for each in states for vector in each}:
            state[vector] = _flatten_arrays([each[vector] for each in states])
        if "steps" in state:
            state["steps"] = steps
        self.continue_from(state)

    def start_from(self, params: Flat) -> None:
        """Make later calls of ``initial`` return a copy of these parameters, f32[n_params]."""
        self._imported_params = check_bindable(params, self.n_params).copy()

    def initial(self) -> Flat:
        """Return DL4J's parameters or those of ``start_from``; random ones after unpickling."""
        return super().initial() if self._imported_params is None else self._imported_params.copy()

    def continue_from(self, state: State) -> None:
        """Make later calls of ``continuing_state`` return a copy of this state."""
        self._resume_state = copy.deepcopy(state)

    def continuing_state(self) -> State:
        """Return a copy of the optimizer state for the first fit; {} means a new state."""
        return copy.deepcopy(self._resume_state or {})

    def describe(self) -> dict[str, Any]:
        """Return options, array shapes and normalizer as JSON values for ``from_description``."""
        return {**super().describe(), "kind": KIND, **describe_normalizer(self.normalizer)}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> ImportedDenseNetwork:
        """Make the network that ``describe`` described, without DL4J's parameters and state."""
        made = cls.__new__(cls)
        made.__setstate__(description)
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Recreate the network from its description, without parameters."""
        super().__setstate__(state)
        self.normalizer = normalizer_from_description(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> ImportedDenseNetwork:
        """Return a separate network with the same initial parameters and optimizer state."""
        copied = ImportedDenseNetwork.__new__(ImportedDenseNetwork)
        copied.__setstate__(self.__getstate__())
        copied._resume_state = self.continuing_state()
        if self._imported_params is not None:
            copied._imported_params = self._imported_params.copy()
        return copied


def make_dense_network(network: SavedNetwork) -> ImportedDenseNetwork | None:
    """Return the network as a DenseNetwork; None if it would not compute or train identically."""
    specs = network.specs
    try:
        rules = [
            (piece.role, get_training_rule(spec, piece))
            for spec in specs
            for piece in list_array_specs(spec)
        ]
    except NotImported:  # because of options that only affect training
        return None
    if not _has_only_dense_layers(specs) or not all(map(_is_plain_dense_layer, specs)):
        return None
    if network.tbptt_length or any(find_untrainable_options(network)):
        return None
    updater = _make_builtin_optimizer(rules)
    penalties = {rule.l2 for role, rule in rules if role != BIAS}
    loss_name = _get_builtin_loss(specs[-1])
    hidden = {_get_plain_activation(spec) for spec in specs[:-1]} or {"relu"}
    if updater is None or loss_name is None or len(penalties) != 1 or len(hidden) != 1:
        return None
    if not hidden <= set(BUILTIN_ACTIVATIONS):
        return None
    if any(rule.l1 or rule.decay or rule.normalization != "none" for _, rule in rules):
        return None
    widths = [specs[0].get_int("nin"), *(spec.get_int("nout") for spec in specs)]
    if [spec.get_int("nin") for spec in specs] != widths[:-1]:
        return None
    return ImportedDenseNetwork(
        widths, hidden=str(hidden.pop()), loss=loss_name, updater=updater, l2=penalties.pop()
    )


def _has_only_dense_layers(specs: tuple[LayerSpec, ...]) -> bool:
    """Return whether the network consists of DenseLayers followed by an OutputLayer."""
    kinds = [spec.kind for spec in specs]
    return kinds[-1] == "outputlayer" and set(kinds[:-1]) <= {"denselayer"}


def _is_plain_dense_layer(spec: LayerSpec) -> bool:
    """Return whether a dense layer has a bias and no dropout, noise or constraints."""
    names = [piece.name for piece in list_array_specs(spec)]
    extras = ("idropout", "weightnoise", "constraints")
    dropped = spec.get_float("dropout", 0.0)
    return names == ["W", "b"] and not dropped and not any(spec.fields.get(e) for e in extras)


def _get_plain_activation(spec: LayerSpec) -> str | None:
    """Return the kind of a layer's activation; None if it has options or is missing."""
    parsed = spec.parse_activation()
    if parsed is None or any(value is not None for value in parsed.fields.values()):
        return None
    return parsed.kind


def _get_builtin_loss(spec: LayerSpec) -> str | None:
    """Return the name of the DenseNetwork loss that is equal to the layer's, or None."""
    parsed = spec.parse_loss()
    if parsed is None or parsed.fields.get("weights") is not None:
        return None
    outputs, activation = spec.get_int("nout"), _get_plain_activation(spec)
    if parsed.kind in CLASS_LOSSES and activation == "softmax" and outputs > 1:
        return "cross_entropy"
    squares = parsed.kind == "l2" or (parsed.kind == "mse" and outputs == 1)
    return "squared_error" if squares and activation == "identity" else None


def _make_builtin_optimizer(rules: list[tuple[str, TrainingRule]]) -> Updater | None:
    """Return the built-in optimizer that is equal to the updaters of all arrays, or None.

    ``rules`` are (role, rule) of each array.
    """
    confs = [rule.optimizer for _, rule in rules]
    if any(conf != confs[0] for conf in confs) or confs[0].schedules != "{}":
        return None
    if any(rule.l2 for role, rule in rules if role == BIAS):
        return None
    options = confs[0].options
    if options.get("learningrate", 0.0) <= 0:
        return None
    match confs[0].kind:
        case "sgd":
            return Sgd(options["learningrate"])
        case "nesterovs":
            return Nesterov(options["learningrate"], options["momentum"])
        case "adam":
            return Adam(
                options["learningrate"], options["beta1"], options["beta2"], options["epsilon"]
            )
        case "adagrad":
            return AdaGrad(options["learningrate"], options["epsilon"])
    return None


def _flatten_arrays(arrays: list[Arrays]) -> Flat:
    """Return weights [inputs, outputs] and biases as one vector, layer by layer."""
    pieces: list[NDArray[np.float32]] = []
    for layer in arrays:
        pieces += [np.ascontiguousarray(layer["W"]).reshape(-1), layer["b"]]
    return np.concatenate(pieces).astype(np.float32)


# Layers whose input has nIn features in dimension 1.
FEATURE_LAYERS = ("denselayer", "outputlayer", *RECURRENT_LAYERS)


def from_dl4j(path: str | os.PathLike[str], *, training: bool = True) -> Any:
    """Return the model that ``ModelSerializer.writeModel`` saved, with its parameters.

    A network of dense layers becomes a DenseNetwork if that class computes and trains it
    identically; all other networks become a TorchModel, which needs torch. ``SparkNetwork`` trains
    either of them with DL4J's loss, penalties and updater, starting from the updater's saved state.
    ``predict`` returns what DL4J's ``output`` does, in the same shapes; ``normalizer`` is the saved
    normalizer, with ``transform(features)``, or None.

    Args:
        path: the zip file.
        training: False imports a network only for prediction, and ignores how it was trained.

    Raises:
        NoDl4jNetwork: the file is damaged or was not written by DL4J.
        NotImported: the network uses something that sparkstrom lacks; the message names it.
        UsageError: the file does not exist.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"path={path!r}: pass the path of a zip that DL4J saved")
    with ModelZip(Path(path)) as file:
        configuration = file.read_configuration()
        network = parse_network(file.path, configuration)
        arrays = split_parameters(network, _read_parameters(file, network))
        states = _read_optimizer_states(file, network) if training else []
        model = make_dense_network(network)
        if model is not None:
            model.load_imported(arrays, states, network.iterations)
        else:
            model = _make_torch_model(file.path, configuration, training)
            model.load_arrays(arrays)
            model.bind(model.initial())
            if states:
                model.load_optimizer_state(states, network.iterations)
        if file.has_entry(NORMALIZER_ENTRY):
            model.normalizer = file.read(NORMALIZER_ENTRY, lambda r: read_normalizer(file.path, r))
            _check_normalizer_width(network, model.normalizer)
    return model


def _check_normalizer_width(network: SavedNetwork, normalizer: Normalizer) -> None:
    """Raise NoDl4jNetwork if the normalizer and the network have different numbers of features."""
    fitted = count_normalized_features(normalizer)
    for spec in network.specs:
        first = NETWORK_INPUT in spec.sources and spec.kind in FEATURE_LAYERS
        if first and fitted not in (None, spec.get_int("nin")):
            why = f"normalizer.bin has {fitted} features, {spec.label} takes {spec.get_int('nin')}"
            raise NoDl4jNetwork(network.path, why)


def _read_parameters(file: ModelZip, network: SavedNetwork) -> Any:
    """Return all parameters f32[n]; a network without parameters may lack the entry for them."""
    count = count_parameters(network)
    if not count:
        return np.zeros(0, np.float32)
    return file.read_array(COEFFICIENTS_ENTRY, count)


def _read_optimizer_states(file: ModelZip, network: SavedNetwork) -> list[dict[str, Arrays]]:
    """Return each layer's updater state as vector name -> array name -> values.

    If no state was saved, DL4J starts a new one, but continues to count steps from the network's
    iterations. The result is [] if an optimizer without a saved state does the same, if no updater
    has a state, or if an updater is unknown.
    """
    count = count_state_values(network)
    if not count:
        return []
    if file.has_entry(UPDATER_ENTRY):
        return split_state(network, file.read_array(UPDATER_ENTRY, count))
    differs_from_default = network.iterations > 0 or any(
        block.optimizer.kind == "adagrad" for block in list_state_blocks(network)
    )
    return split_state(network, make_initial_state(network)) if differs_from_default else []


def _make_torch_model(path: str, configuration: dict[str, Any], training: bool) -> Any:
    """Return a Dl4jModel without parameters. Raise UsageError if torch is not installed."""
    try:
        from sparkstrom.models.dl4j.modules.model import Dl4jModel
    except UsageError as missing:
        raise UsageError(
            f"{path} becomes a TorchModel, because the built-in network cannot compute it, and"
            f" {missing}"
        ) from missing
    return Dl4jModel(path, configuration, training=training)
