"""Deliberate synchronization bugs: each class omits a precaution of the class that it replaces."""

from __future__ import annotations

from sparkstrom.protocol.common.events_and_effects import Directive
from sparkstrom.runtime.trainer_thread import TrainerChannel
from sparkstrom.runtime.training_loop import TrainerItem


class NoLock:
    """A lock that excludes nobody."""

    def locked(self) -> bool:
        return False

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class DirectiveFirstChannel(TrainerChannel):
    """A channel that shows a directive to the trainer before the items that belong to it."""

    def publish(self, items: list[TrainerItem], command: Directive) -> None:
        with self._changed:
            self._command = command
        super().publish(items, command)


class UnlockedReadChannel(TrainerChannel):
    """A channel that takes the items and then reads the directive without holding the lock."""

    def take(self) -> tuple[list[TrainerItem], Directive]:
        with self._changed:
            items = self._inbox.take()
        return items, self._command
