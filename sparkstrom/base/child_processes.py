"""Prepare Python processes on this machine: their environment, and objects pickled for them."""

from __future__ import annotations

import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparkstrom.base.errors import SetupError

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


def make_child_environment(threads: int) -> dict[str, str]:
    """Return a child's environment: this process's variables, its import path, thread limits.

    The limits apply only to variables that this process does not set.
    """
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    limits = {name: str(threads) for name in THREAD_LIMIT_VARIABLES}
    return limits | os.environ | {"PYTHONPATH": path}


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
