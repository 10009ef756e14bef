"""Memory for kernels on the device; what ``to_host`` copies is all that leaves it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike, NDArray

from sparkstrom.encoding.cuda.cuda_device import DeviceArray, seen_by_numba
from sparkstrom.encoding.cuda.cuda_steps import accumulate


def empty(size: int, dtype: DTypeLike) -> DeviceArray:
    """Room for ``size`` entries on the device."""
    return cuda.device_array(size, dtype)


def zeros(size: int, dtype: DTypeLike) -> DeviceArray:
    """``size`` entries of 0 on the device."""
    return cuda.to_device(np.zeros(size, dtype))


def mirror(host: NDArray[Any]) -> DeviceArray:
    """Where kernels write what ``host`` has room for: as much on the device."""
    return empty(host.size, host.dtype)


def to_host(array: Any) -> NDArray[Any]:
    """A copy on the host of an array on the device."""
    copy: NDArray[Any] = seen_by_numba(array, "array").copy_to_host()
    return copy


def add(target: Any, source: Any) -> None:
    """target += source, f32[n] both; ``source`` may be on the host."""
    accumulate(target, cuda.to_device(source) if isinstance(source, np.ndarray) else source)
