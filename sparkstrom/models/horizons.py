"""Horizons: which hyperparameters count steps, and what they are where k workers train.

Momentum m remembers about 1 / (1 - m) steps. Where k workers train side by side, the parameters
move k times between two steps of one of them, so that its momentum would remember k times as much
of the fit as on one machine (asynchrony begets momentum: Mitliagkas et al. 2016). m to the power of
k remembers the same number of the fit's minibatches. Learning rates, second moments, weight decay,
clipping and dampening stay as they are. What BatchNorm keeps follows, too: see
``torch.statistics`` and ``keras_pacing``.

This is the one list of what follows; the models know how to set it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Of torch's parameter groups: a number, or the places of those in a tuple that follow.
TORCH: Mapping[str, tuple[int, ...] | None] = {"momentum": None, "betas": (0,)}
# Of optax's functions, by who makes them; and under which name everywhere.
OPTAX = {"trace": "decay", "ema": "decay", "scale_by_muon": "beta"}
OPTAX_EVERYWHERE = "b1"
# Attributes of Keras' optimizers.
KERAS = ("momentum", "beta_1")
# Fields of our own updaters.
DENSE = ("momentum", "beta1")


UNSEEN = "unseen"  # among changes: what an optimizer has that cannot be looked into


def raised(value: Any, workers: Any) -> Any:
    """What a horizon of a worker's own steps becomes where so many train; the same for one."""
    return value if isinstance(workers, int) and workers == 1 else value**workers


def changed(value: Any, workers: int) -> str:
    """For people, like ``0.9 -> 0.6561``."""
    return f"{float(value):g} -> {float(raised(value, workers)):.4g}"
