"""Copies: an updater's state at one moment, cut into chunks that cannot be mixed up.

A copy's number is a hash of its content. So no two copies share one, whoever made them and when,
but where they are equal; and who has all chunks sees whether they are of one copy.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from sparkstrom.codec.messages import AskUpdater, UpdaterChunk

NUMBER_BITS = 63  # numbers of messages stay below 2^63


def number_of(content: bytes) -> int:
    """The number of the copy with this content: from 1: 0 is none on the wire."""
    digest = hashlib.sha256(content).digest()
    return max(1, int.from_bytes(digest[:8], "little") >> (64 - NUMBER_BITS))


@dataclass(frozen=True, slots=True)
class Copy:
    """A state as bytes, and what it is called."""

    content: bytes
    number: int
    chunk_bytes: int

    @classmethod
    def of(cls, content: bytes, chunk_bytes: int) -> Copy:
        """Of a state that is not empty."""
        return cls(content, number_of(content), chunk_bytes)

    def chunk(self, ask: AskUpdater) -> UpdaterChunk:
        """What is asked for; the first chunk of this copy for who asks for another one."""
        size, count = self.chunk_bytes, -(-len(self.content) // self.chunk_bytes)
        index = ask.index if ask.copy == self.number and ask.index < count else 0
        payload = self.content[index * size : (index + 1) * size]
        return UpdaterChunk(
            asker=ask.asker, copy=self.number, index=index, count=count, payload=payload
        )
