"""Memory for kernels on the device; what ``to_host`` copies is all that leaves it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike, NDArray

from sparkstrom.encoding.cuda.cuda_device import (
    DeviceArray,
    current_device,
    seen_by_numba,
    stream_apart,
)
from sparkstrom.encoding.cuda.cuda_steps import accumulate, difference


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


def copy(array: Any) -> DeviceArray:
    """Another array on the device with the same content."""
    source = seen_by_numba(array, "array")
    twin = cuda.device_array(source.size, source.dtype)
    assign(twin, source)
    return twin


def assign(target: Any, source: Any) -> None:
    """target := source, of one size and type; either may be on the host."""
    to, there = _either(target, "target"), _either(source, "source")
    assert (to.shape, to.dtype) == (there.shape, there.dtype)
    if to.size == 0:
        return
    if not isinstance(to, np.ndarray):
        to.copy_to_device(there)
        cuda.synchronize()  # else the last bytes from the host may still be on their way
    elif isinstance(there, np.ndarray):
        np.copyto(to, there)
    else:
        there.copy_to_host(to)


def _either(array: Any, name: str) -> Any:
    return array if isinstance(array, np.ndarray) else seen_by_numba(array, name)


def subtract(target: Any, one: Any, other: Any) -> None:
    """target := one - other, f32[n] all; ``target`` may be one of them."""
    difference(target, one, other)


def from_host(host: NDArray[Any]) -> DeviceArray:
    """A copy on the device."""
    return cuda.to_device(host)


def part(array: Any, where: slice) -> DeviceArray:
    """The same memory from ``where.start`` to ``where.stop``, whoever made the array."""
    return seen_by_numba(array, "array")[where]


def reader(array: Any) -> Reader:
    """What reads parts of ``array``, from any thread."""
    return Reader(seen_by_numba(array, "array"))


class Reader:
    """Entries of an array on the device, brought to the host, whoever asks.

    It has a stream of its own, so it waits for no kernel of the model that is under way; that the
    array is not written meanwhile is the caller's care. A thread that has not used CUDA before
    would get the first device: the array's is entered for each call.
    """

    def __init__(self, array: DeviceArray) -> None:
        self._array, self._device, self._stream = array, current_device(), stream_apart()

    def __call__(self, begin: int, end: int) -> NDArray[Any]:
        """A fresh array on the host."""
        with cuda.gpus[self._device]:
            part: NDArray[Any] = self._array[begin:end].copy_to_host(stream=self._stream)
            self._stream.synchronize()
        return part
