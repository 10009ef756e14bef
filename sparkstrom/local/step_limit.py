"""Step limit: a step that takes too long is noticed by another thread of its process, and told.

What stands still in a step says nothing itself, and its pulse beats on. Time is counted in looks of
that thread: where the whole process stood still (SIGSTOP, a machine that slept) it does not count.
"""

from __future__ import annotations

import math
import sys
import threading
import traceback

from sparkstrom.local.life_signs import BEAT_S

TRACE_LETTERS_MAX = 8_000


class StepUnderWay:
    """One that is under way."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: that it may take."""
        self.seconds = seconds


class StepLimit:
    """Of this process: one thread takes steps, another one looks, every ``look_s`` or so."""

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._step: StepUnderWay | None = None  # whoever takes steps writes this, and nothing else
        self._seen: StepUnderWay | None = None
        self._looks = 0  # at that one

    @property
    def seconds(self) -> float:
        """How long the step that is under way may take; inf: none is."""
        step = self._step
        return math.inf if step is None else step.seconds

    def allow(self, seconds: float) -> None:
        """A step begins, after another one or not."""
        self._step = StepUnderWay(seconds)

    def lift(self) -> None:
        """No step is under way."""
        self._step = None

    def look(self) -> bool:
        """Has the step that is under way taken longer than it may?"""
        step = self._step
        self._looks = self._looks + 1 if step is self._seen else 0
        self._seen = step
        return step is not None and self._looks * self._look_s > step.seconds

    @property
    def is_same(self) -> bool:
        """Is the step of the newest look still under way?"""
        return self._step is self._seen


limit = StepLimit(BEAT_S)  # of this process' steps; nobody looks but in a worker process


def stack_of_main_thread() -> str:
    """Where it is now, as a traceback has it."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame))[-TRACE_LETTERS_MAX:] if frame else ""
