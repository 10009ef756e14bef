"""Versions: what a Python worker is, asked by code that travels whole.

Where executors have no sparkstrom, or another one, nothing of ours can be imported by name; so this
module is pickled by value, and imports nothing of ours before it has looked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Versions(NamedTuple):
    """Of one Python worker."""

    host: str
    python: str
    program: str  # the interpreter's path
    sparkstrom: str  # "" where it cannot be imported
    refused: str  # why it cannot


def versions(items: Iterable[int] = ()) -> Iterator[tuple[str, str, str, str, str]]:
    """Fields of one ``Versions``."""
    import platform
    import socket
    import sys

    found, refused = "", ""
    try:
        from sparkstrom.base.version import __version__ as found
        from sparkstrom.transport.aeron import library  # noqa: F401  # with what it needs
    except Exception as error:  # whatever an unfinished installation raises
        refused = f"{type(error).__name__}: {error}"
    yield socket.gethostname(), platform.python_version(), sys.executable, found, refused
