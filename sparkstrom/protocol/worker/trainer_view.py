"""Trainer: what a node knows of the one beside it: how far it is, and what it is doing."""

from __future__ import annotations

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import Activity, AuditAnswer
from sparkstrom.protocol.common.endings import Vain
from sparkstrom.protocol.common.stages import INSTALLS, ReplicaStage
from sparkstrom.protocol.worker.limits import NodeLimits
from sparkstrom.protocol.worker.news import News
from sparkstrom.protocol.worker.waits import Sleep, Wait

STEPPING = Activity.STEPPING


class TrainerView:
    """As its trainer said last."""

    def __init__(self, limits: NodeLimits, news: News, now_s: float) -> None:
        self._limits, self._news = limits, news
        self.position = Position(0, 0)
        self.steps = 0  # as its trainer counts
        self.trained = False  # a step itself, so with a state that others may take
        self._head_start = 0  # steps it is credited with: nobody waits for what it missed
        self.activity = Activity.CATCHING_UP
        self._active_s = now_s
        self.final: int | None = None  # it publishes nothing after this seq
        self.audit: AuditAnswer | None = None
        self.stats: dict[str, float] | None = None

    @property
    def pace(self) -> int:
        """Steps for the comparison with the others."""
        return self.steps + self._head_start

    def steps_up_to(self, pace: int) -> int:
        """How far it may count itself where it may go up to this pace."""
        return pace - self._head_start

    def begins_at(self, position: Position, steps: int) -> None:
        """Where its predecessor was."""
        assert not self.trained, "who has trained goes on from where it is"
        self.position, self.steps = position, steps

    def keep_pace(self, slowest: int) -> None:
        """Who joins, or comes back, counts as the slowest one at first."""
        self._head_start = max(self._head_start, slowest - self.steps)

    def advance(self, position: Position, steps: int, now_s: float) -> None:
        """The trainer took a step."""
        self.position, self.steps = position, steps
        self.trained, self._active_s = True, now_s
        self._news.add()

    def is_at(self, activity: Activity, now_s: float) -> None:
        """It does this now."""
        self.activity, self._active_s = activity, now_s
        self._news.add()

    def busy(self, now_s: float) -> None:
        """It has been given a replica, or is done with one."""
        self._active_s = now_s

    def drained(self, last_seq: int) -> None:
        """It publishes nothing any more; under another id the last one has another number."""
        self.final = last_seq
        self._news.add()

    def rekeyed(self, last_seq: int) -> None:
        """Its last update has this number now, if it has made it."""
        if self.final is not None:
            self.final = last_seq

    def hashed(self, answer: AuditAnswer) -> None:
        """Its replica at the final commit."""
        self.audit = answer
        self._news.add()

    def counts(self, stats: dict[str, float]) -> None:
        """For the master, cumulative."""
        self.stats = stats
        self._news.add()

    # -- time ------------------------------------------------------------------------------------

    def slept(self, sleep: Sleep) -> None:
        """See ``Sleep``."""
        self._active_s = sleep.later(self._active_s)

    def wait(self, now_s: float, replica: ReplicaStage, *, paused: bool) -> Wait | None:
        """For the end of a step, or for a replica to be installed, far too long."""
        busy = replica in INSTALLS or (self.activity is STEPPING and not paused)
        if busy and now_s - self._active_s > self._limits.step_s:
            return Wait(self._active_s, self._limits.step_s, Vain.STEP)
        return None
