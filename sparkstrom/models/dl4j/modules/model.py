"""Dl4jModel: a network imported from DL4J (Deeplearning4j) that trains in torch as it did there.

A network that cannot be trained in the same way here can still be imported for prediction, with
``training=False``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Columns, State, arrays_of
from sparkstrom.models.dl4j.configuration import (
    LOSS_LAYERS,
    PREDICT_REMEDY,
    LayerSpec,
    SavedNetwork,
    parse_network,
)
from sparkstrom.models.dl4j.files import NotImported
from sparkstrom.models.dl4j.modules.layers import find_untrainable_dropout, is_statistic
from sparkstrom.models.dl4j.modules.losses import Dl4jLoss
from sparkstrom.models.dl4j.modules.network import Dl4jModule
from sparkstrom.models.dl4j.modules.optimizer import (
    NORMALIZATIONS,
    Dl4jOptimizer,
    get_rate_schedule,
    is_by_epoch,
    is_supported_schedule,
    make_group,
    make_scheduler,
    set_schedule_epoch,
)
from sparkstrom.models.dl4j.normalizers import (
    Normalizer,
    describe_normalizer,
    normalizer_from_description,
)
from sparkstrom.models.dl4j.parameters import (
    Arrays,
    TrainingRule,
    find_untrainable_options,
    get_training_rule,
    list_array_specs,
)
from sparkstrom.models.torch.model import TorchModel
from sparkstrom.models.torch.tensors import FORWARD_REMEDY, TorchBatch, explaining_shape_errors

PREDICT_ONLY_REMEDY = (
    f"{PREDICT_REMEDY}, or to make a TorchModel of its .module with your own optimizer"
)
ParameterRules = list[tuple[str, int, TrainingRule]]  # (parameter name, layer number, rule)


class Dl4jModel(TorchModel):
    """A TorchModel with DL4J's loss, penalties and updaters (optimizers).

    Args:
        path: the zip file that DL4J saved, for error messages.
        configuration: parsed content of configuration.json.
        training: False for a network that only predicts.

    Attributes:
        module: the network, a Dl4jModule.
        normalizer: the saved normalizer of the data, or None.

    Raises:
        NoDl4jNetwork: the configuration is invalid.
        NotImported: a layer or, for ``training``, an option of training is not supported.
    """

    KIND = "dl4j"
    counts_own_steps = True  # in round-based training, like DL4J's workers; see ``Paced``
    OPTIONS = (*TorchModel.OPTIONS, "_configuration", "_path")

    def __init__(self, path: str, configuration: dict[str, Any], *, training: bool = True) -> None:
        network = parse_network(path, configuration)
        self._configuration, self._path = configuration, path
        self.normalizer: Normalizer | None = None
        self._resume_state: State = {}
        module = Dl4jModule(network)
        has_loss = network.specs[-1].kind in LOSS_LAYERS
        if training:
            _refuse_untrainable(network)
        rules = _list_parameter_rules(network, module) if training else []
        is_scheduled = any(get_rate_schedule(rule) for _, _, rule in rules)
        super().__init__(
            module,
            _make_loss(network.specs[-1], training) if has_loss else None,
            Dl4jOptimizer if training else partial(torch.optim.SGD, lr=1e-3),
            groups=partial(_make_groups, rules, network.epochs) if training else None,
            scheduler=(
                partial(make_scheduler, [rule for _, _, rule in rules], network.iterations)
                if is_scheduled
                else None
            ),
            scheduler_interval="step" if is_scheduled else None,
            step=None if has_loss and training else _refuse_step,
            outputs="probabilities" if _predicts_probabilities(network) else "values",
        )

    def predict(self, features: Columns) -> Any:
        """Return the outputs after the last activation, [rows, ...], like DL4J's method ``output``.

        The features are not normalized; if ``normalizer`` is not None, call its ``transform``
        first. Raise UsageError unless they are arrays of numbers [rows, ...].
        """
        known = isinstance(features, np.ndarray | tuple | dict)
        for array in arrays_of(features) if known else (features,):
            if (
                not isinstance(array, np.ndarray)
                or array.dtype.kind not in "biuf"
                or not array.ndim
            ):
                kind = getattr(array, "dtype", type(array).__name__)
                raise UsageError(f"features are {kind}: pass an array of numbers [rows, ...]")
        return super().predict(features)

    def load_arrays(self, arrays: list[Arrays]) -> None:
        """Set parameters and statistics to DL4J's arrays; to be called before ``bind``."""
        self.module.load_arrays(arrays)

    def load_optimizer_state(self, states: list[dict[str, Arrays]], iterations: int) -> None:
        """Make the first fit start with DL4J's updater state.

        Args:
            states: each layer's state as vector name -> array name -> values.
            iterations: number of minibatches that DL4J trained.
        """
        network = parse_network(self._path, self._configuration)
        vectors = {vector for state in states for vector in state}
        state: State = {}
        for vector in sorted(vectors):
            arrays = [
                {k: v for k, v in each.get(vector, {}).items() if not is_statistic(spec, k)}
                for spec, each in zip(network.specs, states, strict=True)
            ]
            for name, values in self.module.map_arrays(arrays).items():
                state[f"state/{name}/{vector}"] = values
                state[f"state/{name}/steps"] = iterations
        self.continue_from(state)

    def continuing_state(self) -> State:
        """Return a copy of the state from ``load_optimizer_state`` or ``continue_from``, else {}.

        A network's first fit starts with this state; {} means a new state.
        """
        return dict(self._resume_state)

    def continue_from(self, state: State) -> None:
        """Make later calls of ``continuing_state`` return a copy of this state."""
        self._resume_state = dict(state)

    def set_position(self, epoch: int, batch: int, batches: int) -> None:
        """Set the learning rates of schedules by epoch, which continue DL4J's epoch count."""
        optimizer, scheduler = self._get_optimizer()
        if scheduler is not None:
            set_schedule_epoch(optimizer, scheduler, self.module.epochs + epoch)

    def penalty(self) -> float:
        """Return DL4J's calcRegularizationScore, in which weight decay counts like l2."""
        network = parse_network(self._path, self._configuration)
        total = 0.0
        for name, _, rule in _list_parameter_rules(network, self.module):
            values = self._named_parameters[name].detach().double()
            squares = float((values**2).sum())
            total += rule.l1 * float(values.abs().sum()) + (rule.l2 + rule.decay) * squares / 2
        return total

    def describe(self) -> dict[str, Any]:
        """Return a description for JSON, with DL4J's configuration and the normalizer."""
        trains = self._custom is None
        source = {"configuration": self._configuration, "training": trains}
        return {**super().describe(), **source, **describe_normalizer(self.normalizer)}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> Dl4jModel:
        """Make the network that ``describe`` described, without its parameters."""
        configuration = description["configuration"]
        model = cls("a saved network of DL4J's", configuration, training=description["training"])
        model.normalizer = normalizer_from_description(description)
        return model

    def _set_up(self, module: nn.Module) -> None:
        """Initialize the attributes that are not pickled."""
        super()._set_up(module)
        self.normalizer = getattr(self, "normalizer", None)
        self._resume_state = getattr(self, "_resume_state", {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a separate model with the same normalizer and optimizer state."""
        copied = super().__deepcopy__(memo)
        copied.normalizer, copied._resume_state = self.normalizer, dict(self._resume_state)
        return copied

    def _call_module(self, features: Any) -> Any:
        """Return the values before the last activation, from which the loss is computed.

        For a network imported only for prediction, return its outputs instead.
        """
        if self._custom is not None:
            return super()._call_module(features)
        with explaining_shape_errors("the network from DL4J", FORWARD_REMEDY, features=features):
            return self._module.before_activation(features)

    def _gradient_step(self, optimizer: Optimizer, batch: TorchBatch, rows: int) -> Tensor:
        """Take one step, or for TruncatedBPTT one per segment; return the sum of their losses."""
        if not self._module.tbptt_length:
            return super()._gradient_step(optimizer, batch, rows)
        total = torch.zeros(())
        with self._module.carrying_state():
            for part in _split_segments(self._path, batch, self._module.tbptt_length):
                total = total + super()._gradient_step(optimizer, part, rows).cpu()
        return total

    def _predict_rows(self, features: Columns) -> Any:
        """Return the outputs for these rows, after the last activation."""
        z = super()._predict_rows(features)
        if self._custom is not None:
            return z
        values = torch.from_numpy(np.ascontiguousarray(z))
        with (
            torch.no_grad(),
            explaining_shape_errors("the last activation", FORWARD_REMEDY, values=values),
        ):
            return self._module.last_layer.activate(values).numpy()


def _split_segments(path: str, batch: TorchBatch, length: int) -> list[TorchBatch]:
    """Split features [rows, features, steps] and their labels into segments of ``length`` steps.

    Labels are [rows, outputs, steps], or classes [rows, steps]. Raise NotImported if the labels
    have no steps, with which DL4J would only warn and train nothing. ``path`` is for the message.
    """
    features, labels = batch.features, batch.labels
    fits = isinstance(features, Tensor) and isinstance(labels, Tensor)
    if not fits or features.ndim != 3 or labels.ndim < 2 or labels.shape[-1] != features.shape[2]:
        shapes = [list(getattr(one, "shape", ())) for one in (features, labels)]
        what = f"TruncatedBPTT of features {shapes[0]} with labels {shapes[1]}"
        raise NotImported(path, "training", what, "labels are needed for each step")
    return [
        TorchBatch(features[:, :, at : at + length], labels[..., at : at + length], batch.weights)
        for at in range(0, features.shape[2], length)
    ]


def _make_loss(spec: LayerSpec, training: bool) -> Dl4jLoss | None:
    """Return the layer's loss, or None if it is not supported and the network only predicts.

    Raise NotImported if it is not supported and ``training`` is True.
    """
    try:
        return Dl4jLoss(spec)
    except NotImported:
        if training:
            raise
        return None


def _refuse_step(*_: Any) -> None:
    """Raise NotImported, because the network was imported only for prediction."""
    raise NotImported(
        "this network", "its training", "it was imported to predict", PREDICT_ONLY_REMEDY
    )


def _list_parameter_rules(network: SavedNetwork, module: Dl4jModule) -> ParameterRules:
    """Return (name, layer number, how to train it) of each trainable parameter, in order."""
    rules: dict[str, tuple[int, TrainingRule]] = {}
    for number, spec in enumerate(network.specs):
        for piece in list_array_specs(spec):
            arrays: list[Arrays] = [{} for _ in network.specs]
            arrays[number] = {piece.name: np.zeros(piece.shape, np.float32)}
            if not is_statistic(spec, piece.name):
                for name in module.map_arrays(arrays):
                    rules.setdefault(name, (number, get_training_rule(spec, piece)))
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    return [(name, *rules[name]) for name in trainable]


def _make_groups(rules: ParameterRules, epochs: int, named: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, one for each parameter in ``rules``.

    ``epochs`` is the number of epochs that DL4J trained; ``named`` maps names to parameters.
    """
    return [make_group(number, named[name], rule, epochs) for name, number, rule in rules]


def _predicts_probabilities(network: SavedNetwork) -> bool:
    """Return whether outputs are probabilities: softmax, or sigmoid with binary cross-entropy."""
    spec = network.specs[-1]
    parsed = spec.parse_activation(), spec.parse_loss()
    kinds = tuple("" if each is None else each.kind for each in parsed)
    return kinds[0] == "softmax" or kinds == ("sigmoid", "binaryxent")


def _refuse_untrainable(network: SavedNetwork) -> None:
    """Raise NotImported, with all reasons, if the network cannot be trained here as in DL4J."""
    untrainable = list(find_untrainable_options(network))
    both_ways = [spec for spec in network.specs if "bidirectional" in spec.kind]
    if network.tbptt_length and both_ways:
        untrainable.append(f"TruncatedBPTT of {both_ways[0].label}")
    if network.specs[-1].kind not in LOSS_LAYERS:
        untrainable.append(f"a network that ends with {network.specs[-1].label}, which has no loss")
    for spec in network.specs:
        if (dropout := find_untrainable_dropout(spec)) is not None:
            untrainable.append(dropout)
        for piece in list_array_specs(spec):
            rule = get_training_rule(spec, piece)
            schedule = get_rate_schedule(rule)
            if schedule is not None and network.tbptt_length and not is_by_epoch(schedule):
                untrainable.append(f"learning rate by {schedule[0]} with TruncatedBPTT")
            if schedule is not None and not is_supported_schedule(schedule):
                untrainable.append(f"learning rate by {schedule[0]} of {spec.label}")
            has_peepholes = "graves" in spec.kind  # DL4J stores peepholes in the recurrent weights
            if rule.normalization not in NORMALIZATIONS or (
                has_peepholes and rule.normalization.endswith("perparamtype")
            ):
                untrainable.append(f"gradientNormalization {rule.normalization} of {spec.label}")
    if untrainable:
        what = "; ".join(dict.fromkeys(untrainable))
        raise NotImported(network.path, "training", what, PREDICT_ONLY_REMEDY)
