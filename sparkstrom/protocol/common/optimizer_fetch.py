"""Optimizer fetch: a copy of somebody's updater state on its way in, chunk by chunk.

All chunks are of one copy, whose number is a hash of it: those of another one begin anew, and so
do chunks that do not make the copy that they name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkstrom.codec.copies import number_of
from sparkstrom.codec.messages import UpdaterChunk

ASKED_AT_ONCE = 4  # chunks under way, through links that carry the commits, too
RETRY_FIRST_S = 2.0  # a source answers once its trainer has made a copy; no chunk tells of a loss


@dataclass(slots=True)
class OptimizerFetch:
    """One copy on its way in."""

    patience_s: float  # without any progress
    until_s: float
    copy: int | None = None  # which one; None: whichever comes first
    count: int = 1
    chunks: dict[int, bytes] = field(default_factory=dict)
    asked_s: dict[int, float] = field(default_factory=dict)
    taken_s: float = 0.0  # when a chunk came last
    moved_s: float = 0.0  # when something came last, or was coming
    retry_s: float = RETRY_FIRST_S  # doubles, and is twice what one took: late is not lost
    whole: bytes | None = None

    def take(self, chunk: UpdaterChunk, now_s: float) -> None:
        """Keep a chunk; one of another copy begins anew."""
        asked_s = self.asked_s.pop(chunk.index, now_s)
        self.retry_s = max(self.retry_s, 2 * (now_s - max(asked_s, self.taken_s)))
        self.taken_s = self.moved_s = now_s
        if chunk.copy != self.copy:
            self._begin(chunk.copy, chunk.count)
        if chunk.index < self.count and chunk.index not in self.chunks:
            self.chunks[chunk.index] = chunk.payload
            self.until_s = now_s + self.patience_s
        if len(self.chunks) < self.count:
            return
        content = b"".join(self.chunks[index] for index in range(self.count))
        if number_of(content) == self.copy:
            self.whole = content
        else:
            self._begin(None, 1)

    def _begin(self, copy: int | None, count: int) -> None:
        self.copy, self.count = copy, count
        self.chunks, self.asked_s = {}, {}

    def wanted(self, now_s: float) -> list[int]:
        """Chunks to ask for now."""
        missing = [index for index in range(self.count) if index not in self.chunks]
        oldest_s = min(self.asked_s.values(), default=now_s)
        if now_s > max(oldest_s, self.moved_s) + self.retry_s:
            self.asked_s.clear()
            self.retry_s *= 2
        waiting = [index for index in missing if index in self.asked_s]
        new = [i for i in missing if i not in waiting][: max(0, ASKED_AT_ONCE - len(waiting))]
        self.asked_s.update(dict.fromkeys(new, now_s))
        return new
