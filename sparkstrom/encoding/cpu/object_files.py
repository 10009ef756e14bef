"""Object files of compiled kernels: found on disk or compiled once per host, and loaded by LLVM.

A module's file is named by a hash of its source and of all of ours that it imports, of the versions
of compiler and interpreter, and of the processor. Whoever finds none compiles it under a lock, and
others on the host wait for that. What lies there is executed: see ``base.kernel_cache``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from sparkstrom.base.errors import SetupError
from sparkstrom.base.files import open_regular
from sparkstrom.base.kernel_cache import VARIABLE, is_safe, kernel_directory
from sparkstrom.base.version import __version__
from sparkstrom.encoding.cpu.calling import Argument, Native

log = logging.getLogger(__name__)

Loaded = dict[str, Native]  # by function
Compiled = tuple[str, list[Argument], str, int, bytes]  # symbol, then as in Native; the object

COMPILER = "sparkstrom.encoding.cpu.compiler"
OURS = re.compile(r"^from (sparkstrom[\w.]*) import", re.MULTILINE)
LAST_OWNER = "NRT_MemInfo_call_dtor"  # called by the last owner of an array, which no kernel is
COMPILE_S = 600.0  # all kernels take 20 s of a core; machines may be busy
LOOK_S = 0.05
_LOCK = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
WORDS_MAX = 2000


def are_on_disk(modules: Sequence[str]) -> bool:
    """Return whether ``load`` finds these modules' functions compiled, as on a second fit."""
    try:
        directory = kernel_directory(os.environ)
        return all((directory / f"{m}-{_fingerprint(m)}.kernels").exists() for m in modules)
    except OSError:
        return False


def load(modules: Sequence[str]) -> dict[str, Loaded]:
    """The compiled functions of these modules, ready to be called.

    Raises SetupError where they are not on disk and cannot be compiled.
    """
    try:
        directory = kernel_directory(os.environ)
        paths = {name: directory / f"{name}-{_fingerprint(name)}.kernels" for name in modules}
        if not all(_is_usable(path) for path in paths.values()):
            with _lock(directory / "kernels.lock"):
                missing = {name: path for name, path in paths.items() if not _is_usable(path)}
                if missing:
                    _compile(missing, directory)
        return {name: read(path) for name, path in paths.items()}
    except OSError as error:
        raise SetupError(
            f"compiled kernels cannot be kept on this host: {error}; set {VARIABLE} to a directory "
            "of the host that can be written to"
        ) from error


def _is_usable(path: Path) -> bool:
    """Whether it is a file that nobody else can have made or changed; another is replaced."""
    try:
        with open_regular(path, follow=False) as file:
            return is_safe(os.fstat(file.fileno()), path.parent.stat().st_uid)
    except OSError:
        return False


def _fingerprint(module: str) -> str:
    """Changes with whatever changes the machine code."""
    digest = hashlib.sha256(_platform().encode())
    waiting, seen = [module], {module}
    while waiting:
        source = _source(waiting.pop())
        digest.update(source.encode())
        found = [name for name in OURS.findall(source) if name in sys.modules]
        waiting += [name for name in dict.fromkeys(found) if name not in seen]
        seen.update(found)
    return digest.hexdigest()[:24]


def _source(name: str) -> str:
    module = sys.modules[name]
    if module.__spec__ is not None:
        return _source_of(module.__spec__)
    return Path(module.__file__ or os.devnull).read_text()


def _source_of(spec: Any) -> str:
    """Of a file; or of a module in an archive, which its loader reads."""
    if spec.origin and os.path.isfile(spec.origin):
        return Path(spec.origin).read_text(encoding="utf-8")
    return spec.loader.get_source(spec.name) or __version__


@cache
def _platform() -> str:
    features = llvm.get_host_cpu_features().flatten()
    machine = [llvm.get_process_triple(), llvm.get_host_cpu_name(), features]
    versions = [importlib.metadata.version(package) for package in ("numba", "llvmlite", "numpy")]
    settings = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NUMBA_")]
    compiler = importlib.util.find_spec(COMPILER)
    code = "" if compiler is None else _source_of(compiler)
    return "\n".join([sys.version, *machine, *versions, *settings, code])


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """One process of the host at a time; the kernel takes the lock back from whoever dies."""
    descriptor = os.open(path, _LOCK, 0o600)
    until_s = time.monotonic() + COMPILE_S
    try:
        while not _try_lock(descriptor):
            if time.monotonic() > until_s:
                raise SetupError(
                    f"another process has held {path} for {COMPILE_S:g} s: it is stuck compiling "
                    "kernels; end it"
                )
            time.sleep(LOOK_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _compile(missing: dict[str, Path], directory: Path) -> None:
    """Have them written by a process that imports Numba, which this one need not."""
    log.warning("compiling kernels into %s, once per host and version", directory)
    with tempfile.TemporaryDirectory(dir=directory) as drafts:
        order = [
            (name, getattr(sys.modules[name], "__file__", None), f"{drafts}/{number}")
            for number, name in enumerate(missing)
        ]
        try:
            subprocess.run(
                [sys.executable, "-P", "-m", COMPILER, json.dumps(order)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=COMPILE_S,
                check=True,
            )
        except subprocess.SubprocessError as error:
            words = (getattr(error, "stderr", None) or str(error).encode()).decode(errors="replace")
            raise SetupError(
                f"kernels could not be compiled on this host: {words[-WORDS_MAX:].strip()}"
            ) from error
        for name, _, draft in order:
            os.chmod(draft, os.stat(draft).st_mode & ~0o022)
            os.replace(draft, missing[name])


def write(path: Path, functions: dict[str, Compiled]) -> None:
    """One line of JSON, and the objects, by name."""
    facts = {name: (*rest, len(data)) for name, (*rest, data) in functions.items()}
    objects = b"".join(data for *_, data in functions.values())
    path.write_bytes(json.dumps(facts).encode() + b"\n" + objects)


def read(path: Path) -> Loaded:
    """Load what ``write`` wrote; it stays in memory as long as this process."""
    with open_regular(path, follow=False) as file:
        if not is_safe(os.fstat(file.fileno()), path.parent.stat().st_uid):
            raise PermissionError(errno.EPERM, "others can write to this file", str(path))
        facts, _, objects = file.read().partition(b"\n")
    engine, at, out = _engine(), 0, {}
    known = json.loads(facts)
    for *_, size in known.values():
        engine.add_object_file(llvm.object_file.ObjectFileRef.from_data(objects[at : at + size]))
        at += size
    engine.finalize_object()
    for name, (symbol, arguments, result, results, _) in known.items():
        address = engine.get_function_address(symbol)
        out[name] = Native(address, [Argument(*a) for a in arguments], result, results)
    return out


_engines: list[Any] = []  # an engine takes its code with it


def _engine() -> Any:
    """A new one for each file: modules may have helpers of the same name."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.add_symbol(LAST_OWNER, ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value)
    target = llvm.Target.from_default_triple().create_target_machine()
    _engines.append(llvm.create_mcjit_compiler(llvm.parse_assembly(""), target))
    return _engines[-1]
