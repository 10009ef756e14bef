"""The memory that the tests work on: the host's, or a simulated device's under Numba's simulator.

``laws/test_encoding_cuda.py`` runs the test files that import this module under the simulator.
"""

from __future__ import annotations

import os
from typing import Any

from sparkstrom.encoding import backends
from sparkstrom.encoding.backends import Backend
from sparkstrom.encoding.layers import Layers
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Flat
from sparkstrom.runtime.theta import Theta

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"


def backend() -> Backend:
    """Return the backend of this run: cuda under the simulator, else cpu."""
    return backends.backend("cuda" if SIMULATED else "cpu")


def make_theta(n_params: int, k: int, layers: Layers | None = None) -> Theta:
    """Return parameters that are all 0, in the memory of this run."""
    return Theta(n_params, k, layers, backend())


def as_host_array(array: Any) -> Flat:
    """Return the array as a host array; a simulated device array is one inside."""
    flat: Flat = array._ary if SIMULATED and hasattr(array, "_ary") else array
    return flat


class BackendDenseNetwork(DenseNetwork):
    """A dense network whose parameters lie in the memory of this run."""

    def bind(self, params: Any) -> None:
        super().bind(as_host_array(params))
