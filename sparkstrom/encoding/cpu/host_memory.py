"""Memory for kernels that work on the host: NumPy arrays, which are where they are needed."""

from __future__ import annotations

from collections.abc import Callable
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


def copy(array: NDArray[Any]) -> NDArray[Any]:
    """Another array with the same content."""
    return array.copy()


def assign(target: NDArray[Any], source: NDArray[Any]) -> None:
    """target := source, of one size and type."""
    assert (target.shape, target.dtype) == (source.shape, source.dtype)
    np.copyto(target, source)


def subtract(
    target: NDArray[np.float32], one: NDArray[np.float32], other: NDArray[np.float32]
) -> None:
    """target := one - other, f32[n] all; ``target`` may be one of them."""
    np.subtract(one, other, out=target)


def from_host(host: NDArray[Any]) -> NDArray[Any]:
    """The array where kernels can read it: the same one."""
    return host


def part(array: NDArray[Any], where: slice) -> NDArray[Any]:
    """The same memory from ``where.start`` to ``where.stop``."""
    return array[where]


def reader(array: NDArray[Any]) -> Callable[[int, int], NDArray[Any]]:
    """What reads entries begin to end of ``array``, from any thread: memory of it, no copy."""
    return lambda begin, end: array[begin:end]
