"""Catch up: a replica fetched in chunks from a live one, and the commits that passed meanwhile.

Nobody freezes anything: each chunk says up to which commit its bytes are, and the commits after
that are held here until the replica is whole. A chunk counts only while all commits after it are
held singly; otherwise it is asked for again.
"""

from __future__ import annotations

from sparkstrom.codec.messages import Chunk, Committed
from sparkstrom.protocol.replay import Log

ASKED_AT_ONCE = 4  # chunks under way: keeps one edge busy without filling its log
RETRY_S = 0.5


class Catchup:
    """One snapshot on its way in; ``before`` is the one that it replaces, if any.

    Progress is to hold more chunks at once than ever before, so that chunks which grow old as
    fast as they come are no progress.
    """

    def __init__(self, held: Log, chunks: int, now_s: float, before: Catchup | None = None) -> None:
        self._count = chunks
        self._chunks: dict[int, Chunk] = {}
        self._asked_s: dict[int, float] = {}
        self._held = held  # the node's log, which begins at the snapshot's base
        self._most: int = before._most if before is not None else 0
        self.progress_s: float = before.progress_s if before is not None else now_s

    def forget_old(self) -> None:
        """Chunks older than what is still held are worthless now."""
        for index in [i for i, c in self._chunks.items() if c.commit < self._held.base]:
            del self._chunks[index]

    def take(self, chunk: Chunk, now_s: float) -> None:
        if chunk.index >= self._count or chunk.commit < self._held.base:
            return
        self._asked_s.pop(chunk.index, None)
        self._chunks.setdefault(chunk.index, chunk)
        if len(self._chunks) > self._most:
            self._most, self.progress_s = len(self._chunks), now_s

    def wanted(self, now_s: float) -> list[int]:
        """Chunks to ask for now."""
        for index in [i for i, at_s in self._asked_s.items() if now_s >= at_s + RETRY_S]:
            del self._asked_s[index]
        out: list[int] = []
        for index in range(self._count):
            if len(self._asked_s) >= ASKED_AT_ONCE:
                break
            if index not in self._chunks and index not in self._asked_s:
                self._asked_s[index] = now_s
                out.append(index)
        return out

    def ready(self, now_s: float) -> bool:
        """Could be installed now; waiting for the trainer is not this wait."""
        if not self._complete():
            return False
        self.progress_s = now_s
        return True

    def _complete(self) -> bool:
        """All chunks are here, and so is every commit that any of them contains."""
        return len(self._chunks) == self._count and all(
            chunk.commit <= self._held.head for chunk in self._chunks.values()
        )

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return tuple(self._chunks[i] for i in range(self._count))

    @property
    def held(self) -> tuple[Committed, ...]:
        held = tuple(self._held.after(self._held.base))
        return tuple(entry for entry in held if isinstance(entry, Committed))

    def resume(self) -> None:
        """There is another parent: what was asked for will not come any more."""
        self._asked_s.clear()
