"""Replay: the recent commits, and a child's place in them.

The root numbers every update, so "seen" is one integer, not a set that grows for ever. What a
child misses is a range that it can name: sending is go-back-N over a bounded log, and whoever
asks for more than the log still holds takes a snapshot.
"""

from __future__ import annotations

from collections import deque

from sparkstrom.codec.messages import Committed

HEADER_BYTES = 64  # what a commit costs in a log beside its payload
RETRY_FIRST_S = 0.25  # a LAN answers in milliseconds; a busy core in tens of them
RETRY_LONGEST_S = 4.0


class Log:
    """The newest commits, without a gap, bounded in bytes: the oldest go first.

    One commit of any size is always admitted.
    """

    def __init__(self, bytes_max: int, base: int = 0) -> None:
        self._bytes_max = bytes_max
        self._commits: deque[Committed] = deque()
        self._bytes = 0
        self.base = base  # the newest commit that is not in the log any more

    @property
    def head(self) -> int:
        return self.base + len(self._commits)

    @property
    def bytes(self) -> int:
        return self._bytes

    def append(self, committed: Committed) -> None:
        assert committed.commit == self.head + 1, "a log has no gaps"
        self._commits.append(committed)
        self._bytes += cost(committed)
        while self._bytes > self._bytes_max and len(self._commits) > 1:
            self._bytes -= cost(self._commits.popleft())
            self.base += 1

    def get(self, commit: int) -> Committed:
        return self._commits[commit - self.base - 1]

    def reaches(self, commit: int) -> bool:
        """Does the log hold all that follows ``commit``?"""
        return commit >= self.base

    def after(self, commit: int) -> tuple[Committed, ...]:
        return tuple(self.get(c) for c in range(commit + 1, self.head + 1))


def cost(committed: Committed) -> int:
    """Bytes that a commit takes up in a log."""
    return HEADER_BYTES + len(committed.payload)


class Downlink:
    """How far one child is: what was sent, what it acknowledged, when to send again."""

    def __init__(self, node: int, acked: int, window_bytes: int, now_s: float) -> None:
        self.node = node
        self.acked = acked
        self._sent = acked
        self._window_bytes = window_bytes
        self._in_flight: deque[int] = deque()  # bytes of each commit in (acked, sent]
        self._in_flight_bytes = 0
        self._retry_s = RETRY_FIRST_S
        self._deadline_s = now_s + self._retry_s

    def acknowledge(self, received: int, now_s: float) -> None:
        """The child has everything up to ``received``."""
        if received <= self.acked:
            return
        for _ in range(min(received, self._sent) - self.acked):
            self._in_flight_bytes -= self._in_flight.popleft()
        self.acked = received
        self._sent = max(self._sent, received)
        self._retry_s = RETRY_FIRST_S
        self._deadline_s = now_s + self._retry_s

    def rewind(self, commit: int, now_s: float) -> None:
        """Send everything after ``commit`` again."""
        self.acked = self._sent = commit
        self._in_flight.clear()
        self._in_flight_bytes = 0
        self._deadline_s = now_s + self._retry_s

    def overdue(self, now_s: float) -> bool:
        return self._sent > self.acked and now_s >= self._deadline_s

    def back_off(self, now_s: float) -> None:
        """Nothing was acknowledged in time: go back, and wait longer before the next time."""
        self._retry_s = min(2 * self._retry_s, RETRY_LONGEST_S)
        self.rewind(self.acked, now_s)

    def due(self, log: Log, now_s: float) -> list[Committed]:
        """The commits that may go now. Only for a log that reaches ``sent``."""
        if self._sent == self.acked:
            self._deadline_s = now_s + self._retry_s
        out: list[Committed] = []
        while self._sent < log.head:
            committed = log.get(self._sent + 1)
            size = cost(committed)
            if self._in_flight and self._in_flight_bytes + size > self._window_bytes:
                break
            self._in_flight.append(size)
            self._in_flight_bytes += size
            self._sent += 1
            out.append(committed)
        return out

    @property
    def sent(self) -> int:
        return self._sent
