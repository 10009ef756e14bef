"""Rehearse the first fit of a script that is otherwise run unchanged.

A rehearsal simulates a fit with many workers on this machine, in virtual time, with the real
model and a sample of the real rows. The script runs until it calls ``fit``. The rehearsal replaces
that call, and the script ends there.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.rehearsal.result import Rehearsal

Rehearse = Callable[..., Rehearsal]  # the method ``rehearse`` of a network

_options: Mapping[str, Any] | None = None  # for ``rehearse``; None: no script is being rehearsed


class ScriptRehearsed(BaseException):
    """Ends a script at its first fit.

    It is not an Exception, so that the script's ``except Exception`` does not catch it.
    """

    def __init__(self, rehearsal: Rehearsal) -> None:
        super().__init__(rehearsal)
        self.rehearsal = rehearsal


def rehearse_instead(rehearse: Rehearse, data: Any, **fit: Any) -> None:
    """Rehearse a fit and end the script, if ``rehearse_script`` runs it; otherwise do nothing.

    Args:
        rehearse: The network's method ``rehearse``.
        data: The fit's rows.
        **fit: The other arguments of the fit that ``rehearse`` also accepts.

    Raises:
        ScriptRehearsed: The fit was rehearsed. The exception contains the result.
    """
    if _options is not None:
        raise ScriptRehearsed(rehearse(data, **fit, **_options))


def rehearse_script(path: Path, arguments: Sequence[str], options: Mapping[str, Any]) -> Rehearsal:
    """Run a script until it calls ``fit``, and rehearse that fit.

    The script ends there: the code after the fit, such as code that saves a model, does not run.
    ``with`` and ``finally`` blocks exit as usual.

    Args:
        path: The script.
        arguments: The script's arguments.
        options: Arguments of ``rehearse``, in addition to those of the fit.

    Returns:
        The result of the rehearsal.

    Raises:
        UsageError: The script does not exist, or ends without a fit. Other errors of the script are
            raised unchanged.
    """
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file; name the script that is to be submitted")
    reason = "it ended"
    with _script_environment(path, arguments, options):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except ScriptRehearsed as done:
            return done.rehearsal
        except SystemExit as end:
            reason = f"it ended with exit code {end.code}"
    raise UsageError(
        f"{path}: {reason} without a fit of a SparkNetwork or ParallelWrapper in this process;"
        " give the script the arguments with which it trains"
    )


@contextmanager
def _script_environment(
    path: Path, arguments: Sequence[str], options: Mapping[str, Any]
) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path`` as ``python script.py`` does, and let fits be rehearsed.

    All changes are undone at the end of the ``with`` block.
    """
    global _options
    before, import_path = sys.argv, sys.path
    sys.argv, _options = [str(path), *arguments], options
    sys.path = [str(path.resolve().parent), *import_path]  # the script may change it
    try:
        yield
    finally:
        sys.argv, _options = before, None
        sys.path = import_path
