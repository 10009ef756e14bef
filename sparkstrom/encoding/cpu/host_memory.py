"""Memory for kernels that work on the host: NumPy arrays, which are where they are needed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def empty(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Room for ``size`` entries; untouched memory costs nothing."""
    return np.empty(size, dtype)


def zeros(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """``size`` entries of 0."""
    return np.zeros(size, dtype)


def mirror(host: NDArray[Any]) -> NDArray[Any]:
    """Where kernels write what ``host`` has room for: here, ``host`` itself."""
    return host


def to_host(array: NDArray[Any]) -> NDArray[Any]:
    """The array where the host can read it: the same one."""
    return array


def add(target: NDArray[np.float32], source: NDArray[np.float32]) -> None:
    """target += source, f32[n] both."""
    target += source
