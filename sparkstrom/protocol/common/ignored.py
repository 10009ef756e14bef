"""Ignored: messages that a machine does not act on, each counted with the reason.

On a network that loses, repeats and overtakes, most of these are as it should be; but none
disappears in silence.
"""

from __future__ import annotations

import enum
from collections import Counter

import msgspec


class Reason(enum.Enum):
    """Why nothing was done."""

    STRANGER = "from nobody who is a neighbour, or a member"
    CLOSED = "of an id that is closed"
    WRONG_WAY = "not a message that comes from there"
    FOR_ANOTHER = "meant for another id or process"
    EARLY = "what has to be here first is not here yet"
    LATE = "a repeat, or overtaken by something newer"
    UNKNOWN = "has counters by names that nobody here knows"
    UNSERVED = "nobody is known who could be served, or serve it"


class Ignored:
    """How many, by kind of message and reason."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, Reason]] = Counter()

    def count(self, message: msgspec.Struct, reason: Reason) -> None:
        """Nothing is done with this one."""
        self.counts[type(message).__name__, reason] += 1

    @property
    def total(self) -> int:
        """One number, for a node's counters."""
        return self.counts.total()
