"""Finding Aeron: four places, in order; what is found is loaded and checked, or refused by name.

No place needs a compiler. A wheel of pyaeron carries the whole C client and media driver inside
its extension module; that file is loaded as a plain shared library, by any CPython.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import sys
import warnings
from pathlib import Path

from sparkstrom.base.errors import SetupError
from sparkstrom.transport.aeron.checked import Aeron
from sparkstrom.transport.aeron.pinned import EXTENSION, MACHINE, PROJECT

ENV_LIBRARY = "SPARKSTROM_AERON_LIBRARY"
SYSTEM_NAMES = ("libaeron_driver.so", "libaeron.so")


def fetched_path() -> Path:
    """Where ``sparkstrom fetch-aeron`` puts the library of this environment."""
    return Path(sys.prefix) / "lib" / "sparkstrom" / Path(EXTENSION).name


def load_library() -> Aeron:
    """The Aeron library of this process. Raise SetupError that lists every place looked at."""
    return _load(os.environ.get(ENV_LIBRARY, ""))


def warn_where_absent(stacklevel: int) -> None:
    """Tell a program that begins that it cannot train here; to predict needs no library."""
    try:
        load_library()
    except SetupError as error:
        text = f"gradient sharing cannot start on this machine (rounds of averaging can): {error}"
        warnings.warn(text, RuntimeWarning, stacklevel + 1)


@functools.cache
def _load(named: str) -> Aeron:
    if named:  # on purpose: its own error is the one to read
        try:
            return Aeron(named)
        except SetupError as error:
            raise SetupError(
                f"{error}; {ENV_LIBRARY} names it: correct that, or unset it for sparkstrom to look"
            ) from error
    tried: list[str] = []
    for place, candidates in (
        (f"the {PROJECT} wheel", _wheel_libraries()),
        ("a system library", SYSTEM_NAMES),
        ("`sparkstrom fetch-aeron`", _fetched()),
    ):
        for candidate in candidates:
            try:
                return Aeron(candidate)
            except SetupError as error:
                tried.append(f"{place}: {error}")
        if not candidates:
            tried.append(f"{place}: not there")
    raise SetupError(_nowhere(tried))


def _wheel_libraries() -> tuple[str, ...]:
    """The extension of an installed pyaeron, found without importing it."""
    spec = importlib.util.find_spec(PROJECT)
    places = spec.submodule_search_locations if spec else None
    return tuple(str(file) for place in places or () for file in Path(place).glob("_pyaeron*.so"))


def _fetched() -> tuple[str, ...]:
    path = fetched_path()
    return (str(path),) if path.exists() else ()


def _nowhere(tried: list[str]) -> str:
    places = "\n".join(
        f"  {n}. {line}" for n, line in enumerate([f"{ENV_LIBRARY}: not set", *tried], 1)
    )
    return f"no Aeron library on this machine; looked at\n{places}\n{_remedy()}"


def _remedy() -> str:
    if sys.platform == "linux" and platform.machine() == MACHINE:
        return f"Run `{sys.executable} -m sparkstrom.cli.main fetch-aeron`, or set {ENV_LIBRARY}."
    return (
        f"There is no {PROJECT} wheel for {sys.platform} on {platform.machine()}: build Aeron's C "
        f"media driver and name its shared library in {ENV_LIBRARY}."
    )
