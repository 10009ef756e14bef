"""Plain text: what others wrote, as one line that is safe to show; and how much of it is shown."""

from __future__ import annotations

from dataclasses import dataclass, field

LINE_CHARS_MAX = 300
TAB = 4


def printable(text: str, chars_max: int = LINE_CHARS_MAX) -> str:
    """Its control characters written out, as ``\\x1b`` for an escape: nothing reaches a terminal
    but letters. What is longer than ``chars_max`` is cut, which an ellipsis says.
    """
    shown = text[: chars_max + 1].expandtabs(TAB)
    shown = "".join(c if c.isprintable() else _written_out(c) for c in shown)
    return shown if len(shown) <= chars_max else shown[: chars_max - 1] + "…"


def _written_out(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


@dataclass(slots=True)
class Allowance:
    """How many lines may be shown: ``burst`` at once, another ``every_s`` seconds, ``total``."""

    burst: int
    every_s: float
    total: int
    _left: float = field(init=False)
    _granted: int = field(init=False, default=0)
    _looked_s: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._left = float(self.burst)

    def grants(self, now_s: float) -> bool:
        """May one more be shown now?"""
        if self._granted >= self.total:
            return False
        if self._looked_s is not None:
            gained = (now_s - self._looked_s) / self.every_s
            self._left = min(float(self.burst), self._left + gained)
        self._looked_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        self._granted += 1
        return True
