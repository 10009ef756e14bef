"""From a saved description back to a model."""

from __future__ import annotations

from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import FlatModel
from sparkstrom.models.networks import DenseNetwork


def from_description(description: dict[str, Any]) -> FlatModel:
    """The model whose ``describe`` returned this. Raise UsageError for an unknown kind."""
    kind = description.get("kind")
    if kind != "dense":
        raise UsageError(f"a model of kind {kind!r} is not known to this version of sparkstrom")
    return DenseNetwork.from_description(description)
