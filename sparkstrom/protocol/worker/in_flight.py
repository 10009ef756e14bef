"""In flight: a node's own updates until it sees them committed.

The origin alone keeps an update. It is sent once, and again when the parent asks or when the edge
was opened anew; the root drops what it has numbered already. Should all signs of a loss have been
lost themselves, the oldest is sent again, after much longer than updates took lately.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import msgspec

from sparkstrom.base.identity import NodeId, Seq
from sparkstrom.codec.messages import Update
from sparkstrom.protocol.common.send_window import HEADER_BYTES
from sparkstrom.protocol.worker.waits import Sleep

ROUNDS = 4  # an update that takes so many times longer than the last ones may be lost
RETRY_LEAST_S = 10.0
RETRY_LONGEST_S = 60.0
AGAIN_LEAST_S = 1.0  # between answers to "again": what is under way comes with the same gap


class InFlight:
    """Uncommitted updates by (id, seq), in the order in which they were made."""

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._own: dict[tuple[NodeId, Seq], Update] = {}
        self._bytes = 0
        self.last_seq = Seq(0)  # newest under the present id
        self._made_s: dict[tuple[NodeId, Seq], float] = {}
        self.round_s = 0.0  # from making an update to its commit, lately; 0: none was committed
        self._retry_s = RETRY_LEAST_S
        self._deadline_s = 0.0
        self._again_s = -1.0
        self.progress_s = 0.0  # when one was last committed, or the list was last empty

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def uncommitted(self) -> tuple[Update, ...]:
        return tuple(self._own.values())

    @property
    def oldest(self) -> Update | None:
        """The uncommitted one that was made first."""
        return next(iter(self._own.values())) if self._own else None

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
        self._made_s[update.origin, update.seq] = now_s
        self._bytes += HEADER_BYTES + len(update.payload)
        self.last_seq = update.seq

    def strike(self, origin: NodeId, seq: Seq, now_s: float) -> Update | None:
        """``(origin, seq)`` is committed; return it, or None if it was struck before."""
        update = self._own.pop((origin, seq), None)
        if update is not None:
            self._bytes -= HEADER_BYTES + len(update.payload)
            made_s = self._made_s.pop((origin, seq), None)
            if made_s is not None:  # it was not made under an id that is closed
                self.round_s = now_s - made_s
            self._restart_timer(now_s)
        return update

    def strike_up_to(
        self, last: Iterable[tuple[NodeId, Seq]], ids: Container[NodeId], now_s: float
    ) -> None:
        """Per id everything up to a seq is committed; only ``ids`` are our own."""
        for origin, seq in last:
            if origin not in ids:
                continue
            for key in [k for k in self._own if k[0] == origin and k[1] <= seq]:
                self.strike(*key, now_s)

    def rekey(self, closed: dict[NodeId, Seq], node: NodeId, now_s: float) -> None:
        """Come back under a new id: what the closed ids did not commit gets new numbers."""
        kept: dict[tuple[NodeId, Seq], Update] = {}
        self.last_seq = Seq(0)
        for (origin, seq), update in self._own.items():
            if origin != node and seq > closed[origin]:
                self.last_seq = Seq(self.last_seq + 1)
                update = msgspec.structs.replace(update, origin=node, seq=self.last_seq)
            kept[update.origin, update.seq] = update
        self._own = kept
        self._made_s.clear()
        self._restart_timer(now_s)

    def again(self, node: NodeId, now_s: float, *, force: bool = False) -> list[Update]:
        """Everything uncommitted under ``node``, in order, unless it was sent a moment ago."""
        if now_s < self._again_s and not force:
            return []
        self._again_s = now_s + max(AGAIN_LEAST_S, ROUNDS * self.round_s)
        self._deadline_s = now_s + self._retry_s
        return [update for update in self._own.values() if update.origin == node]

    def overdue(self, now_s: float) -> bool:
        return bool(self._own) and now_s >= self._deadline_s

    def back_off(self, now_s: float) -> None:
        longest_s = max(RETRY_LONGEST_S, ROUNDS * self.round_s)
        self._retry_s = min(2 * self._retry_s, longest_s)
        self._deadline_s = now_s + self._retry_s

    def moves(self, now_s: float) -> None:
        """Part of what was sent has arrived: nothing of it is lost."""
        self.progress_s = now_s
        self._deadline_s = now_s + self._retry_s

    def slept(self, sleep: Sleep) -> None:
        """See ``Sleep``."""
        self.progress_s = sleep.later(self.progress_s)

    def _restart_timer(self, now_s: float) -> None:
        self._retry_s = max(RETRY_LEAST_S, ROUNDS * self.round_s)
        self._deadline_s = now_s + self._retry_s
        self.progress_s = now_s
