"""The one gate to C: every call that can fail passes through here and raises in Aeron's own words.

The text and code of a failure are per thread and outlive a later success, so a caller that will
look at them clears them first (``Aeron.clear_error``).
"""

from __future__ import annotations

import os
from typing import Any, Final

from sparkstrom.base.errors import DriverLost, SetupError, TransportError
from sparkstrom.transport.aeron.pinned import MAJOR, MINOR_MIN

try:
    from sparkstrom.transport.aeron._aeron import ffi as ffi
except ModuleNotFoundError as error:
    raise SetupError(
        "sparkstrom/transport/aeron/_aeron.py has not been generated: "
        "run `python native/build_aeron.py` in the checkout, or install the package"
    ) from error

# Aeron's threads may still run when the interpreter unloads what it loaded: never unmap the code.
DLOPEN_FLAGS: Final = os.RTLD_NOW | os.RTLD_NODELETE

# As errcode() gives them.
STORAGE_SPACE: Final = -12  # AERON_ERROR_CODE_STORAGE_SPACE
DRIVER_TIMEOUT: Final = -1000  # AERON_CLIENT_ERROR_DRIVER_TIMEOUT: it left a request unanswered


class Aeron:
    """A loaded Aeron library, known to have the version and the symbols that we declare."""

    def __init__(self, path: str) -> None:
        """Load ``path``; raise SetupError where it is no Aeron that we can drive."""
        self.path = path
        try:
            self.lib: Any = ffi.dlopen(path, DLOPEN_FLAGS)
        except OSError as error:
            raise SetupError(f"{path} cannot be loaded as the Aeron library: {error}") from error
        self._check()

    def _check(self) -> None:
        # dir() names what is declared; a look-up fails where the library lacks it.
        missing = [name for name in dir(self.lib) if not _has(self.lib, name)]
        if missing:
            raise SetupError(
                f"{self.path} is not a complete Aeron client with media driver: it lacks "
                f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
            )
        major, minor = self.lib.aeron_version_major(), self.lib.aeron_version_minor()
        if major != MAJOR or minor < MINOR_MIN:
            raise SetupError(
                f"{self.path} is Aeron {major}.{minor}; sparkstrom needs {MAJOR}.{MINOR_MIN} or "
                f"a later {MAJOR}.x"
            )

    @property
    def version(self) -> str:
        """The library's own words about itself."""
        return text(self.lib.aeron_version_full())

    def checked(self, result: int, doing: str) -> int:
        """Pass a C result through, or raise TransportError with Aeron's own words."""
        if result < 0:
            raise self.failure(doing)
        return result

    def failure(self, doing: str) -> TransportError:
        """This thread's last failure, as the error to raise."""
        code, words = self.last_error()
        return (DriverLost if code == DRIVER_TIMEOUT else TransportError)(doing, code, words)

    def last_error(self) -> tuple[int, str]:
        """Code (errno, or minus an Aeron code) and text of this thread's last failure."""
        return int(self.lib.aeron_errcode()), text(self.lib.aeron_errmsg())

    def clear_error(self) -> None:
        """Forget this thread's last failure, so that the next one is not taken for it."""
        self.lib.aeron_err_clear()

    def address_of(self, function: str) -> int:
        """The machine address of a C function, for kernels that call it without Python."""
        return address(ffi.addressof(self.lib, function))


def _has(lib: Any, name: str) -> bool:
    try:
        getattr(lib, name)
    except (AttributeError, ffi.error):
        return False
    return True


def address(pointer: Any) -> int:
    """A cffi pointer as an integer."""
    return int(ffi.cast("uintptr_t", pointer))


def pointer(number: int) -> Any:
    """An integer as a ``void *``."""
    return ffi.cast("void *", number)


def text(chars: Any) -> str:
    """A C string as str."""
    return str(ffi.string(chars).decode(errors="replace"))


def harmless(lib: Any) -> Any:
    """A callback for whatever Aeron may want to tell: a C function that takes no notice of it."""
    return ffi.cast("void *", ffi.addressof(lib, "aeron_err_clear"))
