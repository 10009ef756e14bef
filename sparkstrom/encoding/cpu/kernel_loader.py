"""Provide decorators for compiled kernels; load and call their machine code without Numba.

Numba compiles the kernels once per host, in separate processes that write their machine code to
files. All other processes load these files, which takes less time than importing Numba.

A compiled function is called through cffi and has Numba's calling convention:

    i32 status = f(result*, error**, arguments ...)

An array is passed as seven or more arguments: two pointers to owners of its memory (NULL: the
caller owns it), number of entries, bytes per entry, address, shape, strides. A tuple of numbers of
one type is returned as an array.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import operator
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import llvmlite.binding as llvm
import numpy as np
from _cffi_backend import FFI  # its parser of C types needs no pycparser, unlike that of cffi.FFI

from sparkstrom.base.cache_directory import VARIABLE, is_safe, kernel_directory
from sparkstrom.base.child_processes import count_cores, make_child_environment
from sparkstrom.base.errors import SetupError
from sparkstrom.base.untrusted_files import open_regular
from sparkstrom.base.version import __version__

ffi = FFI()
NULL = ffi.NULL
C_NUMBERS = {
    "int32": "int32_t",
    "int64": "int64_t",
    "uint64": "uint64_t",
    "float32": "float",
    "float64": "double",
}
SUCCESS_STATUSES = (0, -2)  # statuses of success; -2: the function returned None
ERROR = ffi.new("void *[1]")  # where all kernels write the details of an error; never read

ArgumentConverter = Callable[[Any], tuple[Any, ...]]  # a Python value -> its C arguments


class Argument(NamedTuple):
    """The type of one argument: a number, or an array if ``dimensions`` is above 0."""

    kind: str  # NumPy's name of the number's or entries' type
    dimensions: int  # 0: a number
    read_only: bool  # True: the kernel only reads the array; False: the array must be writable


class Native(NamedTuple):
    """A compiled function in memory: its address and types."""

    address: int  # in this process
    arguments: list[Argument]  # types of the arguments, in order
    result: str  # NumPy's name of a number, or "none"
    results: int  # length of the returned tuple; 0: a single number


def python_entry(name: str, native: Native) -> Callable[..., Any]:
    """Return a Python function that calls the compiled function ``native``.

    It raises TypeError for arrays that the kernel cannot use; ``name`` is for error messages.
    """
    types = ["void *", "void *", *[_c_type(argument) for argument in native.arguments]]
    function = ffi.cast(f"int32_t (*)({', '.join(types)})", native.address)
    given = [_argument_converter(name, argument) for argument in native.arguments]
    count = max(1, native.results)
    room = ffi.typeof(f"{C_NUMBERS.get(native.result, 'int64_t')}[{count}]")

    def call(*values: Any) -> Any:
        """Convert the arguments, run the kernel and return its result.

        Raise ArithmeticError if the kernel fails.
        """
        result = ffi.new(room)
        status = function(result, ERROR, *chain.from_iterable(map(operator.call, given, values)))
        if status not in SUCCESS_STATUSES:
            raise ArithmeticError(f"kernel {name} ended with status {status}")
        if native.results:
            return tuple(result)
        return None if native.result == "none" else result[0]

    return call


def _c_type(argument: Argument) -> str:
    """Return the C type of one argument; an array is passed as several C arguments."""
    if not argument.dimensions:
        return C_NUMBERS[argument.kind]
    sizes = ", ".join(["int64_t"] * 2 * argument.dimensions)
    return f"void *, void *, int64_t, int64_t, void *, {sizes}"


def _argument_converter(name: str, argument: Argument) -> ArgumentConverter:
    """Return a function that converts a number or array to the C arguments of kernel ``name``."""
    if not argument.dimensions:
        return lambda value: (value,)
    return _array_converter(name, argument)


def _array_converter(name: str, argument: Argument) -> ArgumentConverter:
    """Return a function that converts an array to its C arguments, and checks the array.

    The check is needed on every call, because compiled code does not check arrays.
    """
    dtype, dimensions, read_only = np.dtype(argument.kind), argument.dimensions, argument.read_only
    itemsize, memory = dtype.itemsize, ffi.from_buffer

    def flatten(array: Any) -> tuple[Any, ...]:
        """Return an array's C arguments. Raise TypeError if the kernel cannot use the array."""
        flags = array.flags
        fits = flags.c_contiguous and flags.aligned if read_only else flags.carray
        if not fits or array.ndim != dimensions or array.dtype != dtype:
            raise TypeError(
                f"kernel {name} takes {dtype}[{dimensions}] in one piece"
                f"{'' if read_only else ', writable'}; got {array.dtype}{list(array.shape)}"
            )
        if dimensions == 1:
            return NULL, NULL, array.size, itemsize, memory(array), array.size, itemsize
        return (NULL, NULL, array.size, itemsize, memory(array), *array.shape, *array.strides)

    return flatten


# The name of a module's object file contains a hash of its source, of all sparkstrom modules that
# it imports, of the versions of compiler and interpreter, and of the processor. The first process
# that does not find the file compiles the module under a lock, and others on the host wait. The
# files are executed, so they must be safe: see ``base.cache_directory``.


log = logging.getLogger(__name__)

Loaded = dict[str, Native]  # a module's compiled functions by name
# (symbol, arguments, result and results as in Native, object code)
Compiled = tuple[str, list[Argument], str, int, bytes]

COMPILER = "sparkstrom.encoding.cpu.numba_compiler"
OWN_IMPORTS = re.compile(r"^from (sparkstrom[\w.]*) import", re.MULTILINE)
LAST_OWNER = "NRT_MemInfo_call_dtor"  # destroys an array; never called, because kernels own none
COMPILE_S = 600.0  # timeout; all kernels take 20 s of one core, but machines may be busy
COMPILER_SETTINGS = {"NUMBA_DISABLE_JIT": "0"}  # the setting is meant for the program's own code
COMPILERS_MAX = 2  # processes of 250 MB each; both compile the helpers that they need
LOCK_POLL_S = 0.05  # interval between attempts to lock
_LOCK = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
ERROR_TEXT_MAX = 2000  # characters of the compiler's error output in a message


class UnknownNumba(Exception):
    """The installed Numba lacks internals that ``numba_compiler`` needs; the message names them."""


def are_on_disk(modules: Sequence[str]) -> bool:
    """Return whether the compiled functions of these modules are already on disk."""
    try:
        directory = kernel_directory(os.environ)
        return all(_is_usable(directory / f"{m}-{_fingerprint(m)}.kernels") for m in modules)
    except OSError:
        return False


def load_modules(modules: Sequence[str]) -> dict[str, Loaded]:
    """Return the compiled functions of these modules by module name; compile them if necessary.

    Raises SetupError if functions are not on disk and cannot be compiled, and UnknownNumba if this
    version of Numba cannot compile to files.
    """
    try:
        directory = kernel_directory(os.environ)
        paths = {name: directory / f"{name}-{_fingerprint(name)}.kernels" for name in modules}
        if not all(_is_usable(path) for path in paths.values()):
            with _lock(directory / "kernels.lock"):
                missing = {name: path for name, path in paths.items() if not _is_usable(path)}
                if missing:
                    _compile(missing, directory)
        return {name: read_functions(path) for name, path in paths.items()}
    except OSError as error:
        raise SetupError(
            f"compiled kernels cannot be kept on this host: {error}; set {VARIABLE} to a directory "
            "of the host that can be written to"
        ) from error


def jit_directory(module: str) -> Path:
    """Create and return a Numba cache directory for a module, named by a hash of its sources.

    Numba itself would only notice changes of the module's own file, not of its imports.
    """
    path = kernel_directory(os.environ) / f"{module}-{_fingerprint(module)}.jit"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _is_usable(path: Path) -> bool:
    """Return whether the file exists, is whole, and no other user can have changed it."""
    try:
        _read_checked(path)
    except OSError:
        return False
    return True


def _read_checked(path: Path) -> bytes:
    """Return the content of a file of ``_write_checked``.

    Raises OSError if it cannot be read or is damaged, and PermissionError if others may write it.
    """
    with open_regular(path, follow=False) as file:
        if not is_safe(os.fstat(file.fileno()), path.parent.stat().st_uid):
            raise PermissionError(errno.EPERM, "others can write to this file", str(path))
        digest, _, content = file.read().partition(b"\n")
    if digest != _hash(content):
        raise OSError(errno.EIO, "the file is damaged", str(path))
    return content


def _write_checked(path: Path, content: bytes) -> None:
    """Write a file that only this user may write, with a hash by which readers detect damage."""
    path.write_bytes(_hash(content) + b"\n" + content)
    os.chmod(path, path.stat().st_mode & ~0o022)


def _hash(content: bytes) -> bytes:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest().encode()


def _fingerprint(module: str) -> str:
    """Return a hash of everything that a module's machine code depends on."""
    digest = hashlib.sha256(_platform().encode())
    waiting, seen = [module], {module}
    while waiting:
        source = module_source(waiting.pop())
        digest.update(source.encode())
        found = [name for name in OWN_IMPORTS.findall(source) if name in sys.modules]
        waiting += [name for name in dict.fromkeys(found) if name not in seen]
        seen.update(found)
    return digest.hexdigest()[:24]


def module_source(name: str) -> str:
    """Return the source text of an imported module."""
    module = sys.modules[name]
    if module.__spec__ is not None:
        return _read_module_source(module.__spec__)
    return Path(module.__file__ or os.devnull).read_text()


def _read_module_source(spec: ModuleSpec) -> str:
    """Return a module's source text, from its file or (in an archive) from its loader.

    If neither has it, return sparkstrom's version instead.
    """
    if spec.origin and os.path.isfile(spec.origin):
        return Path(spec.origin).read_text(encoding="utf-8")
    return cast(InspectLoader, spec.loader).get_source(spec.name) or __version__


@cache
def _platform() -> str:
    """Describe the processor, versions, settings and compiler that machine code depends on."""
    features = llvm.get_host_cpu_features().flatten()
    machine = [llvm.get_process_triple(), llvm.get_host_cpu_name(), features]
    versions = [_find_version(package) for package in ("numba", "llvmlite", "numpy")]
    settings = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("NUMBA_") and "CUDA" not in name  # of GPUs, such as the simulator's
        if name not in COMPILER_SETTINGS
    ]
    compiler = importlib.util.find_spec(COMPILER)
    code = "" if compiler is None else _read_module_source(compiler)
    return "\n".join([sys.version, *machine, *versions, *settings, code])


def _find_version(package: str) -> str:
    """Return the version of an installed package without importing it.

    Its directory is searched first. ``importlib.metadata.version`` alone reads the list of files in
    each zip archive on ``sys.path``; in a Spark task these are large, and this takes 0.15 s.
    """
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:
        directory = str(Path(spec.origin).parents[1])
        for distribution in importlib.metadata.distributions(name=package, path=[directory]):
            return distribution.version
    return importlib.metadata.version(package)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which the operating system releases if this process dies.

    Waits for other processes; raises SetupError after ``COMPILE_S`` seconds.
    """
    descriptor = os.open(path, _LOCK, 0o600)
    until_s = time.monotonic() + COMPILE_S
    try:
        while not _try_lock(descriptor):
            if time.monotonic() > until_s:
                raise SetupError(
                    f"another process has held {path} for {COMPILE_S:g} s: it is stuck compiling "
                    "kernels; end it"
                )
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock the file without waiting; return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compile(missing: dict[str, Path], directory: Path) -> None:
    """Compile modules in subprocesses, so that this process need not import Numba.

    ``missing`` has the file to write for each module name; temporary files are in ``directory``.
    Raises SetupError if a subprocess fails or takes too long.
    """
    log.warning("compiling kernels into %s, once per host and version", directory)
    shares = _count_compilers()
    with tempfile.TemporaryDirectory(dir=directory) as drafts:
        parts = {
            name: [Path(drafts, f"{number}-{share}") for share in range(shares)]
            for number, name in enumerate(missing)
        }
        _run_compilers(parts, shares, drafts)
        for name, path in missing.items():
            whole = Path(drafts, "whole")
            _write_checked(whole, _join_functions(map(_read_checked, parts[name])))
            os.replace(whole, path)


def _count_compilers() -> int:
    """Return the number of processes that compile at the same time.

    It is 1 in Python workers of Spark, which may have to share a small container.
    """
    return 1 if "pyspark.worker" in sys.modules else min(COMPILERS_MAX, count_cores())


def _run_compilers(parts: dict[str, list[Path]], shares: int, drafts: str) -> None:
    """Compile each module (a key of ``parts``) in ``shares`` processes, each to its own file.

    The values of ``parts`` are these files; ``drafts`` is a directory for temporary files. Raises
    SetupError if a process fails or takes too long. All processes have ended afterwards.
    """
    files = {name: getattr(sys.modules[name], "__file__", None) for name in parts}
    until_s = time.monotonic() + COMPILE_S
    running = dict[Path, subprocess.Popen[bytes]]()  # by the file of its error output
    try:
        for share in range(shares):
            order = share, shares, [(n, files[n], str(parts[n][share])) for n in parts]
            path = Path(drafts, f"errors-{share}")
            with path.open("wb") as errors:
                running[path] = subprocess.Popen(
                    [sys.executable, "-P", "-m", COMPILER, json.dumps(order)],
                    env=make_child_environment(1) | COMPILER_SETTINGS,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
        for path, process in running.items():
            if process.wait(max(0.0, until_s - time.monotonic())):
                raise _compile_error(path.read_text(errors="replace"))
    except subprocess.TimeoutExpired as error:
        raise _compile_error(str(error)) from error
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _compile_error(text: str) -> SetupError:
    """Return the error for a compiler that failed with the output ``text``."""
    end = text[-ERROR_TEXT_MAX:].strip()
    return SetupError(f"kernels could not be compiled on this host: {end}")


def write_functions(path: Path, functions: dict[str, Compiled]) -> None:
    """Write compiled functions to a file: a hash, one line of JSON, then the object files."""
    facts = {name: (*rest, len(data)) for name, (*rest, data) in functions.items()}
    objects = b"".join(data for *_, data in functions.values())
    _write_checked(path, json.dumps(facts).encode() + b"\n" + objects)


def _join_functions(parts: Iterable[bytes]) -> bytes:
    """Join the files that the compilers wrote; if one contains a refusal, return that file."""
    facts: dict[str, Any] = {}
    objects = b""
    for part in parts:
        head, _, own_objects = part.partition(b"\n")
        own_facts = json.loads(head)
        if isinstance(own_facts, str):
            return part
        facts |= own_facts
        objects += own_objects
    return json.dumps(facts).encode() + b"\n" + objects


def write_refusal(path: Path, reason: str) -> None:
    """Write to a file why functions cannot be compiled to files, so that no process retries."""
    _write_checked(path, json.dumps(reason).encode())


def read_functions(path: Path) -> Loaded:
    """Load a file of ``write_functions``; the functions stay in memory until the process ends.

    Raises UnknownNumba if ``write_refusal`` wrote the file, PermissionError if others may write it,
    and OSError if it is damaged.
    """
    facts, _, objects = _read_checked(path).partition(b"\n")
    known = json.loads(facts)
    if isinstance(known, str):
        raise UnknownNumba(known)
    engine, at, out = _create_llvm_engine(), 0, {}
    for *_, size in known.values():
        engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(objects[at : at + size]))
        at += size
    engine.finalize_object()
    for name, (symbol, arguments, result, results, _) in known.items():
        address = engine.get_function_address(symbol)
        out[name] = Native(address, [Argument(*a) for a in arguments], result, results)
    return out


_engines: list[Any] = []  # kept forever, because a garbage-collected engine frees its code


def _create_llvm_engine() -> Any:
    """Create an LLVM engine; each file needs its own, because helpers may have equal names."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.add_symbol(LAST_OWNER, ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value)
    target = llvm.Target.from_default_triple().create_target_machine()
    _engines.append(llvm.create_mcjit_compiler(llvm.parse_assembly(""), target))
    return _engines[-1]


# Numba compiles kernels once per host, in separate processes (``numba_compiler``). All other
# processes load the object files with LLVM alone, which takes less time than importing Numba. If
# Numba's internals are unknown, each process compiles with ``njit(cache=True)``. A module's kernels
# are loaded together at the first call of one, or by ``load_all``. ``fastmath`` is off, because
# sums of updates must be exact.


Function = TypeVar("Function", bound=Callable[..., Any])

BYTES = "Array(uint8, 1, 'C', True)"  # read-only u8[:], for bytes; also takes writable arrays


class Compiler(Protocol):
    """Interface of the compiler that the decorators call in the process that compiles."""

    def kernel(self, signature: str, function: Callable[..., Any], /) -> Any:
        """Compile a function that Python code will call; return the compiled function.

        ``signature`` contains the types of the result and the arguments, in Numba's notation.
        """

    def callback(self, signature: str, function: Callable[..., Any], /) -> Any:
        """Compile a function that C code calls; return it. ``signature``: as in ``kernel``."""

    def helper(self, function: Callable[..., Any], /) -> Any:
        """Compile a function that only kernels call; return the compiled function."""

    def native(self, describe: Callable[..., Any], /) -> Any:
        """Return an intrinsic, for kernels to call, from a function that generates LLVM code."""


JIT_WARNING = (
    "each process compiles kernels by njit(cache=True) and starts some seconds later: %s; report"
    " it, or install an older numba"
)

compiler: Compiler | None = None  # set only in the compiling process, before it imports kernels

_units: dict[str, Unit] = {}  # by module name
_loading = threading.RLock()


class Unit:
    """The kernels and callbacks of one module, which are loaded together."""

    def __init__(self, module: str) -> None:
        """Store the name of the module; its kernels are loaded later."""
        self.module = module
        self.loaded: Loaded | None = None  # functions from an object file
        self.jitted: Any = None  # a copy of the module, compiled by Numba in this process

    @property
    def is_loaded(self) -> bool:
        """Whether the kernels are in memory."""
        return self.loaded is not None or self.jitted is not None

    def entry(self, name: str) -> Callable[..., Any]:
        """Return a kernel as a Python callable. The first call loads all kernels of the module."""
        self._ensure_loaded()
        if self.jitted is not None:
            return cast(Callable[..., Any], getattr(self.jitted, name))
        return python_entry(name, self._loaded_function(name))

    def address(self, name: str) -> int:
        """Return the address of a callback. The first call loads all kernels of the module."""
        self._ensure_loaded()
        if self.jitted is not None:
            return int(getattr(self.jitted, name).address)
        return self._loaded_function(name).address

    def _ensure_loaded(self) -> None:
        """Load the kernels unless they are already in memory."""
        if not self.is_loaded:
            _load_units([self])

    def _loaded_function(self, name: str) -> Native:
        """Return a kernel that was loaded from an object file."""
        assert self.loaded is not None, "loading raises where it fails"
        return self.loaded[name]


class Kernel:
    """A compiled function that Python calls. A call raises TypeError for wrong arrays."""

    def __init__(self, unit: Unit, name: str) -> None:
        """Refer to the kernel ``name`` of ``unit``; the first call loads it."""
        self._unit, self._name = unit, name
        self._entry: Callable[..., Any] | None = None

    def __call__(self, *values: Any) -> Any:
        """Call the kernel; the first call loads it."""
        if self._entry is None:
            self._entry = self._unit.entry(self._name)
        return self._entry(*values)


class Callback:
    """A compiled function that C calls."""

    def __init__(self, unit: Unit, name: str) -> None:
        """Refer to the callback ``name`` of ``unit``, which ``address`` loads."""
        self._unit, self._name = unit, name

    @property
    def address(self) -> int:
        """The address of the function, which stays valid until this process ends."""
        return self._unit.address(self._name)


def kernel(signature: str) -> Callable[[Function], Function]:
    """Decorate a function to be compiled for this signature (in Numba's notation)."""

    def declare(function: Function) -> Function:
        """Return the compiled function, or an object that loads it when needed."""
        if compiler is not None:
            return cast(Function, compiler.kernel(signature, function))
        return cast(Function, Kernel(_unit(function), function.__name__))

    return declare


def callback(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function to be compiled to a C function, whose ``address`` C code can call."""

    def declare(function: Callable[..., Any]) -> Any:
        """Return the compiled function, or an object that loads it when needed."""
        if compiler is not None:
            return compiler.callback(signature, function)
        return Callback(_unit(function), function.__name__)

    return declare


def helper(function: Function) -> Function:
    """Decorate a function that only kernels call; it is compiled with them."""
    return function if compiler is None else cast(Function, compiler.helper(function))


def native(describe: Callable[..., Any]) -> Any:
    """Decorate a function that generates LLVM code for kernels to call (Numba's ``intrinsic``)."""
    return describe if compiler is None else compiler.native(describe)


def load_all() -> None:
    """Load the kernels of all modules imported so far; compile them if necessary."""
    with _loading:
        _load_units([unit for unit in _units.values() if not unit.is_loaded])


def are_compiled() -> bool:
    """Return whether all kernels are compiled, so that ``load_all`` only loads files."""
    return are_on_disk([unit.module for unit in _units.values() if not unit.is_loaded])


def _unit(function: Callable[..., Any]) -> Unit:
    """Return the unit (group of kernels) of the module that defines a function."""
    return _units.setdefault(function.__module__, Unit(function.__module__))


def _load_units(units: list[Unit]) -> None:
    """Load units from files; compile these first if necessary.

    If this version of Numba cannot compile to files, have it compile the units in this process.
    """
    with _loading:
        wanted = {unit.module: unit for unit in units if not unit.is_loaded}
        try:
            found = load_modules(list(wanted))
        except UnknownNumba as unknown:
            if all(unit.jitted is None for unit in _units.values()):
                log.warning(JIT_WARNING, unknown)
            jit = importlib.import_module(COMPILER).CachingCompiler()
            for module, unit in wanted.items():
                unit.jitted = jit.copy_module(module)
            return
        for module, loaded in found.items():
            wanted[module].loaded = loaded
