"""Memory for kernels on the host: NumPy arrays, which need no copies to or from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def empty(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Allocate ``size`` uninitialised entries; untouched pages cost no memory."""
    return np.empty(size, dtype)


def zeros(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Allocate ``size`` entries of 0."""
    return np.zeros(size, dtype)


def mirror(host: NDArray[Any]) -> NDArray[Any]:
    """Return an array for kernels to write that is as large as ``host``: ``host`` itself."""
    return host


def to_host(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array itself, which the host can read."""
    return array


def add(target: NDArray[np.float32], source: NDArray[np.float32]) -> None:
    """Add ``source`` to ``target``, f32[n] both."""
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
    """Set ``target`` to one - other, f32[n] all; ``target`` may be one of them."""
    np.subtract(one, other, out=target)


def from_host(host: NDArray[Any]) -> NDArray[Any]:
    """Return the array itself, which kernels can read."""
    return host


def part(array: NDArray[Any], where: slice) -> NDArray[Any]:
    """Return a view of the array from ``where.start`` to ``where.stop``."""
    return array[where]


def reader(array: NDArray[Any]) -> Callable[[int, int], NDArray[Any]]:
    """Return a function (begin, end) that returns a view of ``array``; thread-safe."""
    return lambda begin, end: array[begin:end]
