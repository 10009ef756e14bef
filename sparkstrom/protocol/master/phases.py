"""Phases of a fit: gather, run, drain, audit, done.

Draining begins when every partition is trained and committed, or on a stop. The final commit is
fixed when every worker's last update is numbered; after that the root numbers nothing, and
every live replica is hashed at that commit. Copies of updaters' states that a last checkpoint is to
have are waited for while somebody can lend one.
"""

from __future__ import annotations

from collections.abc import Callable

from sparkstrom.base.identity import CommitNo, NodeId
from sparkstrom.codec.messages import Activity, Phase
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.endings import Lack
from sparkstrom.protocol.master.master_limits import MasterLimits
from sparkstrom.protocol.master.members import Member, Members
from sparkstrom.protocol.master.sequencer import Sequencer


class Phases:
    """Where the fit is, and what the next phase waits for."""

    def __init__(
        self, limits: MasterLimits, members: Members, sequencer: Sequencer, children: Children
    ) -> None:
        self._start_s, self._end_s = limits.start_s, limits.end_s
        self._workers_min = limits.workers_min
        self._members, self._sequencer, self._children = members, sequencer, children
        self.phase = Phase.GATHERING
        self.first_join_s: float | None = None
        self.running_s = 0.0
        self.progress_s = 0.0  # newest commit or phase change
        self.final = CommitNo(0)
        self.own_digest: str | None = None
        self.digests: dict[NodeId, str] = {}
        self.stop_reason: str | None = None
        self.began_s: dict[Phase, float] = {}
        self.awaits_copies: Callable[[], bool] = lambda: False

    def joined(self, now_s: float) -> None:
        if self.first_join_s is None:
            self.first_join_s = now_s

    def progressed(self, now_s: float) -> None:
        """The end comes nearer: an update is committed, something arrives, a hash is there."""
        assert now_s >= self.progress_s, "time does not go back"
        self.progress_s = now_s

    def stop(self, reason: str) -> None:
        """Drain as soon as possible; the first reason stays."""
        self.stop_reason = self.stop_reason or reason

    def hashed(self, digest: str) -> None:
        """The driver's own replica is hashed at the final commit."""
        self.own_digest = digest

    def move(self, now_s: float) -> list[ev.Effect]:
        """Go on to the next phase where it is time; at most one step."""
        members, sequencer, partitions = self._members, self._sequencer, self._members.partitions
        match self.phase:
            case Phase.GATHERING:
                return self._gather(now_s)
            case Phase.RUNNING:
                if self.stop_reason is not None or all(p.trained for p in partitions):
                    self._enter(Phase.DRAINING, now_s)
            case Phase.DRAINING:
                finals = [(m.node, m.final) for m in members.live.values()]
                if all(seq is not None and sequencer.last[n] >= seq for n, seq in finals):
                    sequencer.frozen, self.final = True, sequencer.head
                    self._enter(Phase.AUDIT, now_s)
                    return [ev.Hash(self.final)]
            case Phase.AUDIT:
                answers = {m.node: m.audit for m in members.live.values()}
                is_audited = self.own_digest is not None and all(answers.values())
                if is_audited and not self.awaits_copies():
                    self.digests = {n: a.digest for n, a in answers.items() if a is not None}
                    self._enter(Phase.DONE, now_s)
                    return [ev.Complete()]
            case Phase.DONE:
                pass
        return []

    def overdue(self, now_s: float) -> list[tuple[NodeId, str]]:
        """Nodes that hold up the end; it goes on without them."""
        if self.phase not in (Phase.DRAINING, Phase.AUDIT):
            return []
        if now_s - self.progress_s <= self._end_s:
            return []
        missing = "last update" if self.phase is Phase.DRAINING else "hash"
        reason = f"its {missing} did not come within {self._end_s:g} s"
        late = [m for m in self._members.live.values() if self._is_late(m)]
        return [(m.node, reason) for m in late]

    def _is_late(self, member: Member) -> bool:
        if self.phase is Phase.AUDIT:
            return member.audit is None
        return member.final is None or self._sequencer.last[member.node] < member.final

    def _gather(self, now_s: float) -> list[ev.Effect]:
        """Begin when all are there, or with those who came when the time is over."""
        members, partitions = self._members, self._members.partitions
        nothing_left = any(p.rows > 0 for p in partitions) and all(p.trained for p in partitions)
        if self.stop_reason is not None or nothing_left:
            self._enter(Phase.DRAINING, now_s)
            return []
        if self.first_join_s is None:
            return []
        ready = [m for m in members.live.values() if m.activity is not Activity.CATCHING_UP]
        waited_s = now_s - self.first_join_s
        if all(p.rows == 0 for p in partitions):
            # Who cannot read its rows joins without any, and says why before it has a replica.
            if len(ready) < len(members.live) and waited_s <= self._start_s:
                return []
            return [ev.Abort(NO_ROWS.format(len(partitions)), kind=ev.Failure.USAGE)]
        there = {member.join.partition for member in ready}
        if all(p.trained or p.index in there for p in partitions):
            self._enter(Phase.RUNNING, now_s)
            return []
        if waited_s <= self._start_s:
            return []
        if len(ready) < self._workers_min:
            counts = (len(ready), waited_s, self._workers_min, len(partitions))
            reason = Lack.AT_START.value.format(*counts)
            return [ev.Abort(reason, kind=ev.Failure.SETUP, lack=Lack.AT_START)]
        self._enter(Phase.RUNNING, now_s)
        return [ev.Note(f"began with {len(ready)} of {len(partitions)} workers")]

    def _enter(self, phase: Phase, now_s: float) -> None:
        assert phase > self.phase, f"{self.phase} does not lead to {phase}"
        assert phase is not Phase.AUDIT or self._sequencer.frozen, "what is hashed must not change"
        self.phase, self.progress_s, self.began_s[phase] = phase, now_s, now_s
        if phase is Phase.RUNNING:
            self.running_s = now_s
        if phase is Phase.DONE:
            self._members.checkpoints.settle(self._members.live)
        self._children.announce()


NO_ROWS = (
    "all {} partitions are empty: there are no rows to train on; look at the data's filters, and "
    "at what validation holds out"
)
