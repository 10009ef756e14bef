"""Cadence: how often a checkpoint is written, by the clock, by epochs or by updates."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import COUNT_MAX, shown

EVERY = r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*"  # an amount and its unit
AMOUNT_MAX = COUNT_MAX

SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1.0),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
}
COUNTS = {"epoch": "epochs", "epochs": "epochs", "update": "updates", "updates": "updates"}


@dataclass(frozen=True, slots=True)
class CheckpointEvery:
    """So many seconds, epochs or updates lie between two checkpoints."""

    amount: float
    unit: str  # "s", "epochs" or "updates"


def parse_every(text: object) -> CheckpointEvery:
    """Read ``checkpoint_every``. Raise UsageError where it is no such thing."""
    found = re.fullmatch(EVERY, text) if isinstance(text, str) else None
    if found and float(found[1]) <= AMOUNT_MAX:
        amount, unit = float(found[1]), found[2]
        if unit in SECONDS and amount > 0:
            return CheckpointEvery(amount * SECONDS[unit], "s")
        if unit in COUNTS and amount >= 1 and amount.is_integer():
            return CheckpointEvery(amount, COUNTS[unit])
    raise UsageError(
        f"checkpoint_every is {shown(text)}: say a number of seconds, minutes or hours, or a whole"
        " number of epochs or updates, such as '30 s', '5 min', '2 h', '2 epochs', '500 updates'"
    )


class Cadence:
    """Says when the next checkpoint is due: so much after the beginning, then after the last."""

    def __init__(
        self, every: CheckpointEvery, now_s: float, epochs: int = 0, updates: int = 0
    ) -> None:
        self._every = every
        self.done(now_s, epochs, updates)

    def is_due(self, now_s: float, epochs: int, updates: int) -> bool:
        """True from the moment on where enough lies behind."""
        return self._at(now_s, epochs, updates) >= self._due

    def done(self, now_s: float, epochs: int, updates: int) -> None:
        """A checkpoint of this moment is being written."""
        at = self._at(now_s, epochs, updates)
        if self._every.unit == "epochs":  # after the 2nd, 4th, ... epoch, also where one is late
            at = math.floor(at / self._every.amount) * self._every.amount
        self._due = at + self._every.amount

    def _at(self, now_s: float, epochs: int, updates: int) -> float:
        return {"s": now_s, "epochs": epochs, "updates": updates}[self._every.unit]
