"""The master's machine: admits nodes, numbers updates, feeds them down, ends the fit.

It is the root of the tree and the one authority on membership, order and phase. It holds a
replica, which ``Deliver`` changes, and does not train.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import (
    Address,
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
    Leaving,
    Message,
    Phase,
    Refused,
    Release,
    Report,
    State,
    Stats,
    Update,
    Welcome,
)
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.events import Effect, Send
from sparkstrom.protocol.keeping import Keeping
from sparkstrom.protocol.leases import Leases
from sparkstrom.protocol.members import Departure, Member, Members
from sparkstrom.protocol.partitions import Partition
from sparkstrom.protocol.phases import Phases
from sparkstrom.protocol.replay import Downlink
from sparkstrom.protocol.sequencer import Sequencer

FIRST_STREAM = 1000  # up streams of edges; below are the lobby and room for people's own
STATE_SPACING_S = 0.005
AGAIN_SPACING_S = 0.05


@dataclass(frozen=True, slots=True)
class MasterLimits:
    """Times in seconds of the master's clock, sizes in bytes; each wait counts from progress."""

    lease_s: float = 10.0
    start_s: float = 60.0  # from the first join until training begins with those who came
    workers_min: int = 1
    rejoin_s: float = 300.0  # how long a partition may be without a worker
    release_s: float = 10.0  # how long one waits before a finished worker gives up its slot
    end_s: float = 60.0  # draining or auditing without progress
    log_bytes: int = 64 << 20
    downlink_bytes: int = 4 << 20


class Master:
    """The driver's node. ``step(event, now_s)`` returns the effects."""

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
        kept: dict[str, dict[str, float]] | None = None,
    ) -> None:
        self._version, self._limits, self._chunks = version, limits, chunks
        self._host, self._port = host, port
        self.sequencer = Sequencer(limits.log_bytes)
        self.members = Members()
        self.partitions = [Partition(i, epochs) for i in range(partitions)]
        self.phases = Phases(limits.start_s, limits.workers_min, limits.end_s)
        self.keeping = Keeping(kept or {})
        self._leases = Leases(limits.lease_s, now_s)
        self._edges = 0
        self._slowest = 0
        self.aborted = False
        for partition in self.partitions:
            partition.unowned_s = now_s

    def step(self, event: ev.Event, now_s: float) -> list[Effect]:
        if self.aborted:
            return self._after_abort(event)
        match event:
            case ev.Received(sender=sender, message=message):
                effects = self._on_message(sender, message, now_s)
            case ev.Tick():
                effects = self._on_tick(now_s)
            case ev.StopRequested(reason=reason):
                self.phases.stop(reason)
                effects = []
            case ev.Moved(host=host, port=port):
                effects = self._on_moved(host, port)
            case ev.Hashed(commit=commit, digest=digest):
                self.phases.own_digest = digest
                assert commit == self.phases.final
                effects = []
            case _:
                raise AssertionError(f"no rule for {event}")
        effects += self._move_phase(now_s)
        self.aborted = self.aborted or any(isinstance(e, ev.Abort) for e in effects)
        return effects

    def _on_message(self, sender: int, message: Message, now_s: float) -> list[Effect]:
        if isinstance(message, Join):
            return self._on_join(message, now_s)
        member = self.members.live.get(sender)
        if member is None:
            self.sequencer.dropped["stranger"] += 1
            return []
        self._leases.renew(sender, now_s)
        match message:
            case Update():
                return self._on_update(member, message, now_s)
            case Report():
                return self._on_report(member, message, now_s)
            case AskAfter(commit=commit):
                member.downlink.rewind(commit, now_s)
                return self._feed(member, now_s)
            case AskChunk(index=index):
                return [ev.SendChunk(sender, index)] if index < self._chunks else []
            case Final(seq=seq):
                member.final = seq
            case AuditAnswer():
                if member.audit is None:
                    self.keeping.keep(member.join.executor, message.kept)
                member.audit = message
            case Stats(values=values):
                return [ev.Observed(sender, values)]
            case Failed(reason=reason, trace=trace):
                return self._on_failed(member, reason, trace)
            case Leaving(reason=reason, kept=kept):
                self.keeping.keep(member.join.executor, kept)
                return self._close(member, reason, now_s)
            case _:
                self.sequencer.dropped["not for a master"] += 1
        return []

    # -- membership ------------------------------------------------------------------------------

    def _on_join(self, join: Join, now_s: float) -> list[Effect]:
        node = self.members.of(join)
        if node is not None and node in self.members.live:
            return self._on_join_again(self.members.live[node], join, now_s)
        refusal = self._refusal(join)
        if refusal is not None:
            return [ev.Answer(join.address, refusal)]
        if node is not None:
            return [ev.Answer(join.address, self._closed_answer(node, join))]
        return self._admit(join, now_s)

    def _on_join_again(self, member: Member, join: Join, now_s: float) -> list[Effect]:
        """The same join gets the same answer; a newer edge of it replaces the older one."""
        self._leases.renew(member.node, now_s)
        if join.edge < member.join.edge:
            return []
        if join.edge == member.join.edge:
            return [Send(member.node, member.welcome)]
        return self._welcome(member.node, join, member, now_s)

    def _refusal(self, join: Join) -> Refused | None:
        """Why this process cannot join, if it cannot."""
        if join.version != self._version:
            return refuse(join, f"{DIFFERENT_VERSIONS} {self._version}, here {join.version}", True)
        if join.partition >= len(self.partitions):
            return refuse(join, f"there is no partition {join.partition}", True)
        partition = self.partitions[join.partition]
        if partition.attempt > join.attempt:
            return refuse(join, "a newer attempt of its task has taken the partition over", True)
        if self.phases.phase >= Phase.DRAINING or partition.trained:
            return refuse(join, "its partition is trained already", False)
        return None

    def _closed_answer(self, node: int, join: Join) -> Closed:
        partition = self.partitions[join.partition]
        free = partition.owner is None and partition.last_owner == node
        reason = "its lease ran out" if free else SUPERSEDED
        return Closed(node, reason, free)

    def _admit(self, join: Join, now_s: float) -> list[Effect]:
        partition = self.partitions[join.partition]
        if not partition.seen_before(join.rows, join.checksum, join.batches):
            return [self._different_rows(join, partition)]
        returning = bool(self.members.former(join.token))
        if returning and partition.last_owner not in self.members.former(join.token):
            return [ev.Answer(join.address, refuse(join, SUPERSEDED, True))]
        effects: list[Effect] = []
        if partition.owner is not None:
            effects += self._close(self.members.live[partition.owner], SUPERSEDED, now_s)
        node = self.members.next_id
        self.sequencer.admit(node)
        partition.owner = partition.last_owner = node
        partition.attempt = join.attempt
        self._leases.renew(node, now_s)
        self.phases.joined(now_s)
        return effects + self._welcome(node, join, None, now_s)

    def _welcome(self, node: int, join: Join, old: Member | None, now_s: float) -> list[Effect]:
        """Open an edge to this node and tell it where to begin."""
        self._edges += 1
        stream = FIRST_STREAM + 2 * self._edges
        local = Address(self._host, self._port, stream, stream + 1)
        follows = join.has_replica and self.sequencer.log.reaches(join.have)
        base = join.have if follows else self.sequencer.head
        partition = self.partitions[join.partition]
        grants = () if old or join.has_replica else self.keeping.grant(join.executor, node)
        former = self.members.former(join.token)
        welcome = Welcome(
            token=join.token,
            count=join.count,
            edge=join.edge,
            node=node,
            up=local,
            base=base,
            snapshot=not follows,
            chunks=self._chunks,
            last=self._last_of([*former, node]),
            closed=[(n, self.sequencer.closed[n]) for n in former if n in self.sequencer.closed],
            epoch=partition.position.epoch,
            batch=partition.position.batch,
            steps=self._slowest,
            grants=list(old.welcome.grants if old else grants),
        )
        member = Member(node, join, local, welcome, self._downlink(node, base, now_s))
        if old is not None:
            member.pending, member.steps = old.pending, old.steps
            member.final, member.audit, member.activity = old.final, old.audit, old.activity
        self.members.add(member)
        return [ev.OpenEdge(node, join.edge, local, join.address), Send(node, welcome)]

    def _downlink(self, node: int, base: int, now_s: float) -> Downlink:
        return Downlink(node, base, self._limits.downlink_bytes, now_s)

    def _last_of(self, nodes: list[int]) -> list[tuple[int, int]]:
        known = {**self.sequencer.closed, **self.sequencer.last}
        return [(node, known[node]) for node in sorted(set(nodes))]

    def _close(self, member: Member, reason: str, now_s: float) -> list[Effect]:
        """End this id: its last seq and its partition's position are read in the same act."""
        node, partition = member.node, self.partitions[member.join.partition]
        self.sequencer.close(node)
        if reason in GOOD_ENDS:
            self.keeping.used(node)
        self._leases.drop(node)
        del self.members.live[node]
        self.members.departures.append(Departure(node, partition.index, member.join.host, reason))
        if partition.owner == node:
            partition.owner, partition.unowned_s = None, now_s
        effects: list[Effect] = [ev.CloseEdge(node)]
        if reason not in GOOD_ENDS:
            where = f"partition {partition.index} on {member.join.host}"
            effects.append(ev.Note(f"node {node} ({where}) left: {reason}"))
        return effects

    def _on_moved(self, host: str, port: int) -> list[Effect]:
        """All edges are gone with the old media driver; the nodes will ask for new ones."""
        self._host, self._port = host, port
        return [ev.CloseEdge(node) for node in self.members.live]

    def _on_failed(self, member: Member, reason: str, trace: str) -> list[Effect]:
        where = (member.join.host, member.join.partition)
        farewell = Closed(member.node, "the fit has failed", False)
        return [Send(member.node, farewell), ev.Abort(reason, trace, *where)]

    def _after_abort(self, event: ev.Event) -> list[Effect]:
        """Nothing counts any more; only who failed is told that it was heard."""
        match event:
            case ev.Received(sender=sender, message=Failed()) if sender in self.members.live:
                return [Send(sender, Closed(sender, "the fit has failed", False))]
            case _:
                return []

    def _different_rows(self, join: Join, partition: Partition) -> ev.Abort:
        reason = (
            f"partition {partition.index} had {partition.rows} rows in {partition.batches} "
            f"minibatches (checksum {partition.checksum:016x}) at first and has {join.rows} in "
            f"{join.batches} (checksum {join.checksum:016x}) when its task is tried again: the "
            "data must not change between attempts; write it to files or persist it first"
        )
        return ev.Abort(reason, "", join.host, join.partition, "usage")

    # -- updates and acknowledgements ------------------------------------------------------------

    def _on_update(self, member: Member, update: Update, now_s: float) -> list[Effect]:
        if update.origin != member.node:
            self.sequencer.dropped["not its own"] += 1
            return []
        committed = self.sequencer.number(update)
        member.steps = max(member.steps, update.steps)
        if committed is None:
            ahead = update.seq > self.sequencer.last[member.node] + 1
            if ahead and not self.sequencer.frozen and now_s >= member.again_s:
                member.again_s = now_s + AGAIN_SPACING_S
                return [Send(member.node, Again(self.sequencer.last[member.node]))]
            return []
        self.phases.progress_s = now_s
        partition = self.partitions[member.join.partition]
        partition.advance(Position(update.epoch, update.batch))
        self._count_pending(member)
        effects: list[Effect] = [ev.Deliver(committed)]
        for other in self.members.live.values():
            effects += self._feed(other, now_s)
        return effects

    def _on_report(self, member: Member, report: Report, now_s: float) -> list[Effect]:
        if report.edge != member.join.edge:
            return []
        member.downlink.acknowledge(report.received, now_s)
        member.steps = max(member.steps, report.steps)
        member.activity = report.activity
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
        if self.sequencer.last[member.node] >= after_seq:
            self.partitions[member.join.partition].advance(position)
            member.pending = None

    def _feed(self, member: Member, now_s: float) -> list[Effect]:
        """Send down what this child misses and has room for."""
        downlink, log = member.downlink, self.sequencer.log
        if not log.reaches(downlink.sent):
            downlink.rewind(log.head, now_s)
            former = self.members.former(member.join.token)
            return [Send(member.node, Behind(log.head, self._chunks, self._last_of(former)))]
        return [
            Send(member.node, number_only(committed) if committed.origin in self._own(member)
                 else committed)
            for committed in downlink.due(log, now_s)
        ]  # fmt: skip

    def _own(self, member: Member) -> set[int]:
        return set(self.members.former(member.join.token))

    # -- time ------------------------------------------------------------------------------------

    def _on_tick(self, now_s: float) -> list[Effect]:
        effects: list[Effect] = []
        for node, silent_s in self._leases.expire(now_s):
            reason = f"silent for {silent_s:.1f} s (lease {self._limits.lease_s:g} s)"
            effects += self._close(self.members.live[node], reason, now_s)
        slowest = self.members.slowest()
        changed = slowest is not None and slowest != self._slowest
        self._slowest = slowest if slowest is not None else self._slowest
        for member in self.members.live.values():
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
            phase=self.phases.phase,
            head=self.sequencer.head,
            final=self.phases.final,
            slowest=self._slowest,
            last_seq=self.sequencer.last[member.node],
        )
        out: list[Effect] = [Send(member.node, state)]
        if member.releasing is not None:
            out.append(Send(member.node, Release(member.releasing)))
        return out

    def _check_partitions(self, now_s: float) -> list[Effect]:
        """Find a slot for a partition without a worker, and give up when none comes."""
        if self.phases.phase is not Phase.RUNNING:
            return []
        waiting = [p for p in self.partitions if p.owner is None and not p.trained]
        if not waiting:
            return []
        longest = min(waiting, key=lambda p: p.unowned_s)
        waited_s = now_s - max(longest.unowned_s, self.phases.running_s)
        if waited_s > self._limits.rejoin_s:
            reason = NO_WORKER.format(longest.index, waited_s)
            return [ev.Abort(reason, partition=longest.index, kind="setup")]
        releasing = any(m.releasing for m in self.members.live.values())
        if waited_s > self._limits.release_s and not releasing:
            self._release_one(longest.index)
        return []

    def _release_one(self, waiting: int) -> None:
        """Spark may need the slot of a worker that only waits for the end."""
        for member in self.members.live.values():
            if self.partitions[member.join.partition].trained:
                member.releasing = f"partition {waiting} needs a task slot"
                member.state_due = True
                return

    # -- phases ----------------------------------------------------------------------------------

    def _move_phase(self, now_s: float) -> list[Effect]:
        before = self.phases.phase
        effects = self.phases.move(self.members, self.partitions, self.sequencer, now_s)
        if self.phases.phase is not before:
            for member in self.members.live.values():
                member.state_due, member.state_s = True, -1.0
        for node, reason in self.phases.overdue(self.members, now_s):
            effects += self._close(self.members.live[node], reason, now_s)
        return effects


DIFFERENT_VERSIONS = (
    "the driver and this executor run different versions of sparkstrom; install the same on all: "
    "on the driver"
)
SUPERSEDED = "another attempt of its task has taken the partition over"
NO_WORKER = (
    "partition {} has been without a worker for {:.0f} s: Spark has not started its task again; "
    "see the executors' state in Spark's UI (lost, out of memory, no free slot?)"
)
GOOD_ENDS = ("done", "released")


def refuse(join: Join, reason: str, fatal: bool) -> Refused:
    """No place for this join."""
    return Refused(token=join.token, count=join.count, reason=reason, fatal=fatal)


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
