"""End: how a task comes to its end, and what it says until the master has heard."""

from __future__ import annotations

from sparkstrom.codec.messages import Direct, Failed, Leaving
from sparkstrom.protocol.common.endings import Ending
from sparkstrom.protocol.common.events import Directive, Order
from sparkstrom.protocol.common.stages import ENDED, TRAINING, Cause, after
from sparkstrom.protocol.worker.fit_view import FAREWELL_S
from sparkstrom.protocol.worker.waits import Sleep


class TaskEnd:
    """``command``: what ends the task, or lets it leave; no order follows the first that ends."""

    def __init__(self) -> None:
        self.stage = TRAINING
        self.command: Directive | None = None
        self._failed: Failed | None = None
        self._failed_s = 0.0
        self._leaving: Leaving | None = None
        self._leaving_s = 0.0

    @property
    def ended(self) -> bool:
        """The task is over."""
        return self.stage is ENDED

    def end(self, command: Directive) -> None:
        """How it ended first stays."""
        if not self.ended:
            self.command = command
        self.stage = after(self.stage, Cause.ENDED)

    def release(self, reason: str) -> None:
        """The master wants its slot."""
        if not self.ended:
            self.command = Directive(Order.RELEASE, reason)
        self.stage = after(self.stage, Cause.RELEASED)

    def left(self, leaving: Leaving, now_s: float) -> None:
        """Its trainer has kept what it had."""
        self._leaving, self._leaving_s = leaving, now_s
        self.stage = after(self.stage, Cause.LEFT)

    def failed(self, failed: Failed, now_s: float) -> None:
        """Training raised, or its thread has found it stuck."""
        self._failed, self._failed_s = failed, now_s
        self.stage = after(self.stage, Cause.FAILED)

    @property
    def last_words(self) -> tuple[Direct, ...]:
        """What the master itself must hear and has not shown to know."""
        if self.stage is TRAINING:
            return ()
        return tuple(word for word in (self._failed, self._leaving) if word is not None)

    def on_refusal(self) -> Directive | None:
        """What follows where the master has heard the last words; None: there were none."""
        if self._failed is not None:
            return Directive(Order.FAIL, self._failed.reason, why=Ending.FAILED)
        if self._leaving is not None:
            return Directive(Order.END, self._leaving.reason, why=Ending.RELEASED)
        return None

    # -- time ------------------------------------------------------------------------------------

    def slept(self, sleep: Sleep) -> None:
        """See ``Sleep``."""
        self._failed_s = sleep.later(self._failed_s)
        self._leaving_s = sleep.later(self._leaving_s)

    def is_unheard(self, now_s: float) -> Directive | None:
        """The end, where nobody has answered the last words for long enough."""
        if self._failed is not None and now_s - self._failed_s > FAREWELL_S:
            return Directive(Order.FAIL, self._failed.reason, why=Ending.FAILED)
        if self._leaving is not None and now_s - self._leaving_s > FAREWELL_S:
            return Directive(Order.END, self._leaving.reason, why=Ending.RELEASED)
        return None
