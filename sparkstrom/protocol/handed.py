"""Handed up: does what a node sends up over its present edge still arrive?

The parent counts the updates that came and says so with each state. That tells a dead stream from
a mesh that is slow to number them, and at every hop, whoever made the updates.
"""

from __future__ import annotations


class Handed:
    """Over one edge. ``since_s``: the oldest of what was handed up after the last sign of arrival,
    or None."""

    def __init__(self) -> None:
        self._taken = 0
        self.since_s: float | None = None

    def up(self, now_s: float) -> None:
        """Another one is on its way."""
        if self.since_s is None:
            self.since_s = now_s

    def taken(self, count: int) -> None:
        """So many have come. The next one that is sent, or sent again, has to show it anew."""
        if count > self._taken:
            self._taken, self.since_s = count, None
