"""Uplink: a node's own updates until it sees them committed.

The origin alone keeps an update. It is sent once, and again when the parent asks, when the edge
was opened anew, or when the oldest is overdue; the root drops what it has numbered already.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import msgspec

from sparkstrom.codec.messages import Update
from sparkstrom.protocol.replay import HEADER_BYTES

RETRY_FIRST_S = 0.5
RETRY_LONGEST_S = 8.0
AGAIN_SPACING_S = 0.05  # answers to "again" closer than this would repeat what is under way


class Uplink:
    """Uncommitted updates by (id, seq), in the order in which they were made."""

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._own: dict[tuple[int, int], Update] = {}
        self._bytes = 0
        self.last_seq = 0  # newest under the present id
        self._retry_s = RETRY_FIRST_S
        self._deadline_s = 0.0
        self._again_s = -1.0
        self.progress_s = 0.0  # when one was last committed, or the list was last empty

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def uncommitted(self) -> tuple[Update, ...]:
        return tuple(self._own.values())

    def __len__(self) -> int:
        return len(self._own)

    def has_room(self) -> bool:
        """An empty window takes one update of any size."""
        return not self._own or self._bytes < self._window_bytes

    def add(self, update: Update, now_s: float) -> None:
        assert update.seq == self.last_seq + 1, "seqs have no gaps"
        if not self._own:
            self._restart_timer(now_s)
        self._own[update.origin, update.seq] = update
        self._bytes += HEADER_BYTES + len(update.payload)
        self.last_seq = update.seq

    def strike(self, origin: int, seq: int, now_s: float) -> Update | None:
        """``(origin, seq)`` is committed; return it, or None if it was struck before."""
        update = self._own.pop((origin, seq), None)
        if update is not None:
            self._bytes -= HEADER_BYTES + len(update.payload)
            self._restart_timer(now_s)
        return update

    def strike_up_to(
        self, last: Iterable[tuple[int, int]], ids: Container[int], now_s: float
    ) -> None:
        """Per id everything up to a seq is committed; only ``ids`` are our own."""
        for origin, seq in last:
            if origin not in ids:
                continue
            for key in [k for k in self._own if k[0] == origin and k[1] <= seq]:
                self.strike(*key, now_s)

    def rekey(self, closed: dict[int, int], node: int, now_s: float) -> None:
        """Come back under a new id: what the closed ids did not commit gets new numbers."""
        kept: dict[tuple[int, int], Update] = {}
        self.last_seq = 0
        for (origin, seq), update in self._own.items():
            if origin != node and seq > closed[origin]:
                self.last_seq += 1
                update = msgspec.structs.replace(update, origin=node, seq=self.last_seq)
            kept[update.origin, update.seq] = update
        self._own = kept
        self._restart_timer(now_s)

    def again(self, node: int, now_s: float, *, force: bool = False) -> list[Update]:
        """Everything uncommitted under ``node``, in order, unless it was sent a moment ago."""
        if now_s < self._again_s and not force:
            return []
        self._again_s = now_s + AGAIN_SPACING_S
        self._deadline_s = now_s + self._retry_s
        return [update for update in self._own.values() if update.origin == node]

    def overdue(self, now_s: float) -> bool:
        return bool(self._own) and now_s >= self._deadline_s

    def back_off(self, now_s: float) -> None:
        self._retry_s = min(2 * self._retry_s, RETRY_LONGEST_S)
        self._deadline_s = now_s + self._retry_s

    def _restart_timer(self, now_s: float) -> None:
        self._retry_s = RETRY_FIRST_S
        self._deadline_s = now_s + self._retry_s
        self.progress_s = now_s
