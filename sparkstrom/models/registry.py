"""From a saved description back to a model; an adapter is imported only when it is asked for."""

from __future__ import annotations

import importlib
from typing import Any, cast

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import FlatModel

# What ``describe()`` calls itself -> where its class is. A description names no module, so a
# file from elsewhere cannot make us import one.
KINDS = {
    "dense": ("sparkstrom.models.networks", "DenseNetwork"),
    "jax": ("sparkstrom.models.jax", "JaxModel"),
    "lightning": ("sparkstrom.models.lightning", "LightningModel"),
    "torch": ("sparkstrom.models.torch", "TorchModel"),
    "dl4j-dense": ("sparkstrom.models.dl4j.dense_import", "ImportedDenseNetwork"),
    "dl4j": ("sparkstrom.models.dl4j.modules.dl4j_torch_model", "Dl4jModel"),
    "keras": ("sparkstrom.models.keras", "KerasModel"),
}

# What must be in a description for the model to be made of it alone; others lack their code.
ENOUGH = {"dense": "widths", "dl4j-dense": "widths", "keras": "model", "dl4j": "configuration"}


def says_all(description: dict[str, Any]) -> bool:
    """Can the model be made from this description, or was its code left out?"""
    return ENOUGH.get(description.get("kind", "")) in description


def from_description(description: dict[str, Any]) -> FlatModel:
    """The model whose ``describe`` returned this. Raise UsageError for an unknown kind."""
    kind = description.get("kind")
    if kind not in KINDS:
        raise UsageError(
            f"a model of kind {kind!r} is not known to this version of sparkstrom; it knows"
            f" {', '.join(KINDS)}"
        )
    module, name = KINDS[kind]
    made = getattr(importlib.import_module(module), name).from_description(description)
    return cast(FlatModel, made)
