"""Move a fit through its phases, and watch for partitions without a worker.

The phases are gathering (wait for workers), running (train), draining (workers publish what is
left, once every partition is trained or a stop was requested), audit (every live replica is hashed
at the final commit, and the hashes are compared) and done. A commit is an update that the master
has numbered. The final commit is fixed when every worker's last update has a number; no update gets
one after that.
"""

from __future__ import annotations

from collections.abc import Callable

from sparkstrom.base.identity import CommitNo, NodeId
from sparkstrom.codec.messages import Activity, Phase, Release
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.events_and_effects import Effect, WorkerShortage
from sparkstrom.protocol.common.process_pause import ProcessPause
from sparkstrom.protocol.master.commit_sequencer import Sequencer
from sparkstrom.protocol.master.members import MasterLimits, Member, Members


class Phases:
    """The phase of the fit and the conditions for the next one.

    ``awaits_copies`` returns whether the audit must wait for the last optimizer copies.
    """

    def __init__(
        self,
        limits: MasterLimits,
        members: Members,
        sequencer: Sequencer,
        children: Children,
        awaits_copies: Callable[[], bool],
    ) -> None:
        self._awaits_copies = awaits_copies
        self._start_s, self._end_s = limits.start_s, limits.end_s
        self._workers_min = limits.workers_min
        self._members, self._sequencer, self._children = members, sequencer, children
        self.phase = Phase.GATHERING
        self.first_join_s: float | None = None  # None: nobody has joined
        self.running_s = 0.0  # when training began; later after a pause of the process
        self.progress_s = 0.0  # last progress towards the end; see ``note_progress``
        self.final = CommitNo(0)  # the audited commit, from AUDIT on
        self.own_digest: str | None = None  # of the master's replica at ``final``
        self.digests: dict[NodeId, str] = {}  # of the workers' replicas, from DONE on
        self.stop_reason: str | None = None  # why the fit ends early; None: it does not
        self.began_s: dict[Phase, float] = {}  # when each phase was entered

    def on_join(self, now_s: float) -> None:
        """Note that a worker has joined; the first join starts the wait for the other workers."""
        if self.first_join_s is None:
            self.first_join_s = now_s

    def note_progress(self, now_s: float) -> None:
        """Restart the deadline of draining and of the audit.

        The caller has observed that data were committed, received or hashed.
        """
        assert now_s >= self.progress_s, "time does not go back"
        self.progress_s = now_s

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadlines by a pause of the process, which does not count as waiting."""
        if self.first_join_s is not None:
            self.first_join_s = pause.shift(self.first_join_s)
        self.running_s = pause.shift(self.running_s)
        self.progress_s = pause.shift(self.progress_s)

    def request_stop(self, reason: str) -> None:
        """Request that draining begins as soon as possible; the first reason is kept."""
        self.stop_reason = self.stop_reason or reason

    def enter_next_if_due(self, now_s: float) -> list[ev.Effect]:
        """Enter the next phase if its conditions hold; at most one phase per call."""
        members, sequencer, partitions = self._members, self._sequencer, self._members.partitions
        match self.phase:
            case Phase.GATHERING:
                return self._begin_run_if_ready(now_s)
            case Phase.RUNNING:
                if self.stop_reason is not None or all(p.trained for p in partitions):
                    self._enter_phase(Phase.DRAINING, now_s)
            case Phase.DRAINING:
                finals = [(m.node, m.final) for m in members.live.values()]
                if all(seq is not None and sequencer.last[n] >= seq for n, seq in finals):
                    sequencer.frozen, self.final = True, sequencer.head
                    self._enter_phase(Phase.AUDIT, now_s)
                    return [ev.HashReplica(self.final)]
            case Phase.AUDIT:
                answers = {m.node: m.audit for m in members.live.values()}
                is_audited = self.own_digest is not None and all(answers.values())
                if is_audited and not self._awaits_copies():
                    self.digests = {n: a.digest for n, a in answers.items() if a is not None}
                    self._enter_phase(Phase.DONE, now_s)
                    return [ev.Complete()]
            case Phase.DONE:
                pass
        return []

    def overdue_nodes(self, now_s: float) -> list[tuple[NodeId, str]]:
        """Return the nodes that hold up draining or the audit for too long, each with a reason."""
        if self.phase not in (Phase.DRAINING, Phase.AUDIT):
            return []
        if now_s - self.progress_s <= self._end_s:
            return []
        missing = "last update" if self.phase is Phase.DRAINING else "hash"
        reason = f"its {missing} did not come within {self._end_s:g} s"
        late = [m for m in self._members.live.values() if self._is_late(m)]
        return [(m.node, reason) for m in late]

    def _is_late(self, member: Member) -> bool:
        """Return whether the current phase still waits for this member."""
        if self.phase is Phase.AUDIT:
            return member.audit is None
        return member.final is None or self._sequencer.last[member.node] < member.final

    def _begin_run_if_ready(self, now_s: float) -> list[ev.Effect]:
        """Begin training once every partition has a ready worker, or the wait for them is over.

        Abort if all partitions are empty, or if too few workers are ready after the wait. Begin
        draining instead if a stop was requested or nothing is left to train.
        """
        members, partitions = self._members, self._members.partitions
        nothing_left = any(p.rows > 0 for p in partitions) and all(p.trained for p in partitions)
        if self.stop_reason is not None or nothing_left:
            self._enter_phase(Phase.DRAINING, now_s)
            return []
        if self.first_join_s is None:
            return []
        ready = [m for m in members.live.values() if m.activity is not Activity.CATCHING_UP]
        waited_s = now_s - self.first_join_s
        if all(p.rows == 0 for p in partitions):
            # A worker that cannot read its rows joins without any, and reports its error at once.
            if len(ready) < len(members.live) and waited_s <= self._start_s:
                return []
            return [ev.Abort(NO_ROWS.format(len(partitions)), kind=ev.Failure.USAGE)]
        there = {member.join.partition for member in ready}
        if all(p.trained or p.index in there for p in partitions):
            self._enter_phase(Phase.RUNNING, now_s)
            return []
        if waited_s <= self._start_s:
            return []
        if len(ready) < self._workers_min:
            counts = (len(ready), waited_s, self._workers_min, len(partitions))
            reason = WorkerShortage.AT_START.value.format(*counts)
            return [ev.Abort(reason, kind=ev.Failure.SETUP, lack=WorkerShortage.AT_START)]
        self._enter_phase(Phase.RUNNING, now_s)
        return [ev.Note(f"began with {len(ready)} of {len(partitions)} workers")]

    def _enter_phase(self, phase: Phase, now_s: float) -> None:
        """Enter this later phase and announce it."""
        assert phase > self.phase, f"{self.phase} does not lead to {phase}"
        assert phase is not Phase.AUDIT or self._sequencer.frozen, "what is hashed must not change"
        self.phase, self.progress_s, self.began_s[phase] = phase, now_s, now_s
        if phase is Phase.RUNNING:
            self.running_s = now_s
        if phase is Phase.DONE:
            self._members.checkpoints.count_used_and_lost(self._members.live)
        self._children.announce_state()


NO_ROWS = (
    "all {} partitions are empty: there are no rows to train on; check the filters of the data, "
    "and what validation holds out"
)


RELEASE_SPACING_S = 0.25  # between repeats of a request, which may be lost


class VacantPartitions:
    """Watches partitions without a worker, and makes finished workers free task slots for them."""

    def __init__(
        self, limits: MasterLimits, members: Members, phases: Phases, now_s: float
    ) -> None:
        self._rejoin_s, self._patience_s = limits.rejoin_s, limits.release_s
        self._members, self._phases = members, phases
        self._released_s = 0.0  # when a worker was last chosen to give up its slot
        self._asked_s = now_s  # when the chosen ones were last asked
        self._busy_s = now_s  # when some owned partition last had rows to train

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadlines by a pause of the process, which does not count as waiting."""
        self._released_s = pause.shift(self._released_s)
        self._busy_s = pause.shift(self._busy_s)
        for partition in self._members.partitions:
            partition.unowned_s = pause.shift(partition.unowned_s)

    def check(self, now_s: float) -> list[Effect]:
        """Abort if a partition has lacked a worker for too long; before that, free a task slot.

        The deadline does not run while other workers train, since each can free its slot when it
        finishes.
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
            at, shortage = longest.index, WorkerShortage.LATER
            text = shortage.value.format(at, waited_s)
            return [ev.Abort(text, partition=at, kind=ev.Failure.SETUP, lack=shortage)]
        if min(waited_s, now_s - self._released_s) > self._patience_s:
            self._choose_worker_to_leave(longest.index, now_s)
        return []

    def _choose_worker_to_leave(self, waiting: int, now_s: float) -> None:
        """Choose a finished worker that must give up its task slot to the partition ``waiting``.

        Do nothing if there is none. Spark takes a while to use a free slot, so ``check`` chooses
        the next worker only if the first one's slot did not help.
        """
        for member in self._members.live.values():
            if not member.placed or member.releasing is not None:
                continue  # it may not know its id and its granted files yet
            if self._members.partition_of(member).trained:
                self._released_s = now_s
                member.releasing = f"partition {waiting} needs a task slot"
                return

    def resend_releases(self, now_s: float) -> list[Effect]:
        """Return the requests to give up a slot, which are repeated until each is obeyed."""
        if now_s < self._asked_s + RELEASE_SPACING_S:
            return []
        self._asked_s = now_s
        return [
            member.send(Release(member.releasing))
            for member in self._members.live.values()
            if member.releasing is not None
        ]
