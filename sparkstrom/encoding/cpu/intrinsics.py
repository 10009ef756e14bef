"""Give kernels four machine instructions that LLVM has for every processor but Numba lacks.

Kernels call these functions by name, such as ``lowest_bit(word)``, but the functions themselves run
only when Numba compiles such a call: given Numba's typing context and the types of the arguments, a
function returns the signature of the call and a generator of LLVM code for it. The docstrings say
what this code does. It does not check bounds; callers must. The functions import Numba inside their
bodies, because only the process that compiles kernels executes them.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from sparkstrom.encoding.cpu.kernel_loader import native

_BIT, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Return the LLVM pointer to array[index]."""
    from numba.np.arrayobj import make_array

    return builder.gep(make_array(array_type)(context, builder, array).data, [index])


@native
def lowest_bit(typing: Any, word: Any) -> Any:
    """Define an intrinsic: return the position of the lowest 1 bit of a u64 word; 64 for 0."""
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Add the LLVM code of one call to ``builder``; return the call's LLVM value."""
        return builder.cttz(arguments[0], ir.Constant(_BIT, 0))

    return types.uint64(types.uint64), generate


@native
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Define an intrinsic: start to load array[index] into the processor's cache, for writing.

    The index may be out of bounds.
    """
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Add the LLVM code of one call to ``builder``; return the call's LLVM value."""
        where = _address(context, builder, signature.args[0], *arguments)
        shape = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], shape)
        write, keep, data = (ir.Constant(_I32, number) for number in (1, 3, 1))
        builder.call(function, [builder.bitcast(where, _BYTES), write, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.uint64), generate


@native
def load_word(typing: Any, array: Any, at: Any) -> Any:
    """Define an intrinsic: return 8 bytes at array[at], aligned or not, as a native u64."""
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Add the LLVM code of one call to ``builder``; return the call's LLVM value."""
        where = _address(context, builder, signature.args[0], *arguments)
        word = builder.load(builder.bitcast(where, _I64.as_pointer()))
        word.align = 1
        return word

    return types.uint64(array, types.uint64), generate


@native
def store_word(typing: Any, array: Any, at: Any, word: Any) -> Any:
    """Define an intrinsic: store a u64 in the 8 bytes at array[at], aligned or not."""
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        """Add the LLVM code of one call to ``builder``; return the call's LLVM value."""
        array_type, where = signature.args[0], arguments[:2]
        target = _address(context, builder, array_type, *where)
        builder.store(arguments[2], builder.bitcast(target, _I64.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint64), generate
