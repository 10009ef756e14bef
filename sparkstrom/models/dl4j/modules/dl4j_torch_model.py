"""Dl4jModel: an imported network behind the flat-parameter protocol, trained as DL4J trains it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Columns, Flat, State, arrays_of
from sparkstrom.models.dl4j.data_normalizers import Normalizer, described, normalizer_in
from sparkstrom.models.dl4j.dl4j_errors import NotImported
from sparkstrom.models.dl4j.layer_arrays import Arrays, pieces_of
from sparkstrom.models.dl4j.modules.dl4j_dropout import untrainable_dropout
from sparkstrom.models.dl4j.modules.dl4j_layers import is_statistic
from sparkstrom.models.dl4j.modules.dl4j_losses import Dl4jLoss
from sparkstrom.models.dl4j.modules.dl4j_module import Dl4jModule
from sparkstrom.models.dl4j.modules.dl4j_optimizer import (
    NORMALIZATIONS,
    Dl4jOptimizer,
    group_of,
    is_by_epoch,
    is_known,
    schedule_of,
    scheduler_of,
    stand_at_epoch,
)
from sparkstrom.models.dl4j.network_steps import ENDS, TO_PREDICT, SavedNetwork, Step, network_of
from sparkstrom.models.dl4j.training_rules import Rule, rule_of, untrainable
from sparkstrom.models.torch.model import TorchModel
from sparkstrom.models.torch.tensors import FORWARD_FITS, TorchBatch, explained

ONLY_PREDICT = f"{TO_PREDICT}, or to make a TorchModel of its .module with an optimizer of yours"
Numbered = list[tuple[str, int, Rule]]  # a parameter's name, its layer's number, its rule


class Dl4jModel(TorchModel):
    """A TorchModel that knows what DL4J said of its training; ``module`` is the network itself.

    ``predict`` answers what DL4J's ``output`` does. ``normalizer`` is the data's, if one was
    saved; None otherwise. Raise NotImported where ``training`` is wanted and cannot be as there.
    """

    KIND = "dl4j"
    OPTIONS = (*TorchModel.OPTIONS, "_configuration", "_path")

    def __init__(self, path: str, configuration: dict[str, Any], *, training: bool = True) -> None:
        network = network_of(path, configuration)
        self._configuration, self._path = configuration, path
        self.normalizer: Normalizer | None = None
        self._continuing: State = {}
        module = Dl4jModule(network)
        ends = network.steps[-1].kind in ENDS
        if training:
            _refuse_untrainable(network)
        rules = _numbered(network, module) if training else []
        scheduled = any(schedule_of(rule) for _, _, rule in rules)
        super().__init__(
            module,
            _loss(network.steps[-1], training) if ends else None,
            Dl4jOptimizer if training else partial(torch.optim.SGD, lr=1e-3),
            groups=partial(_groups, rules, network.epochs) if training else None,
            scheduler=(
                partial(scheduler_of, [rule for _, _, rule in rules], network.iterations)
                if scheduled
                else None
            ),
            scheduler_interval="step" if scheduled else None,
            step=None if ends and training else _no_step,
            outputs="probabilities" if _is_of_classes(network) else "values",
        )

    def predict(self, features: Columns) -> Any:
        """What DL4J's ``output`` answers. Raise UsageError for what are no rows of numbers."""
        known = isinstance(features, np.ndarray | tuple | dict)
        for array in arrays_of(features) if known else (features,):
            if (
                not isinstance(array, np.ndarray)
                or array.dtype.kind not in "biuf"
                or not array.ndim
            ):
                kind = getattr(array, "dtype", type(array).__name__)
                raise UsageError(f"features are {kind}: give an array of numbers [rows, ...]")
        return super().predict(features)

    def load_arrays(self, arrays: list[Arrays]) -> None:
        """DL4J's parameters, before anything is bound."""
        module: Any = self.module
        module.load_arrays(arrays)

    def begin_with(self, states: list[dict[str, Arrays]], iterations: int) -> None:
        """DL4J's updater's state: the next fit goes on with it."""
        module: Any = self.module
        network = network_of(self._path, self._configuration)
        vectors = {vector for state in states for vector in state}
        state: State = {}
        for vector in sorted(vectors):
            given = [
                {k: v for k, v in one.get(vector, {}).items() if not is_statistic(step, k)}
                for step, one in zip(network.steps, states, strict=True)
            ]
            for name, values in module.placed(given).items():
                state[f"state/{name}/{vector}"] = values
                state[f"state/{name}/steps"] = iterations
        self._continuing = state

    def continuing_state(self) -> State:
        """What the next fit begins with; empty where there is nothing."""
        return dict(self._continuing)

    def stand_at(self, epoch: int, batch: int, batches: int) -> None:
        """Before a step: learning rates by epoch are where DL4J's would be."""
        module: Any = self.module
        optimizer, scheduler = self._made()
        if scheduler is not None:
            stand_at_epoch(optimizer, scheduler, module.epochs + epoch)

    def penalty(self) -> float:
        """As DL4J's calcRegularizationScore; weight decay counts as l2 does, without a rate."""
        network = network_of(self._path, self._configuration)
        module: Any = self.module
        named = dict(module.named_parameters())
        total = 0.0
        for name, _, rule in _numbered(network, module):
            values = named[name].detach().double()
            squares = float((values**2).sum())
            total += rule.l1 * float(values.abs().sum()) + (rule.l2 + rule.decay) * squares / 2
        return total

    def describe(self) -> dict[str, Any]:
        """The configuration, from which an equal network is made without any code."""
        trains = self._custom is None
        said = {"configuration": self._configuration, "training": trains}
        return {**super().describe(), **said, **described(self.normalizer)}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> Dl4jModel:
        """The network that ``describe`` described; its parameters are bound by whoever asks."""
        given = description["configuration"]
        made = cls("a saved network of DL4J's", given, training=description["training"])
        made.normalizer = normalizer_in(description)
        return made

    def _set_up(self, module: nn.Module) -> None:
        super()._set_up(module)
        self.normalizer = getattr(self, "normalizer", None)
        self._continuing = getattr(self, "_continuing", {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = super().__deepcopy__(memo)
        twin.normalizer, twin._continuing = self.normalizer, dict(self._continuing)
        return twin

    def _called(self, features: Any) -> Any:
        """For the loss: what stands before the last activation."""
        module: Any = self._module
        if self._custom is not None:
            return super()._called(features)
        with explained("the network from DL4J", FORWARD_FITS, features=features):
            return module.before_activation(features)

    def _gradient_step(self, optimizer: Optimizer, batch: TorchBatch, rows: int) -> Tensor:
        """With TruncatedBPTT one for each segment of the sequences."""
        module: Any = self._module
        if not module.segment:
            return super()._gradient_step(optimizer, batch, rows)
        total = torch.zeros(())
        with module.carrying():
            for part in _segments(self._path, batch, module.segment):
                total = total + super()._gradient_step(optimizer, part, rows).cpu()
        return total

    def _outputs(self, features: Columns) -> Any:
        """For predictions: all of it."""
        module: Any = self._module
        last = module.last
        z = super()._outputs(features)
        if self._custom is not None:
            return z
        with explained("the last activation", FORWARD_FITS, values=torch.from_numpy(z)):
            return _activated(last, z)


def _activated(last: Any, z: Flat) -> Flat:
    with torch.no_grad():
        made: Flat = last.activated(torch.from_numpy(np.ascontiguousarray(z))).numpy()
    return made


def _segments(path: str, batch: TorchBatch, length: int) -> list[TorchBatch]:
    """Of features [rows, features, steps], labels [rows, outputs, steps] or classes [rows, steps].

    Raise NotImported where labels are not of each step: there DL4J trains nothing, and warns.
    """
    features, labels = batch.features, batch.labels
    fits = isinstance(features, Tensor) and isinstance(labels, Tensor)
    if not fits or features.ndim != 3 or labels.ndim < 2 or labels.shape[-1] != features.shape[2]:
        shapes = [list(getattr(one, "shape", ())) for one in (features, labels)]
        what = f"TruncatedBPTT of features {shapes[0]} with labels {shapes[1]}"
        raise NotImported(path, "training", what, "labels are needed of each step")
    return [
        TorchBatch(features[:, :, at : at + length], labels[..., at : at + length], batch.weights)
        for at in range(0, features.shape[2], length)
    ]


def _loss(step: Step, training: bool) -> Dl4jLoss | None:
    """None for one that is not known, where nothing is trained."""
    try:
        return Dl4jLoss(step)
    except NotImported:
        if training:
            raise
        return None


def _no_step(*_: Any) -> None:
    raise NotImported("this network", "its training", "it was imported to predict", ONLY_PREDICT)


def _numbered(network: SavedNetwork, module: Dl4jModule) -> Numbered:
    """Rules of the trainable parameters, in the module's order."""
    found: dict[str, tuple[int, Rule]] = {}
    for number, step in enumerate(network.steps):
        for piece in pieces_of(step):
            arrays: list[Arrays] = [{} for _ in network.steps]
            arrays[number] = {piece.name: np.zeros(piece.shape, np.float32)}
            if not is_statistic(step, piece.name):
                for name in module.placed(arrays):
                    found.setdefault(name, (number, rule_of(step, piece)))
    trainable = [name for name, p in module.named_parameters() if p.requires_grad]
    return [(name, *found[name]) for name in trainable]


def _groups(rules: Numbered, epochs: int, named: dict[str, Any]) -> list[dict[str, Any]]:
    return [group_of(number, named[name], rule, epochs) for name, number, rule in rules]


def _is_of_classes(network: SavedNetwork) -> bool:
    """Softmax; or sigmoids, each learnt as the probability of class 1, or of its label."""
    from sparkstrom.models.dl4j.java_names import activation, loss

    step = network.steps[-1]
    found = activation(step.fields.get("activationfn", step.fields.get("activationfunction")))
    learnt = loss(step.fields.get("lossfn", step.fields.get("lossfunction")))
    kinds = tuple(one.kind if one is not None else "" for one in (found, learnt))
    return kinds[0] == "softmax" or kinds == ("sigmoid", "binaryxent")


def _refuse_untrainable(network: SavedNetwork) -> None:
    """Raise NotImported naming what of DL4J's training is not done here."""
    said = list(untrainable(network))
    both_ways = [step for step in network.steps if "bidirectional" in step.kind]
    if network.segment and both_ways:
        said.append(f"TruncatedBPTT of {both_ways[0].where}")
    if network.steps[-1].kind not in ENDS:
        said.append(f"a network that ends with {network.steps[-1].where}, which has no loss")
    for step in network.steps:
        if (dropped := untrainable_dropout(step)) is not None:
            said.append(dropped)
        for piece in pieces_of(step):
            rule = rule_of(step, piece)
            found = schedule_of(rule)
            if found is not None and network.segment and not is_by_epoch(found):
                said.append(f"learning rate by {found[0]} with TruncatedBPTT")
            if found is not None and not is_known(found):
                said.append(f"learning rate by {found[0]} of {step.where}")
            peeps = "graves" in step.kind  # there they are part of the recurrent weights
            if rule.normalization not in NORMALIZATIONS or (
                peeps and rule.normalization.endswith("perparamtype")
            ):
                said.append(f"gradientNormalization {rule.normalization} of {step.where}")
    if said:
        what = "; ".join(dict.fromkeys(said))
        raise NotImported(network.path, "training", what, ONLY_PREDICT)
