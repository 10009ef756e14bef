"""The process that compiles kernels: ``python -m sparkstrom.encoding.cpu.compiler ORDER``.

Started by ``object_files`` only. It imports the modules with decorators that have Numba compile,
and writes what comes out: machine code that needs neither Numba's runtime nor Python.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from sparkstrom.encoding.cpu import compiled
from sparkstrom.encoding.cpu.calling import Argument
from sparkstrom.encoding.cpu.object_files import LAST_OWNER, Compiled, write

NOTHING = ir.FunctionType(ir.VoidType(), [])
PYTHONS = ("Py", "numba_", "NRT_")  # names in Python and in Numba's own runtime
# Wrappers would need Python.
UNWRAPPED = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class NumbaCompiler:
    """Compiles at once what is decorated; what it made, by module and name."""

    def __init__(self) -> None:
        self.made: dict[str, dict[str, Compiled]] = {}

    def kernel(self, signature: str, function: Callable[..., Any], /) -> Any:
        dispatcher = njit(signature, **UNWRAPPED)(function)
        (result,) = dispatcher.overloads.values()
        self._keep(function, result.fndesc.llvm_func_name, result.signature, result.library)
        return dispatcher

    def callback(self, signature: str, function: Callable[..., Any], /) -> Any:
        """Numba's ``cfunc`` without its way to tell Python of an error: there is none to tell."""
        dispatcher = njit(signature, **UNWRAPPED)(function)
        (result,) = dispatcher.overloads.values()
        symbol = f"callback.{result.fndesc.llvm_func_name}"
        self._keep(function, symbol, result.signature, c_function(symbol, result))
        return dispatcher

    def helper(self, function: Callable[..., Any], /) -> Any:
        return njit(nogil=True, inline="never")(function)

    def native(self, describe: Callable[..., Any], /) -> Any:
        return intrinsic(describe)

    def _keep(
        self, function: Callable[..., Any], symbol: str, signature: Any, library: Any
    ) -> None:
        library._ensure_finalized()
        needed = [f.name for f in library._final_module.functions if f.is_declaration]
        needed = [name for name in needed if name.startswith(PYTHONS) and name != LAST_OWNER]
        assert not needed, f"{function.__name__} needs {needed}, which only Python has"
        result, results = signature.return_type, 0
        if isinstance(result, types.UniTuple):
            result, results = result.dtype, result.count
        arguments = [_argument(kind) for kind in signature.args]
        written = symbol, arguments, str(result), results, library._get_compiled_object()
        self.made.setdefault(function.__module__, {})[function.__name__] = written


def _argument(kind: Any) -> Argument:
    if isinstance(kind, types.Array):
        assert kind.layout == "C", f"{kind}: arrays come in one piece"
        return Argument(str(kind.dtype), kind.ndim, not kind.mutable)
    return Argument(str(kind), 0, False)


def c_function(symbol: str, compiled_function: Any) -> Any:
    """A library with a C function of that name around a compiled one; a failure traps."""
    inner = compiled_function.fndesc.llvm_func_name
    context, signature = compiled_function.target_context, compiled_function.signature
    library = context.codegen().create_library(symbol)
    module = library.create_ir_module(symbol)
    given = [context.get_value_type(kind) for kind in signature.args]
    returns_none = signature.return_type == types.none
    answer = ir.IntType(64) if returns_none else context.get_value_type(signature.return_type)
    bytes_type = ir.IntType(8).as_pointer()
    callee_type = ir.FunctionType(ir.IntType(32), [bytes_type, bytes_type, *given])
    callee = ir.Function(module, callee_type, inner)
    outer_type = ir.FunctionType(ir.VoidType() if returns_none else answer, given)
    outer = ir.Function(module, outer_type, symbol)
    builder = ir.IRBuilder(outer.append_basic_block())
    result, error = builder.alloca(answer), builder.alloca(bytes_type)
    outs = [builder.bitcast(room, bytes_type) for room in (result, error)]
    status = builder.call(callee, [*outs, *outer.args])
    with builder.if_then(builder.icmp_signed(">", status, ir.Constant(ir.IntType(32), 0))):
        builder.call(module.declare_intrinsic("llvm.trap", (), NOTHING), [])
        builder.unreachable()
    builder.ret_void() if returns_none else builder.ret(builder.load(result))
    library.add_ir_module(module)
    library.add_linking_library(compiled_function.library)
    with global_compiler_lock:
        library.finalize()
    return library


def keep_object_files() -> None:
    """Have every library keep its object, as Numba does for its own cache."""
    make = CPUCodeLibrary.__init__

    def make_keeping(library: Any, *args: Any, **keywords: Any) -> None:
        make(library, *args, **keywords)
        library.enable_object_caching()

    CPUCodeLibrary.__init__ = make_keeping


def imported(name: str, file: str | None) -> ModuleType:
    """Ours by name; a test's or a program's by its file."""
    if name.startswith("sparkstrom.") or file is None:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location("compiled_now", file)
    assert spec is not None, f"{file} is a Python file"
    assert spec.loader is not None, f"{file} is a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks up its annotations
    spec.loader.exec_module(module)
    return module


def main(order: list[tuple[str, str | None, str]]) -> int:
    """Compile each module, and write the file of it."""
    keep_object_files()
    compiled.compiler = making = NumbaCompiler()
    for name, file, target in order:
        module = imported(name, file)
        write(Path(target), making.made[module.__name__])
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
