"""Start Python processes on this machine, and prepare their environment and pickled objects."""

from __future__ import annotations

import fcntl
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from sparkstrom.base.errors import SetupError

FIRST_FREE_DESCRIPTOR = 3  # after standard input, output and error
THREAD_LIMIT_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
CGROUP = Path("/sys/fs/cgroup")  # limits of the container
# Files with microseconds of CPU time per period, and the period: cgroup v2 and v1.
CPU_LIMITS = (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def count_cores() -> int:
    """Return the number of CPU cores that this process, or its container, may use."""
    cores = len(os.sched_getaffinity(0))
    for names in CPU_LIMITS:
        with suppress(OSError, ValueError):  # no container, or one without a limit ("max", -1)
            text = " ".join((CGROUP / name).read_text() for name in names)
            quota, period = map(float, text.split())
            if quota > 0:
                cores = max(1, min(cores, math.ceil(quota / period)))
    return cores


def _find_working_directory() -> str:
    """Return the path of the working directory; "" if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


_FIRST_DIRECTORY = _find_working_directory()


def list_import_path() -> list[str]:
    """Return ``sys.path`` with absolute entries, for a child.

    A notebook's modules are found by the entry "", also if it has changed its working directory
    since it imported them: relative entries are joined with the first and the present one.
    """
    directories = _find_working_directory(), _FIRST_DIRECTORY
    found = [os.path.join(each, entry) for entry in sys.path for each in directories]
    return list(dict.fromkeys(map(os.path.normpath, found)))


def make_child_environment(threads: int) -> dict[str, str]:
    """Return a child's environment: this process's variables, import path and thread limits.

    Variables such as OMP_NUM_THREADS are set to ``threads``, unless this process has set them.
    """
    limits = {name: str(threads) for name in THREAD_LIMIT_VARIABLES}
    return limits | os.environ | {"PYTHONPATH": os.pathsep.join(list_import_path())}


def start_module(
    module: str,
    descriptors: Sequence[int],
    *arguments: str,
    output: Any,
    env: Mapping[str, str],
    stdin: Any = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    """Start ``python -m module`` in a process group of its own, so that Ctrl-C does not reach it.

    Args:
        module: Name of the module. Its first arguments are the numbers of the passed descriptors.
        descriptors: File descriptors of which the process gets copies.
        *arguments: Further arguments.
        output: Receives the process's stdout and stderr: a file or subprocess.DEVNULL.
        env: Environment variables of the process.
        stdin: Standard input of the process: a file or subprocess.DEVNULL.

    Raises:
        OSError: The process cannot be started.
    """
    with ExitStack() as closing:
        # A program that was started without stdin, stdout or stderr gives their numbers to other
        # files, which the process's own streams would replace.
        copies = [
            fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE_DESCRIPTOR) for each in descriptors
        ]
        for copy in copies:
            closing.callback(os.close, copy)
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *map(str, copies), *arguments],
            stdin=stdin,
            stdout=output,
            stderr=output,
            env=env,
            process_group=0,
            pass_fds=copies,
        )


def pickle_by_value(value: Any) -> bytes:
    """Pickle a value, including the code of classes that the user's script or notebook defines.

    A child unpickles it with ``pickle.loads``. Raise SetupError if cloudpickle is not installed.
    """
    try:
        import cloudpickle
    except ImportError:
        raise SetupError(
            "other processes get models by cloudpickle, which is not installed: "
            "pip install cloudpickle"
        ) from None
    content: bytes = cloudpickle.dumps(value)
    return content
