"""How each array is trained: its updater, penalties and gradient normalization, as DL4J says them.

And the updater's saved state, which lies in blocks: neighbouring arrays of the same updater share
one, with each of its vectors one behind the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.models.dl4j.dl4j_errors import NoDl4jNetwork
from sparkstrom.models.dl4j.java_names import Typed, typed
from sparkstrom.models.dl4j.layer_arrays import BIAS, STATISTIC, WEIGHT, Arrays, Piece, pieces_of
from sparkstrom.models.dl4j.network_steps import TO_PREDICT, SavedNetwork, Step, number_in

NO_OP = "noop"
# Of each updater the vectors that it keeps, in the order of a block.
VECTORS: dict[str, tuple[str, ...]] = {
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
DEFAULTS: dict[str, dict[str, float]] = {  # org.nd4j.linalg.learning.config
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
ADAGRAD_FRESH = 1e-6  # whatever its epsilon is
# What 0.8 and earlier wrote beside the updater's name.
OLD_NAMES = {
    "adammeandecay": "beta1",
    "adamvardecay": "beta2",
    **{name: name for name in ("learningrate", "momentum", "rho", "rmsdecay", "epsilon")},
}


def fresh_value(kind: str, options: Mapping[str, Any]) -> float:
    """What an updater's vectors begin with."""
    if kind == "adagrad":
        return ADAGRAD_FRESH
    return float(options["epsilon"]) if kind == "rmsprop" else 0.0


@dataclass(frozen=True, slots=True)
class UpdaterConf:
    """An updater's class and options; equal ones share a block."""

    kind: str
    options: dict[str, float] = field(default_factory=dict)
    schedules: str = "{}"  # by option, as JSON: learning rates and momenta that change

    @property
    def vectors(self) -> tuple[str, ...] | None:
        """That it keeps; None where its class is not known here."""
        return VECTORS.get(self.kind)


@dataclass(frozen=True, slots=True)
class Rule:
    """How one array is trained. ``decay`` is taken off each step, times the rate where said."""

    updater: UpdaterConf
    l1: float = 0.0
    l2: float = 0.0
    decay: float = 0.0
    decay_by_rate: bool = True
    normalization: str = "none"  # of gradients, in lower case
    threshold: float = 1.0


def rule_of(step: Step, piece: Piece) -> Rule:
    """Of one array of a layer."""
    if step.frozen or piece.role == STATISTIC:
        return Rule(UpdaterConf(NO_OP))
    bias = piece.role == BIAS
    conf = _updater(step, "biasupdater") if bias else None
    penalties = _penalties(step, bias) if piece.role in (WEIGHT, BIAS) else {}
    return Rule(
        conf or _updater(step, "iupdater") or _old_updater(step),
        normalization=step.word("gradientnormalization", "none"),
        threshold=step.number("gradientnormalizationthreshold", 1.0),
        **penalties,
    )


def _updater(step: Step, name: str) -> UpdaterConf | None:
    found = typed(step.fields.get(name))
    return None if found is None else _conf_of(step, found)


def _old_updater(step: Step) -> UpdaterConf:
    """Of 0.8 and earlier; a layer that says nothing has none."""
    name = step.fields.get("updater")
    if not isinstance(name, str):
        return UpdaterConf("none")
    said = {new: step.fields[old] for old, new in OLD_NAMES.items() if old in step.fields}
    return _conf_of(step, Typed(name.lower(), said))


def _conf_of(step: Step, found: Typed) -> UpdaterConf:
    where, fields = f"{found.kind} of {step.where}", found.fields
    options = {
        name: number_in(step.path, where, fields, name, default)
        for name, default in DEFAULTS.get(found.kind, {}).items()
    }
    schedules = {k: v for k, v in fields.items() if k.endswith("schedule") and v}
    return UpdaterConf(found.kind, options, json.dumps(schedules, sort_keys=True))


def _penalties(step: Step, bias: bool) -> dict[str, Any]:
    """l1, l2 and weight decay."""
    listed = step.fields.get("regularizationbias" if bias else "regularization")
    end = "bias" if bias else ""
    if not isinstance(listed, list):  # before 1.0.0-beta4; l2 was then what is weight decay now
        return {
            "l1": step.number(f"l1{end}", 0.0),
            "decay": step.number(f"l2{end}", 0.0),
            "decay_by_rate": False,
        }
    made: dict[str, Any] = {}
    for found in filter(None, map(typed, listed)):
        if found.kind == "l1regularization":
            made["l1"] = _constant(step, found.fields.get("l1"))
        elif found.kind == "l2regularization":
            made["l2"] = _constant(step, found.fields.get("l2"))
        elif found.kind == "weightdecay":
            made["decay"] = _constant(step, found.fields.get("coeff"))
            made["decay_by_rate"] = bool(found.fields.get("applylr", True))
        else:
            raise step.refuse(f"regularization {found.kind}", TO_PREDICT)
    return made


def _constant(step: Step, value: Any) -> float:
    """Of a number, or of a schedule that stays the same."""
    found = typed(value)
    if found is not None and found.kind == "fixedschedule":
        value = found.fields.get("value")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise step.refuse("regularization that follows a schedule", TO_PREDICT)
    return float(value)


# -- the updater's state ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Block:
    """Neighbouring arrays with the same updater."""

    updater: UpdaterConf
    pieces: list[tuple[int, Piece]]  # with their step's number

    @property
    def size(self) -> int:
        return sum(piece.size for _, piece in self.pieces)


def blocks_of(network: SavedNetwork) -> list[_Block]:
    """In the order of the file."""
    blocks: list[_Block] = []
    for number, step in enumerate(network.steps):
        for piece in pieces_of(step):
            updater = rule_of(step, piece).updater
            if not blocks or blocks[-1].updater != updater:
                blocks.append(_Block(updater, []))
            blocks[-1].pieces.append((number, piece))
    return blocks


def state_count(network: SavedNetwork) -> int | None:
    """How many values updaterState.bin must have; None where an updater is not known."""
    total = 0
    for block in blocks_of(network):
        if block.updater.vectors is None:
            return None
        total += len(block.updater.vectors) * block.size
    return total


def cut_state(network: SavedNetwork, flat: NDArray[np.float32]) -> list[dict[str, Arrays]]:
    """Of each step: vector -> arrays in DL4J's shapes, as ``layer_arrays.cut`` has parameters."""
    made: list[dict[str, Arrays]] = [{} for _ in network.steps]
    at = 0
    for block in blocks_of(network):
        for vector in block.updater.vectors or ():
            for number, piece in block.pieces:
                values = flat[at : at + piece.size]
                shaped = values.reshape(piece.shape, order=piece.order)
                made[number].setdefault(vector, {})[piece.name] = shaped
                at += piece.size
    if at != flat.size:
        raise NoDl4jNetwork(network.path, f"updaterState.bin has {flat.size} values, not {at}")
    return made


def fresh_state(network: SavedNetwork) -> NDArray[np.float32]:
    """What updaterState.bin would have before the first step, f32[state_count]."""
    parts = [
        np.full(
            len(block.updater.vectors or ()) * block.size,
            fresh_value(block.updater.kind, block.updater.options),
            np.float32,
        )
        for block in blocks_of(network)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def untrainable(network: SavedNetwork) -> Iterator[str]:
    """What hinders training it here as there, by name."""
    yield from network.untrainable
    for step in network.steps:
        for name, word in (("weightnoise", "weightNoise"), ("constraints", "constraints")):
            if step.fields.get(name):
                yield f"{word} of {step.where}"
        for piece in pieces_of(step):
            updater = rule_of(step, piece).updater
            if updater.vectors is None:
                yield f"updater {updater.kind} of {step.where}"
            if "momentum" in updater.schedules:  # momentumISchedule, or 0.9's momentumSchedule
                yield f"momentumSchedule of {step.where}"
            rate = updater.options.get("learningrate", 1.0)  # 0.9 and earlier have one of biases
            if piece.role == BIAS and step.number("biaslearningrate", rate) != rate:
                yield f"biasLearningRate of {step.where}"
