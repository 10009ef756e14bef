"""Life signs: a count in memory that a worker process moves on, and the calling process looks at.

One that stands still (SIGSTOP, a debugger, a machine that only swaps) keeps its socket open, so
nothing says that it does no work. A thread of its own counts: steps may take as long as they like.
"""

from __future__ import annotations

import mmap
import os
import time

COUNT_BYTES = 8  # u64, little endian
BEAT_S = 0.2
START_S = 60.0  # until the first sign: an interpreter starts, and imports


class LifeSigns:
    """Of one process, in the calling one."""

    def __init__(self, lease_s: float) -> None:
        self.descriptor = os.memfd_create("sparkstrom-life")
        os.ftruncate(self.descriptor, COUNT_BYTES)
        self._memory = mmap.mmap(self.descriptor, COUNT_BYTES)
        self._lease_s = lease_s
        self._count, self._since_s = 0, time.monotonic()

    @property
    def limit_s(self) -> float:
        """How long it may be silent now."""
        return self._lease_s if self._count else max(self._lease_s, START_S)

    def is_silent(self) -> bool:
        """Was the count the same, in all looks, for longer than that?

        A calling process that stood still itself finds a later count, whenever it looks again.
        """
        count, now_s = int.from_bytes(self._memory, "little"), time.monotonic()
        if count != self._count:
            self._count, self._since_s = count, now_s
        return now_s - self._since_s > self.limit_s

    def close(self) -> None:
        """Idempotent."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.descriptor)


class Pulse:
    """Of this process: each ``beat`` is a sign."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, COUNT_BYTES)
        self._count = 0

    def beat(self) -> None:
        self._count += 1
        self._memory[:] = self._count.to_bytes(COUNT_BYTES, "little")
