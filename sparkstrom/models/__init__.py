"""Models behind the flat-parameter protocol, and a small NumPy network."""

from sparkstrom.models.base import FlatModel
from sparkstrom.models.networks import DenseNetwork
from sparkstrom.models.updaters import AdaGrad, Adam, Nesterov, RmsProp, Sgd

__all__ = ["AdaGrad", "Adam", "DenseNetwork", "FlatModel", "Nesterov", "RmsProp", "Sgd"]
