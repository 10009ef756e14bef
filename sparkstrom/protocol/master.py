"""The master's machine: admits nodes, numbers updates, feeds them down, ends the fit.

It is the root of the tree and the one authority on membership, order and phase. It holds a
replica, which ``Deliver`` changes, and does not train.
"""

from __future__ import annotations

import msgspec

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import (
    Again,
    AskAfter,
    AskChunk,
    AuditAnswer,
    Behind,
    Closed,
    Committed,
    Failed,
    Final,
    Join,
    Kept,
    Leaving,
    Message,
    Phase,
    Release,
    Report,
    State,
    Stats,
    Update,
)
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.admission import on_join
from sparkstrom.protocol.events import Effect, Send
from sparkstrom.protocol.fit import Fit, MasterLimits
from sparkstrom.protocol.keeping import Keeping, KeptFiles
from sparkstrom.protocol.leases import Leases
from sparkstrom.protocol.members import Member
from sparkstrom.protocol.partitions import Partition
from sparkstrom.protocol.phases import Phases
from sparkstrom.protocol.sequencer import Sequencer

STATE_SPACING_S = 0.005
AGAIN_SPACING_S = 0.05


class Master:
    """The driver's node. ``step(event, now_s)`` returns the effects; ``fit`` is its state."""

    def __init__(
        self,
        *,
        version: str,
        partitions: int,
        epochs: int,
        chunks: int,
        host: str,
        port: int,
        limits: MasterLimits,
        now_s: float,
        kept: KeptFiles | None = None,
    ) -> None:
        self.fit = Fit(
            version=version,
            chunks=chunks,
            limits=limits,
            host=host,
            port=port,
            sequencer=Sequencer(limits.log_bytes),
            partitions=[Partition(i, epochs, unowned_s=now_s) for i in range(partitions)],
            phases=Phases(limits.start_s, limits.workers_min, limits.end_s),
            keeping=Keeping(kept or {}),
            leases=Leases(limits.lease_s, now_s),
        )
        self.aborted = False

    def step(self, event: ev.Event, now_s: float) -> list[Effect]:
        """React, then go on to the next phase where it is time."""
        if self.aborted:
            return self._after_abort(event)
        effects = self._react(event, now_s) + self._move_phase(now_s)
        self.aborted = any(isinstance(effect, ev.Abort) for effect in effects)
        if self.aborted:
            effects += [self._farewell(node) for node in self.fit.members.live]
        return effects

    def _react(self, event: ev.Event, now_s: float) -> list[Effect]:
        fit = self.fit
        match event:
            case ev.Received(message=Join() as join):
                return on_join(fit, join, now_s)
            case ev.Received(sender=sender, message=message) if sender in fit.members.live:
                fit.leases.renew(sender, now_s)
                return self._on_message(fit.members.live[sender], message, now_s)
            case ev.Received():
                fit.sequencer.dropped["stranger"] += 1
            case ev.Tick():
                return self._on_tick(now_s)
            case ev.GivenUp(reason=reason):
                return [ev.Abort(reason)]
            case ev.StopRequested(reason=reason):
                fit.phases.stop(reason)
            case ev.Moved(host=host, port=port):
                fit.host, fit.port = host, port
                return [self._forget_edge(member) for member in fit.members.live.values()]
            case ev.Hashed(digest=digest):
                fit.phases.own_digest = digest
            case _:
                raise AssertionError(f"no rule for {event}")
        return []

    def _on_message(self, member: Member, message: Message, now_s: float) -> list[Effect]:
        match message:
            case Update():
                return self._on_update(member, message, now_s)
            case Report():
                return self._on_report(member, message, now_s)
            case AskAfter(commit=commit) if commit <= self.fit.sequencer.head:
                member.downlink.rewind(commit, now_s)
                return self._feed(member, now_s)
            case AskChunk(index=index) if index < self.fit.chunks:
                return [ev.SendChunk(member.node, index)]
            case Final(seq=seq):
                member.final = seq
            case AuditAnswer():
                if member.audit is None:
                    self.fit.keeping.keep(member.join.executor, member.node, message.kept)
                member.audit = message
            case Stats(values=values):
                return [ev.Observed(member.node, values)]
            case Failed(reason=reason, trace=trace):
                return self._on_failed(member, reason, trace)
            case Leaving(reason=reason, kept=kept):
                return self._on_leaving(member, reason, kept, now_s)
            case _:
                self.fit.sequencer.dropped["not for a master"] += 1
        return []

    def _on_leaving(
        self, member: Member, reason: str, kept: Kept | None, now_s: float
    ) -> list[Effect]:
        """A released one stays until it knows that what it left behind is known."""
        self.fit.keeping.keep(member.join.executor, member.node, kept)
        effects = self.fit.close(member, reason, now_s)
        if member.releasing is not None:
            effects.append(ev.Answer(member.join.address, farewell(member.node, reason)))
        return effects

    def _forget_edge(self, member: Member) -> Effect:
        """Its edge went with the media driver; whatever it says next in a join opens another."""
        member.join = msgspec.structs.replace(member.join, edge=0)
        return ev.CloseEdge(member.node)

    def _on_failed(self, member: Member, reason: str, trace: str) -> list[Effect]:
        """One failure ends the fit, unless the fit is done already."""
        if self.fit.phases.phase is Phase.DONE:
            return [self._farewell(member.node)]
        return [ev.Abort(reason, trace, member.join.host, member.join.partition)]

    def _after_abort(self, event: ev.Event) -> list[Effect]:
        """Nothing counts any more; whoever still speaks is told so.

        Spark does not end the tasks of a stage that it is about to repeat.
        """
        match event:
            case ev.Received(sender=sender) if sender in self.fit.members.live:
                return [self._farewell(sender)]
            case _:
                return []

    def _farewell(self, node: int) -> Effect:
        return Send(node, farewell(node, "the fit has failed"))

    # -- updates and acknowledgements ------------------------------------------------------------

    def _on_update(self, member: Member, update: Update, now_s: float) -> list[Effect]:
        if update.origin != member.node:
            self.fit.sequencer.dropped["not its own"] += 1
            return []
        committed = self.fit.sequencer.number(update)
        member.steps = max(member.steps, update.steps)
        if committed is None:
            ahead = update.seq > self.fit.sequencer.last[member.node] + 1
            if ahead and not self.fit.sequencer.frozen and now_s >= member.again_s:
                member.again_s = now_s + AGAIN_SPACING_S
                return [Send(member.node, Again(self.fit.sequencer.last[member.node]))]
            return []
        self.fit.phases.progress_s = now_s
        partition = self.fit.partition_of(member)
        partition.advance(Position(update.epoch, update.batch))
        self._count_pending(member)
        effects: list[Effect] = [ev.Deliver(committed)]
        for other in self.fit.members.live.values():
            effects += self._feed(other, now_s)
        return effects

    def _on_report(self, member: Member, report: Report, now_s: float) -> list[Effect]:
        if report.edge != member.join.edge:
            return []
        member.downlink.acknowledge(report.received, now_s)
        member.steps = max(member.steps, report.steps)
        member.is_at(report.activity)
        position = Position(report.epoch, report.batch)
        if member.pending is None or member.pending <= (report.after_seq, position):
            member.pending = (report.after_seq, position)
        self._count_pending(member)
        member.state_due = True
        return self._feed(member, now_s)

    def _count_pending(self, member: Member) -> None:
        if member.pending is None:
            return
        after_seq, position = member.pending
        if self.fit.sequencer.last[member.node] >= after_seq:
            self.fit.partition_of(member).advance(position)
            member.pending = None

    def _feed(self, member: Member, now_s: float) -> list[Effect]:
        """Send down what this child misses and has room for."""
        downlink, log = member.downlink, self.fit.sequencer.log
        if not log.reaches(downlink.sent):
            downlink.rewind(log.head, now_s)
            last = self.fit.last_of(list(member.own))
            return [Send(member.node, Behind(log.head, self.fit.chunks, last))]
        out: list[Effect] = []
        for committed in downlink.due(log, now_s):
            own = committed.origin in member.own
            out.append(Send(member.node, number_only(committed) if own else committed))
        return out

    # -- time ------------------------------------------------------------------------------------

    def _on_tick(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for node, silent_s in self.fit.leases.expire(now_s):
            reason = f"silent for {silent_s:.1f} s (lease {self.fit.limits.lease_s:g} s)"
            effects += self.fit.close(self.fit.members.live[node], reason, now_s)
        slowest = self.fit.members.slowest()
        changed = slowest is not None and slowest != self.fit.slowest
        self.fit.slowest = slowest if slowest is not None else self.fit.slowest
        for member in self.fit.members.live.values():
            if member.downlink.overdue(now_s):
                member.downlink.back_off(now_s)
            effects += self._feed(member, now_s)
            effects += self._tell(member, changed, now_s)
        return effects + self._check_partitions(now_s)

    def _tell(self, member: Member, changed: bool, now_s: float) -> list[Effect]:
        """The state, where there is news or the node has asked."""
        member.state_due = member.state_due or changed
        if not member.state_due or now_s < member.state_s + STATE_SPACING_S:
            return []
        member.state_due, member.state_s = False, now_s
        state = State(
            phase=self.fit.phases.phase,
            head=self.fit.sequencer.head,
            final=self.fit.phases.final,
            slowest=self.fit.slowest,
            last_seq=self.fit.sequencer.last[member.node],
        )
        out: list[Effect] = [Send(member.node, state)]
        if member.releasing is not None:
            out.append(Send(member.node, Release(member.releasing)))
        return out

    def _check_partitions(self, now_s: float) -> list[Effect]:
        """Find a slot for a partition without a worker, and give up when none comes."""
        if self.fit.phases.phase is not Phase.RUNNING:
            return []
        waiting = [p for p in self.fit.partitions if p.owner is None and not p.trained]
        if not waiting:
            return []
        longest = min(waiting, key=lambda p: p.unowned_s)
        waited_s = now_s - max(longest.unowned_s, self.fit.phases.running_s)
        if waited_s > self.fit.limits.rejoin_s:
            reason = NO_WORKER.format(longest.index, waited_s)
            return [ev.Abort(reason, partition=longest.index, kind="setup")]
        if min(waited_s, now_s - self.fit.released_s) > self.fit.limits.release_s:
            self._release_one(longest.index, now_s)
        return []

    def _release_one(self, waiting: int, now_s: float) -> None:
        """Spark may need the slot of a worker that only waits for the end; it gets one at a time.

        Spark takes a while to use it; the next goes only if that did not help.
        """
        for member in self.fit.members.live.values():
            if self.fit.partition_of(member).trained and member.releasing is None:
                self.fit.released_s = now_s
                member.releasing = f"partition {waiting} needs a task slot"
                member.state_due = True
                return

    # -- phases ----------------------------------------------------------------------------------

    def _move_phase(self, now_s: float) -> list[Effect]:
        before = self.fit.phases.phase
        effects = self.fit.phases.move(
            self.fit.members, self.fit.partitions, self.fit.sequencer, now_s
        )
        if self.fit.phases.phase is Phase.DONE and before is not Phase.DONE:
            self._settle_grants()
        if self.fit.phases.phase is not before:
            for member in self.fit.members.live.values():
                member.state_due, member.state_s = True, -1.0
        for node, reason in self.fit.phases.overdue(self.fit.members, self.fit.sequencer, now_s):
            effects += self.fit.close(self.fit.members.live[node], reason, now_s)
        return effects

    def _settle_grants(self) -> None:
        """Whoever lives at the end has used what it was granted; the rest is lost."""
        for node in self.fit.members.live:
            self.fit.keeping.used(node)
        self.fit.keeping.finish()


NO_WORKER = (
    "partition {} has been without a worker for {:.0f} s: Spark has not started its task again; "
    "see the executors' state in Spark's UI (lost, out of memory, no free slot?)"
)


def farewell(node: int, reason: str) -> Closed:
    """To a node that failed or leaves: it was heard, and may end."""
    return Closed(token=0, count=0, node=node, seq=0, reason=reason, free=False)


def number_only(committed: Committed) -> Committed:
    """What the origin gets of its own update: it has the payload."""
    return Committed(
        commit=committed.commit,
        origin=committed.origin,
        seq=committed.seq,
        form=0,
        tau_quanta=0,
        count=0,
        payload=b"",
    )
