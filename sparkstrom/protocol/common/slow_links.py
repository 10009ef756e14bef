"""Slow links: which carry less than training would fill, in words for whoever can mend it.

A neighbour that stays behind is not slow when what it misses still waits here for room on the
link to it. It is told once for each link, and by how much.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkstrom.observe.telemetry import SlowLink

NARROW_S = 5.0  # behind for so long without a break: no burst, and no pause of a process


@dataclass(slots=True)
class Backlog:
    """What waits for one link. ``since_s``: without a break since then; None: nothing does."""

    since_s: float | None = None
    from_bytes: int = 0  # of what training had made by then
    is_reported: bool = False

    def looks(self, waits: bool, made_bytes: int, carries: float, now_s: float) -> float | None:
        """Bytes per second that training makes, the first time that it is too much for long.

        Where the link carries more, it is a process that stands still.
        """
        if not waits or self.is_reported:
            self.since_s = None
        elif self.since_s is None:
            self.since_s, self.from_bytes = now_s, made_bytes
        elif now_s - self.since_s > NARROW_S:
            needed = (made_bytes - self.from_bytes) / (now_s - self.since_s)
            self.is_reported, self.since_s = needed > carries, None
            return needed if self.is_reported else None
        return None


def in_words(link: SlowLink, host: str) -> str:
    """For people; ``host`` is where its lower end runs."""
    how = "summed" if link.sums else "delayed"
    return (
        f"the link to node {link.node} ({host}) carries {_mega(link.carries)} MB/s, training "
        f"would fill {_mega(link.needed)}: updates are {how}, staleness {link.behind}"
    )


def _mega(rate: float) -> str:
    """Two digits, but all before the point."""
    mega = rate / 1e6
    return f"{mega:.2g}" if mega < 0.095 else f"{mega:.1f}" if mega < 9.95 else f"{mega:.0f}"
