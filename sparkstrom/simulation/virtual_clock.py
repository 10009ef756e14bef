"""Virtual time for simulations: a queue of scheduled calls and one seeded random generator.

A run repeats exactly and takes only as long as its calls need. Calls of the current time slot are
in a heap. Later calls are kept unordered per slot, so the cost of a call does not grow with the
number of waiting calls. ``WorldView`` is the interface through which checkers and the network read
a running simulation.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from sparkstrom.codec.messages import Phase
from sparkstrom.protocol.master.master import Master
from sparkstrom.simulation.invariants import TopologyChecker
from sparkstrom.simulation.process import SimProcess
from sparkstrom.simulation.run_options import RunSize

SIMULTANEOUS_EVENTS_MAX = 20_000  # more calls at one virtual time are an endless loop
SLOTS_PER_S = 64  # time slots of the queue

# Virtual time, order of scheduling, function, arguments.
ScheduledCall = tuple[float, int, Callable[..., object], tuple[Any, ...]]


class VirtualClock:
    """The virtual clock of one run, its random generator, transcript and count of faults."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self._slot, self._due = 0, list[ScheduledCall]()  # the current slot and its heap
        self._later: dict[int, list[ScheduledCall]] = {}
        self._slots: list[int] = []  # keys of ``_later``, as a heap
        self._order = itertools.count()
        self.transcript: list[str] = []
        self.faults: Counter[str] = Counter()
        self.over = False  # set by a call to end the run

    def monotonic_s(self) -> float:
        """Return the virtual time, as ``base.clock.Clock`` requires."""
        return self.now_s

    def at(self, at_s: float, act: Callable[..., object], *args: Any) -> None:
        """Schedule the call ``act(*args)`` for ``at_s``; equal times keep the scheduling order."""
        entry, slot = (at_s, next(self._order), act, args), int(at_s * SLOTS_PER_S)
        if slot <= self._slot:
            heapq.heappush(self._due, entry)
        elif (later := self._later.get(slot)) is not None:
            later.append(entry)
        else:
            self._later[slot] = [entry]
            heapq.heappush(self._slots, slot)

    def after(self, seconds: float, act: Callable[..., object], *args: Any) -> None:
        """Schedule the call ``act(*args)`` after ``seconds`` of virtual time."""
        self.at(self.now_s + seconds, act, *args)

    def say(self, line: str) -> None:
        """Add a line to the transcript, with the virtual time."""
        self.transcript.append(f"{self.now_s:9.4f}  {line}")

    def run(self, until_s: float) -> bool:
        """Run the scheduled calls in order of time; return True once ``over`` is set.

        Return False if it is not set by ``until_s``, if no call is left, or if calls at one virtual
        time never end.
        """
        pop, now_s, at_once = heapq.heappop, self.now_s, 0
        while not self.over and (self._due or self._advance_slot()):
            due_s, _, act, args = pop(self._due)
            if due_s != now_s:
                self.now_s, now_s, at_once = due_s, due_s, 0
            else:
                at_once += 1
            if now_s > until_s or at_once > SIMULTANEOUS_EVENTS_MAX:
                return False
            act(*args)
        return self.over

    def _advance_slot(self) -> bool:
        """Advance to the next slot that has calls; return False if none has."""
        if not self._slots:
            return False
        self._slot = heapq.heappop(self._slots)
        self._due = self._later.pop(self._slot)
        heapq.heapify(self._due)
        return True


class WorldView(Protocol):
    """The parts of a running world that checkers and the network may read."""

    size: RunSize  # size and options of the run
    time: VirtualClock  # the run's clock
    master: Master  # the protocol's master
    shape: TopologyChecker  # checks the tree; faults excuse missing progress in it

    @property
    def phase(self) -> Phase:
        """The fit's phase in the master's state, such as GATHERING or RUNNING."""

    @property
    def alive(self) -> list[SimProcess]:
        """The processes that have neither ended nor been killed."""
