"""The scaling of momentum to the number of workers, for all frameworks.

Momentum m remembers about 1 / (1 - m) steps. With k workers the parameters move k times between two
steps of one worker, so that its momentum would remember k times as much of the fit as on one
machine (asynchrony begets momentum: Mitliagkas et al. 2016). m to the power of k remembers the same
number of the fit's minibatches. Learning rates, second moments, weight decay, clipping and
dampening are not scaled. BatchNorm's momentum is; see ``models.torch.worker_scaling`` and
``models.keras_support``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# The constants ..._MOMENTA list the hyperparameters that are scaled, for each library.
# Keys of torch's parameter groups; for a tuple, the indices of its elements that are scaled.
TORCH_MOMENTA: Mapping[str, tuple[int, ...] | None] = {"momentum": None, "betas": (0,)}
# Closure variables of optax's functions, by the function that makes them; one name is common.
OPTAX_MOMENTA = {"trace": "decay", "ema": "decay", "scale_by_muon": "beta"}
OPTAX_SHARED_MOMENTUM = "b1"
# Attributes of Keras' optimizers.
KERAS_MOMENTA = ("momentum", "beta_1")
UNINSPECTABLE = "unseen"  # key among changes: callables whose contents cannot be inspected


def scale_momentum(value: Any, workers: Any) -> Any:
    """Return the momentum for ``workers`` workers: value ** workers."""
    return value if isinstance(workers, int) and workers == 1 else value**workers


class MomentumChange(str):
    """The text of a change, such as ``0.9 -> 0.6561``, with the momenta that are changed.

    It is a ``str`` because ``Paced.horizons`` of users' models returns plain texts.
    """

    momenta: tuple[float, ...]  # the values before scaling, unrounded

    def __new__(cls, text: str, momenta: Iterable[float] = ()) -> MomentumChange:
        """Attach the momenta to the text."""
        made = super().__new__(cls, text)
        made.momenta = tuple(momenta)
        return made


def describe_change(value: Any, workers: int) -> MomentumChange:
    """Return the text of how one momentum changes when this many workers train."""
    text = f"{float(value):g} -> {float(scale_momentum(value, workers)):.4g}"
    return MomentumChange(text, [float(value)])


def join_changes(changes: Iterable[MomentumChange], separator: str = "; ") -> MomentumChange:
    """Return several changes of one hyperparameter as one text."""
    parts = list(changes)
    return MomentumChange(separator.join(parts), [m for part in parts for m in part.momenta])


def join_changes_by_name(changes: Iterable[tuple[str, MomentumChange]]) -> dict[str, str]:
    """Return each hyperparameter's changes as one text, without repeating equal ones."""
    grouped: dict[str, dict[MomentumChange, None]] = {}
    for name, change in changes:
        grouped.setdefault(name, {})[change] = None
    return {name: join_changes(parts) for name, parts in grouped.items()}
