"""Vacancies: partitions without a worker, and the slots that finished workers give up for them."""

from __future__ import annotations

from sparkstrom.codec.messages import Phase, Release
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.endings import Lack
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.master.master_limits import MasterLimits
from sparkstrom.protocol.master.members import Members
from sparkstrom.protocol.master.phases import Phases

RELEASE_SPACING_S = 0.25


class Vacancies:
    """How long each may last, and who was asked to make room."""

    def __init__(
        self, limits: MasterLimits, members: Members, phases: Phases, now_s: float
    ) -> None:
        self._rejoin_s, self._patience_s = limits.rejoin_s, limits.release_s
        self._members, self._phases = members, phases
        self._released_s = 0.0  # when one was last chosen to give up its slot
        self._asked_s = now_s  # when those chosen were last asked
        self._busy_s = now_s  # when somebody last had something to train

    def look(self, now_s: float) -> list[Effect]:
        """Find a slot for a partition without a worker; give up when none comes.

        Not while others train: where the cluster has no room they leave theirs when they are done.
        """
        if self._phases.phase is not Phase.RUNNING:
            return []
        waiting = [p for p in self._members.partitions if p.owner is None and not p.trained]
        if not waiting:
            return []
        if any(p.owner is not None and not p.trained for p in self._members.partitions):
            self._busy_s = now_s
        longest = min(waiting, key=lambda p: p.unowned_s)
        waited_s = now_s - max(longest.unowned_s, self._phases.running_s)
        if min(waited_s, now_s - self._busy_s) > self._rejoin_s:
            reason, at = Lack.LATER.value.format(longest.index, waited_s), longest.index
            return [ev.Abort(reason, partition=at, kind=ev.Failure.SETUP, lack=Lack.LATER)]
        if min(waited_s, now_s - self._released_s) > self._patience_s:
            self._release_one(longest.index, now_s)
        return []

    def _release_one(self, waiting: int, now_s: float) -> None:
        """Spark may need the slot of a worker that only waits for the end; it gets one at a time.

        Spark takes a while to use it; the next goes only if that did not help.
        """
        for member in self._members.live.values():
            if not member.placed or member.releasing is not None:
                continue  # it may not know its id yet, and what it was granted
            if self._members.partition_of(member).trained:
                self._released_s = now_s
                member.releasing = f"partition {waiting} needs a task slot"
                return

    def ask_again(self, now_s: float) -> list[Effect]:
        """Those that are to give up their slots, until they do."""
        if now_s < self._asked_s + RELEASE_SPACING_S:
            return []
        self._asked_s = now_s
        return [
            member.answer(Release(member.releasing))
            for member in self._members.live.values()
            if member.releasing is not None
        ]
