"""Leases: who was heard of lately, and who is lost.

Spark ends Python workers with SIGKILL, so nobody says that it leaves. Whoever is silent for a
lease is gone; a holder that was itself asleep renews everybody, since it cannot know who called.
"""

from __future__ import annotations


class Leases:
    """Deadlines by node."""

    def __init__(self, lease_s: float, now_s: float) -> None:
        self._lease_s = lease_s
        self._heard_s: dict[int, float] = {}
        self._awake_s = now_s

    def renew(self, node: int, now_s: float) -> None:
        self._heard_s[node] = now_s

    def holds(self, node: int) -> bool:
        return node in self._heard_s

    def remind(self, node: int, now_s: float) -> None:
        """Its lease is over and somebody was told; bring it up again in a quarter of one."""
        self._heard_s[node] = now_s - 3 / 4 * self._lease_s

    def silent_for(self, seconds: float, now_s: float) -> list[int]:
        """Who has not been heard of for so long, each time it has been so long again."""
        return [n for n, at_s in self._heard_s.items() if now_s - at_s > seconds]

    def silence(self, node: int, now_s: float) -> float:
        """Seconds since this node was heard of."""
        return now_s - self._heard_s.get(node, now_s)

    def drop(self, node: int) -> None:
        self._heard_s.pop(node, None)

    def expire(self, now_s: float) -> list[tuple[int, float]]:
        """Nodes whose lease is over, and for how long they have been silent."""
        asleep = now_s - self._awake_s > self._lease_s / 4
        self._awake_s = now_s
        if not self._heard_s:
            return []
        if asleep:
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        lost = self.silent_for(self._lease_s, now_s)
        return [(n, now_s - self._heard_s[n]) for n in lost]
