"""Waits: since when a part of a node waits, and what of that it slept through."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from sparkstrom.protocol.common.endings import Vain

NO_FIGURES: Mapping[str, float | str] = MappingProxyType({})
LEVELS_ABOVE = 4  # in a mesh: each may have to fetch its replica before the next gets its place


class Wait(NamedTuple):
    """Something is waited for: since when, for how long at most, and what to say then."""

    since_s: float
    limit_s: float
    vain: Vain
    figures: Mapping[str, float | str] = NO_FIGURES  # of the text, beside the seconds


class Sleep(NamedTuple):
    """Time in which this process stood still counts for no wait: it could hear nobody."""

    slept_s: float
    now_s: float

    def later(self, since_s: float) -> float:
        """When a wait that began at ``since_s`` is taken to have begun."""
        return min(self.now_s, since_s + self.slept_s)
