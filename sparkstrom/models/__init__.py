"""Models whose parameters are one flat vector, and the optimizers of the built-in NumPy network.

``from_dl4j``, which imports a network that Deeplearning4j (DL4J) saved, is itself imported on first
use, because training tasks do not need it.
"""

from typing import TYPE_CHECKING, Any

from sparkstrom.models.base import FlatModel
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.models.updaters import AdaGrad, Adam, Nesterov, RmsProp, Sgd

if TYPE_CHECKING:
    from sparkstrom.models.dl4j.importing import from_dl4j as from_dl4j

__all__ = [
    "AdaGrad",
    "Adam",
    "DenseNetwork",
    "FlatModel",
    "Nesterov",
    "RmsProp",
    "Sgd",
    "from_dl4j",
]


def __getattr__(name: str) -> Any:
    """Import ``from_dl4j`` on first use and return it. Raise AttributeError for other names."""
    if name != "from_dl4j":
        raise AttributeError(f"module 'sparkstrom.models' has no attribute {name!r}")
    from sparkstrom.models.dl4j.importing import from_dl4j

    return from_dl4j


def __dir__() -> list[str]:
    """Return the public names without importing ``from_dl4j``."""
    return sorted(__all__)
