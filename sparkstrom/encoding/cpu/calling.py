"""Calling compiled functions by Numba's own convention, with ctypes, without Numba.

    i32 status = f(result*, error**, arguments ...)

An array is nine or more arguments: two owners, for which NULL says that it is the caller's,
entries, bytes of one, address, shape, strides. A tuple of equal numbers is written as an array.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

NUMBERS = {
    "int32": ctypes.c_int32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}
FINE = (0, -2)  # -2: nothing to return

Given = Callable[[Any], tuple[Any, ...]]  # a value as the arguments that it becomes


class Argument(NamedTuple):
    """A number, or an array where ``dimensions`` is above 0."""

    kind: str  # NumPy's name
    dimensions: int
    read_only: bool


class Native(NamedTuple):
    """A compiled function."""

    address: int
    arguments: list[Argument]
    result: str  # NumPy's name of a number, or "none"
    results: int  # so many of them, as a tuple; 0: one number


def entry(name: str, native: Native) -> Callable[..., Any]:
    """What Python calls; raises TypeError for values of another kind."""
    pointer = ctypes.c_void_p
    types = [kind for argument in native.arguments for kind in _types(argument)]
    function = ctypes.CFUNCTYPE(ctypes.c_int32, pointer, pointer, *types)(native.address)
    given = [_given(name, argument) for argument in native.arguments]
    number: Any = NUMBERS.get(native.result, ctypes.c_int64)
    room = number * max(1, native.results)

    def call(*values: Any) -> Any:
        flat = [part for take, value in zip(given, values, strict=True) for part in take(value)]
        result, error = room(), pointer()
        status = function(ctypes.addressof(result), ctypes.addressof(error), *flat)
        if status not in FINE:
            raise ArithmeticError(f"kernel {name} ended with status {status}")
        if native.results:
            return tuple(result)
        return None if native.result == "none" else result[0]

    return call


def _types(argument: Argument) -> Sequence[Any]:
    if not argument.dimensions:
        return [NUMBERS[argument.kind]]
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    return [pointer, pointer, size, size, pointer, *[size] * 2 * argument.dimensions]


def _given(name: str, argument: Argument) -> Given:
    if not argument.dimensions:
        plain = float if argument.kind.startswith("float") else int
        return lambda value: (plain(value),)
    return _given_array(name, argument)


def _given_array(name: str, argument: Argument) -> Given:
    """Checked on every call: what compiled code is told, it does not doubt."""
    dtype, dimensions, read_only = np.dtype(argument.kind), argument.dimensions, argument.read_only
    itemsize, memory = dtype.itemsize, ctypes.c_char * 0

    def flatten(array: Any) -> tuple[Any, ...]:
        flags = array.flags
        fits = flags.c_contiguous and flags.aligned if read_only else flags.carray
        if not fits or array.ndim != dimensions or array.dtype != dtype:
            raise TypeError(
                f"kernel {name} takes {dtype}[{dimensions}] in one piece"
                f"{'' if read_only else ', writable'}; got {array.dtype}{list(array.shape)}"
            )
        # Both are the address; where memory may be written, there is a way at half the time.
        where = array.__array_interface__["data"][0] if read_only else memory.from_buffer(array)
        if dimensions == 1:
            return None, None, array.size, itemsize, where, array.size, itemsize
        return (None, None, array.size, itemsize, where, *array.shape, *array.strides)

    return flatten
