"""The device: is there one, whose arrays are these, how are kernels compiled for it.

Arrays are taken in place, whoever made them: Numba, CuPy and torch say where their memory is by
``__cuda_array_interface__``, JAX and others by DLPack. They must lie on Numba's current device.
Numba works on the legacy default stream, as torch and CuPy do unless told otherwise; who uses
another stream synchronises it first. Every function answers when its work is done.

Numba fuses ``a * b + c`` into one operation of one rounding, and offers no way to forbid it. So
wherever bits matter a kernel only multiplies where the product is exact (a power of two times an
integer, squares of float32 in float64), or chooses a sign in place of multiplying by it. Then
fused and separate operations give the same bits.

Under Numba's simulator (``NUMBA_ENABLE_CUDASIM=1``) a thread is a Python thread: blocks are small.
It puts its own ``cuda`` into a kernel's file while the kernel runs. A helper's file it would change
and change back at every call, under the eyes of other threads; there ``running`` stands for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import byref
from typing import Any, TypeVar, cast

import numpy as np
from numba import cuda
from numba.core import config
from numba.cuda.cudadrv import driver, drvapi
from numba.cuda.cudadrv.devicearray import is_cuda_ndarray
from numba.cuda.cudadrv.error import CudaSupportError
from numpy.typing import DTypeLike, NDArray

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.encoding.cuda import cuda_dlpack

Function = TypeVar("Function", bound=Callable[..., Any])
DeviceArray = Any  # one that Numba's kernels take

SIMULATED = bool(config.ENABLE_CUDASIM)
THREADS = 8 if SIMULATED else 256
PREFIX_THREADS = 8 if SIMULATED else 1024  # of the one block that adds up all tiles
ITEMS = 32  # parameters per thread, as many as a word has bits
TILE = THREADS * ITEMS  # parameters per block

STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no order with the legacy default stream

# A small model is no mistake, and neither is a prefix sum in one block.
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0


def require() -> None:
    """Raise SetupError with the reason where CUDA cannot be used; start it otherwise."""
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
    """Let this thread work on that device. Raise SetupError where there is none."""
    try:
        count = len(cuda.gpus)
    except CudaSupportError:
        require()  # says what is missing
        raise
    if not 0 <= index < count:
        raise SetupError(f"backend='cuda': device {index} is wanted, Numba sees {count}")
    if getattr(cuda.gpus.current, "id", None) != index:
        cuda.select_device(index)
    scratch.move_to(index)


def current_device() -> int:
    """The index of the device that this thread works on."""
    return int(cuda.current_context().device.id) if not SIMULATED else 0


def stream_apart() -> Any:
    """A stream of this thread's device that waits for no other one, nor others for it.

    Numba makes streams that wait for the default one, on which a model's step is under way.
    """
    if SIMULATED:
        return cuda.stream()
    if driver.USE_NV_BINDING:
        handle = int(driver.driver.cuStreamCreate(STREAM_NON_BLOCKING))
    else:
        made = drvapi.cu_stream()
        driver.driver.cuStreamCreate(byref(made), STREAM_NON_BLOCKING)
        handle = made.value
    return cuda.external_stream(handle)


def is_usable() -> bool:
    """Whether there is a device and a compiler for it; ``require`` says what is missing."""
    return bool(cuda.is_available())


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).partition(". ")[0].rstrip(" :.")


def kernel(signature: str) -> Callable[[Callable[..., None]], Any]:
    """Compile for exactly this signature, when the module is imported; launch as ``k[grid](...)``.

    No ``fastmath``: conservation is exact arithmetic. Without a device nothing is compiled, and
    ``backends`` hands out no kernels; modules can still be imported.
    """

    def compile_now(function: Callable[..., None]) -> Any:
        if not is_usable():
            return cuda.jit(function)
        return cuda.jit(signature, cache=not SIMULATED)(function)

    return compile_now


def helper(function: Function) -> Function:
    """Compile a function that kernels call: of the same file, or from ``cuda_blocks``."""
    return cast(Function, cuda.jit(function, device=True))


class _Running:
    """``numba.cuda`` as the simulated kernel that runs has it."""

    def __init__(self) -> None:
        from numba.cuda.simulator import kernel

        self._simulated = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._simulated._get_kernel_context(), name)


running: Any = _Running() if SIMULATED else cuda  # ``cuda`` of a file that has helpers only


def tiles_of(n: int) -> int:
    """How many blocks cover n parameters when each takes a tile."""
    return -(-n // TILE)


def blocks_of(n: int) -> int:
    """How many blocks cover n entries with one thread for each."""
    return -(-n // THREADS)


def taken(array: Any, dtype: DTypeLike, name: str) -> DeviceArray:
    """The same memory as Numba sees it; UsageError where it is not what kernels work on."""
    device = seen_by_numba(array, name)
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


def seen_by_numba(array: Any, name: str) -> DeviceArray:
    """The same memory as a device array of Numba's; UsageError where it is the host's."""
    if is_cuda_ndarray(array):
        return array
    if hasattr(array, "__cuda_array_interface__"):
        return cuda.as_cuda_array(array)
    if cuda_dlpack.is_on_cuda(array):
        return cuda.as_cuda_array(cuda_dlpack.Interface(array))
    raise UsageError(
        f"{name} is a {type(array).__module__}.{type(array).__qualname__} in host memory:"
        " backend='cuda' works on device arrays in place; move the model to the device, or use"
        " backend='cpu'"
    )


class Scratch(threading.local):
    """A thread's working memory on the device, kept from call to call and grown when needed."""

    def __init__(self) -> None:
        self._arrays: dict[str, DeviceArray] = {}
        self._device: int | None = None

    def move_to(self, device: int) -> None:
        """What lies on another device is of no use any more."""
        if device != self._device:
            self._arrays, self._device = {}, device

    def get(self, name: str, size: int, dtype: DTypeLike) -> DeviceArray:
        """The array of this name, with at least ``size`` entries; garbage at first."""
        held = self._arrays.get(name)
        if held is None or held.size < size:
            held = self._arrays[name] = cuda.device_array(max(1, size), dtype)
        return held

    def zeros(self, name: str, size: int) -> DeviceArray:
        """The i32[size] of this name, all 0 at first; who changes it puts that back."""
        if name not in self._arrays:
            self._arrays[name] = cuda.to_device(np.zeros(size, np.int32))
        return self._arrays[name]


scratch = Scratch()


def total(partial: DeviceArray, size: int) -> float:
    """The sum of the first ``size`` of f64[...], in an order that depends on size alone."""
    host: NDArray[np.float64] = partial[:size].copy_to_host()
    return float(host.sum())
