"""Rehearse the first fit of a script that is otherwise run unchanged.

A rehearsal simulates a fit with many workers on this machine, in virtual time, with the real
model and a sample of the real rows. The script runs until it calls ``fit``. The rehearsal replaces
that call, and the script ends there.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

from sparkstrom.base.errors import UsageError
from sparkstrom.rehearsal.result import Rehearsal

Rehearse = Callable[..., Rehearsal]  # the method ``rehearse`` of a network
LEFT_THREADS_S = 10.0  # time for a script's threads to end after the main thread
INTERRUPTION = signal.SIGUSR2  # not SIGINT, which programs in the background of a shell ignore


@dataclass(slots=True)
class _ScriptRun:
    """The state of a script that runs until its first fit, which is rehearsed."""

    options: Mapping[str, Any]  # for ``rehearse``
    result: Rehearsal | None = None  # of the first fit, once there is one
    lock: threading.Lock = field(default_factory=threading.Lock)  # fits may run in several threads
    # The threads that the script has left running, which must not train; None: it has not ended.
    left: WeakSet[threading.Thread] | None = None


_script: _ScriptRun | None = None  # the newest; None: no script was rehearsed


class ScriptRehearsed(SystemExit):
    """Ends a script at its first fit.

    It is no Exception, so that the script's ``except Exception`` does not catch it. As a
    SystemExit, it ends a thread without a traceback.
    """


def rehearse_instead(rehearse: Rehearse, data: Any, **fit: Any) -> None:
    """Rehearse a fit and end the script, if ``rehearse_script`` runs it; otherwise do nothing.

    Only the first fit is rehearsed; later ones end their threads, also after the script's end. A
    fit in a thread also interrupts the script's main thread, which may wait for the thread forever,
    as in Spark ML's CrossValidator.

    Args:
        rehearse: The network's method ``rehearse``.
        data: The fit's rows.
        **fit: The other arguments of the fit that ``rehearse`` also accepts.

    Raises:
        ScriptRehearsed: The fit, or an earlier one, was rehearsed.
    """
    script, thread = _script, threading.current_thread()
    if script is None or (script.left is not None and thread not in script.left):
        return
    with script.lock:
        if script.result is None and script.left is None:
            script.result = rehearse(data, **fit, **script.options)
            main = threading.main_thread()
            if main.ident is not None and thread is not main:
                signal.pthread_kill(main.ident, INTERRUPTION)
    raise ScriptRehearsed


def rehearse_script(path: Path, arguments: Sequence[str], options: Mapping[str, Any]) -> Rehearsal:
    """Run a script until it calls ``fit``, and rehearse that fit.

    The script ends there: the code after the fit, such as code that saves a model, does not run.
    ``with`` and ``finally`` blocks exit as usual; an error in them, such as for a missing result of
    the fit, is ignored.

    Args:
        path: The script.
        arguments: The script's arguments.
        options: Arguments of ``rehearse``, in addition to those of the fit.

    Returns:
        The result of the rehearsal.

    Raises:
        UsageError: The script does not exist, or ends without a fit. Other errors of the script
            before the end of the rehearsal are raised unchanged.
    """
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file; name the script that is to be submitted")
    reason = "it ended"
    with _script_environment(path, arguments, options) as script:
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            reason = f"it ended with exit code {end.code or 0}"
        except BaseException:
            if script.result is None:
                raise
    if script.result is not None:
        return script.result
    raise UsageError(
        f"{path}: {reason} without a fit of a SparkNetwork or ParallelWrapper in this process;"
        " give the script the arguments with which it trains"
    )


@contextmanager
def _script_environment(
    path: Path, arguments: Sequence[str], options: Mapping[str, Any]
) -> Iterator[_ScriptRun]:
    """Set ``sys.argv`` and ``sys.path`` as ``python script.py`` does, and let fits be rehearsed.

    The end of the ``with`` block waits for a fit that is being rehearsed in a thread, and undoes
    all changes; threads that the script has left running still cannot train.
    """
    global _script
    before, import_path, threads = sys.argv, sys.path, {*threading.enumerate()}
    handler = signal.signal(INTERRUPTION, _end_script)
    _script = run = _ScriptRun(options)
    sys.argv = [str(path), *arguments]
    sys.path = [str(path.resolve().parent), *import_path]  # the script may change it
    try:
        yield run
    finally:
        signal.signal(INTERRUPTION, lambda *_: None)  # the script has ended already
        with run.lock:
            run.left = WeakSet({*threading.enumerate()} - threads)
        sys.argv, sys.path = before, import_path
        signal.signal(INTERRUPTION, handler)


def _end_script(number: int, frame: object) -> None:
    """End the script that is being rehearsed, as the handler of INTERRUPTION."""
    raise ScriptRehearsed


def limit_left_threads() -> None:
    """Let this process end LEFT_THREADS_S after its main thread, although a script's threads run.

    Python would wait for those that are not daemons, which may wait forever for the script's rest.
    """
    left = [] if _script is None or _script.left is None else list(_script.left)
    ended = threading.Event()

    def end() -> None:
        ended.wait()
        time.sleep(LEFT_THREADS_S)
        names = ", ".join(thread.name for thread in left if thread.is_alive())
        print(f"sparkstrom rehearse: the script's threads still run: {names}", file=sys.stderr)
        os._exit(0)

    if any(thread.is_alive() and not thread.daemon for thread in left):
        # Joining the main thread is not enough: it counts as alive while it waits for the threads
        # of a ThreadPoolExecutor.
        threading._register_atexit(ended.set)  # type: ignore[attr-defined]
        threading.Thread(target=end, daemon=True).start()
