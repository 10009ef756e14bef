"""Memory for kernels on a CUDA device, and copies to and from the host."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike, NDArray

from sparkstrom.encoding.cuda.device import (
    DeviceArray,
    as_numba_array,
    current_device,
    independent_stream,
)
from sparkstrom.encoding.cuda.parameter_kernels import accumulate, subtract_arrays


def empty(size: int, dtype: DTypeLike) -> DeviceArray:
    """Allocate ``size`` uninitialised entries on the device."""
    return cuda.device_array(size, dtype)


def zeros(size: int, dtype: DTypeLike) -> DeviceArray:
    """Allocate ``size`` entries of 0 on the device."""
    return cuda.to_device(np.zeros(size, dtype))


def mirror(host: NDArray[Any]) -> DeviceArray:
    """Allocate an array on the device with the size and type of ``host``."""
    return empty(host.size, host.dtype)


def to_host(array: Any) -> NDArray[Any]:
    """Copy an array from the device to the host."""
    copy: NDArray[Any] = as_numba_array(array, "array").copy_to_host()
    return copy


def add(target: Any, source: Any) -> None:
    """Add ``source`` to ``target``, f32[n] both; ``source`` may be on the host."""
    accumulate(target, cuda.to_device(source) if isinstance(source, np.ndarray) else source)


def copy(array: Any) -> DeviceArray:
    """Return a copy of the array on the device."""
    source = as_numba_array(array, "array")
    twin = cuda.device_array(source.size, source.dtype)
    assign(twin, source)
    return twin


def assign(target: Any, source: Any) -> None:
    """Copy ``source`` to ``target``, of equal size and type; either may be on the host."""
    to, there = _host_or_device_array(target, "target"), _host_or_device_array(source, "source")
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


def _host_or_device_array(array: Any, name: str) -> Any:
    """Return a NumPy array itself, and any other array as a device array of Numba's."""
    return array if isinstance(array, np.ndarray) else as_numba_array(array, name)


def subtract(target: Any, one: Any, other: Any) -> None:
    """Set ``target`` to one - other, f32[n] all; ``target`` may be one of them."""
    subtract_arrays(target, one, other)


def from_host(host: NDArray[Any]) -> DeviceArray:
    """Copy an array from the host to the device."""
    return cuda.to_device(host)


def part(array: Any, where: slice) -> DeviceArray:
    """Return a view of the array from ``where.start`` to ``where.stop``."""
    return as_numba_array(array, "array")[where]


def reader(array: Any) -> Reader:
    """Return a thread-safe reader for ranges of ``array``."""
    return Reader(as_numba_array(array, "array"))


class Reader:
    """Copies ranges of a device array to the host, from any thread.

    It uses a stream of its own, so it does not wait for kernels of the model. The caller must
    ensure that the array is not written meanwhile. Each call selects the array's device, because a
    thread that has not used CUDA before would get the first one.
    """

    def __init__(self, array: DeviceArray) -> None:
        """Prepare to read ``array`` of the current device, on a new stream."""
        self._array, self._device, self._stream = array, current_device(), independent_stream()

    def __call__(self, begin: int, end: int) -> NDArray[Any]:
        """Copy entries ``begin`` to ``end`` to a new array on the host."""
        with cuda.gpus[self._device]:
            part: NDArray[Any] = self._array[begin:end].copy_to_host(stream=self._stream)
            self._stream.synchronize()
        return part
