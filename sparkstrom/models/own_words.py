"""Own words: which exceptions are a user's own, and what a library's says in one line."""

from __future__ import annotations

import dis
import importlib.util
import os

from sparkstrom.base.errors import first_line


def is_users_own(error: BaseException, *libraries: str) -> bool:
    """Was it raised by a ``raise`` (or ``assert``) outside of these, and not by an operation?"""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_lasti < 0:
        return False
    code = trace.tb_frame.f_code
    is_raise = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"
    return is_raise and not code.co_filename.startswith(tuple(map(_folder, libraries)))


def _folder(library: str) -> str:
    spec = importlib.util.find_spec(library)
    assert spec is not None, f"{library} raised something"
    assert spec.origin is not None, "it is a package of files"
    return os.path.dirname(spec.origin) + os.sep


def said_by(error: BaseException) -> str:
    """Its kind and its first line; the rest is in the error that it is the cause of."""
    return f"{type(error).__name__}: {first_line(error)}"
