"""The state machine of one worker's node.

``Node.step`` takes an event and returns effects. It delegates to parts (the link to the parent,
children, publishing, fetching a snapshot and so on), derives from their states what the trainer
must do next (a directive), and ends the task with an error if a wait exceeds its limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import msgspec

from sparkstrom.base.identity import MASTER, NodeId, Position, Seq
from sparkstrom.codec.messages import (
    Activity,
    Adopt,
    AttachReply,
    AuditAnswer,
    Chunk,
    Commit,
    Data,
    Disown,
    IdClosed,
    JoinRefusal,
    LeaveNotice,
    MergedRange,
    Message,
    OptimizerChunk,
    OptimizerRequest,
    Phase,
    Probe,
    ProbeReply,
    Release,
    ResendRequest,
    SnapshotRequired,
    State,
    TrainingFailure,
    Update,
    Welcome,
    WorkerLog,
)
from sparkstrom.observe.telemetry import NodeCounters, WorkerCounters, to_wire
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import Children, Leases
from sparkstrom.protocol.common.commit_log import History, Log
from sparkstrom.protocol.common.events_and_effects import (
    Command,
    Directive,
    Effect,
    IgnoredMessages,
    IgnoreReason,
    TaskEnding,
)
from sparkstrom.protocol.common.process_pause import PauseDetector, ProcessPause
from sparkstrom.protocol.common.stages import (
    ATTACHED,
    CLOSED,
    DISMISSED,
    ENDED,
    INSTALLING,
    TRAINING,
)
from sparkstrom.protocol.worker.heartbeats import Heartbeats
from sparkstrom.protocol.worker.identity import Identity, Membership
from sparkstrom.protocol.worker.joining import Joining
from sparkstrom.protocol.worker.node_state import (
    OVER,
    DirtyFlag,
    FitView,
    StatusTable,
    Subtree,
    TaskEnd,
    TrainerView,
)
from sparkstrom.protocol.worker.optimizer_transfer import OptimizerTransfers
from sparkstrom.protocol.worker.parent_link import InFlight, ParentLink
from sparkstrom.protocol.worker.replication import Relaying, Replication
from sparkstrom.protocol.worker.time_limits import NodeLimits, Wait

# What the parent sends only after its attach reply.
AFTER_REPLY = Commit | MergedRange | Chunk | OptimizerChunk | ResendRequest | SnapshotRequired
QUIET_EVENTS = (ev.CommitApplied, ev.ActivityChanged, ev.DataArriving)  # change no directive
RUNNING = Phase.RUNNING  # a module-level name, because it is compared after every event
JOINING = Directive(Command.WAIT, "joining")
GATHERING = Directive(Command.WAIT, "the others have not joined yet")
WINDOW_FULL = Directive(Command.WAIT, "its updates are not committed yet")
STALE = Directive(Command.WAIT, "what the others sent a round ago is not here yet")
AHEAD = Directive(Command.WAIT, "it is ahead of the slowest")
NOT_THERE = Directive(Command.WAIT, "the last updates have not come yet")
DRAIN = Directive(Command.DRAIN)
TRANSFERRING = Directive(Command.WAIT, "the updater's state of another worker is on its way")
LINGERING = Directive(Command.WAIT, "others hear from it that the fit is done")
DONE = Directive(Command.END, TaskEnding.DONE.value, cause=TaskEnding.DONE)


class Directives:
    """Derives the trainer's current directive from the states of the node's parts."""

    def __init__(
        self,
        limits: NodeLimits,
        *,
        replication: Replication,
        in_flight: InFlight,
        trainer: TrainerView,
        fit: FitView,
        transfers: OptimizerTransfers,
        children: Children,
    ) -> None:
        self._limits, self._replication, self._in_flight = limits, replication, in_flight
        self._trainer, self._fit = trainer, fit
        self._transfers, self._children = transfers, children

    def current(self) -> Directive:
        """Return the directive that applies now."""
        replication, state = self._replication, self._fit.state
        pauses, stage = replication.pauses, replication.stage
        if replication.fetch is not None or (stage is INSTALLING and pauses):
            return Directive(Command.PAUSE, "a replica is on its way", number=pauses)
        if state is None or not replication.has_replica:
            return JOINING
        if state.phase is RUNNING:
            return TRANSFERRING if self._transfers.fetch is not None else self._train(state)
        match state.phase:
            case Phase.DONE if self._trainer.audit is not None:
                return DONE if self._fit.may_end else LINGERING
            case Phase.AUDIT | Phase.DONE:
                if replication.received < state.final:
                    return NOT_THERE
                return Directive(Command.AUDIT, commit=state.final, epochs=state.epochs)
            case Phase.DRAINING:
                return DRAIN
            case _:
                return GATHERING

    def _train(self, state: State) -> Directive:
        """Return a directive to train or, if a limit is reached, one to wait with that reason."""
        most = self._limits.publications_max
        if most is None and not self._in_flight.has_room():
            return WINDOW_FULL
        workers = max(1, state.training)  # at least this one, which the master may not know yet
        limit = None
        if workers > 1:
            limit, waits = self._step_limit(workers)
            if limit is not None and self._trainer.steps >= limit:
                return waits
        publishes = most is None or len(self._in_flight) < most
        progress = state.minibatches, state.minibatches_expected, state.epochs
        team = workers, state.summed or None
        return _train_directive(limit, publishes, self._time_to_commit_s(state), *team, *progress)

    def _time_to_commit_s(self, state: State) -> float:
        """Return how many seconds a publication recently took until it was committed.

        With ``max_lead`` every worker waits for those behind slow links, where commits arrive late.
        Then return the longest link delay known here, if that is longer, so that all publish less.
        """
        if self._limits.max_lead is None or not self._in_flight.round_s:
            return self._in_flight.round_s
        waits_s = max(state.wait_ms / 1000, round(self._children.max_link_delay_s, 3))
        return max(self._in_flight.round_s, waits_s)

    def _step_limit(self, workers: int) -> tuple[int | None, Directive]:
        """Return the step count at which training waits (None: no limit), and the wait's directive.

        ``max_lead`` limits the steps ahead of the slowest worker. ``max_staleness`` limits the
        steps after this worker's oldest uncommitted update: once that commit has come, so have all
        earlier ones. Where a worker's share of ``lead_minibatches`` or of ``age_of_updates`` is
        larger, it applies instead. The lower of the two step counts is returned.
        """
        limits = self._limits
        limit, waits = None, AHEAD
        if limits.max_lead is not None:
            lead = max(limits.max_lead, limits.lead_minibatches // max(1, workers - 1))
            limit = self._trainer.steps_at_pace(self._fit.slowest + lead)
        if limits.max_staleness is not None:
            beside = max(limits.max_staleness, limits.age_of_updates // workers - limits.steps_each)
            oldest = self._in_flight.oldest
            sent = self._trainer.steps + 1 if oldest is None else oldest.steps  # + 1: the next step
            if limit is None or sent + beside < limit:
                limit, waits = sent + beside, STALE
        return limit, waits


@lru_cache(maxsize=1024)  # called after every event, mostly with equal arguments
def _train_directive(
    steps_max: int | None,
    publishes: bool,
    round_s: float,
    workers: int,
    summed: int | None,
    minibatches: int,
    minibatches_expected: int,
    epochs: int,
) -> Directive:
    """Return a directive to train; the arguments are fields of ``Directive``.

    Directives are derived after every event, so they are cached.
    """
    return Directive(
        Command.TRAIN,
        steps_max=steps_max,
        publishes=publishes,
        round_s=round_s,
        workers=workers,
        summed=summed,
        minibatches=minibatches,
        minibatches_expected=minibatches_expected,
        epochs=epochs,
    )


class DeadlineHolder(Protocol):
    """A part of a node that has deadlines of its own."""

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadlines by a pause of the process, which does not count as waiting."""


class Deadlines:
    """Checks the deadlines of everything that a node waits for, counted from the last progress."""

    def __init__(
        self,
        limits: NodeLimits,
        deadline_holders: Sequence[DeadlineHolder],
        *,
        membership: Membership,
        link: ParentLink,
        replication: Replication,
        trainer: TrainerView,
        fit: FitView,
        task: TaskEnd,
        now_s: float,
    ) -> None:
        self._pauses = PauseDetector(limits.lease_s, now_s)
        self._deadline_holders = deadline_holders
        self._membership, self._link, self._replication = membership, link, replication
        self._trainer, self._fit, self._task = trainer, fit, task

    def shift_after_pause(self, now_s: float) -> None:
        """Shift all deadlines if this process did not run for over a quarter of a lease."""
        if (pause := self._pauses.pause_before(now_s)) is not None:
            for deadline_holder in self._deadline_holders:
                deadline_holder.shift_deadlines(pause)

    def timeout_directive(self, now_s: float) -> Directive | None:
        """Return the directive that ends the task if a wait is overdue; otherwise None."""
        wait = self._first_long_wait(now_s)
        if wait is not None and now_s - wait.since_s > wait.limit_s:
            text = wait.reason.value.format(silent=now_s - wait.since_s, **wait.figures)
            return Directive(Command.FAIL, text, cause=wait.reason)
        if self._task.stage is TRAINING:
            return None
        return self._task.directive_if_unconfirmed_too_long(now_s)

    def _first_long_wait(self, now_s: float) -> Wait | None:
        """Return the first wait that is overdue or close to it; more general causes come first."""
        replication, joined = self._replication, self._membership.node is not None
        return (
            self._fit.overdue_wait(now_s, joined=joined)
            or (None if joined else self._membership.overdue_wait(now_s))
            or (None if replication.fetch is None else replication.overdue_snapshot_wait(now_s))
            or self._link.overdue_wait(now_s)
            or replication.overdue_commits_wait(self._fit.state, now_s)
            or self._trainer.overdue_wait(now_s, replication.stage, paused=replication.paused)
        )


__all__ = ["Identity", "Node", "NodeLimits"]


class Node:
    """The protocol side of one worker: joins, fetches a replica, publishes, and relays commits.

    ``step`` takes an event and returns effects, which the caller carries out in order. The trainer
    reads ``directive``, which tells what it must do, before each minibatch, and reports its work
    through events. The trainer owns the replica and changes it for effects such as ``ApplyCommit``
    and ``InstallSnapshot``. Each part owns its state and its deadlines; ``Node`` dispatches each
    event to the part that handles it.
    """

    def __init__(self, identity: Identity, limits: NodeLimits, now_s: float) -> None:
        # No part uses one that is constructed later.
        self.limits = limits
        self.directive = JOINING
        self.report_flag, self.ignored = report_flag, ignored = DirtyFlag(), IgnoredMessages()
        history = History(Log(limits.log_bytes))
        self.in_flight = InFlight(limits.window_bytes)
        self.children = Children(limits.flow_limits, history, Leases(limits.lease_s, now_s))
        self.subtree = Subtree(self.children, StatusTable())
        self.membership = membership = Membership(identity, limits, now_s)
        self.fit, self.task = FitView(limits, now_s), TaskEnd()
        self.trainer = TrainerView(limits, report_flag, now_s)
        self.link = link = ParentLink(limits, membership, self.in_flight, report_flag, now_s)
        self.replication = Replication(
            limits,
            history,
            membership=membership,
            link=link,
            in_flight=self.in_flight,
            trainer=self.trainer,
            children=self.children,
            report_flag=report_flag,
            ignored=ignored,
            now_s=now_s,
        )
        self.transfers = OptimizerTransfers(
            limits,
            membership=membership,
            link=link,
            trainer=self.trainer,
            fit=self.fit,
            subtree=self.subtree,
            report_flag=report_flag,
            ignored=ignored,
        )
        self._make_dependent_parts(now_s)

    def _make_dependent_parts(self, now_s: float) -> None:
        """Construct the parts that need several of the parts constructed before."""
        self.relaying = Relaying(
            membership=self.membership,
            link=self.link,
            replication=self.replication,
            transfers=self.transfers,
            subtree=self.subtree,
            report_flag=self.report_flag,
            ignored=self.ignored,
        )
        self.reporting = Heartbeats(
            self.limits,
            membership=self.membership,
            link=self.link,
            replication=self.replication,
            in_flight=self.in_flight,
            trainer=self.trainer,
            fit=self.fit,
            task=self.task,
            transfers=self.transfers,
            subtree=self.subtree,
            report_flag=self.report_flag,
            now_s=now_s,
        )
        self._joining = Joining(
            membership=self.membership,
            link=self.link,
            replication=self.replication,
            in_flight=self.in_flight,
            trainer=self.trainer,
            fit=self.fit,
            task=self.task,
            subtree=self.subtree,
            reporting=self.reporting,
            ignored=self.ignored,
        )
        self._directives = Directives(
            self.limits,
            replication=self.replication,
            in_flight=self.in_flight,
            trainer=self.trainer,
            fit=self.fit,
            transfers=self.transfers,
            children=self.children,
        )
        deadline_holders = (
            self.membership, self.fit, self.replication, self.trainer, self.link, self.task,
            self.in_flight, self.transfers,
        )  # fmt: skip
        self._deadlines = Deadlines(
            self.limits,
            deadline_holders,
            membership=self.membership,
            link=self.link,
            replication=self.replication,
            trainer=self.trainer,
            fit=self.fit,
            task=self.task,
            now_s=now_s,
        )

    @property
    def node(self) -> NodeId | None:
        """Return the current id; None before the first welcome."""
        return self.membership.node

    @property
    def has_pending_report(self) -> bool:
        """Return whether there is news for the parent that no heartbeat has reported yet."""
        return self.report_flag.is_set

    @property
    def tick_due_s(self) -> float:
        """Return when a report or state that was held back is due; infinity if none was."""
        news_due_s = self.reporting.news_due_s if self.link.attached else math.inf
        return min(news_due_s, self.children.state_due_s)

    def step(self, event: ev.Event, now_s: float) -> list[Effect]:
        """Process one event and return the effects, then update ``directive``."""
        effects = self._react(event, now_s)
        if isinstance(event, QUIET_EVENTS):
            return effects
        if self.task.stage is TRAINING:
            self.directive = self._directives.current()
            if self.directive is DONE:
                self.task.end(DONE)
        elif self.task.directive is not None:
            self.directive = self.task.directive
        return effects

    def _react(self, event: ev.Event, now_s: float) -> list[Effect]:
        """Dispatch an event to the part that handles it, and return the effects."""
        match event:
            case ev.Received(sender=sender, message=message):
                assert sender is not None, "nobody tells a worker directly but the master"
                return self._on_message(sender, message, now_s)
            case ev.Tick():
                return self._on_tick(now_s)
            case ev.DataArriving(sender=sender, bytes=size):
                return self._on_data_arriving(event, sender, size, now_s)
            case ev.StreamsOpened():
                return self._joining.on_streams_opened(event, now_s)
            case _:
                return self._on_trainer_event(event, now_s)

    def _on_trainer_event(self, event: ev.Event, now_s: float) -> list[Effect]:
        """Process an event from this node's trainer."""
        match event:
            case ev.UpdatePublished():
                return self._on_published(event, now_s)
            case ev.StepCompleted():
                position = Position(event.epoch, event.batch)
                self.trainer.advance(position, event.steps, now_s, published=False)
            case ev.ActivityChanged(activity=activity):
                self.trainer.set_activity(Activity(activity), now_s)
            case ev.TrainerPaused(number=number):
                self.replication.on_paused(number)
            case ev.ReplicaInstalled():
                if not self.replication.has_replica:
                    self.trainer.credit_head_start(self.fit.slowest)
                    self.transfers.begin_if_late(now_s)
                self.replication.on_installed(now_s)
            case ev.CommitApplied(commit=commit):
                self.replication.on_applied(commit)
            case ev.TrainerDrained():
                self.trainer.set_final(self.in_flight.last_seq)
            case ev.ReplicaHashed(commit=commit, digest=digest, checkpoint=checkpoint):
                self.trainer.set_audit(AuditAnswer(commit, digest, checkpoint))
            case ev.TrainerReleased(checkpoint=checkpoint):
                leaving = LeaveNotice(
                    node=self.membership.id, reason=TaskEnding.RELEASED.value, checkpoint=checkpoint
                )
                self.task.on_trainer_left(leaving, now_s)
                return [ev.SendDirect(leaving)]
            case ev.OutputPrinted(lines=lines, skipped=skipped):
                who = self.membership.identity
                log = WorkerLog(
                    host=who.host, partition=who.partition, lines=lines, skipped=skipped
                )
                return [ev.SendDirect(log)]
            case ev.TrainerFailed():
                return self._on_training_failure(event, now_s)
            case _:
                raise AssertionError(f"no rule for {event}")
        return []

    def _on_training_failure(self, event: ev.TrainerFailed, now_s: float) -> list[Effect]:
        """Report an exception in training to the master."""
        who = self.membership.identity
        failed = TrainingFailure(
            node=self.membership.node,
            host=who.host,
            partition=who.partition,
            attempt=who.attempt,
            reason=event.reason,
            trace=event.trace,
            phase=event.phase,
        )
        self.task.on_training_failed(failed, now_s)
        return [ev.SendDirect(failed)]

    def _on_published(self, made: ev.UpdatePublished, now_s: float) -> list[Effect]:
        """Make a numbered update of what was published, and queue it if a parent is attached."""
        position = Position(made.epoch, made.batch)
        self.trainer.advance(position, made.steps, now_s, published=True)
        update = Update(
            origin=self.membership.id,
            seq=Seq(self.in_flight.last_seq + 1),
            seen=made.seen,
            epoch=made.epoch,
            batch=made.batch,
            steps=self.trainer.pace,
            payload=made.payload,
        )
        self.in_flight.add(update, now_s)
        return self.link.enqueue(update, None, now_s) if self.link.attached else []

    def _on_message(self, sender: NodeId, message: Message, now_s: float) -> list[Effect]:
        """Dispatch a message by its sender: the master, the parent or a child."""
        if sender == MASTER:
            self.fit.on_master_heard(now_s)
        self.link.note_sign_of_life(sender, message, now_s)
        child = self.children.by_node.get(sender)
        if child is not None:
            return self.relaying.on_child(child, message, now_s)
        if sender == MASTER and (effects := self._on_direct(message, now_s)) is not None:
            return effects
        if sender == self.link.parent:
            return self._on_parent_message(message, now_s)
        self.ignored.count(message, IgnoreReason.STRANGER)
        return []

    def _on_direct(self, message: Message, now_s: float) -> list[Effect] | None:
        """Process a message that only the master sends, directly; return None for any other."""
        match message:
            case Welcome():
                return self._joining.on_welcome(message, now_s)
            case Adopt():
                return self.relaying.on_adopt(message, now_s)
            case Disown():
                return self.relaying.on_disown(message)
            case OptimizerRequest():
                return self.transfers.on_request(message, self.link.parent)
            case Probe(node=node) if node == self.node:
                return [ev.SendDirect(ProbeReply(node))]
            case Probe():
                self.ignored.count(message, IgnoreReason.FOR_ANOTHER)
            case JoinRefusal():
                self._joining.on_join_refusal(message)
            case IdClosed():
                return self._joining.on_id_closed(message)
            case Release(reason=reason):
                self.task.release(reason)
            case State() if message.phase is OVER:
                return self._on_state(message, now_s)
            case _:
                return None
        return []

    def _on_data_arriving(
        self, event: ev.DataArriving, sender: NodeId, size: int, now_s: float
    ) -> list[Effect]:
        """Record that part of a data message has arrived, so its stream is alive."""
        child = self.children.by_node.get(sender)
        if child is not None:
            self.children.on_data_arriving(child, size)
        elif sender == self.link.parent:
            self.link.on_partial_data(size)
            self.replication.note_data(now_s)
        else:
            self.ignored.count(event, IgnoreReason.STRANGER)
        return []

    def _on_parent_message(self, message: Message, now_s: float) -> list[Effect]:
        """Process a message that the parent sent over the edge."""
        link, replication = self.link, self.replication
        if isinstance(message, Data):
            link.on_data(message)
        if isinstance(message, Commit):
            self.fit.note_pace(message.slowest)
        match message:  # what comes most comes first
            case Commit() if link.stage is ATTACHED:
                return replication.on_commit(message, now_s)
            case State():
                return self._on_state(message, now_s)
            case AttachReply():
                return self._joining.on_attach_reply(message, now_s)
            case _ if link.stage is not ATTACHED and isinstance(message, AFTER_REPLY):
                self.ignored.count(message, IgnoreReason.EARLY)  # it overtook the answer
            case MergedRange():
                return replication.on_merged(message, now_s)
            case Chunk():
                return replication.on_chunk(message, now_s)
            case OptimizerChunk():
                assert link.parent is not None
                return self.transfers.on_chunk(message, link.parent, now_s)
            case ResendRequest():
                return self.relaying.on_resend_request(message, now_s)
            case SnapshotRequired():
                return replication.on_snapshot_required(message, now_s)
            case _:
                self.ignored.count(message, IgnoreReason.WRONG_WAY)
        return []

    def _on_state(self, state: State, now_s: float) -> list[Effect]:
        """Apply the acknowledgements in a state; store the state unless it is older.

        If the state lists this node's id as closed, request fresh streams, to join again.
        """
        fit, link, known = self.fit, self.link, self.fit.state
        if self.subtree.statuses.on_ack(state.stamp):
            self.report_flag.set()
        link.on_state(state, now_s)
        if self.membership.node in state.closed:
            return [ev.ReopenStreams()]  # the master will answer whether this process may return
        effects = link.send_queued(now_s)
        if not fit.accept_state(state, now_s):
            self.ignored.count(state, IgnoreReason.LATE)
            return effects
        if known is None or state.beat > known.beat:
            link.reset_patience()
        self.replication.restart_wait_if_current(state, now_s)
        if link.parent != MASTER and not state.head:
            link.reset_answer_timer(now_s)  # a relay may have no replica yet
        if self.children.by_node and (
            known is None or _relayed_part(state) != _relayed_part(known)
        ):
            self.children.announce_state()
        return effects

    def _on_tick(self, now_s: float) -> list[Effect]:
        """Run all periodic work: deadlines, children, reports, requests, giving up a dead edge."""
        link = self.link
        self._deadlines.shift_after_pause(now_s)
        if (end := self._deadlines.timeout_directive(now_s)) is not None:
            self.task.end(end)
        if self.task.stage is ENDED or link.stage is CLOSED:
            return []
        effects = self.relaying.tick(self.fit.state, now_s)
        if self.fit.done:
            effects += self._leave_if_done(now_s)
        if self.transfers.fetch is not None:
            effects += self.transfers.continue_fetch(now_s)
        if self.fit.farewell is DISMISSED:
            return effects
        silent = link.is_silent(now_s)
        stalled_since_s = self.replication.stalled_since_s(self.fit.state)
        if silent or link.is_starved(self.fit, stalled_since_s, now_s):  # time for fresh streams
            link.give_up(now_s, silent=silent)
            return [*effects, ev.ReopenStreams()]
        if link.stage is not ATTACHED:
            return effects + self._joining.retry_if_due(now_s)
        if self.replication.fetch is not None:
            effects += self.replication.continue_fetch(now_s)
        if link.waiting:
            effects += link.send_queued(now_s)
        if self.in_flight.is_overdue(now_s):
            effects += link.resend_overdue(now_s)
        return effects + self.reporting.report_if_due(now_s)

    def _leave_if_done(self, now_s: float) -> list[Effect]:
        """Send the parent a leave notice once the fit is done and no child depends on this node."""
        audited, needed = self.trainer.audit is not None, bool(self.children.by_node)
        leaves = self.fit.begin_farewell_if_due(now_s, audited=audited, needed=needed)
        if not leaves or self.link.parent is None:
            return []
        me, reason = self.membership.id, TaskEnding.DONE.value
        return [self.link.send(LeaveNotice(node=me, reason=reason, checkpoint=None))]

    def set_counters(self, counters: WorkerCounters) -> None:
        """Set the worker's cumulative counters, which the next report contains.

        The node's own counters are added, among them its newest slow link to a child.
        """
        slow_links, node = self.children.slow_links, counters.node or NodeCounters()
        slow, ignored = (slow_links[-1] if slow_links else None), self.ignored.total
        node = replace(node, round_s=self.in_flight.round_s, ignored=ignored, slow_link=slow)
        self.trainer.set_counters(to_wire(replace(counters, node=node)))


def _relayed_part(state: State) -> State:
    """Return the state with 0 in each field whose change need not be relayed at once."""
    return msgspec.structs.replace(
        state,
        head=0,
        minibatches=0,
        wait_ms=0,
        stamp=0,
        sent=0,
        bytes_received=0,
        bytes_forwarded=0,
    )
