"""Optimizer lending: a copy of a trainer's updater state, for workers that join in mid-training.

The trainer makes the copy at a batch boundary when its node was asked for one, and numbers it by
its content (``codec/copies``); the node's thread sends it in chunks. A copy lives while it is asked
for; who begins to ask gets a new one, unless somebody else is in the middle of this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from sparkstrom.base.clock import Clock
from sparkstrom.base.identity import NodeId
from sparkstrom.codec.copies import Copy
from sparkstrom.codec.messages import AskUpdater, UpdaterChunk

CHUNK_BYTES = 64 * 1024  # four are asked for at once, over links that carry commits, too
KEPT_S = 20.0  # after the last question: longer than anybody waits between two
FRESH_S = 1.0  # a copy no older than that is as good as a new one; so is one that nobody had yet


class OptimizerLender:
    """Shared by a trainer and its node's thread."""

    __slots__ = (
        "_asked_s", "_chunk_bytes", "_clock", "_copy", "_is_given", "_lock", "_made_s", "_takers",
        "_unanswered", "_wanted",
    )  # fmt: skip

    def __init__(self, clock: Clock, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._clock, self._chunk_bytes = clock, chunk_bytes
        self._lock = threading.Lock()
        self._wanted = self._is_given = False
        self._copy: Copy | None = None
        self._asked_s = self._made_s = 0.0
        self._takers: dict[NodeId, float] = {}  # who is in the middle of it, and asked last when
        self._unanswered: dict[tuple[NodeId, NodeId], AskUpdater] = {}  # by neighbour and asker

    def ask(self, to: NodeId, ask: AskUpdater) -> None:
        """Somebody asks, and is to be answered over this neighbour. The node's thread alone."""
        self._unanswered[to, ask.asker] = ask

    def answers(self) -> Iterator[tuple[NodeId, UpdaterChunk]]:
        """What can be answered now, and to which neighbour: the rest waits for the trainer."""
        for (to, asker), ask in tuple(self._unanswered.items()):
            chunk = self.chunk(ask)
            if chunk is not None:
                del self._unanswered[to, asker]
                yield to, chunk

    def chunk(self, ask: AskUpdater) -> UpdaterChunk | None:
        """Part of the copy; None where there is none yet."""
        with self._lock:
            now_s = self._asked_s = self._clock.monotonic_s()
            if ask.copy:
                self._takers[ask.asker] = now_s
            elif self._is_over(ask.asker, now_s):
                self._copy = None
            if self._copy is None:
                self._wanted = True
                return None
            self._is_given = True
            return self._copy.chunk(ask)

    def _is_over(self, asker: NodeId, now_s: float) -> bool:
        """Is the copy an old one that somebody has had, and nobody else is taking?

        Who asks a second time, because the first came before the copy, gets what was made for it.
        """
        self._takers.pop(asker, None)
        if not self._is_given:
            return False
        taken = any(now_s - asked_s < KEPT_S for asked_s in self._takers.values())
        return now_s - self._made_s > FRESH_S and not taken

    def at_boundary(self, state: Callable[[], bytes]) -> None:
        """The trainer stands between two steps: copy what is wanted, drop what is not."""
        if self._copy is not None and self._clock.monotonic_s() - self._asked_s > KEPT_S:
            with self._lock:
                self._copy = None
        if not self._wanted:
            return
        copy = Copy.of(state(), self._chunk_bytes)
        with self._lock:
            self._copy, self._made_s = copy, self._clock.monotonic_s()
            self._wanted = self._is_given = False
            self._takers.clear()
