"""Looks: who may end a fit in rounds looks at it now and then, and is waited for at an epoch's end.

Rounds that went on until the next look would make chance of two things: where the fit ends, and
which round's parameters are kept as those of the best epoch.
"""

from __future__ import annotations

import threading

JUDGED_S = 30.0  # how long a fit waits at an epoch's end
JUDGED_LOOKS = 2  # one, and what follows from it


class Looks:
    """Of one fit. ``judged``: somebody may end it at an epoch's end, and is waited for there."""

    def __init__(self, *, judged: bool) -> None:
        self._judged, self._count = judged, 0
        self._there = threading.Condition()

    def add(self) -> None:
        """Somebody is about to look, and has done what followed from the look before."""
        with self._there:
            self._count += 1
            self._there.notify_all()

    def end(self) -> None:
        """Nobody judges any more, and nobody is waited for."""
        with self._there:
            self._judged = False
            self._there.notify_all()

    def await_judgement(self) -> None:
        """Of the epoch whose end is there to be looked at; at most ``JUDGED_S``."""
        with self._there:
            wanted = self._count + JUDGED_LOOKS
            self._there.wait_for(
                lambda: self._count >= wanted or not self._judged, timeout=JUDGED_S
            )
