"""Compile kernels with Numba to object files that can be called without Numba.

``encoding.cpu.kernel_loader`` runs this module in one or more separate processes: ``python -m
sparkstrom.encoding.cpu.numba_compiler ORDER``, where ORDER is JSON: the number of this process, the
number of processes, and the modules with their files. Each process imports all of the modules,
compiles its share of the decorated functions, and writes their machine code. This needs internals
of Numba. If the installed version has different internals, the process writes the reason to the
files instead. Then every process that needs kernels compiles them itself with ``CachingCompiler``,
which uses only public functions of Numba.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numba
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

from sparkstrom.encoding.cpu import kernel_loader as compiled
from sparkstrom.encoding.cpu.kernel_loader import (
    LAST_OWNER,
    Argument,
    Compiled,
    jit_directory,
    module_source,
    write_functions,
    write_refusal,
)

DECORATORS = ("kernel", "callback", "helper", "native")
COMPILED_NOW = "compiled_now"  # name for a program's module, instead of __main__
NOTHING = ir.FunctionType(ir.VoidType(), [])
PYTHONS = ("Py", "numba_", "NRT_")  # prefixes of names in Python and in Numba's runtime
# Options that omit Numba's wrappers, because these need Python.
UNWRAPPED = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


class NumbaCompiler:
    """Compiles functions as soon as they are decorated, and collects the results.

    Several processes can share the work: of every ``shares`` functions, in the order in which they
    are decorated, this process compiles the one with number ``share`` (counted from 0).
    """

    def __init__(self, share: int = 0, shares: int = 1) -> None:
        """Start with empty results, ``made``: module name -> function name -> compiled function."""
        self.made: dict[str, dict[str, Compiled]] = {}
        self._share, self._shares, self._decorated = share, shares, 0

    def kernel(self, signature: str, function: Callable[..., Any], /) -> Any:
        """Compile a kernel for its signature and record it; return it for other kernels to call.

        If the kernel is another process's share, it is not recorded, and is compiled only if a
        kernel of this process calls it.
        """
        if not self._is_in_share():
            return _compile_when_called(signature, function)
        dispatcher = njit(signature, **UNWRAPPED)(function)
        (result,) = dispatcher.overloads.values()
        self._record(function, result.fndesc.llvm_func_name, result.signature, result.library)
        return dispatcher

    def callback(self, signature: str, function: Callable[..., Any], /) -> Any:
        """Compile a function for C to call, in which an error ends the process, and record it.

        If the function is another process's share, return it unchanged.
        """
        if not self._is_in_share():
            return function
        dispatcher = njit(signature, **UNWRAPPED)(function)
        (result,) = dispatcher.overloads.values()
        symbol = f"callback.{result.fndesc.llvm_func_name}"
        self._record(function, symbol, result.signature, c_function(symbol, result))
        return dispatcher

    def _is_in_share(self) -> bool:
        """Count a decorated function; return whether this process is to compile it."""
        self._decorated += 1
        return (self._decorated - 1) % self._shares == self._share

    def helper(self, function: Callable[..., Any], /) -> Any:
        """Compile a function that only kernels call."""
        return njit(nogil=True, inline="never")(function)

    def native(self, describe: Callable[..., Any], /) -> Any:
        """Return an intrinsic, for kernels to call, from a function that generates LLVM code."""
        return intrinsic(describe)

    def _record(
        self, function: Callable[..., Any], symbol: str, signature: Any, library: Any
    ) -> None:
        """Store a function's symbol, types and object code in ``made``.

        Raise AssertionError if the code needs Python or Numba's runtime.
        """
        library._ensure_finalized()
        needed = [f.name for f in library._final_module.functions if f.is_declaration]
        needed = [name for name in needed if name.startswith(PYTHONS) and name != LAST_OWNER]
        assert not needed, f"{function.__name__} needs {needed}, which only Python has"
        result, results = signature.return_type, 0
        if isinstance(result, types.UniTuple):
            result, results = result.dtype, result.count
        arguments = [_describe_type(kind) for kind in signature.args]
        written = symbol, arguments, str(result), results, library._get_compiled_object()
        self.made.setdefault(function.__module__, {})[function.__name__] = written


def _compile_when_called(signature: str, function: Callable[..., Any]) -> Any:
    """Return a function that Numba compiles for its signature when it compiles a caller."""
    dispatcher = njit(**UNWRAPPED)(function)
    find_template = dispatcher.get_call_template

    def find_compiled_template(*arguments: Any) -> Any:
        """Compile the function if necessary; return the template by which Numba types its calls."""
        if not dispatcher.overloads:
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        return find_template(*arguments)

    dispatcher.get_call_template = find_compiled_template
    return dispatcher


class CachingCompiler:
    """Compiles kernels in the calling process, with Numba's public functions and cache."""

    def __init__(self) -> None:
        """Start without any compiled copy of a module."""
        self._copies: dict[str, ModuleType] = {}

    def copy_module(self, name: str) -> ModuleType:
        """Execute a module again, with compiled kernels; return the copy.

        ``sys.modules`` keeps the original. Both share their imports, except that the copy imports
        copies of modules that declare kernels.
        """
        if name not in self._copies:
            first = sys.modules[name]
            copy = ModuleType(COMPILED_NOW if name == "__main__" else name)
            if name == "__main__":
                sys.modules[COMPILED_NOW] = copy  # dataclasses look up annotations there
            copy.__dict__.update(
                __spec__=first.__spec__,
                __package__=first.__package__,
                __file__=first.__file__,
                __builtins__=vars(builtins) | {"__import__": self._import_copy},
            )
            self._copies[name] = copy
            code = compile(module_source(name), first.__file__ or name, "exec")
            with use_cache_directory(jit_directory(name)):
                exec(code, copy.__dict__)
        return self._copies[name]

    def _import_copy(
        self,
        name: str,
        given: Any = None,
        local: Any = None,
        fromlist: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> Any:
        """Import like ``__import__``, but return copies of modules that declare kernels."""
        found = builtins.__import__(name, given, local, fromlist or (), level)
        if not fromlist:
            return found
        modules = {each: getattr(found, each, None) for each in fromlist}
        copies = {each: self._copy_if_kernels(module) for each, module in modules.items()}
        if copies != modules:
            return SimpleNamespace(**(vars(found) | copies))
        return self._copy_if_kernels(found)

    def _copy_if_kernels(self, found: Any) -> Any:
        """Return the copy of a module that declares kernels; return any other object itself.

        For ``kernel_loader``, return the substitute with this compiler's decorators.
        """
        if found is compiled:
            return self._substitute_decorators()
        is_ours = isinstance(found, ModuleType) and declares_kernels(found)
        return self.copy_module(found.__name__) if is_ours else found

    def _substitute_decorators(self) -> Any:
        """Return a substitute for ``kernel_loader`` whose decorators compile with this compiler."""
        decorators = {
            "compiler": self,
            "kernel": lambda signature: lambda function: self.kernel(signature, function),
            "callback": lambda signature: lambda function: self.callback(signature, function),
            "helper": self.helper,
            "native": self.native,
        }
        return SimpleNamespace(**(vars(compiled) | decorators))

    def kernel(self, signature: str, function: Callable[..., Any], /) -> Any:
        """Compile a kernel for its signature; return it as a Python function."""
        return _compile_cached(njit, signature, function, nogil=True)

    def callback(self, signature: str, function: Callable[..., Any], /) -> Any:
        """Compile a function for C to call; return it with its ``address``."""
        return _compile_cached(cfunc, signature, function)

    def helper(self, function: Callable[..., Any], /) -> Any:
        """Compile a function that only kernels call."""
        return njit(nogil=True, inline="never")(function)

    def native(self, describe: Callable[..., Any], /) -> Any:
        """Return an intrinsic, for kernels to call, from a function that generates LLVM code."""
        return intrinsic(describe)


@contextmanager
def use_cache_directory(directory: Path) -> Iterator[None]:
    """Have Numba use this cache directory for functions decorated in the ``with`` block."""
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(directory)
    try:
        yield
    finally:
        numba.config.CACHE_DIR = before


def declares_kernels(module: Any) -> bool:
    """Return whether a module has imported any of the decorators of ``kernel_loader``."""
    return any(getattr(module, name, None) is getattr(compiled, name) for name in DECORATORS)


def _compile_cached(
    decorator: Any, signature: str, function: Callable[..., Any], **options: Any
) -> Any:
    """Compile with Numba's cache, or without a cache if the function's module is in an archive."""
    try:
        return decorator(signature, cache=True, **options)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):  # raised for a module in an archive
            raise
        return decorator(signature, **options)(function)


def _describe_type(kind: Any) -> Argument:
    """Return the Argument that describes a Numba type."""
    if isinstance(kind, types.Array):
        assert kind.layout == "C", f"{kind}: arrays come in one piece"
        return Argument(str(kind.dtype), kind.ndim, not kind.mutable)
    return Argument(str(kind), 0, False)


def c_function(symbol: str, compiled_function: Any) -> Any:
    """Return a code library whose C function ``symbol`` calls a compiled function.

    An error in the compiled function ends the process.
    """
    from numba.core.compiler_lock import global_compiler_lock

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
    """Patch Numba so that every code library keeps its object file, as Numba does for its cache."""
    from numba.core.codegen import CPUCodeLibrary

    make = CPUCodeLibrary.__init__

    def make_keeping(library: Any, *args: Any, **keywords: Any) -> None:
        """Create a library whose object file is kept."""
        make(library, *args, **keywords)
        library.enable_object_caching()

    CPUCodeLibrary.__init__ = make_keeping


def import_kernel_module(name: str, file: str | None) -> ModuleType:
    """Import a module by name if it belongs to sparkstrom or has no file, otherwise by its file."""
    if name.startswith("sparkstrom.") or file is None:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(COMPILED_NOW, file)
    assert spec is not None, f"{file} is a Python file"
    assert spec.loader is not None, f"{file} is a Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations there
    spec.loader.exec_module(module)
    return module


def main(share: int, shares: int, order: list[tuple[str, str | None, str]]) -> int:
    """Compile share number ``share`` of ``shares`` of the modules' functions to files; return 0.

    ``order`` contains (name of a module, its file or None, target file) for each module. If this
    version of Numba has other internals, the reason is written to the target files instead.
    """
    try:
        keep_object_files()
        compiled.compiler = making = NumbaCompiler(share, shares)
        for name, file, target in order:
            module = import_kernel_module(name, file)
            write_functions(Path(target), making.made.get(module.__name__, {}))
    except (ImportError, AttributeError, TypeError) as error:
        reason = f"Numba {numba.__version__} has other internals ({error})"
        for _, _, target in order:
            write_refusal(Path(target), reason)
    return 0


if __name__ == "__main__":
    sys.exit(main(*json.loads(sys.argv[1])))
