"""Fetch a copy of another worker's optimizer state, chunk by chunk.

A copy's number is a hash of its content. The fetch starts again if a chunk of another copy arrives,
or if the complete content does not match the hash.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkstrom.codec.messages import OptimizerChunk, hash_optimizer_copy
from sparkstrom.protocol.common.process_pause import ProcessPause

ASKED_AT_ONCE = 4  # chunks under way; few, because their links also carry the commits
RETRY_FIRST_S = 2.0  # until chunks are requested again; the source's trainer first makes a copy


@dataclass(slots=True)
class OptimizerFetch:
    """A copy of another worker's optimizer state while it is being fetched in chunks."""

    patience_s: float  # longest time without progress
    until_s: float  # time at which the fetch is given up; each new chunk postpones it
    copy: int | None = None  # number of the copy; None: any copy is taken
    count: int = 1  # number of chunks; 1 until the first chunk states it
    chunks: dict[int, bytes] = field(default_factory=dict)  # by index
    asked_s: dict[int, float] = field(default_factory=dict)  # requests under way: index -> when
    taken_s: float = 0.0  # when the last chunk came
    moved_s: float = 0.0  # when the last chunk, or part of one, came
    retry_s: float = RETRY_FIRST_S  # doubles; at least twice the time that a chunk took
    whole: bytes | None = None  # the complete copy, whose hash is right

    def add_chunk(self, chunk: OptimizerChunk, now_s: float) -> None:
        """Store a chunk; if it belongs to another copy, discard the chunks of the old one.

        When all chunks have come, set ``whole``, or start again if the hash is wrong.
        """
        asked_s = self.asked_s.pop(chunk.index, now_s)
        self.retry_s = max(self.retry_s, 2 * (now_s - max(asked_s, self.taken_s)))
        self.taken_s = self.moved_s = now_s
        if chunk.copy != self.copy:
            self._restart(chunk.copy, chunk.count)
        if chunk.index < self.count and chunk.index not in self.chunks:
            self.chunks[chunk.index] = chunk.payload
            self.until_s = now_s + self.patience_s
        if len(self.chunks) < self.count:
            return
        content = b"".join(self.chunks[index] for index in range(self.count))
        if hash_optimizer_copy(content) == self.copy:
            self.whole = content
        else:
            self._restart(None, 1)

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadline by a pause of the process, which does not count as waiting."""
        self.until_s += pause.pause_s

    def _restart(self, copy: int | None, count: int) -> None:
        """Forget all chunks and requests, and begin with ``copy``, which has ``count`` chunks.

        None: begin with any copy.
        """
        self.copy, self.count = copy, count
        self.chunks, self.asked_s = {}, {}

    def next_requests(self, now_s: float) -> list[int]:
        """Return the indices of chunks to request now; overdue ones are requested again."""
        missing = [index for index in range(self.count) if index not in self.chunks]
        oldest_s = min(self.asked_s.values(), default=now_s)
        if now_s > max(oldest_s, self.moved_s) + self.retry_s:
            self.asked_s.clear()
            self.retry_s *= 2
        waiting = [index for index in missing if index in self.asked_s]
        new = [i for i in missing if i not in waiting][: max(0, ASKED_AT_ONCE - len(waiting))]
        self.asked_s.update(dict.fromkeys(new, now_s))
        return new
