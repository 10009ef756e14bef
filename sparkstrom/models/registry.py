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
    "torch": ("sparkstrom.models.torch", "TorchModel"),
    "keras": ("sparkstrom.models.keras", "KerasModel"),
}


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
