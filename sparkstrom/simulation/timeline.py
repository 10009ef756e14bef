"""Timeline: virtual time. What happens is an entry in a queue; what is drawn has one seed.

So a run repeats exactly, and takes as long as its events need, not as the clock says. Only what is
due within the present slot of time is in order, in a heap; all that comes later waits unordered by
slots, so that an event costs the same however many are waiting.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

AT_ONCE_MAX = 20_000  # events without time between them: they go round in a circle
SLOTS_PER_S = 64

Entry = tuple[float, int, Callable[..., object], tuple[Any, ...]]


class Timeline:
    """The one clock, the one generator, and what was seen to happen."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_s = 0.0
        self._slot, self._due = 0, list[Entry]()  # the present slot and its heap
        self._later: dict[int, list[Entry]] = {}
        self._slots: list[int] = []  # those of ``later``, as a heap
        self._order = itertools.count()
        self.transcript: list[str] = []
        self.faults: Counter[str] = Counter()
        self.over = False

    def monotonic_s(self) -> float:
        """As a clock for what asks one."""
        return self.now_s

    def at(self, at_s: float, act: Callable[..., object], *args: Any) -> None:
        """Do this then; what is due at the same time goes in the order of its asking."""
        entry, slot = (at_s, next(self._order), act, args), int(at_s * SLOTS_PER_S)
        if slot <= self._slot:
            heapq.heappush(self._due, entry)
        elif (later := self._later.get(slot)) is not None:
            later.append(entry)
        else:
            self._later[slot] = [entry]
            heapq.heappush(self._slots, slot)

    def after(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        self.at(self.now_s + seconds, act, *args)

    def say(self, line: str) -> None:
        self.transcript.append(f"{self.now_s:9.4f}  {line}")

    def run(self, until_s: float) -> bool:
        """Until it is over; False if it is not over by then."""
        pop, now_s, at_once = heapq.heappop, self.now_s, 0
        while not self.over and (self._due or self._turn()):
            due_s, _, act, args = pop(self._due)
            if due_s != now_s:
                self.now_s, now_s, at_once = due_s, due_s, 0
            else:
                at_once += 1
            if now_s > until_s or at_once > AT_ONCE_MAX:
                return False
            act(*args)
        return self.over

    def _turn(self) -> bool:
        """To the next slot in which anything happens, if there is one."""
        if not self._slots:
            return False
        self._slot = heapq.heappop(self._slots)
        self._due = self._later.pop(self._slot)
        heapq.heapify(self._due)
        return True
