"""The master's state machine, which admits workers, numbers their updates and ends the fit.

The master is the root of a tree whose other nodes are the workers. A member is a worker process
that has joined under an id; the master closes the id, for good, when the worker leaves, is silent
or is replaced. A commit is an update that the master has numbered.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sparkstrom.base.identity import MASTER, Endpoint, NodeId, Seq
from sparkstrom.codec.messages import (
    Attach,
    ChildSilent,
    ChunkRequest,
    CommitsRequest,
    Heartbeat,
    IdClosed,
    Join,
    LeaveNotice,
    Message,
    OptimizerChunk,
    OptimizerRequest,
    Phase,
    ProbeReply,
    TrainingFailure,
    Update,
    WorkerLog,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import Child, Children, Leases
from sparkstrom.protocol.common.events_and_effects import (
    Effect,
    IgnoredMessages,
    IgnoreReason,
    TaskEnding,
)
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.common.process_pause import PauseDetector
from sparkstrom.protocol.common.stages import PROBE
from sparkstrom.protocol.master.announcements import ClosedNotices, StateBroadcast, WelcomeFactory
from sparkstrom.protocol.master.commit_order import CommitOrder
from sparkstrom.protocol.master.commit_sequencer import Sequencer
from sparkstrom.protocol.master.members import (
    CheckpointFiles,
    MasterLimits,
    Member,
    Members,
    Partitions,
    ResidualCheckpoints,
    send_to_process,
)
from sparkstrom.protocol.master.membership import Admission, MembershipCloser
from sparkstrom.protocol.master.optimizer_sources import OptimizerCopies, OptimizerSources
from sparkstrom.protocol.master.phases import Phases, VacantPartitions
from sparkstrom.protocol.master.statuses import Statuses
from sparkstrom.protocol.master.tree_placement import Placement

SCAN_S_PER_NODE = 20e-6  # least time from one scan of all members to the next, per member
SCAN_ALWAYS_NODES = 64  # up to this many members, a scan is so short that each event causes one


class Master:
    """Decides alone about membership, the order of commits and the phase of the fit.

    The master does not train. It has a replica (a copy of the parameters), to which its caller adds
    commits by the effect ``ApplyCommit``. ``chunks`` is the number of chunks in a snapshot of the
    replica, ``endpoint`` the address where the master listens, ``kept`` are the residual files of
    the last fit, and ``average`` combines the buffers of all partitions' models (None: the model
    has none).
    """

    aborted = False  # an effect ``Abort`` was returned
    _scan_due_s = -math.inf  # when all members are next scanned; -inf: at once

    def __init__(
        self,
        spec: FitSpec,
        *,
        chunks: int,
        endpoint: Endpoint,
        limits: MasterLimits,
        now_s: float,
        kept: CheckpointFiles | None = None,
        average: Callable[[list[bytes]], bytes] | None = None,
    ) -> None:
        # No part uses one that is constructed later.
        self.spec, self.limits, self.chunks = spec, limits, chunks
        self.ignored = ignored = IgnoredMessages()
        self.leases = leases = Leases(limits.lease_s, now_s)
        self.sequencer = sequencer = Sequencer(limits.log_bytes, ignored)
        self.children = children = Children(limits.flow_limits, sequencer.history, leases)
        self.partitions = Partitions.from_spec(spec, now_s)
        self.checkpoints = ResidualCheckpoints(kept or {})
        self.members = members = Members(self.partitions, self.checkpoints)
        self.sources = OptimizerSources(members, ignored)
        self.copies = copies = OptimizerCopies(limits.lease_s, members, self.sources, ignored)
        self.phases = phases = Phases(
            limits,
            members,
            sequencer,
            children,
            awaits_copies=lambda: limits.last_copies is not None and copies.is_pending,
        )
        self.notices = ClosedNotices(limits.lease_s, members, sequencer)
        self.broadcast = StateBroadcast(
            limits.lease_s,
            members=members,
            sequencer=sequencer,
            phases=phases,
            notices=self.notices,
            children=children,
        )
        self.order = CommitOrder(
            sequencer,
            members=members,
            phases=phases,
            notices=self.notices,
            children=children,
            average=average,
        )
        self.placement = Placement(
            limits,
            endpoint,
            members=members,
            leases=leases,
            children=children,
            welcomes=WelcomeFactory(chunks, members, sequencer, self.broadcast),
            now_s=now_s,
        )
        self.vacancies = VacantPartitions(limits, members, phases, now_s)
        self._pauses = PauseDetector(limits.lease_s, now_s)
        self._make_dependent_parts()

    def _make_dependent_parts(self) -> None:
        """Construct the parts that need several of the parts constructed before."""
        self.closing = MembershipCloser(
            self.limits.lease_s,
            members=self.members,
            leases=self.leases,
            placement=self.placement,
            order=self.order,
            notices=self.notices,
        )
        self.admission = Admission(
            self.spec.version,
            members=self.members,
            phases=self.phases,
            order=self.order,
            placement=self.placement,
            closing=self.closing,
            ignored=self.ignored,
        )
        self.statuses = Statuses(
            members=self.members,
            phases=self.phases,
            order=self.order,
            placement=self.placement,
            notices=self.notices,
            ignored=self.ignored,
        )

    def step(self, event: ev.Event, now_s: float) -> list[Effect]:
        """Process one event, then enter the next phase if it is due; return all effects.

        After an ``Abort``, only notices of the failure to members are returned.
        """
        if self.aborted:
            return self._react_after_abort(event)
        if (pause := self._pauses.pause_before(now_s)) is not None:
            for deadline_holder in (self.phases, self.vacancies, self.copies):
                deadline_holder.shift_deadlines(pause)
        effects = self._react(event, now_s)
        if now_s >= self._scan_due_s:
            nodes = len(self.members.live)
            self._scan_due_s = now_s
            if nodes > SCAN_ALWAYS_NODES:
                self._scan_due_s += nodes * SCAN_S_PER_NODE
            effects += self._move_phase(now_s)
        self.aborted = any(isinstance(effect, ev.Abort) for effect in effects)
        if self.aborted:
            effects += [self._make_failure_notice(member) for member in self.members.live.values()]
        return effects

    def _react(self, event: ev.Event, now_s: float) -> list[Effect]:
        """Dispatch an event to the part that handles it, and return the effects."""
        children = self.children
        match event:
            case ev.Received(sender=sender, message=message):
                child = None if sender is None else children.by_node.get(sender)
                if child is None:
                    return self._on_direct(message, now_s)
                self.leases.renew(child.node, now_s)
                return self._on_child(child, message, now_s)
            case ev.DataArriving(sender=sender, bytes=size):
                if (child := children.by_node.get(sender)) is not None:
                    children.on_data_arriving(child, size)
                    self.copies.on_data_arriving(now_s)
            case ev.Tick():
                return self._on_tick(now_s)
            case ev.AbortRequested(reason=reason):
                return [ev.Abort(reason)]
            case ev.SummedWorkersLimited(workers=workers):
                self.broadcast.limit_summed_workers(workers)
            case ev.StopRequested(reason=reason):
                self.phases.request_stop(reason)
            case ev.EndpointChanged(host=host, port=port):
                return self.placement.reopen_all(Endpoint(host, port), now_s)
            case ev.ReplicaHashed(digest=digest):
                self.phases.own_digest = digest
            case ev.OptimizerCopyRequest():
                return self.copies.begin(event, now_s)
            case _:
                raise AssertionError(f"no rule for {event}")
        return []

    def _on_direct(self, message: Message, now_s: float) -> list[Effect]:
        """Process a message that bypassed the tree, or whose sender is not the master's child."""
        live = self.members.live
        if isinstance(message, Join):
            if self.members.id_of(message) in live and self.phases.phase is Phase.DONE:
                return [send_to_process(message, self.broadcast.state)]
            return self.admission.on_join(message, now_s)
        if isinstance(message, WorkerLog):  # any process with the key may send one, member or not
            return [ev.ShowWorkerLog(message)]
        node: NodeId | None = getattr(message, "node", None)
        member = None if node is None else live.get(node)
        match message:
            case TrainingFailure(node=None) if self.phases.phase is not Phase.DONE:
                return self._on_failure_without_id(message)
            case _ if member is None:
                self.ignored.count(message, IgnoreReason.STRANGER)
                return []
        match message:
            case ChildSilent():
                return self.placement.on_child_silent(message, now_s)
            case ProbeReply():
                self.placement.on_probe_reply(member, now_s)
            case TrainingFailure():
                return self._on_training_failure(member, message)
            case LeaveNotice():
                return self._on_leave_notice(member, message, now_s)
            case _:
                self.ignored.count(message, IgnoreReason.WRONG_WAY)
        return []

    def _on_leave_notice(self, member: Member, leaving: LeaveNotice, now_s: float) -> list[Effect]:
        """Close the id of a member that left on request, and record its residual file.

        Confirm the notice, which the member repeats until then. Ignore a notice without a request.
        """
        if member.releasing is None:
            self.ignored.count(leaving, IgnoreReason.EARLY)
            return []
        self.checkpoints.record(member.join.executor, member.node, leaving.checkpoint)
        effects = self.closing.close(member.node, leaving.reason, now_s, released=True)
        self.notices.drop(member.node)
        return [*effects, send_to_process(member.join, end_notice(member, leaving.reason))]

    def _on_failure_without_id(self, failed: TrainingFailure) -> list[Effect]:
        """Abort the fit because a worker without an id failed, unless a newer attempt replaced it.

        Spark does not end the tasks of a stage that it repeats. Such a task of an earlier stage
        attempt may be refused, or fail, while a newer attempt trains its partition.
        """
        if self.partitions.has_newer_attempt(failed.partition, failed.attempt):
            self.ignored.count(failed, IgnoreReason.LATE)
            return []
        where = (failed.host, failed.partition)
        return [ev.Abort(failed.reason, failed.trace, *where, phase=failed.phase)]

    def _on_training_failure(self, member: Member, failed: TrainingFailure) -> list[Effect]:
        """Abort the fit because a worker failed; if the fit is done, only confirm the report."""
        if self.phases.phase is Phase.DONE:
            return [self._make_failure_notice(member)]
        where = (member.join.host, member.join.partition)
        return [ev.Abort(failed.reason, failed.trace, *where, phase=failed.phase)]

    def _react_after_abort(self, event: ev.Event) -> list[Effect]:
        """Return notices of the fit's failure to the members from which this event brings messages.

        Spark does not end the tasks of a stage that it is about to repeat, so they must end
        themselves.
        """
        live = self.members.live
        match event:
            case ev.Received(sender=sender, message=Heartbeat(statuses=statuses)):
                speakers = {sender, *(status.node for status in statuses)}
            case ev.Received(sender=sender, message=Join() as join):
                speakers = {sender, self.members.id_of(join)}
            case ev.Received(sender=sender, message=message):
                speakers = {sender, getattr(message, "node", None)}
            case _:
                return []
        return [self._make_failure_notice(live[node]) for node in sorted(live.keys() & speakers)]

    def _make_failure_notice(self, member: Member) -> Effect:
        """Return the effect that notifies a member that the fit has failed; its task must end."""
        return send_to_process(member.join, end_notice(member, TaskEnding.FIT_FAILED.value))

    def _on_child(self, child: Child, message: Message, now_s: float) -> list[Effect]:
        """Process a message that a child sent over its edge."""
        children = self.children
        match message:
            case Update():
                return self.order.on_update(child, message, now_s)
            case Heartbeat():
                effects: list[Effect] = []
                for status in message.statuses:
                    effects += self.statuses.on_status(status, now_s)
                if message.received > child.received:  # slow links carry something, too
                    self.phases.note_progress(now_s)
                return effects + children.on_heartbeat(child, message, now_s)
            case Attach():
                child.state_due = child.state_is_urgent = True
                effects = children.on_attach(child, message, now_s)
                if child.stage is not PROBE and child.node in self.members.live:
                    self.placement.confirm(self.members.live[child.node], child.edge)
                return effects
            case CommitsRequest(commit=commit) if commit <= self.sequencer.head:
                return children.on_commits_request(child, commit, now_s)
            case ChunkRequest(index=index) if index < self.chunks:
                return children.on_chunk_request(child, index, now_s)
            case OptimizerRequest():
                return self.sources.on_request(message)
            case OptimizerChunk(asker=asker) if asker == MASTER:
                child.arriving = 0
                return self.copies.on_chunk(message, now_s)
            case OptimizerChunk(asker=asker) if asker in self.placement.tree:
                child.arriving = 0
                return [ev.Send(self.placement.tree.path(asker)[0], message)]
            case LeaveNotice():
                return children.disown(child.node)
            case CommitsRequest() | ChunkRequest():
                self.ignored.count(message, IgnoreReason.EARLY)  # there is no such commit, or chunk
            case OptimizerChunk():
                self.ignored.count(message, IgnoreReason.UNSERVED)
            case _:
                self.ignored.count(message, IgnoreReason.WRONG_WAY)
        return []

    def _on_tick(self, now_s: float) -> list[Effect]:
        """Run all periodic work: leases, places, notices, children, vacant partitions."""
        children, placement = self.children, self.placement
        done = self.phases.phase is Phase.DONE
        effects = [] if done else self.closing.tick(now_s)
        if now_s >= self._scan_due_s:
            self.broadcast.refresh()
            effects += self.vacancies.check(now_s)
        self.broadcast.announce_if_due(now_s)
        if not done:
            effects += placement.send_due_orders(now_s) + placement.probe_suspects(now_s)
            effects += self.notices.resend_due(now_s) + self.copies.continue_fetch(now_s)
        effects += children.tick(self.broadcast.state, now_s) + self.vacancies.resend_releases(
            now_s
        )
        found, children.slow_links = children.slow_links, []
        return effects + self.statuses.report_slow_links(found)

    def _move_phase(self, now_s: float) -> list[Effect]:
        """Enter the next phase if it is due; close the ids of nodes that hold it up for too long.

        When draining begins, also begin the optimizer copies for the last checkpoint.
        """
        before, last = self.phases.phase, self.limits.last_copies
        effects = self.phases.enter_next_if_due(now_s)
        if self.phases.phase is not before:
            # Workers that only evaluate learn with the audit that the last epoch is over.
            self.broadcast.refresh()
        if last is not None and self.phases.phase is Phase.DRAINING is not before:
            self.copies.begin_last(last, now_s)
        for node, reason in self.phases.overdue_nodes(now_s):
            effects += self.closing.close(node, reason, now_s)
        return effects


def end_notice(member: Member, reason: str) -> IdClosed:
    """Return the message that ends a node's task and confirms its notice of leaving or failure."""
    join, node = member.join, member.node
    return IdClosed(
        token=join.token, count=join.count, node=node, seq=Seq(0), reason=reason, free=False
    )
