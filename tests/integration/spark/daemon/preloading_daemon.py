"""Spark's Python daemon, which imports others' libraries once for all workers that it forks.

A worker that imports Numba takes half a second of processor time before it does anything, and one
that imports torch three; tests that kill workers, or make tasks fail, start hundreds. Each worker
still imports sparkstrom itself, as with Spark's own daemon, and JAX, which must not be imported
before a fork. Applications of other tests have Spark's own daemon or ``sparkstrom.spark.daemon``.
"""

from __future__ import annotations

import importlib
import os
import sys

from pyspark import daemon

FIRST = ("numpy", "numba")  # every worker that trains or predicts has them
ON_DEMAND = ("pyarrow", "pandas", "torch")  # once a worker had them


class Libraries:
    """What this daemon has imported; workers tell it, by a pipe, what they had to import."""

    def __init__(self) -> None:
        self._daemon = os.getpid()
        self._told, self._tell = os.pipe()
        os.set_blocking(self._told, False)

    def load(self, names: tuple[str, ...]) -> None:
        """Import them, if they are installed."""
        for name in names:
            try:
                importlib.import_module(name)
            except ImportError:
                continue

    def load_told(self) -> None:
        """Import what workers reported; runs before each fork."""
        if os.getpid() != self._daemon:
            return
        try:
            words = os.read(self._told, 65536).decode().split()
        except BlockingIOError:
            return
        self.load(tuple(name for name in ON_DEMAND if name in words and name not in sys.modules))

    def tell(self, before: set[str]) -> None:
        """Report what a task has imported that was not in ``before``."""
        new = [name for name in ON_DEMAND if name in sys.modules and name not in before]
        if new:
            os.write(self._tell, f"{' '.join(new)} ".encode())


def main() -> None:
    libraries, work = Libraries(), daemon.worker

    def worker(*given: object) -> int:
        before = set(sys.modules)
        try:
            return work(*given)
        finally:
            libraries.tell(before)

    daemon.worker = worker
    libraries.load(FIRST)
    os.register_at_fork(before=libraries.load_told)
    daemon.manager()


if __name__ == "__main__":
    main()
