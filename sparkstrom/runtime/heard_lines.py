"""Heard lines: what workers' code said, as the driver keeps it for people; bounded."""

from __future__ import annotations

from dataclasses import dataclass

from sparkstrom.codec.messages import Says
from sparkstrom.observe.plain_text import Allowance, printable

BURST, EVERY_S, TOTAL = 60, 0.5, 500  # lines of all workers: at once, then one so often, in all
PLACE_CHARS_MAX = 60


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One line, and who said it while doing what. Without control characters."""

    partition: int
    host: str
    phase: str
    text: str


class HeardLines:
    """The lines to show, in order; what is beyond the allowance is counted."""

    def __init__(self) -> None:
        self.lines: tuple[WorkerLine, ...] = ()
        self.skipped = 0  # by workers, and here
        self._allowance = Allowance(BURST, EVERY_S, TOTAL)

    def take(self, says: Says, now_s: float) -> None:
        """As many as are granted."""
        self.skipped += says.skipped
        new = []
        for phase, text in says.lines:
            if self._allowance.grants(now_s):
                host, doing = (
                    printable(says.host, PLACE_CHARS_MAX),
                    printable(phase, PLACE_CHARS_MAX),
                )
                new.append(WorkerLine(says.partition, host, doing, printable(text)))
            else:
                self.skipped += 1
        self.lines += tuple(new)
