"""Spark's Python daemon for executors, which imports libraries once for all workers that it forks.

These settings turn it on:

    --conf spark.python.daemon.module=sparkstrom.spark.daemon
    --conf spark.executorEnv.SPARKSTROM_PRELOAD=torch

Spark starts one Python daemon per executor, and the daemon forks a Python worker per task slot.
With Spark's own daemon each worker imports Numba, and torch if the model needs it. This takes
seconds of processor time, in all workers of an executor at once. This daemon imports NumPy, Numba,
sparkstrom and the modules named in ``SPARKSTROM_PRELOAD`` before it forks. Modules that start
threads when they are imported, such as JAX, must not be named there, because only the thread that
forks exists in the worker.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterable

from sparkstrom.base.descriptors import redirect_stdout_to_stderr

PRELOAD_VARIABLE = "SPARKSTROM_PRELOAD"  # names of modules, separated by commas
# What every worker of a fit imports.
WORKER_MODULES = (
    "numba",
    "sparkstrom.spark.executor.entry_points",
    "sparkstrom.worker.training_task",
)
# Modules that are imported together with a named module, because workers that use it need them.
COMPANIONS = {"torch": ("sparkstrom.models.torch",)}
UNSAFE_TO_FORK = ("jax", "keras", "tensorflow")  # they have threads once they are imported


def preload(names: Iterable[str]) -> list[str]:
    """Import modules, such as "torch"; return a line that explains each one not imported."""
    problems = []
    for name in names:
        if name.partition(".")[0] in UNSAFE_TO_FORK:
            problems.append(f"{name} starts threads, which a forked worker lacks; leave it out")
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # the workers that need the module will raise it
            problems.append(f"{name} cannot be imported: {type(error).__name__}: {error}")
    return problems


def reseed_random_numbers(daemon_pid: int) -> None:
    """Reseed NumPy's and torch's global generators in a process that the daemon has forked.

    Otherwise all workers would draw equal numbers. Python's own generator reseeds itself after a
    fork. As with Spark's own daemon, nothing is reseeded in a process that a worker forks; its
    parent is not ``daemon_pid``.
    """
    if os.getppid() != daemon_pid:
        return
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    if torch := sys.modules.get("torch"):
        torch.seed()


def main() -> None:
    """Import the modules, then serve Spark until the executor ends."""
    names = list(WORKER_MODULES)
    for name in os.environ.get(PRELOAD_VARIABLE, "").replace(",", " ").split():
        names += [name, *COMPANIONS.get(name, ())]
    gc.disable()  # importing torch takes an eighth less time without collections
    with redirect_stdout_to_stderr():  # Spark reads the daemon's port from standard output
        for problem in preload(names):
            print(f"sparkstrom.spark.daemon: {problem}", file=sys.stderr)
    daemon_pid = os.getpid()
    os.register_at_fork(after_in_child=lambda: reseed_random_numbers(daemon_pid))
    gc.freeze()  # workers share these pages as long as no collection writes to them
    gc.enable()
    from pyspark import daemon

    daemon.manager()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
