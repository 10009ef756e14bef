"""Trainer channel: where a worker's trainer and its node thread meet.

The trainer posts events and takes items; the thread publishes items and the command that holds.
Neither ever waits for the other but for the length of a list operation.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from sparkstrom.observe.telemetry import TrainingCounters
from sparkstrom.protocol.common.events import Applied, Busy, Directive, Event, Order, Said
from sparkstrom.runtime.trainer_inbox import Item, TrainerInbox

DOING = {  # what a worker does, in words, by its node's order
    Order.WAIT: "waiting",
    Order.TRAIN: "training",
    Order.PAUSE: "copying parameters",
    Order.DRAIN: "draining",
    Order.AUDIT: "comparing replicas",
}
CAN_WAIT = (Applied, Busy)  # seen with the next frame, or a few milliseconds later


def nothing() -> None:
    """There is no thread yet."""


def nothing_said() -> None:
    """Nobody listens to what the worker's code says."""


class TrainerChannel:
    """Shared by exactly two threads."""

    def __init__(self, inbox: TrainerInbox) -> None:
        self._changed = threading.Condition()
        self._inbox = inbox
        self._command = Directive(Order.WAIT, "joining")
        self._error: BaseException | None = None
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.wake: Callable[[], None] = nothing  # lets the thread see now what was posted
        self.stats: TrainingCounters | None = None  # the trainer replaces it whole
        self.said: Callable[[], Said | None] = nothing_said  # what its code printed since, to tell

    # -- the trainer's side ----------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Tell the machine what happened; at once, unless it is one of those that can wait."""
        self.events.put(event)
        if not isinstance(event, CAN_WAIT):
            self.wake()

    def take(self) -> tuple[list[Item], Directive]:
        """All waiting items, in order, and the command that holds. Raises what broke the thread."""
        with self._changed:
            if self._error is not None:
                raise self._error
            return self._inbox.take(), self._command

    @property
    def command(self) -> Directive:
        """The command that holds, also when the thread is broken."""
        return self._command

    def doing(self) -> str:
        """What the worker does now, in words."""
        return DOING.get(self._command.order, "ending")

    def wait(self, seconds: float, known: Directive) -> None:
        """Until there is an item, another command than the known one, or an error; at most so long.

        A command that came since ``take`` is news: nobody waits for the one after it.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_news(known), seconds)

    def _has_news(self, known: Directive) -> bool:
        return len(self._inbox) > 0 or self._command != known or self._error is not None

    # -- the node thread's side ------------------------------------------------------------------

    def publish(self, items: list[Item], command: Directive) -> None:
        """Make items and the command known."""
        if not items and command == self._command:
            return
        with self._changed:
            for item in items:
                self._inbox.put(item)  # type: ignore[arg-type]
            self._command = command
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The thread cannot go on."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
