"""Memory for the CUDA kernels: allocate device arrays, and copy them to and from the host.

The functions implement ``encoding.backends.Memory``.
"""

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
    """Allocate a device array of ``size`` uninitialised entries."""
    return cuda.device_array(size, dtype)


def zeros(size: int, dtype: DTypeLike) -> DeviceArray:
    """Allocate a device array of ``size`` zeros."""
    return cuda.to_device(np.zeros(size, dtype))


def mirror(host: NDArray[Any]) -> DeviceArray:
    """Allocate an uninitialised device array with the size and dtype of ``host``."""
    return empty(host.size, host.dtype)


def to_host(array: Any) -> NDArray[Any]:
    """Copy an array from the device to the host."""
    copy: NDArray[Any] = as_numba_array(array, "array").copy_to_host()
    return copy


def add(target: Any, source: Any) -> None:
    """Add ``source``, which may be on the host, to ``target``; both are f32[n]."""
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
        cuda.synchronize()  # otherwise the last bytes may still be in transfer
    elif isinstance(there, np.ndarray):
        np.copyto(to, there)
    else:
        there.copy_to_host(to)


def _host_or_device_array(array: Any, name: str) -> Any:
    """Return a NumPy array as it is, and any other array as a Numba device array."""
    return array if isinstance(array, np.ndarray) else as_numba_array(array, name)


def subtract(target: Any, one: Any, other: Any) -> None:
    """Set ``target`` to one - other, all f32[n]; ``target`` may be either of the two."""
    subtract_arrays(target, one, other)


def from_host(host: NDArray[Any]) -> DeviceArray:
    """Copy an array from the host to the device."""
    return cuda.to_device(host)


def part(array: Any, where: slice) -> DeviceArray:
    """Return a view of the array's entries in the slice ``where``."""
    return as_numba_array(array, "array")[where]


def reader(array: Any) -> Reader:
    """Return a thread-safe callable that copies ranges of ``array`` to the host."""
    return Reader(as_numba_array(array, "array"))


class Reader:
    """Copies ranges of a device array to the host, from any thread.

    A reader uses its own stream, so that it does not wait for the model's kernels. The caller must
    ensure that the array is not written during a call. Each call selects the array's device,
    because a thread that has not used CUDA before would use the first device.
    """

    def __init__(self, array: DeviceArray) -> None:
        """Prepare to read ``array``, which is on the current device, with a new stream."""
        self._array, self._device, self._stream = array, current_device(), independent_stream()

    def __call__(self, begin: int, end: int) -> NDArray[Any]:
        """Copy entries ``begin`` to ``end`` - 1 to a new host array."""
        with cuda.gpus[self._device]:
            part: NDArray[Any] = self._array[begin:end].copy_to_host(stream=self._stream)
            self._stream.synchronize()
        return part
