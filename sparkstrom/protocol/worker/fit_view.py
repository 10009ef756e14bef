"""Fit: what a worker knows of it: where it is, that the master lives, and whether it is over."""

from __future__ import annotations

from sparkstrom.codec.messages import Phase, State
from sparkstrom.protocol.common.endings import Vain
from sparkstrom.protocol.common.stages import DISMISSED, Cause, FarewellStage, after
from sparkstrom.protocol.worker.limits import NodeLimits
from sparkstrom.protocol.worker.waits import Sleep, Wait

OVER = Phase.DONE
FAREWELL_S = 5.0  # how long a node waits for others to have heard: of the end, or of its own


class FitView:
    """The newest state, and when the master was last heard of."""

    def __init__(self, limits: NodeLimits, now_s: float) -> None:
        self._limits = limits
        self.state: State | None = None
        self.done = False
        self.heard_s = now_s  # a sign that the master lives
        self.steady_s = now_s  # since then these signs have come without a gap
        self.farewell = FarewellStage.NEEDED
        self._done_s: float | None = None  # since when the fit is done and this node audited

    def hear(self, now_s: float) -> None:
        """The master itself has said something."""
        self.heard_s = now_s

    def begins_anew(self, now_s: float) -> None:
        """Over another edge, whose signs are counted for themselves."""
        self.steady_s = now_s

    def take(self, state: State, now_s: float) -> bool:
        """From now on this one counts, unless a newer one has overtaken it."""
        known = self.state
        if known is not None and (state.phase, state.beat) < (known.phase, known.beat):
            return False
        if known is None or state.beat > known.beat:  # the master lives
            if now_s - self.heard_s > self._limits.lease_s / 2:
                self.steady_s = now_s
            self.heard_s = now_s
        self.state, self.done = state, state.phase is OVER
        return True

    @property
    def slowest(self) -> int:
        """Steps of the slowest worker, as far as is known."""
        return 0 if self.state is None else self.state.slowest

    def is_steady(self, since_s: float, now_s: float) -> bool:
        """Have signs of the master come for a lease, without a gap, and until now?"""
        lease_s = self._limits.lease_s
        lasting = now_s - max(since_s, self.steady_s) > lease_s
        return lasting and now_s - self.heard_s <= lease_s / 2

    # -- the end ---------------------------------------------------------------------------------

    @property
    def may_end(self) -> bool:
        """Nobody below this node needs it any more."""
        return self.farewell is DISMISSED

    def over(self, now_s: float, *, audited: bool, needed: bool) -> bool:
        """Is this the moment to take leave? ``needed``: somebody below may not have heard yet."""
        if not (self.done and audited):
            return False
        if self._done_s is None:
            self._done_s = now_s
            self.farewell = after(self.farewell, Cause.DONE)
        if self.may_end or (needed and now_s - self._done_s <= FAREWELL_S):
            return False
        self.farewell = after(self.farewell, Cause.UNNEEDED)
        return True

    # -- time ------------------------------------------------------------------------------------

    def slept(self, sleep: Sleep) -> None:
        """See ``Sleep``."""
        self.heard_s = sleep.later(self.heard_s)
        if self._done_s is not None:
            self._done_s = sleep.later(self._done_s)

    def wait(self, now_s: float, *, joined: bool) -> Wait | None:
        """For a word of the master, far too long."""
        silent_s = now_s - self.heard_s
        if joined:
            if silent_s > self._limits.master_silent_s:
                return Wait(self.heard_s, self._limits.master_silent_s, Vain.MASTER)
        elif silent_s > self._limits.join_s:
            return Wait(self.heard_s, self._limits.join_s, Vain.ANSWER)
        return None
