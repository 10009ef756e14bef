"""Snapshot fetch: a replica in chunks from a live one, and the commits that passed meanwhile.

Nobody freezes anything: each chunk says up to which commit its bytes are, and the commits after
that are held here until the replica is whole, one by one or as sums. A chunk counts only while all
commits after it are held and no sum is half in it; otherwise it is asked for again. A chunk that
was asked for comes, or its stream is gone: there is no timer.
"""

from __future__ import annotations

from itertools import islice

from sparkstrom.codec.messages import Chunk
from sparkstrom.protocol.common.history import Entry, Log
from sparkstrom.protocol.worker.waits import Sleep

ASKED_AT_ONCE = 8  # chunks: the parent sends them as the link takes them


class SnapshotFetch:
    """One snapshot on its way in; ``before`` is the one that it replaces, if any.

    Progress is to hold more chunks at once than ever before, so that chunks which grow old as
    fast as they come are no progress.
    """

    def __init__(
        self, held: Log, chunks: int, now_s: float, before: SnapshotFetch | None = None
    ) -> None:
        self._count = chunks
        self._chunks: dict[int, Chunk] = {}
        self._asked: set[int] = set()
        self._held = held  # the node's log, which begins at the snapshot's base
        self._most: int = before._most if before is not None else 0
        self.progress_s: float = before.progress_s if before is not None else now_s

    def forget_useless(self) -> None:
        """The log changed: chunks older than what it holds, or inside of a sum, are worthless."""
        for index in [i for i, chunk in self._chunks.items() if self._is_useless(chunk)]:
            del self._chunks[index]

    def _is_useless(self, chunk: Chunk) -> bool:
        log = self._held
        return chunk.commit < log.base or (
            chunk.commit < log.head and not log.reaches(chunk.commit)
        )

    def take(self, chunk: Chunk, now_s: float) -> bool:
        """Keep it, if it is of use and was not here."""
        self._asked.discard(chunk.index)
        if chunk.index >= self._count or self._is_useless(chunk) or chunk.index in self._chunks:
            return False
        self._chunks[chunk.index] = chunk
        if len(self._chunks) > self._most:
            self._most, self.progress_s = len(self._chunks), now_s
        return True

    def wanted(self) -> list[int]:
        """Chunks to ask for now."""
        missing = (i for i in range(self._count) if i not in self._chunks and i not in self._asked)
        out = list(islice(missing, max(0, ASKED_AT_ONCE - len(self._asked))))
        self._asked.update(out)
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
    def held(self) -> tuple[Entry, ...]:
        return tuple(self._held.after(self._held.base))

    def resume(self) -> None:
        """There is another parent: what was asked for will not come any more."""
        self._asked.clear()

    def slept(self, sleep: Sleep) -> None:
        """See ``Sleep``."""
        self.progress_s = sleep.later(self.progress_s)
