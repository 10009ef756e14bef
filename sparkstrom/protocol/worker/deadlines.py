"""Deadlines: every wait of a node has one, counted from the last progress, and a reason.

Each part knows its own; here is which comes first where several are over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sparkstrom.protocol.common.events import Directive, Order
from sparkstrom.protocol.common.stages import TRAINING
from sparkstrom.protocol.worker.fit_view import FitView
from sparkstrom.protocol.worker.limits import NodeLimits
from sparkstrom.protocol.worker.membership import Membership
from sparkstrom.protocol.worker.parent_link import ParentLink
from sparkstrom.protocol.worker.replication import Replication
from sparkstrom.protocol.worker.task_end import TaskEnd
from sparkstrom.protocol.worker.trainer_view import TrainerView
from sparkstrom.protocol.worker.waits import Sleep, Wait


class Sleeper(Protocol):
    """A part with waits of its own."""

    def slept(self, sleep: Sleep) -> None:
        """Count the sleep for none of them."""


class Deadlines:
    """Asked at each tick, so it looks at each wait only once."""

    def __init__(
        self,
        limits: NodeLimits,
        sleepers: Sequence[Sleeper],
        *,
        membership: Membership,
        link: ParentLink,
        replication: Replication,
        trainer: TrainerView,
        fit: FitView,
        task: TaskEnd,
        now_s: float,
    ) -> None:
        self._nap_s_max, self._sleepers = limits.lease_s / 4, sleepers
        self._membership, self._link, self._replication = membership, link, replication
        self._trainer, self._fit, self._task = trainer, fit, task
        self._ticked_s = now_s

    def forget_sleep(self, now_s: float) -> None:
        """See ``Sleep``; what is shorter than a moment is none."""
        slept_s, self._ticked_s = now_s - self._ticked_s, now_s
        if slept_s <= self._nap_s_max:
            return
        sleep = Sleep(slept_s, now_s)
        for sleeper in self._sleepers:
            sleeper.slept(sleep)

    def expired(self, now_s: float) -> Directive | None:
        """The end, with what was waited for in vain, for how long, and what to do; None before."""
        wait = self._longest_wait(now_s)
        if wait is not None and now_s - wait.since_s > wait.limit_s:
            text = wait.vain.value.format(silent=now_s - wait.since_s, **wait.figures)
            return Directive(Order.FAIL, text, why=wait.vain)
        return None if self._task.stage is TRAINING else self._task.is_unheard(now_s)

    def _longest_wait(self, now_s: float) -> Wait | None:
        """The first that is over its limit, or close to it."""
        replication, joined = self._replication, self._membership.node is not None
        return (
            self._fit.wait(now_s, joined=joined)
            or (None if joined else self._membership.wait(now_s))
            or (None if replication.fetch is None else replication.wait_for_copy(now_s))
            or self._link.wait(now_s)
            or replication.wait_for_commits(self._fit.state, now_s)
            or self._trainer.wait(now_s, replication.stage, paused=replication.paused)
        )
