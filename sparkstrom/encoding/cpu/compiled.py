"""The one way we compile: no GIL, cached on disk, exact arithmetic, types fixed in advance.

Signatures are given, so a kernel is compiled (or loaded from the cache) when its module is
imported, never in the middle of a step. No ``fastmath``: conservation is exact arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])

BYTES = "Array(uint8, 1, 'C', True)"  # read-only u8[:]: bytes from the network; takes writable too


def kernel(signature: str) -> Callable[[Function], Function]:
    """Compile for exactly this signature (Numba's notation)."""

    def compile_now(function: Function) -> Function:
        return cast(Function, njit(signature, nogil=True, cache=True)(function))

    return compile_now


def helper(function: Function) -> Function:
    """Compile a function that only kernels of the same file call."""
    return cast(Function, njit(nogil=True, inline="never")(function))
