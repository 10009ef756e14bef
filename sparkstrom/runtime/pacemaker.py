"""Pacemaker: how many train and how far the fit is, told to a worker's model before each step."""

from __future__ import annotations

from sparkstrom.models.base import Paced
from sparkstrom.protocol.common.events import Directive


class Pacemaker:
    """One worker's. Between two words of the master all are taken to be as fast as this one."""

    def __init__(self, model: Paced, before: int) -> None:
        self._model = model
        self._before = before  # minibatches of earlier fits
        self._told = 0  # of this fit, by the master's newest word
        self._workers = 1
        self._base, self._since = 0, 0  # about there when this worker had taken so many steps
        self._about = 0  # the estimate, which never goes back

    def keep(self, command: Directive, steps: int) -> None:
        """Tell the model; this worker has taken so many steps of its own."""
        if command.minibatches > self._told:
            self._base, self._since, self._told = command.minibatches, steps, command.minibatches
        elif command.workers != self._workers:
            self._base, self._since = self._at(steps), steps
        self._workers = command.workers
        self._about = max(self._about, self._at(steps))
        self._model.keep_pace(self._workers, self._before + self._about, self._before + self._told)

    def _at(self, steps: int) -> int:
        return self._base + self._workers * (steps - self._since)
