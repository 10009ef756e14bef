"""Weights: payloads as long as those of a model with so many parameters.

The small replica of whole numbers stays as it is, and zeros make up what its payloads lack. So all
that counts bytes, in the machines and under way, counts what it would count in a real fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sparkstrom.protocol.common.send_window import SUM_ENTRY_BYTES
from sparkstrom.runtime.optimizer_lending import CHUNK_BYTES as UPDATER_CHUNK_BYTES

ENTRY_BITS = 10  # of an encoded update, about: a sign and a gap
PARAM_BYTES = 4
STATE_BYTES = 8  # per parameter of an updater like Adam
CHUNK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Weights:
    """``params`` 0: nothing is longer than what it says. ``density``: of an update's entries."""

    params: int = 0
    density: float = 0.0

    @property
    def entries(self) -> int:
        return round(self.density * self.params)

    @property
    def update_bytes(self) -> int:
        return self.entries * ENTRY_BITS // 8

    def sum_bytes(self, count: int) -> int:
        """Of so many different entries."""
        return min(int(SUM_ENTRY_BYTES * count), PARAM_BYTES * self.params)

    @property
    def chunks(self) -> int:
        """Of a snapshot, and one for buffers."""
        return -(-PARAM_BYTES * self.params // CHUNK_BYTES) + 1

    @property
    def chunk_bytes(self) -> int:
        return CHUNK_BYTES if self.params else 0

    @property
    def updater_chunks(self) -> int:
        return -(-STATE_BYTES * self.params // UPDATER_CHUNK_BYTES)

    @property
    def longest(self) -> int:
        """Bytes of the longest message that cannot be helped."""
        return max(CHUNK_BYTES if self.params else 0, self.update_bytes)


@lru_cache(maxsize=64)
def _zeros(size: int) -> bytes:
    return bytes(size)


def padded(payload: bytes, size: int) -> bytes:
    """At least so long; of an even length where it was."""
    lacking = size - len(payload)
    return payload + _zeros(lacking + lacking % 2) if lacking > 0 else payload
