"""Four machine instructions that Numba has no name for; LLVM has them on every processor.

Nothing here checks bounds: callers do. Only the process that compiles runs what is in here, so
Numba is imported inside.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from sparkstrom.encoding.cpu.compiled import native

_BIT, _I32, _I64 = ir.IntType(1), ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    from numba.np.arrayobj import make_array

    return builder.gep(make_array(array_type)(context, builder, array).data, [index])


@native
def lowest_bit(typing: Any, word: Any) -> Any:
    """The position of the lowest 1 in a u64 word; 64 where there is none."""
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(_BIT, 0))

    return types.uint64(types.uint64), generate


@native
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Have array[index] on its way into the cache, to be written; any index will do."""
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = _address(context, builder, signature.args[0], *arguments)
        shape = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], shape)
        write, keep, data = (ir.Constant(_I32, number) for number in (1, 3, 1))
        builder.call(function, [builder.bitcast(where, _BYTES), write, keep, data])
        return context.get_dummy_value()

    return types.void(array, types.uint64), generate


@native
def load_word(typing: Any, array: Any, at: Any) -> Any:
    """The 8 bytes from array[at] on, aligned or not, as the machine's u64."""
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = _address(context, builder, signature.args[0], *arguments)
        word = builder.load(builder.bitcast(where, _I64.as_pointer()))
        word.align = 1
        return word

    return types.uint64(array, types.uint64), generate


@native
def store_word(typing: Any, array: Any, at: Any, word: Any) -> Any:
    """Write a u64 to the 8 bytes from array[at] on, aligned or not."""
    from numba import types

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, where = signature.args[0], arguments[:2]
        target = _address(context, builder, array_type, *where)
        builder.store(arguments[2], builder.bitcast(target, _I64.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.uint64, types.uint64), generate
