"""Access CUDA devices: select one, accept other libraries' arrays, compile kernels, keep buffers.

Arrays are used in place. Numba, CuPy and torch expose the address of their memory by
``__cuda_array_interface__``, JAX and others by DLPack. Arrays must be on Numba's current device.
Numba uses the legacy default stream, as torch and CuPy do by default; callers on another stream
must synchronise that stream first. All functions are synchronous.

Numba fuses ``a * b + c`` into one operation with one rounding, which cannot be disabled. If exact
bits matter, a kernel therefore multiplies only if the product is exact (a power of two times an
integer, or squares of float32 in float64), and selects a sign instead of multiplying by it. Fused
and separate operations then give the same bits.

Under Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``) every CUDA thread is a Python thread, so blocks
are small. While the simulator runs a function, it replaces the global ``cuda`` of the function's
module by an object of its own. This is not thread-safe: at the end it restores the global, even if
other threads still run functions of that module. ``device_functions`` run in many threads, so they
use ``running`` (defined below), which the simulator never replaces. ``running`` is ``numba.cuda``
or, under the simulator, forwards to the simulator's object.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from ctypes import byref
from typing import Any, TypeVar, cast

import numpy as np
from numba import cuda
from numba.core import config
from numba.cuda.cudadrv import driver
from numba.cuda.cudadrv.devicearray import is_cuda_ndarray
from numba.cuda.cudadrv.error import CudaSupportError
from numpy.typing import DTypeLike, NDArray

from sparkstrom.base.errors import SetupError, UsageError

# ``DLPackInterface`` converts device arrays that support only DLPack. DLPack passes a capsule
# around a C struct, from which pointer, shape and strides can be read without a library. We neither
# rename nor free the capsule: its owner frees it with the last reference, so we keep a reference as
# long as the memory is in use. Source: dlpack.h, version 0.8 (the layout of unversioned capsules
# has not changed since).


CUDA, CUDA_MANAGED = 2, 13  # DLDeviceType
KINDS = {0: "i", 1: "u", 2: "f"}  # DLDataTypeCode


class _Tensor(ctypes.Structure):
    """The C struct DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in entries, not bytes; null: contiguous
        ("byte_offset", ctypes.c_uint64),
    )


_pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_in.restype = ctypes.c_void_p
_pointer_in.argtypes = (ctypes.py_object, ctypes.c_char_p)


def is_on_cuda(array: Any) -> bool:
    """Return whether an array supports DLPack and is on a CUDA device."""
    ask = getattr(array, "__dlpack_device__", None)
    return ask is not None and int(ask()[0]) in (CUDA, CUDA_MANAGED)


class DLPackInterface:
    """Adapter that gives a DLPack device array a ``__cuda_array_interface__`` (version 3)."""

    def __init__(self, array: Any) -> None:
        """Export ``array`` by DLPack. Raise UsageError for an unsupported entry type."""
        self._capsule = array.__dlpack__()  # the producer synchronises with the default stream
        tensor = _Tensor.from_address(_pointer_in(self._capsule, b"dltensor"))
        if tensor.code not in KINDS or tensor.lanes != 1:
            raise UsageError(
                f"a device array with DLPack type code {tensor.code} and {tensor.lanes} lanes:"
                " must be float32"
            )
        size = tensor.bits // 8
        axes = range(tensor.ndim)
        self.__cuda_array_interface__ = {
            "version": 3,
            "data": ((tensor.data or 0) + tensor.byte_offset, False),
            "shape": tuple(tensor.shape[axis] for axis in axes),
            "strides": tuple(tensor.strides[axis] * size for axis in axes)
            if tensor.strides
            else None,
            "typestr": f"<{KINDS[tensor.code]}{size}",
        }


Function = TypeVar("Function", bound=Callable[..., Any])
DeviceArray = Any  # a Numba device array, which kernels accept

SIMULATED = bool(config.ENABLE_CUDASIM)
THREADS = 8 if SIMULATED else 256
PREFIX_THREADS = 8 if SIMULATED else 1024  # threads of the single block that adds up all tiles
ITEMS = 32  # parameters per thread: the number of bits in a word
TILE = THREADS * ITEMS  # parameters per block

STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the legacy default stream

# Do not warn about low occupancy: small models and prefix sums in one block are normal.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0


def require() -> None:
    """Initialise CUDA. Raise SetupError with the reason if it cannot be used."""
    if SIMULATED:
        return
    try:
        cuda.current_context()
    except CudaSupportError as error:
        reason = _first_sentence(error)
        raise SetupError(
            f"backend='cuda': {reason}. Install NVIDIA's driver and make a GPU visible to this"
            " process (nvidia-smi, CUDA_VISIBLE_DEVICES), or use backend='cpu'"
        ) from error
    if not is_usable():
        raise SetupError(
            "backend='cuda': there is a GPU, but Numba finds no compiler for it (libNVVM)."
            " Install the CUDA toolkit or the package numba-cuda, or use backend='cpu'"
        )


def select(index: int) -> None:
    """Make this thread use device number ``index``; drop its working arrays on other devices.

    Raise SetupError if the device does not exist, or if CUDA cannot be used.
    """
    try:
        count = len(cuda.gpus)
    except CudaSupportError:
        require()  # raises an error that names what is missing
        raise
    if not 0 <= index < count:
        raise SetupError(f"backend='cuda': device {index} is wanted, Numba sees {count}")
    if getattr(cuda.gpus.current, "id", None) != index:
        cuda.select_device(index)
    scratch.move_to(index)


def current_device() -> int:
    """Return the index of the device that this thread uses."""
    return int(cuda.current_context().device.id) if not SIMULATED else 0


def independent_stream() -> Any:
    """Create a stream on this thread's device that does not synchronise with the default stream.

    Numba's own streams would wait for the default stream, on which the model's step runs.
    """
    if SIMULATED:
        return cuda.stream()
    if getattr(driver, "USE_NV_BINDING", True):  # new versions of numba-cuda have no other binding
        return cuda.external_stream(int(driver.driver.cuStreamCreate(STREAM_NON_BLOCKING)))
    made = ctypes.c_void_p()
    driver.driver.cuStreamCreate(byref(made), STREAM_NON_BLOCKING)
    return cuda.external_stream(made.value)


def is_usable() -> bool:
    """Return whether a CUDA device and a compiler exist; ``require`` names what is missing."""
    return bool(cuda.is_available())


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an error's message, without the final period."""
    return " ".join(str(error).split()).partition(". ")[0].rstrip(" :.")


def kernel(signature: str) -> Callable[[Callable[..., None]], Any]:
    """Decorate a kernel to be compiled at import for ``signature``, which has Numba's notation.

    It is called as ``k[blocks, threads](...)``. ``fastmath`` is off, because sums of updates must
    be exact. Without a device, nothing is compiled, so that modules can still be imported, and
    ``backends.kernels`` raises SetupError.
    """

    def compile_now(function: Callable[..., None]) -> Any:
        """Compile the function for ``signature``."""
        if not is_usable():
            return cuda.jit(function)
        return cuda.jit(signature, cache=not SIMULATED)(function)

    return compile_now


def helper(function: Function) -> Function:
    """Decorate a function that kernels call on the device.

    It is for kernels of the same file, except in ``device_functions``, which serves all files.
    """
    return cast(Function, cuda.jit(function, device=True))


class _SimulatedCuda:
    """Substitute for ``numba.cuda`` in device functions that Numba's simulator runs."""

    def __init__(self) -> None:
        """Import Numba's simulator, which must be enabled."""
        from numba.cuda.simulator import kernel

        self._simulated = kernel

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the simulated ``numba.cuda``."""
        return getattr(self._simulated._get_kernel_context(), name)


running: Any = _SimulatedCuda() if SIMULATED else cuda  # ``cuda`` for ``device_functions``


def tiles_of(n: int) -> int:
    """Return the number of blocks for n parameters, with one tile of parameters per block."""
    return -(-n // TILE)


def blocks_of(n: int) -> int:
    """Return the number of blocks for n entries, with one thread per entry."""
    return -(-n // THREADS)


def checked_array(array: Any, dtype: DTypeLike, name: str) -> DeviceArray:
    """Return the array as a Numba device array, in the same memory.

    Raises UsageError unless the array is a contiguous vector of this dtype on the device.
    """
    device = as_numba_array(array, name)
    if device.dtype != np.dtype(dtype):
        raise UsageError(
            f"{name} is {device.dtype} on the device: must be {np.dtype(dtype)}, and is changed in"
            " place, so convert the model's own array"
        )
    if device.ndim != 1 or not device.is_c_contiguous():
        raise UsageError(
            f"{name} has shape {tuple(device.shape)} and strides {tuple(device.strides)}: must be"
            " one contiguous vector; flatten the parameters into one array and use views of it"
        )
    return device


def as_numba_array(array: Any, name: str) -> DeviceArray:
    """Return the array as a Numba device array, in the same memory.

    Raises UsageError if the array is in host memory.
    """
    if is_cuda_ndarray(array):
        return array
    if hasattr(array, "__cuda_array_interface__"):
        return cuda.as_cuda_array(array)
    if is_on_cuda(array):
        return cuda.as_cuda_array(DLPackInterface(array))
    raise UsageError(
        f"{name} is a {type(array).__module__}.{type(array).__qualname__} in host memory:"
        " backend='cuda' works on device arrays in place; move the model to the device, or use"
        " backend='cpu'"
    )


class Scratch(threading.local):
    """Named working arrays of one thread on the device, reused across calls and grown on demand."""

    def __init__(self) -> None:
        """Start without arrays; ``get`` allocates them."""
        self._arrays: dict[str, DeviceArray] = {}
        self._device: int | None = None

    def move_to(self, device: int) -> None:
        """Drop all arrays if they are on a device other than this one."""
        if device != self._device:
            self._arrays, self._device = {}, device

    def get(self, name: str, size: int, dtype: DTypeLike) -> DeviceArray:
        """Return the array of this name, with at least ``size`` entries of undefined content."""
        held = self._arrays.get(name)
        if held is None or held.size < size:
            held = self._arrays[name] = cuda.device_array(max(1, size), dtype)
        return held

    def zeros(self, name: str, size: int) -> DeviceArray:
        """Return the i32[size] array of this name, all 0. Callers must reset what they change."""
        if name not in self._arrays:
            self._arrays[name] = cuda.to_device(np.zeros(size, np.int32))
        return self._arrays[name]


scratch = Scratch()


def sum_partial(partial: DeviceArray, size: int) -> float:
    """Return the sum of the first ``size`` entries of ``partial`` f64[any], added on the host."""
    host: NDArray[np.float64] = partial[:size].copy_to_host()
    return float(host.sum())
