"""Find, load and call the Aeron C library, and fetch the build that sparkstrom is tested with.

A ``pyaeron`` wheel contains the complete C client and media driver in its extension module. That
file is loaded as a plain shared library, by any CPython version and without a compiler.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any, Final

from sparkstrom.base.errors import DriverLost, SetupError, TransportError

WHEEL_PROJECT = "pyaeron"
WHEEL_VERSION = "0.1.0"
WHEEL_NAME = "pyaeron-0.1.0-cp312-cp312-manylinux_2_28_x86_64.whl"
WHEEL_SHA256 = "6889d44b2aa2b5e8b653c29123717855cf114edf037490b0679ab7a156d7ec77"
WHEEL_PYTHON = "3.12"  # the wheel's Python; its extension module loads into any CPython
WHEEL_LIBRARY_PATH = "pyaeron/_pyaeron.cpython-312-x86_64-linux-gnu.so"
WHEEL_MACHINE = "x86_64"
WHEEL_PLATFORM = f"manylinux_2_28_{WHEEL_MACHINE}"

AERON_MAJOR = 1
AERON_MINOR_MIN = 51  # client error codes and several signatures changed in this version


try:
    from sparkstrom.transport.aeron._aeron import ffi as ffi
except ModuleNotFoundError as error:
    raise SetupError(
        "sparkstrom/transport/aeron/_aeron.py has not been generated: "
        "run `python native/build_aeron.py` in the checkout, or install the package"
    ) from error

# Aeron's threads may still run when the interpreter unloads libraries: never unmap the code.
DLOPEN_FLAGS: Final = os.RTLD_NOW | os.RTLD_NODELETE

# As aeron_errcode() returns them.
STORAGE_SPACE_ERROR: Final = -12  # AERON_ERROR_CODE_STORAGE_SPACE
# AERON_CLIENT_ERROR_DRIVER_TIMEOUT: the driver did not answer a request.
DRIVER_TIMEOUT_ERROR: Final = -1000


class AeronLibrary:
    """A loaded Aeron library of a supported version, with every function that sparkstrom uses.

    Calls that can fail go through ``check_result``. Aeron keeps the code and text of a failure per
    thread, even after a later success, so callers that inspect them call ``clear_error`` first.
    """

    def __init__(self, path: str) -> None:
        """Load the library at ``path``; raise SetupError if it is not a usable Aeron library."""
        self.path = path
        try:
            self.lib: Any = ffi.dlopen(path, DLOPEN_FLAGS)
        except OSError as error:
            raise SetupError(f"{path} cannot be loaded as the Aeron library: {error}") from error
        self._check()

    def _check(self) -> None:
        """Raise SetupError if functions are missing or the version is not supported."""
        # dir() lists the declared functions; getattr fails if the library lacks one.
        missing = [name for name in dir(self.lib) if not _has_symbol(self.lib, name)]
        if missing:
            raise SetupError(
                f"{self.path} is not a complete Aeron client with media driver: it lacks "
                f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
            )
        major, minor = self.lib.aeron_version_major(), self.lib.aeron_version_minor()
        if major != AERON_MAJOR or minor < AERON_MINOR_MIN:
            raise SetupError(
                f"{self.path} is Aeron {major}.{minor}; sparkstrom needs {AERON_MAJOR}."
                f"{AERON_MINOR_MIN} or a later {AERON_MAJOR}.x"
            )

    @property
    def version(self) -> str:
        """The library's full version text."""
        return decode_c_string(self.lib.aeron_version_full())

    def check_result(self, result: int, operation: str) -> int:
        """Return a C function's result; if it is negative, raise TransportError with Aeron's text.

        ``operation`` names the operation in the error.
        """
        if result < 0:
            raise self.failure(operation)
        return result

    def failure(self, operation: str) -> TransportError:
        """Return this thread's last failure as an exception; DriverLost after a driver timeout."""
        code, message = self.last_error()
        kind = DriverLost if code == DRIVER_TIMEOUT_ERROR else TransportError
        return kind(operation, code, message)

    def last_error(self) -> tuple[int, str]:
        """Return code (errno, or a negative Aeron code) and text of this thread's last failure."""
        return int(self.lib.aeron_errcode()), decode_c_string(self.lib.aeron_errmsg())

    def clear_error(self) -> None:
        """Clear this thread's last failure, so that it is not mistaken for a later one."""
        self.lib.aeron_err_clear()

    def function_address(self, function: str) -> int:
        """Return the machine address of a C function, for kernels that call it without Python."""
        return pointer_to_int(ffi.addressof(self.lib, function))


def _has_symbol(lib: Any, name: str) -> bool:
    """Return whether the library contains a function."""
    try:
        getattr(lib, name)
    except (AttributeError, ffi.error):
        return False
    return True


def pointer_to_int(pointer: Any) -> int:
    """Return the address in a cffi pointer as an int."""
    return int(ffi.cast("uintptr_t", pointer))


def int_to_pointer(number: int) -> Any:
    """Return an address as a ``void *`` of cffi."""
    return ffi.cast("void *", number)


def decode_c_string(chars: Any) -> str:
    """Return a C string as a Python string."""
    return str(ffi.string(chars).decode(errors="replace"))


def no_op_callback(lib: Any) -> Any:
    """Return a C function without a noticeable effect, to register as a callback."""
    return ffi.cast("void *", ffi.addressof(lib, "aeron_err_clear"))


LIBRARY_VARIABLE = "SPARKSTROM_AERON_LIBRARY"
SYSTEM_LIBRARIES = ("libaeron_driver.so", "libaeron.so")


def fetched_library_path() -> Path:
    """Return the path where ``sparkstrom fetch-aeron`` puts the library of this environment."""
    return Path(sys.prefix) / "lib" / "sparkstrom" / Path(WHEEL_LIBRARY_PATH).name


def load_library() -> AeronLibrary:
    """Return the Aeron library of this process, which is loaded once.

    Raise SetupError, with every place that was searched, if none is found.
    """
    return _find_and_load(os.environ.get(LIBRARY_VARIABLE, ""))


def warn_if_library_missing(stacklevel: int) -> None:
    """Warn that this process cannot train by gradient sharing if it has no Aeron library.

    ``stacklevel`` is that of ``warnings.warn``, counted from this function's caller.
    """
    try:
        load_library()
    except SetupError as error:
        text = f"gradient sharing cannot start on this machine (rounds of averaging can): {error}"
        warnings.warn(text, RuntimeWarning, stacklevel + 1)


@functools.cache
def _find_and_load(path: str) -> AeronLibrary:
    """Return the library at ``path`` or, if that is "", the first usable one at known places."""
    if path:  # set by the user, so its own error is the relevant one
        try:
            return AeronLibrary(path)
        except SetupError as error:
            raise SetupError(
                f"{error}; {LIBRARY_VARIABLE} names it: correct that, or unset it for sparkstrom "
                "to look"
            ) from error
    tried: list[str] = []
    for place, candidates in (
        (f"the {WHEEL_PROJECT} wheel", _wheel_libraries()),
        ("a system library", SYSTEM_LIBRARIES),
        ("`sparkstrom fetch-aeron`", _fetched_libraries()),
    ):
        for candidate in candidates:
            try:
                return AeronLibrary(candidate)
            except SetupError as error:
                tried.append(f"{place}: {error}")
        if not candidates:
            tried.append(f"{place}: not there")
    raise SetupError(_format_not_found(tried))


def _wheel_libraries() -> tuple[str, ...]:
    """Return the paths of an installed pyaeron's extension modules, without importing pyaeron."""
    spec = importlib.util.find_spec(WHEEL_PROJECT)
    places = spec.submodule_search_locations if spec else None
    return tuple(str(file) for place in places or () for file in Path(place).glob("_pyaeron*.so"))


def _fetched_libraries() -> tuple[str, ...]:
    """Return the file that ``sparkstrom fetch-aeron`` has installed, as a tuple, or ()."""
    path = fetched_library_path()
    return (str(path),) if path.exists() else ()


def _format_not_found(tried: list[str]) -> str:
    """Return the error message that lists the places where a library was searched."""
    places = "\n".join(
        f"  {n}. {line}" for n, line in enumerate([f"{LIBRARY_VARIABLE}: not set", *tried], 1)
    )
    return f"no Aeron library on this machine; looked at\n{places}\n{_install_remedy()}"


def _install_remedy() -> str:
    """Return how to get the library on this machine, for an error message."""
    if sys.platform == "linux" and platform.machine() == WHEEL_MACHINE:
        return (
            f"Run `{sys.executable} -m sparkstrom.cli.main fetch-aeron`, or set {LIBRARY_VARIABLE}."
        )
    return (
        f"There is no {WHEEL_PROJECT} wheel for {sys.platform} on {platform.machine()}: build "
        f"Aeron's C media driver and name its shared library in {LIBRARY_VARIABLE}."
    )


DOWNLOAD_TIMEOUT_S = 120


def fetch_library(wheel: Path | None = None, target: Path | None = None) -> Path:
    """Install the pinned library atomically at ``target`` and return its path.

    Args:
        wheel: a wheel file that was downloaded before; None downloads it with pip.
        target: path of the library; None is where ``load_library`` searches.

    Raises:
        SetupError: the wheel cannot be downloaded, has another hash, or does not load.
    """
    target = target or fetched_library_path()
    with tempfile.TemporaryDirectory(prefix="sparkstrom-fetch-") as scratch:
        source = wheel or _download_wheel(Path(scratch))
        library = _extract_library(source)
    _install_library(library, target)
    return target


def _download_wheel(scratch: Path) -> Path:
    """Download the pinned wheel with pip; return its path. Raise SetupError if that fails."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(scratch)]
    command += ["--only-binary=:all:", "--python-version", WHEEL_PYTHON]
    command += ["--platform", WHEEL_PLATFORM, f"{WHEEL_PROJECT}=={WHEEL_VERSION}"]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            f"downloading {WHEEL_NAME} took over {DOWNLOAD_TIMEOUT_S} s: {_MANUAL_DOWNLOAD}"
        ) from error
    if process.returncode != 0:
        raise SetupError(
            f"downloading {WHEEL_NAME} failed:\n{process.stderr.strip()}\n{_MANUAL_DOWNLOAD}"
        )
    return scratch / WHEEL_NAME


_MANUAL_DOWNLOAD = (
    f"fetch that file elsewhere and run `sparkstrom fetch-aeron --wheel {WHEEL_NAME}`"
)


def _extract_library(wheel: Path) -> bytes:
    """Return the wheel's library; raise SetupError if the wheel is unreadable or another one."""
    try:
        content = wheel.read_bytes()
    except OSError as error:
        raise SetupError(
            f"{wheel} cannot be read ({error.strerror}): {_MANUAL_DOWNLOAD}"
        ) from error
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != WHEEL_SHA256:
        raise SetupError(
            f"{wheel} has sha256 {sha256}, not {WHEEL_SHA256}: it is not {WHEEL_NAME}, "
            "which sparkstrom is tested with; delete it and fetch again"
        )
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(WHEEL_LIBRARY_PATH)


def _install_library(library: bytes, target: Path) -> None:
    """Write the library next to ``target``, check that it loads, then rename it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".fetch-", suffix=".so", dir=target.parent)
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(library)
        draft.chmod(0o755)
        AeronLibrary(name)  # do not install a library that does not load
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
