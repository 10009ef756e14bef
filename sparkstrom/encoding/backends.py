"""Define the interfaces of kernels and of their memory, and select both by a backend's name.

A kernel is a function that processes all parameters, or all hits (the parameters that an update
changes). The backend "reference" is the specification in NumPy, "cpu" has the same functions
compiled with Numba, and "cuda" has them for device arrays. The latter two are compiled, or loaded
from files, before their first call. ``warm_up`` does this before a worker joins a fit, so that the
worker is not considered dead while it compiles.
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

BACKENDS = {  # modules with kernels for arrays in host memory
    "reference": "sparkstrom.encoding.reference_kernels",
    "cpu": "sparkstrom.encoding.cpu.kernels",
}

CUDA = "cuda"  # name of the backend for arrays on a GPU
CUDA_KERNELS = "sparkstrom.encoding.cuda.kernels"

SCRATCH_BYTES = 512  # working memory of the bitmap kernels


class Kernels(Protocol):
    """Interface of a set of kernels; ``encoding.reference_kernels`` documents the arguments.

    A hit is a parameter whose residual (what is learned but not sent) reaches tau in absolute
    value. A hit's code is its index, or ``~index`` if the residual is negative. The residual is
    local - theta for kernels named ``*_local``, and a separate array for ``*_replica``. Results
    (overflows, first) are the number of parameters that left the range in which float32 sums are
    exact, and the index of the first of them or -1. ``q`` is the quantum, of which theta and all
    its changes are multiples; ``side`` (+1 or -1) is the sign of a bitmap's half steps.
    """

    def scan_local(self, local: F32, theta: F32, tau: float, codes: I32, /) -> tuple[int, int]:
        """Write the code (``index`` or ``~index``) of each hit in local - theta to ``codes``.

        Returns (number of hits, bits of the largest |local|, which reveal NaN and infinity).
        """

    def scan_replica(self, residual: F32, delta: F32, tau: float, codes: I32, /) -> tuple[int, int]:
        """Add delta to the residual and write its hits' codes, like ``scan_local``.

        Returns (number of hits, bits of the largest |residual|).
        """

    def move(
        self, theta: F32, other: F32, codes: I32, step: float, other_step: float, q: float, /
    ) -> tuple[int, int]:
        """Add +-step to theta and +-other_step to ``other`` at hits; return (overflows, first)."""

    def choose_local(
        self, local: F32, theta: F32, tau: float, limit: int, seed: int, codes: I32, /
    ) -> int:
        """Write codes of selected hits in local - theta; return the number of selected hits.

        All hits of at least 2 tau are selected, and smaller ones with a probability of limit/2^32;
        ``seed`` determines which.
        """

    def choose_replica(
        self, residual: F32, tau: float, limit: int, seed: int, codes: I32, /
    ) -> int:
        """Write codes of selected hits in the residual, like ``choose_local``; return how many."""

    def sample(self, one: F32, other: F32, sign: int, seed: int, where: I32, sizes: F32, /) -> None:
        """Sample residuals: write random indices to ``where``, and the residuals to ``sizes``.

        ``sizes`` gets the absolute values, |one + sign * other|. ``seed`` determines the indices.
        """

    def find_levels_local(
        self, local: F32, theta: F32, codes: I32, tau: float, top: int, levels: U8, /
    ) -> int:
        """Write the level of each hit to ``levels``: the largest l <= top that the hit reaches.

        A hit reaches level l if |local - theta| >= tau * 2^l. ``codes`` contains the hits' codes.
        Returns the highest of the levels; 0 without hits.
        """

    def find_levels_replica(
        self, residual: F32, codes: I32, tau: float, top: int, levels: U8, /
    ) -> int:
        """Write each hit's level to ``levels``, as ``find_levels_local`` does, for ``residual``.

        Returns the highest of the levels; 0 without hits.
        """

    def move_by_levels(
        self,
        theta: F32,
        other: F32,
        codes: I32,
        levels: U8,
        step: float,
        other_step: float,
        q: float,
        /,
    ) -> tuple[int, int]:
        """Apply hits like ``move``, with both steps multiplied by 2^level of the hit."""

    def shift_codes(self, codes: I32, start: int, /) -> None:
        """Add ``start`` to the index in each hit code (``index`` or ``~index``), in place."""

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
    ) -> tuple[int, int, int, int]:
        """Write local - theta to ``out`` as a bitmap, and apply the bitmap to theta and local.

        For each parameter, a bitmap has +step (residual >= tau), -step (residual <= -tau), half a
        step of the sign ``side`` (residual >= tau / 2 with that sign), or nothing. Theta gains this
        step, and local gains +-(step - tau), or half of that for a half step, so that the residual
        shrinks by tau, or by tau / 2.
        Returns (hits, half steps, overflows, index of the first overflow or -1).
        """

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
    ) -> tuple[int, int, int, int]:
        """Write the residual as a bitmap, and apply it to theta and the residual.

        Like ``bitmap_local``, but ``residual`` is an array, from which tau, or half, is subtracted.
        """

    def bitmap_count(self, packed: U8, n: int, /) -> int:
        """Count the entries of a bitmap of n parameters; return -1 if padding bits are set."""

    def bitmap_decode(
        self, packed: U8, n: int, side: int, quanta: int, indices: I32, amounts: I32, /
    ) -> int:
        """Unpack a bitmap to indices and amounts (+-quanta or half); return how many."""

    def bitmap_add(
        self, theta: F32, packed: U8, side: int, step: float, q: float, scratch: U8, /
    ) -> tuple[int, int]:
        """Add a bitmap's steps to theta; return (overflows, first). ``scratch``: working memory."""

    def bitmap_add_both(
        self, theta: F32, local: F32, packed: U8, side: int, step: float, q: float, scratch: U8, /
    ) -> tuple[int, int]:
        """Add a bitmap's steps to theta and to local, so that local - theta stays the same.

        Returns the result of ``bitmap_add`` for theta; overflows of local are not counted.
        """

    def apply_hits(self, theta: F32, indices: I32, quanta: I32, q: float, /) -> tuple[int, int]:
        """Add quanta * q to theta at ``indices``; return (overflows, index of the first or -1)."""

    def apply_hits_both(
        self, theta: F32, local: F32, indices: I32, quanta: I32, q: float, /
    ) -> tuple[int, int]:
        """Add quanta * q to theta and to local at ``indices``: local - theta stays the same.

        Returns the result of ``apply_hits`` for theta; overflows of local are not counted.
        """

    def sum_hits(self, total: I32, indices: I32, quanta: I32, /) -> tuple[int, int]:
        """Add quanta to the integer sums ``total`` at ``indices``.

        Returns (number of sums that wrapped around, index of the first or -1).
        """

    def add_quanta(self, theta: F32, total: I32, q: float, /) -> tuple[int, int]:
        """Add ``total`` * q, a sum of updates, to theta; return (overflows, first or -1)."""

    def add_quanta_both(self, theta: F32, local: F32, total: I32, q: float, /) -> tuple[int, int]:
        """Add ``total`` * q to theta and to local, so that local - theta stays the same.

        Returns the result of ``add_quanta`` for theta; overflows of local are not counted.
        """

    def clip_local(self, local: F32, theta: F32, limit: float, /) -> float:
        """Clip local to within ``limit`` of theta; return the sum of absolute changes."""

    def clip_replica(self, residual: F32, limit: float, /) -> float:
        """Clip the residual f32[n] to +-limit; return the sum of absolute changes."""

    def residual_sums_local(self, local: F32, theta: F32, /) -> tuple[float, float]:
        """Return (sum of |local - theta|, sum of (local - theta)^2), in float64."""

    def residual_sums_replica(self, residual: F32, /) -> tuple[float, float]:
        """Return (sum of |residual|, sum of residual^2), in float64."""


Read = Callable[[int, int], NDArray[Any]]  # (begin, end) -> entries begin to end - 1, on the host


class Memory(Protocol):
    """Interface that allocates arrays for a set of kernels, and copies arrays from and to the host.

    All functions are synchronous: they leave no work running on a device.
    """

    def empty(self, size: int, dtype: DTypeLike, /) -> NDArray[Any]:
        """Allocate an array of ``size`` uninitialised entries."""

    def zeros(self, size: int, dtype: DTypeLike, /) -> NDArray[Any]:
        """Allocate an array of ``size`` zeros."""

    def mirror(self, host: NDArray[Any], /) -> NDArray[Any]:
        """Return an array that kernels can write: ``host`` itself, or one of its size and dtype."""

    def to_host(self, array: NDArray[Any], /) -> NDArray[Any]:
        """Return the array's content as a host array, which may be the array itself."""

    def add(self, target: F32, source: F32, /) -> None:
        """Add ``source``, which may be on the host, to ``target``; both are f32[n]."""

    def copy(self, array: NDArray[Any], /) -> NDArray[Any]:
        """Return a copy of the array in the same memory."""

    def assign(self, target: NDArray[Any], source: NDArray[Any], /) -> None:
        """Copy ``source`` to ``target``, of equal size and type; either may be on the host."""

    def subtract(self, target: F32, one: F32, other: F32, /) -> None:
        """Set ``target`` to one - other, all f32[n]; ``target`` may be either of the two."""

    def from_host(self, host: NDArray[Any], /) -> NDArray[Any]:
        """Return ``host``, or a copy of it, as an array that kernels can read."""

    def part(self, array: NDArray[Any], where: slice, /) -> NDArray[Any]:
        """Return a view of the array's entries in the slice ``where``."""

    def reader(self, array: NDArray[Any], /) -> Read:
        """Return a thread-safe function (begin, end) that returns that range on the host."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A set of kernels, and the memory of the arrays that they process."""

    name: str  # "reference", "cpu" or "cuda"
    kernels: Kernels  # functions that process arrays
    memory: Memory  # allocates and copies these arrays


@cache
def backend(name: str = "cpu") -> Backend:
    """Return the backend of this name: "cpu", "reference" or "cuda".

    Raises SetupError with the reason if CUDA is unavailable, UsageError for an unknown name.
    """
    return Backend(name, kernels(name), memory(name))


def host() -> Backend:
    """Return the CPU backend, for arrays that are always on the host, such as payloads and sums."""
    return backend("cpu")


def on_device(index: int) -> Backend:
    """Return the CUDA backend, and make this thread use GPU number ``index`` of the visible ones.

    Raises SetupError with the reason if the GPU is unavailable.
    """
    need_device(index)
    return backend(CUDA)


def need_device(index: int) -> None:
    """Make this thread use GPU number ``index``, without compiling kernels.

    Raises SetupError with the reason if the GPU is unavailable.
    """
    _cuda_device().select(index)


def kernels(name: str = "cpu") -> Kernels:
    """Return the module with the kernels of the backend "cpu", "reference" or "cuda".

    The first call may compile the kernels or load them from a cache. Raises SetupError with the
    reason if CUDA is unavailable, UsageError for an unknown name.
    """
    if name == CUDA:
        return _cuda_kernels()
    if name not in BACKENDS:
        have = sorted([*BACKENDS, CUDA])
        raise UsageError(f"backend={name!r}: there is no such kernel set; have {have}")
    return cast(Kernels, importlib.import_module(BACKENDS[name]))


def _cuda_kernels() -> Kernels:
    """Return the CUDA kernels. Raise SetupError if CUDA is unavailable or cannot compile them."""
    _cuda_device().require()
    try:
        return cast(Kernels, importlib.import_module(CUDA_KERNELS))
    except Exception as error:  # what Numba raises is not documented, and differs between versions
        raise SetupError(
            f"backend='cuda': Numba cannot compile kernels: {type(error).__name__}: {error}."
            " Install versions of numba-cuda, numpy and the CUDA toolkit that fit together, or"
            " use backend='cpu'"
        ) from error


def _cuda_device() -> Any:
    """Return the module ``cuda.device``. Raise SetupError if numba.cuda cannot be imported."""
    try:
        return importlib.import_module("sparkstrom.encoding.cuda.device")
    except (ImportError, ValueError) as error:  # ValueError: NUMBA_CUDA_DRIVER is wrong
        raise SetupError(
            f"backend='cuda': numba.cuda cannot be imported: {error}. Install the package"
            " numba-cuda and look at the variables NUMBA_CUDA_*, or use backend='cpu'"
        ) from error


def memory(name: str = "cpu") -> Memory:
    """Return the module that allocates and copies arrays for a backend.

    ``name`` is not checked: "cuda" means arrays on a GPU, any other name arrays of the host.
    """
    module = "cuda.memory" if name == CUDA else "cpu.host_memory"
    return cast(Memory, importlib.import_module(f"sparkstrom.encoding.{module}"))


COMPILING = "sparkstrom: compiling kernels, once per machine: about 15 s"


def warm_up(name: str = "cpu", say: Callable[[str], None] | None = None) -> None:
    """Load or compile every kernel that a training step can need.

    ``say`` is called with a message if kernels must be compiled, which takes about 15 s.
    """
    kernels(name)
    importlib.import_module("sparkstrom.encoding.gaps")
    compiled = importlib.import_module("sparkstrom.encoding.cpu.kernel_loader")
    if say is not None and not compiled.are_compiled():
        say(COMPILING)
    compiled.load_all()
