"""Lending: a copy of a trainer's updater state, for workers that join in mid-training.

The trainer makes the copy at a batch boundary when its node was asked for one; the node's thread
sends it in chunks. A copy lives while it is asked for.
"""

from __future__ import annotations

import threading
import time

from sparkstrom.codec.messages import AskUpdater, UpdaterChunk
from sparkstrom.codec.states import encode_state
from sparkstrom.models.base import FlatModel

CHUNK_BYTES = 256 * 1024
KEPT_S = 20.0  # after the last question: longer than anybody waits between two


class Lender:
    """Shared by a trainer and its node's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = False
        self._copy, self._number, self._asked_s = b"", 0, 0.0

    def chunk(self, ask: AskUpdater) -> UpdaterChunk | None:
        """Part of the copy; None where there is none yet."""
        with self._lock:
            self._asked_s = time.monotonic()
            if not self._number:
                self._wanted = True
                return None
            count = -(-len(self._copy) // CHUNK_BYTES)
            index = ask.index if ask.copy == self._number and ask.index < count else 0
            return UpdaterChunk(
                asker=ask.asker,
                copy=self._number,
                index=index,
                count=count,
                payload=self._copy[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES],
            )

    def at_boundary(self, model: FlatModel, steps: int) -> None:
        """The trainer stands between two steps: copy what is wanted, drop what is not."""
        if self._number and time.monotonic() - self._asked_s > KEPT_S:
            with self._lock:
                self._copy, self._number = b"", 0
        if not self._wanted:
            return
        copy = encode_state(model.updater_state())
        with self._lock:
            self._copy, self._number, self._wanted = copy, 1 + steps, False
