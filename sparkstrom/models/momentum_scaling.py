"""Scale momentum to the number of workers, for all frameworks.

A momentum m remembers about 1 / (1 - m) steps. With k workers, the parameters change k times
between two steps of one worker, so an unscaled momentum would remember k times as much of the fit
as on one machine (asynchrony begets momentum: Mitliagkas et al. 2016). The scaled momentum, m to
the power of k, remembers the same number of the fit's minibatches as m does on one machine.
Learning rates, second moments, weight decay, clipping and dampening are not scaled. For the
momentum of BatchNorm's statistics, which is also scaled, see ``models.keras_support`` and
``models.torch.hyperparameter_scaling``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# The constants ..._MOMENTA name the hyperparameters of each library that are scaled.
# Keys of torch's parameter groups; if a value is a tuple, the indices of the scaled elements.
TORCH_MOMENTA: Mapping[str, tuple[int, ...] | None] = {"momentum": None, "betas": (0,)}
# Closure variables in optax, by the function that creates them; "b1" is common to all functions.
OPTAX_MOMENTA = {"trace": "decay", "ema": "decay", "scale_by_muon": "beta"}
OPTAX_SHARED_MOMENTUM = "b1"
# Attributes of Keras' optimizers.
KERAS_MOMENTA = ("momentum", "beta_1")
UNINSPECTABLE = "unseen"  # key in a dict of changes: callables that could not be inspected
BY_FIT = "steps by the fit's minibatches"  # text for what changes in a learning-rate schedule


def scale_momentum(value: Any, workers: Any) -> Any:
    """Return the momentum ``value`` scaled to ``workers`` workers, value ** workers."""
    return value if isinstance(workers, int) and workers == 1 else value**workers


class MomentumChange(str):
    """The text of a change, such as ``0.9 -> 0.6561``, together with the original momenta.

    It is a subclass of ``str`` because user-defined models return plain texts from
    ``Paced.horizons``.
    """

    momenta: tuple[float, ...]  # the values before scaling, unrounded

    def __new__(cls, text: str, momenta: Iterable[float] = ()) -> MomentumChange:
        """Create the text with the momenta attached to it."""
        made = super().__new__(cls, text)
        made.momenta = tuple(momenta)
        return made


def describe_change(value: Any, workers: int) -> MomentumChange:
    """Return how the momentum ``value`` changes with this many workers, as "old -> new"."""
    text = f"{float(value):g} -> {float(scale_momentum(value, workers)):.4g}"
    return MomentumChange(text, [float(value)])


def join_changes(changes: Iterable[MomentumChange], separator: str = "; ") -> MomentumChange:
    """Combine several changes of one hyperparameter into one, with all their texts and momenta."""
    parts = list(changes)
    return MomentumChange(separator.join(parts), [m for part in parts for m in part.momenta])


def join_changes_by_name(changes: Iterable[tuple[str, MomentumChange]]) -> dict[str, str]:
    """Group (name, change) pairs by name; return name -> text of its different changes."""
    grouped: dict[str, dict[MomentumChange, None]] = {}
    for name, change in changes:
        grouped.setdefault(name, {})[change] = None
    return {name: join_changes(parts) for name, parts in grouped.items()}
