"""Timeline: virtual time. What happens is an entry in one heap; what is drawn has one seed.

So a run repeats exactly, and takes as long as its events need, not as the clock says.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

AT_ONCE_MAX = 20_000  # events without time between them: they go round in a circle


class Timeline:
    """The one clock, the one generator, and what was seen to happen."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self.transcript: list[str] = []
        self.faults: Counter[str] = Counter()
        self.over = False

    def at(self, at_s: float, act: Callable[..., object], *args: Any) -> None:
        """Do this then; what is due at the same time goes in the order of its asking."""
        heapq.heappush(self._heap, (at_s, next(self._order), act, args))

    def after(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        self.at(self.now_s + seconds, act, *args)

    def say(self, line: str) -> None:
        self.transcript.append(f"{self.now_s:9.4f}  {line}")

    def run(self, until_s: float) -> bool:
        """Until it is over; False if it is not over by then."""
        heap, pop = self._heap, heapq.heappop
        at_once = 0
        while heap and not self.over:
            before_s = self.now_s
            self.now_s, _, act, args = pop(heap)
            at_once = at_once + 1 if self.now_s == before_s else 0
            if self.now_s > until_s or at_once > AT_ONCE_MAX:
                return False
            act(*args)
        return self.over
