"""Networks of dense layers that the built-in network computes and trains as DL4J does."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.models.base import Flat, State
from sparkstrom.models.dl4j.data_normalizers import Normalizer, described, normalizer_in
from sparkstrom.models.dl4j.dl4j_errors import NotImported
from sparkstrom.models.dl4j.java_names import activation, loss
from sparkstrom.models.dl4j.layer_arrays import BIAS, Arrays, pieces_of
from sparkstrom.models.dl4j.network_steps import SavedNetwork, Step
from sparkstrom.models.dl4j.training_rules import Rule, rule_of, untrainable
from sparkstrom.models.networks import DenseNetwork
from sparkstrom.models.updaters import AdaGrad, Adam, Nesterov, Sgd, Updater

HIDDEN = ("relu", "tanh", "sigmoid", "identity")
CLASSES = ("mcxent", "negativeloglikelihood")
WITH_NORMALIZER = "dl4j-dense"  # what ``describe()`` calls one; without, it is as any other
VECTORS = {"velocity": "velocity", "mean": "mean", "square": "square"}  # DL4J's here -> ours


class ImportedDenseNetwork(DenseNetwork):
    """A DenseNetwork that begins with DL4J's parameters and updater's state.

    ``normalizer`` is the data's, if one was saved; None otherwise.
    """

    normalizer: Normalizer | None = None
    _imported: Flat | None = None
    _continuing: State | None = None

    def take(self, arrays: list[Arrays], states: list[dict[str, Arrays]], steps: int) -> None:
        """Parameters, and an updater's vectors; ``states`` may be empty."""
        self._imported = _flat(arrays)
        self.bind(self._imported.copy())
        if not states:
            return
        state = copy.deepcopy(self.updater_state())
        for vector in {vector for one in states for vector in one}:
            state[VECTORS[vector]] = _flat([one[vector] for one in states])
        if "steps" in state:
            state["steps"] = steps
        self._continuing = state

    def initial(self) -> Flat:
        """DL4J's parameters, f32[n_params]; they do not travel."""
        return super().initial() if self._imported is None else self._imported.copy()

    def continuing_state(self) -> State:
        """What the next fit begins with; empty where there is nothing."""
        return copy.deepcopy(self._continuing or {})

    def describe(self) -> dict[str, Any]:
        """With its normalizer, where it has one: a saved network answers what this one does."""
        kind = {} if self.normalizer is None else {"kind": WITH_NORMALIZER}
        return {**super().describe(), **kind, **described(self.normalizer)}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> ImportedDenseNetwork:
        """The network that ``describe`` described, without what it began with."""
        made = cls.__new__(cls)
        made.__setstate__(description)
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.normalizer = normalizer_in(state)

    def __deepcopy__(self, memo: dict[int, Any]) -> ImportedDenseNetwork:
        twin = ImportedDenseNetwork.__new__(ImportedDenseNetwork)
        twin.__setstate__(self.__getstate__())
        twin._continuing = self.continuing_state()
        twin._imported = None if self._imported is None else self._imported.copy()
        return twin


def dense_network(network: SavedNetwork) -> ImportedDenseNetwork | None:
    """The built-in network of the same shape; None where it is not one of that kind."""
    steps = network.steps
    try:
        rules = [_rules(step) for step in steps]
    except NotImported:  # which prediction alone need not know
        return None
    if not _is_dense(steps) or not all(map(_is_plain, steps)):
        return None
    if network.segment or any(untrainable(network)):
        return None
    updater = _updater(rules)
    penalties = {rule.l2 for weight, _ in rules for rule in weight}
    loss_name = _loss(steps[-1])
    hidden = {_activation(step) for step in steps[:-1]} or {"relu"}
    if updater is None or loss_name is None or len(penalties) != 1 or len(hidden) != 1:
        return None
    if not hidden <= set(HIDDEN) or not all(map(_is_common, _all(rules))):
        return None
    widths = [steps[0].whole("nin"), *(step.whole("nout") for step in steps)]
    if [step.whole("nin") for step in steps] != widths[:-1]:
        return None
    return ImportedDenseNetwork(
        widths, hidden=str(hidden.pop()), loss=loss_name, updater=updater, l2=penalties.pop()
    )


def _is_dense(steps: tuple[Step, ...]) -> bool:
    kinds = [step.kind for step in steps]
    return kinds[-1] == "outputlayer" and set(kinds[:-1]) <= {"denselayer"}


def _is_plain(step: Step) -> bool:
    """With a bias, and nothing that only torch's layers do."""
    names = [piece.name for piece in pieces_of(step)]
    extras = ("idropout", "weightnoise", "constraints")
    dropped = step.number("dropout", 0.0)
    return names == ["W", "b"] and not dropped and not any(step.fields.get(e) for e in extras)


def _activation(step: Step) -> str | None:
    found = activation(step.fields.get("activationfn", step.fields.get("activationfunction")))
    if found is None or any(value is not None for value in found.fields.values()):
        return None
    return found.kind


def _loss(step: Step) -> str | None:
    found = loss(step.fields.get("lossfn", step.fields.get("lossfunction")))
    if found is None or found.fields.get("weights") is not None:
        return None
    outputs, act = step.whole("nout"), _activation(step)
    if found.kind in CLASSES and act == "softmax" and outputs > 1:
        return "cross_entropy"
    squares = found.kind == "l2" or (found.kind == "mse" and outputs == 1)
    return "squared_error" if squares and act == "identity" else None


def _rules(step: Step) -> tuple[list[Rule], list[Rule]]:
    """Of weights, and of biases."""
    pieces = pieces_of(step)
    return (
        [rule_of(step, piece) for piece in pieces if piece.role != BIAS],
        [rule_of(step, piece) for piece in pieces if piece.role == BIAS],
    )


def _all(rules: list[tuple[list[Rule], list[Rule]]]) -> list[Rule]:
    return [rule for pair in rules for part in pair for rule in part]


def _is_common(rule: Rule) -> bool:
    return not (rule.l1 or rule.decay) and rule.normalization == "none"


def _updater(rules: list[tuple[list[Rule], list[Rule]]]) -> Updater | None:
    """The one of all arrays, where we have it; biases have no l2."""
    confs = [rule.updater for rule in _all(rules)]
    if any(conf != confs[0] for conf in confs) or confs[0].schedules != "{}":
        return None
    if any(rule.l2 for _, biases in rules for rule in biases):
        return None
    o = confs[0].options
    if o.get("learningrate", 0.0) <= 0:
        return None
    match confs[0].kind:
        case "sgd":
            return Sgd(o["learningrate"])
        case "nesterovs":
            return Nesterov(o["learningrate"], o["momentum"])
        case "adam":
            return Adam(o["learningrate"], o["beta1"], o["beta2"], o["epsilon"])
        case "adagrad":
            return AdaGrad(o["learningrate"], o["epsilon"])
    return None


def _flat(arrays: list[Arrays]) -> Flat:
    """Weights [inputs, outputs] and biases, layer by layer."""
    pieces: list[NDArray[np.float32]] = []
    for one in arrays:
        pieces += [np.ascontiguousarray(one["W"]).reshape(-1), one["b"]]
    return np.concatenate(pieces).astype(np.float32)
