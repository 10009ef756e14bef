"""Recovery: a thread's work goes on over another media driver when one has died.

Also when the next one dies in its turn, but not for ever: a machine on which none lives is broken,
and whoever only starts them again and again would hide it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sparkstrom.base.clock import Clock
from sparkstrom.base.errors import DriverLost, SetupError

log = logging.getLogger(__name__)

LIVED_S = 60.0  # one that served so long has served; starved ones stall for 10 s now and then
DEATHS_MAX = 10  # one after the other, none of which lived so long; a stalled one takes some 10 s


class Recovery:
    """``replace`` opens another transport and tells the machine; it may meet a death itself.

    ``whose``: the media drivers, for people.
    """

    def __init__(self, whose: str, replace: Callable[[], None], clock: Clock) -> None:
        self._whose, self._replace, self._clock = whose, replace, clock
        self._since_s: float | None = clock.monotonic_s()  # the present one serves; None: none does
        self._deaths = 0

    def guard(self, work: Callable[[], None]) -> None:
        """Work, and replace the transport if the media driver dies over it, until one lives.

        The rest of the work is left out. Raise SetupError when too many have died in a row.
        """
        doing = work
        while True:
            try:
                doing()
            except DriverLost as lost:
                self._count(lost)
                doing = self._replace
                continue
            if doing is not work:
                self._since_s = self._clock.monotonic_s()
            return

    def _count(self, lost: DriverLost) -> None:
        now_s = self._clock.monotonic_s()
        lived = self._since_s is not None and now_s - self._since_s > LIVED_S
        self._deaths = 1 if lived else self._deaths + 1
        self._since_s = None
        if self._deaths > DEATHS_MAX:
            raise SetupError(NONE_LIVES.format(self._whose, self._deaths, LIVED_S, lost)) from lost
        log.warning("the media driver of %s is gone (%s); starting another", self._whose, lost)


NONE_LIVES = (
    "the media driver of {} died {} times in a row, none lived for {:.0f} s; the last one: {}. "
    "Look at the end of its log: is shared memory (/dev/shm) full, does the machine run out of "
    "memory, or is it so busy that a process does not run for seconds?"
)
