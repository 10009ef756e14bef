"""Memory for the CPU kernels: plain NumPy arrays, so transfers to and from the host are no-ops.

The functions implement ``encoding.backends.Memory``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def empty(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Allocate an array of ``size`` uninitialised entries; untouched pages use no memory."""
    return np.empty(size, dtype)


def zeros(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Allocate an array of ``size`` zeros."""
    return np.zeros(size, dtype)


def mirror(host: NDArray[Any]) -> NDArray[Any]:
    """Return ``host`` itself, because kernels can write it."""
    return host


def to_host(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array itself, because it is on the host."""
    return array


def add(target: NDArray[np.float32], source: NDArray[np.float32]) -> None:
    """Add ``source`` to ``target``; both are f32[n]."""
    target += source


def copy(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy of the array."""
    return array.copy()


def assign(target: NDArray[Any], source: NDArray[Any]) -> None:
    """Copy ``source`` to ``target``, of equal size and type."""
    assert (target.shape, target.dtype) == (source.shape, source.dtype)
    np.copyto(target, source)


def subtract(
    target: NDArray[np.float32], one: NDArray[np.float32], other: NDArray[np.float32]
) -> None:
    """Set ``target`` to one - other, all f32[n]; ``target`` may be either of the two."""
    np.subtract(one, other, out=target)


def from_host(host: NDArray[Any]) -> NDArray[Any]:
    """Return the array itself, because kernels can read it."""
    return host


def part(array: NDArray[Any], where: slice) -> NDArray[Any]:
    """Return a view of the array's entries in the slice ``where``."""
    return array[where]


def reader(array: NDArray[Any]) -> Callable[[int, int], NDArray[Any]]:
    """Return a thread-safe function (begin, end) that returns a view of that range of ``array``."""
    return lambda begin, end: array[begin:end]
