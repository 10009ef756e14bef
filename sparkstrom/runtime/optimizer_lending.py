"""Optimizer lending: a copy of a trainer's updater state, for workers that join in mid-training.

The trainer makes the copy at a batch boundary when its node was asked for one, and numbers it by
its content (``codec/copies``); the node's thread sends it in chunks. A copy lives while it is asked
for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from sparkstrom.base.clock import Clock
from sparkstrom.codec.copies import Copy
from sparkstrom.codec.messages import AskUpdater, UpdaterChunk

CHUNK_BYTES = 64 * 1024  # four are asked for at once, over links that carry commits, too
KEPT_S = 20.0  # after the last question: longer than anybody waits between two


class OptimizerLender:
    """Shared by a trainer and its node's thread."""

    __slots__ = ("_asked_s", "_chunk_bytes", "_clock", "_copy", "_lock", "_wanted")

    def __init__(self, clock: Clock, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._clock, self._chunk_bytes = clock, chunk_bytes
        self._lock = threading.Lock()
        self._wanted = False
        self._copy: Copy | None = None
        self._asked_s = 0.0

    def chunk(self, ask: AskUpdater) -> UpdaterChunk | None:
        """Part of the copy; None where there is none yet."""
        with self._lock:
            self._asked_s = self._clock.monotonic_s()
            if self._copy is None:
                self._wanted = True
                return None
            return self._copy.chunk(ask)

    def at_boundary(self, state: Callable[[], bytes]) -> None:
        """The trainer stands between two steps: copy what is wanted, drop what is not."""
        if self._copy is not None and self._clock.monotonic_s() - self._asked_s > KEPT_S:
            with self._lock:
                self._copy = None
        if not self._wanted:
            return
        copy = Copy.of(state(), self._chunk_bytes)
        with self._lock:
            self._copy, self._wanted = copy, False
