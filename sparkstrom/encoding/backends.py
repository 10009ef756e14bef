"""Which kernels do the work, chosen once, by name.

``reference`` is the definition in NumPy, ``cpu`` the same functions in Numba, ``cuda`` the same
for device arrays. Importing the latter two compiles them or loads them from Numba's cache, with
their real signatures: ``warm_up`` does that before a node joins the mesh, so that no lease runs
out over a compiler.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparkstrom.base.errors import SetupError, UsageError

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]

BACKENDS = {  # for arrays in host memory
    "reference": "sparkstrom.encoding.reference",
    "cpu": "sparkstrom.encoding.cpu.kernels_cpu",
}

CUDA = "cuda"  # for arrays on a device
CUDA_KERNELS = "sparkstrom.encoding.cuda.kernels_cuda"

SCRATCH_BYTES = 512  # working memory of the bitmap kernels


class Kernels(Protocol):
    """A kernel set. Argument tables: ``sparkstrom.encoding.reference``."""

    def scan_local(self, local: F32, theta: F32, tau: float, codes: I32, /) -> tuple[int, int]: ...

    def scan_replica(
        self, residual: F32, delta: F32, tau: float, codes: I32, /
    ) -> tuple[int, int]: ...

    def move(
        self, theta: F32, other: F32, codes: I32, step: float, other_step: float, q: float, /
    ) -> tuple[int, int]: ...

    def choose_local(
        self, local: F32, theta: F32, tau: float, limit: int, seed: int, codes: I32, /
    ) -> int: ...

    def choose_replica(
        self, residual: F32, tau: float, limit: int, seed: int, codes: I32, /
    ) -> int: ...

    def sample(
        self, one: F32, other: F32, sign: int, seed: int, where: I32, sizes: F32, /
    ) -> None: ...

    def levels_local(
        self, local: F32, theta: F32, codes: I32, tau: float, top: int, levels: U8, /
    ) -> int: ...

    def levels_replica(
        self, residual: F32, codes: I32, tau: float, top: int, levels: U8, /
    ) -> int: ...

    def move_levels(
        self,
        theta: F32,
        other: F32,
        codes: I32,
        levels: U8,
        step: float,
        other_step: float,
        q: float,
        /,
    ) -> tuple[int, int]: ...

    def shift_codes(self, codes: I32, start: int, /) -> None: ...

    def bitmap_local(
        self,
        local: F32,
        theta: F32,
        tau: float,
        step: float,
        side: int,
        q: float,
        scratch: U8,
        out: U8,
        /,
    ) -> tuple[int, int, int, int]: ...

    def bitmap_replica(
        self,
        residual: F32,
        theta: F32,
        tau: float,
        step: float,
        side: int,
        q: float,
        scratch: U8,
        out: U8,
        /,
    ) -> tuple[int, int, int, int]: ...

    def bitmap_count(self, packed: U8, n: int, /) -> int: ...

    def bitmap_decode(
        self, packed: U8, n: int, side: int, quanta: int, indices: I32, amounts: I32, /
    ) -> int: ...

    def bitmap_add(
        self, theta: F32, packed: U8, side: int, step: float, q: float, scratch: U8, /
    ) -> tuple[int, int]: ...

    def bitmap_add_both(
        self, theta: F32, local: F32, packed: U8, side: int, step: float, q: float, scratch: U8, /
    ) -> tuple[int, int]: ...

    def apply_hits(self, theta: F32, indices: I32, quanta: I32, q: float, /) -> tuple[int, int]: ...

    def apply_hits_both(
        self, theta: F32, local: F32, indices: I32, quanta: I32, q: float, /
    ) -> tuple[int, int]: ...

    def sum_hits(self, total: I32, indices: I32, quanta: I32, /) -> tuple[int, int]: ...

    def add_quanta(self, theta: F32, total: I32, q: float, /) -> tuple[int, int]: ...

    def add_quanta_both(
        self, theta: F32, local: F32, total: I32, q: float, /
    ) -> tuple[int, int]: ...

    def clip_local(self, local: F32, theta: F32, limit: float, /) -> float: ...

    def clip_replica(self, residual: F32, limit: float, /) -> float: ...

    def norms_local(self, local: F32, theta: F32, /) -> tuple[float, float]: ...

    def norms_replica(self, residual: F32, /) -> tuple[float, float]: ...


Read = Callable[[int, int], NDArray[Any]]  # (begin, end) -> that part of an array, on the host


class Memory(Protocol):
    """Where a kernel set's arrays lie, and how the host gets at them.

    Each function answers when its work is done: nothing of it is under way on a device any more.
    """

    def empty(self, size: int, dtype: DTypeLike, /) -> NDArray[Any]: ...

    def zeros(self, size: int, dtype: DTypeLike, /) -> NDArray[Any]: ...

    def mirror(self, host: NDArray[Any], /) -> NDArray[Any]: ...

    def to_host(self, array: NDArray[Any], /) -> NDArray[Any]: ...

    def add(self, target: F32, source: F32, /) -> None: ...

    def copy(self, array: NDArray[Any], /) -> NDArray[Any]: ...

    def assign(self, target: NDArray[Any], source: NDArray[Any], /) -> None: ...

    def subtract(self, target: F32, one: F32, other: F32, /) -> None: ...

    def from_host(self, host: NDArray[Any], /) -> NDArray[Any]: ...

    def part(self, array: NDArray[Any], where: slice, /) -> NDArray[Any]: ...

    def reader(self, array: NDArray[Any], /) -> Read: ...


@dataclass(frozen=True, slots=True)
class Backend:
    """Where parameters lie and what works on them, handed to whoever holds some."""

    name: str
    kernels: Kernels
    memory: Memory


@cache
def backend(name: str = "cpu") -> Backend:
    """The backend of this name: "cpu", "reference" or "cuda".

    Raises SetupError with the reason where ``cuda`` is asked for and cannot be had, UsageError
    where there is no such backend.
    """
    return Backend(name, kernels(name), memory(name))


def host() -> Backend:
    """The backend for what is on the host by nature: payloads, and sums that travel."""
    return backend("cpu")


def on_device(index: int) -> Backend:
    """The CUDA backend, and from now on this thread works on that GPU of those it sees.

    Raises SetupError with the reason where it cannot be had.
    """
    need_device(index)
    return backend(CUDA)


def need_device(index: int) -> None:
    """Let this thread work on that GPU; nothing is compiled. Raises SetupError as ``on_device``."""
    _cuda_device().select(index)


def kernels(name: str = "cpu") -> Kernels:
    """The kernel set of this name; the first call compiles it or loads it from the cache.

    Raises SetupError with the reason where ``cuda`` is asked for and cannot be had.
    """
    if name == CUDA:
        return _cuda_kernels()
    if name not in BACKENDS:
        have = sorted([*BACKENDS, CUDA])
        raise UsageError(f"backend={name!r}: there is no such kernel set; have {have}")
    return cast(Kernels, importlib.import_module(BACKENDS[name]))


def _cuda_kernels() -> Kernels:
    _cuda_device().require()
    return cast(Kernels, importlib.import_module(CUDA_KERNELS))


def _cuda_device() -> Any:
    try:
        return importlib.import_module("sparkstrom.encoding.cuda.cuda_device")
    except (ImportError, ValueError) as error:  # the latter: NUMBA_CUDA_DRIVER leads nowhere
        raise SetupError(
            f"backend='cuda': numba.cuda cannot be imported: {error}. Install the package"
            " numba-cuda and look at the variables NUMBA_CUDA_*, or use backend='cpu'"
        ) from error


def memory(name: str = "cpu") -> Memory:
    """The memory that goes with the kernel set of this name."""
    module = "cuda.cuda_memory" if name == CUDA else "cpu.host_memory"
    return cast(Memory, importlib.import_module(f"sparkstrom.encoding.{module}"))


COMPILING = "sparkstrom: compiling kernels, once per machine: about 20 s"


def warm_up(name: str = "cpu", say: Callable[[str], None] | None = None) -> None:
    """Have every kernel that a step can need in memory, ready to run.

    ``say`` is told where they must be compiled first, which takes a while.
    """
    kernels(name)
    importlib.import_module("sparkstrom.encoding.gaps")
    compiled = importlib.import_module("sparkstrom.encoding.cpu.compiled")
    if say is not None and not compiled.are_compiled():
        say(COMPILING)
    compiled.ready()
