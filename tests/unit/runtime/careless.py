"""Bugs between two threads, to be planted: each class forgets what its parent takes care of."""

from __future__ import annotations

from sparkstrom.protocol.common.events_and_effects import Directive
from sparkstrom.runtime.trainer_thread import TrainerChannel
from sparkstrom.runtime.training_loop import TrainerItem


class NoLock:
    """Whoever comes is let in."""

    def locked(self) -> bool:
        return False

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class OrdersFirst(TrainerChannel):
    """A command is there before the items that it goes with."""

    def publish(self, items: list[TrainerItem], command: Directive) -> None:
        with self._changed:
            self._command = command
        super().publish(items, command)


class TakesTwice(TrainerChannel):
    """Items are taken, then the command: another one may have come in between."""

    def take(self) -> tuple[list[TrainerItem], Directive]:
        with self._changed:
            items = self._inbox.take()
        return items, self._command
