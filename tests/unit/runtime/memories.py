"""Which memory these tests work on: the host's, or a device's in a run under Numba's simulator.

``laws/test_encoding_cuda.py`` starts such a run with the files that go through here.
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
    """Of this run."""
    return backends.backend("cuda" if SIMULATED else "cpu")


def make_theta(n_params: int, k: int, layers: Layers | None = None) -> Theta:
    """All 0, in the memory of this run."""
    return Theta(n_params, k, layers, backend())


def seen(array: Any) -> Flat:
    """The array itself where the host can work on it: a simulated device's is the host's, too."""
    flat: Flat = array._ary if SIMULATED and hasattr(array, "_ary") else array
    return flat


class OnMemory(DenseNetwork):
    """A dense network that is bound to the memory of this run."""

    def bind(self, params: Any) -> None:
        super().bind(seen(params))
