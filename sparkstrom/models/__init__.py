"""Models trained on one flat parameter vector, and the optimizers of the built-in NumPy network."""

from sparkstrom.models.base import FlatModel
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.models.dl4j.importing import from_dl4j
from sparkstrom.models.updaters import AdaGrad, Adam, Nesterov, RmsProp, Sgd

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
