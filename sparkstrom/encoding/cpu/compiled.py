"""Kernels: functions that run as machine code, exact, without the GIL, types fixed in advance.

Numba compiles them once per host, in a process of its own (``compiler``); everybody else loads the
object files (``object_files``) with LLVM alone, which takes less than importing Numba does.
A module's kernels are loaded at the first call of one, or by ``ready``, never in the middle of a
step. No ``fastmath``: conservation is exact arithmetic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from sparkstrom.encoding.cpu.calling import Native, entry
from sparkstrom.encoding.cpu.object_files import Loaded, are_on_disk, load

Function = TypeVar("Function", bound=Callable[..., Any])

BYTES = "Array(uint8, 1, 'C', True)"  # read-only u8[:]: bytes from the network; takes writable too


class Compiler(Protocol):
    """What the decorators do in the process that compiles."""

    def kernel(self, signature: str, function: Callable[..., Any], /) -> Any: ...

    def callback(self, signature: str, function: Callable[..., Any], /) -> Any: ...

    def helper(self, function: Callable[..., Any], /) -> Any: ...

    def native(self, describe: Callable[..., Any], /) -> Any: ...


compiler: Compiler | None = None  # set by that process, before it imports a module with kernels

_units: dict[str, Unit] = {}  # by module
_loading = threading.RLock()


class Unit:
    """The kernels of one module, loaded together."""

    def __init__(self, module: str) -> None:
        self.module = module
        self._loaded: Loaded | None = None

    def take(self, loaded: Loaded) -> None:
        """Have what ``object_files`` has found or had compiled."""
        self._loaded = loaded

    @property
    def is_loaded(self) -> bool:
        return self._loaded is not None

    def native(self, name: str) -> Native:
        """One function's address and how it is called; the first time for all of them."""
        if self._loaded is None:
            _load([self])
        assert self._loaded is not None, "loading raises where it fails"
        return self._loaded[name]


class Kernel:
    """A compiled function that Python calls; raises TypeError for arrays of another kind."""

    def __init__(self, unit: Unit, name: str) -> None:
        self._unit, self._name = unit, name
        self._entry: Callable[..., Any] | None = None

    def __call__(self, *values: Any) -> Any:
        if self._entry is None:
            self._entry = entry(self._name, self._unit.native(self._name))
        return self._entry(*values)


class Callback:
    """A compiled function that C calls."""

    def __init__(self, unit: Unit, name: str) -> None:
        self._unit, self._name = unit, name

    @property
    def address(self) -> int:
        """Where it lies, for as long as this process lives."""
        return self._unit.native(self._name).address


def kernel(signature: str) -> Callable[[Function], Function]:
    """Machine code for exactly this signature (Numba's notation)."""

    def declare(function: Function) -> Function:
        if compiler is not None:
            return cast(Function, compiler.kernel(signature, function))
        return cast(Function, Kernel(_unit(function), function.__name__))

    return declare


def callback(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """A C function of this signature, whose ``address`` a library is given."""

    def declare(function: Callable[..., Any]) -> Any:
        if compiler is not None:
            return compiler.callback(signature, function)
        return Callback(_unit(function), function.__name__)

    return declare


def helper(function: Function) -> Function:
    """What kernels call, and nobody else."""
    return function if compiler is None else cast(Function, compiler.helper(function))


def native(describe: Callable[..., Any]) -> Any:
    """What kernels call, from what writes its LLVM: Numba's ``intrinsic``."""
    return describe if compiler is None else compiler.native(describe)


def ready() -> None:
    """Have all kernels of all modules imported so far in memory."""
    with _loading:
        _load([unit for unit in _units.values() if not unit.is_loaded])


def are_compiled() -> bool:
    """Return whether ``ready`` has nothing to compile."""
    return are_on_disk([unit.module for unit in _units.values() if not unit.is_loaded])


def _unit(function: Callable[..., Any]) -> Unit:
    return _units.setdefault(function.__module__, Unit(function.__module__))


def _load(units: list[Unit]) -> None:
    with _loading:
        wanted = {unit.module: unit for unit in units if not unit.is_loaded}
        for module, loaded in load(list(wanted)).items():
            wanted[module].take(loaded)
