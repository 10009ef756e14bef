"""What a node knows about the fit, its own task, its trainer and the nodes below it.

The trainer is the thread that trains. A directive is the node's current instruction to the trainer.
A status is a node's report about itself, which travels up the tree to the master.

Each class holds one part of this knowledge:

    FitView                the newest state of the fit
    TaskEnd                how the node's own task ends
    TrainerView            the progress and activity of the node's trainer
    Subtree, StatusTable   the newest statuses of the nodes below it in the tree
    DirtyFlag              whether the node should report changes to its parent
"""

from __future__ import annotations

import msgspec

from sparkstrom.base.identity import EdgeNo, NodeId, Position, Seq
from sparkstrom.codec.messages import (
    Activity,
    AuditAnswer,
    Direct,
    LeaveNotice,
    Phase,
    ResendRequest,
    State,
    Status,
    TrainingFailure,
)
from sparkstrom.protocol.common.children import Child, Children
from sparkstrom.protocol.common.events_and_effects import (
    Command,
    Directive,
    Effect,
    Send,
    TaskEnding,
    TimeoutReason,
)
from sparkstrom.protocol.common.process_pause import ProcessPause
from sparkstrom.protocol.common.stages import (
    DISMISSED,
    ENDED,
    INSTALLS,
    TRAINING,
    FarewellStage,
    ReplicaStage,
    Trigger,
    next_stage,
)
from sparkstrom.protocol.worker.time_limits import NodeLimits, Wait

AUDIT_COST, COUNTERS_PER_COST = 6, 2  # a plain status, of about 30 bytes, costs 1 in a report
COST_MAX = 600  # of one report, which then is well below the limit of a control stream


class StatusTable:
    """Stores the newest status of a node and of all nodes below it, and which the parent lacks.

    Each change gets a higher stamp, which the parent acknowledges. Statuses are not summed on the
    way up; a lost one is in the next report. Unchanged statuses are not repeated, so the size of a
    report depends on the number of changes and not on the size of the mesh. Counters, by far the
    largest part, are left out of a status once the parent has them.
    """

    def __init__(self) -> None:
        self._known: dict[NodeId, Status] = {}  # the newest status of this node and all below
        self._via: dict[NodeId, NodeId] = {}  # node -> child it is reached through, or itself
        self._unheard: dict[NodeId, int] = {}  # node with a pending status -> stamp, lowest first
        self._counters_unheard: set[NodeId] = set()  # those whose counters are also pending
        self._stamp = 0  # the highest stamp so far

    def update(self, status: Status, via: NodeId) -> bool:
        """Store a status that came through the node ``via``; return False if it is not newer.

        ``via`` is a child, or this node itself for its own status.
        """
        known = self._known.get(status.node)
        if known is not None and known.age >= status.age:
            if known.age == status.age:  # a node above it was moved, and it moved along
                self._via[status.node] = via
            return False
        counters = None if known is None else known.stats
        if status.stats is None and counters is not None:
            status = msgspec.structs.replace(status, stats=counters)
        elif status.stats != counters:
            self._counters_unheard.add(status.node)
        self._known[status.node], self._via[status.node] = status, via
        self._unheard.pop(status.node, None)
        self._stamp += 1
        self._unheard[status.node] = self._stamp
        return True

    def child_towards(self, node: NodeId) -> NodeId | None:
        """Return the child through which ``node`` is reached; None if there is none."""
        return self._via.get(node)

    def drop_subtree(self, child: NodeId) -> None:
        """Drop all statuses that came through this child."""
        for node in [n for n, via in self._via.items() if via == child]:
            del self._known[node], self._via[node]
            self._unheard.pop(node, None)
            self._counters_unheard.discard(node)

    def on_ack(self, stamp: int) -> bool:
        """Remove statuses up to ``stamp`` from the pending ones.

        Return True if that removed any and others are still pending.
        """
        struck = False
        while self._unheard:
            node = next(iter(self._unheard))
            if self._unheard[node] > stamp:
                return struck
            del self._unheard[node]
            self._counters_unheard.discard(node)
            struck = True
        return False

    def resend_all(self) -> None:
        """Mark every status as pending, for a new parent."""
        self._counters_unheard = set(self._known)
        self._unheard = {}
        for node in self._known:
            self._stamp += 1
            self._unheard[node] = self._stamp

    @property
    def has_pending(self) -> bool:
        """Return whether there are statuses that the parent lacks."""
        return bool(self._unheard)

    def next_report(self) -> tuple[int, list[Status]]:
        """Return (stamp, statuses) of the next report: those that have been pending for longest.

        A report has as many statuses as its cost limit allows, but at least one if any is pending.
        Counters that the parent has are left out. The stamp is that of the report's newest status;
        the parent acknowledges the report by repeating the stamp.
        """
        out: list[Status] = []
        stamp, spent = self._stamp, 0
        for node, at in self._unheard.items():
            status = self._known[node]
            if node not in self._counters_unheard and status.stats is not None:
                status = msgspec.structs.replace(status, stats=None)
            price = 1 + len(status.stats or ()) // COUNTERS_PER_COST
            price += AUDIT_COST if status.audit is not None else 0
            if spent and spent + price > COST_MAX:
                break
            out.append(status)
            stamp, spent = at, spent + price
        return stamp, out


class DirtyFlag:
    """Flag that a status report is due: set by any part of the node, cleared by a report."""

    __slots__ = ("is_set", "is_urgent")

    def __init__(self) -> None:
        self.is_set = self.is_urgent = False

    def set(self) -> None:
        """Request a report with the next tick, instead of with the next lease renewal."""
        self.is_set = self.is_urgent = True

    def set_routine(self) -> None:
        """Request a report of news that is not urgent, which is gathered for a moment."""
        self.is_set = True

    def clear(self) -> None:
        """Record that a report with all changes so far is being sent."""
        self.is_set = self.is_urgent = False


class Subtree:
    """A worker's children and the newest status of every node below it.

    Removing a child also removes the statuses that came through it.
    """

    def __init__(self, children: Children, statuses: StatusTable) -> None:
        self.children, self.statuses = children, statuses

    def drop(self, node: NodeId, edge: EdgeNo | None = None) -> list[Effect]:
        """Remove a child and close its edge, unless it has a newer edge than ``edge``.

        Without ``edge``, remove it in any case. Return no effects if nothing was removed.
        """
        effects = self.children.disown(node, edge)
        if effects:
            self.statuses.drop_subtree(node)
        return effects

    def drop_all(self) -> list[Effect]:
        """Close the edges to all children; each notices the silence and joins again."""
        effects: list[Effect] = []
        for child in list(self.children.by_node):
            effects += self.drop(child)
        return effects

    def request_resend_from_all(self) -> list[Effect]:
        """Ask all nodes below to send their uncommitted updates again."""
        return [Send(child, ResendRequest(None)) for child in self.children.by_node]

    def child_towards(self, node: NodeId) -> Child | None:
        """Return the child through which ``node`` is reached, or None if it is not below."""
        via = self.statuses.child_towards(node)
        return None if via is None else self.children.by_node.get(via)


OVER = Phase.DONE
FAREWELL_S = 5.0  # longest wait until children know of the end, or the master of a failure


class FitView:
    """The newest state of the fit, and when the master was last heard from."""

    def __init__(self, limits: NodeLimits, now_s: float) -> None:
        self._limits = limits
        self.state: State | None = None  # the newest one; None: none has come
        self._pace = 0  # steps of the slowest worker, from the newest commits
        self.done = False  # its phase is DONE
        self.heard_s = now_s  # time of the last sign that the master lives
        self.contact_since_s = now_s  # since when such signs have come without a gap
        self.farewell = FarewellStage.NEEDED
        self._done_s: float | None = None  # when the fit was done and this node audited

    def on_master_heard(self, now_s: float) -> None:
        """Record a sign of the master's life; after a gap, a new contact begins."""
        if now_s - self.heard_s > self._limits.lease_s / 2:
            self.contact_since_s = now_s
        self.heard_s = now_s

    def on_new_edge(self, now_s: float) -> None:
        """Discard earlier signs of life, so that only those over the new edge count."""
        self.contact_since_s = now_s

    def accept_state(self, state: State, now_s: float) -> bool:
        """Store a state; return False if a newer one is stored already."""
        known = self.state
        if known is not None and (state.phase, state.beat) < (known.phase, known.beat):
            return False
        if known is None or state.beat > known.beat:
            self.on_master_heard(now_s)
        self.state, self.done = state, state.phase is OVER
        return True

    def note_pace(self, slowest: int) -> None:
        """Record the steps of the slowest worker, which every commit carries."""
        self._pace = max(self._pace, slowest)

    @property
    def slowest(self) -> int:
        """Return the steps of the slowest worker by the newest state or commit; 0 without any."""
        return self._pace if self.state is None else max(self._pace, self.state.slowest)

    def has_steady_contact(self, since_s: float, now_s: float) -> bool:
        """Return whether signs of the master's life have come without a gap for more than a lease.

        Only the time after ``since_s`` counts. A gap is a silence of more than half a lease.
        """
        lease_s = self._limits.lease_s
        lasting = now_s - max(since_s, self.contact_since_s) > lease_s
        return lasting and now_s - self.heard_s <= lease_s / 2

    @property
    def may_end(self) -> bool:
        """Return whether the task may end, because no node below depends on this one."""
        return self.farewell is DISMISSED

    def begin_farewell_if_due(self, now_s: float, *, audited: bool, needed: bool) -> bool:
        """Return True once, when the node should send its leave notice and may end.

        That is after the fit is done and this node was ``audited``. While ``needed`` is true, a
        child may not know of the fit's end yet; wait for it up to FAREWELL_S.
        """
        if not (self.done and audited):
            return False
        if self._done_s is None:
            self._done_s = now_s
            self.farewell = next_stage(self.farewell, Trigger.DONE)
        if self.may_end or (needed and now_s - self._done_s <= FAREWELL_S):
            return False
        self.farewell = next_stage(self.farewell, Trigger.UNNEEDED)
        return True

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadlines by a pause of the process, which does not count as waiting."""
        self.heard_s = pause.shift(self.heard_s)
        if self._done_s is not None:
            self._done_s = pause.shift(self._done_s)

    def overdue_wait(self, now_s: float, *, joined: bool) -> Wait | None:
        """Return the wait for the master if it has been silent for too long; otherwise None.

        ``joined``: whether this process has had an id; before that, ``join_s`` is the limit.
        """
        silent_s = now_s - self.heard_s
        if joined:
            if silent_s > self._limits.master_silent_s:
                return Wait(self.heard_s, self._limits.master_silent_s, TimeoutReason.MASTER)
        elif silent_s > self._limits.join_s:
            return Wait(self.heard_s, self._limits.join_s, TimeoutReason.ANSWER)
        return None


class TaskEnd:
    """How the task ends, and messages about its end that the master has not confirmed.

    ``directive`` makes the trainer end or leave; it is None before that. A directive that ends the
    task is final.
    """

    def __init__(self) -> None:
        self.stage = TRAINING
        self.directive: Directive | None = None
        self._failed: TrainingFailure | None = None  # repeated until the master confirms it
        self._failed_s = 0.0  # when training failed
        self._leaving: LeaveNotice | None = None  # likewise
        self._leaving_s = 0.0  # when the trainer left

    @property
    def ended(self) -> bool:
        """Return whether the final directive is set."""
        return self.stage is ENDED

    def end(self, directive: Directive) -> None:
        """End the task with this directive, unless it has ended already."""
        if not self.ended:
            self.directive = directive
        self.stage = next_stage(self.stage, Trigger.ENDED)

    def release(self, reason: str) -> None:
        """Make the trainer save its residual and leave, because the master needs the task slot."""
        if not self.ended:
            self.directive = Directive(Command.RELEASE, reason)
        self.stage = next_stage(self.stage, Trigger.RELEASED)

    def on_trainer_left(self, leaving: LeaveNotice, now_s: float) -> None:
        """Store the leave notice of a trainer that has saved its residual."""
        self._leaving, self._leaving_s = leaving, now_s
        self.stage = next_stage(self.stage, Trigger.LEFT)

    def on_training_failed(self, failed: TrainingFailure, now_s: float) -> None:
        """Store the report of an exception in training, or of a step that took too long."""
        self._failed, self._failed_s = failed, now_s
        self.stage = next_stage(self.stage, Trigger.FAILED)

    @property
    def unconfirmed_messages(self) -> tuple[Direct, ...]:
        """Return the messages about the end that the master has not confirmed, for repetition."""
        if self.stage is TRAINING:
            return ()
        return tuple(word for word in (self._failed, self._leaving) if word is not None)

    def directive_after_confirmation(self) -> Directive | None:
        """Return the directive that ends the task when the master has confirmed the report.

        Return None if neither a failure nor a leave was reported.
        """
        if self._failed is not None:
            return Directive(Command.FAIL, self._failed.reason, cause=TaskEnding.FAILED)
        if self._leaving is not None:
            return Directive(Command.END, self._leaving.reason, cause=TaskEnding.RELEASED)
        return None

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadlines by a pause of the process, which does not count as waiting."""
        self._failed_s = pause.shift(self._failed_s)
        self._leaving_s = pause.shift(self._leaving_s)

    def directive_if_unconfirmed_too_long(self, now_s: float) -> Directive | None:
        """Return the final directive if the master has not confirmed the report for FAREWELL_S."""
        if self._failed is not None and now_s - self._failed_s > FAREWELL_S:
            return Directive(Command.FAIL, self._failed.reason, cause=TaskEnding.FAILED)
        if self._leaving is not None and now_s - self._leaving_s > FAREWELL_S:
            return Directive(Command.END, self._leaving.reason, cause=TaskEnding.RELEASED)
        return None


STEPPING = Activity.STEPPING
ALTERNATING = {STEPPING, Activity.WAITING}  # activities between which a training worker changes


class TrainerView:
    """The node's view of its trainer: the progress and the activity that the trainer reported."""

    def __init__(self, limits: NodeLimits, report_flag: DirtyFlag, now_s: float) -> None:
        self._limits, self._report_flag = limits, report_flag
        self.position = Position(0, 0)
        self.steps = 0  # as the trainer counts them
        self.trained = False  # it has taken a step, so others may copy its optimizer state
        self._head_start = 0  # steps credited to it, so that nobody waits for steps that it missed
        self.activity = Activity.CATCHING_UP
        self._active_s = now_s  # when it last reported anything or was given a replica
        self.final: Seq | None = None  # seq of its last update; None: more may follow
        self.audit: AuditAnswer | None = None  # None: not hashed yet
        self.stats: dict[str, float] | None = None  # cumulative; None: none sampled yet

    @property
    def pace(self) -> int:
        """Return the step count plus the credited head start, for comparison with other workers."""
        return self.steps + self._head_start

    def steps_at_pace(self, pace: int) -> int:
        """Return the trainer's own step count at which it reaches ``pace``."""
        return pace - self._head_start

    def start_from(self, position: Position, steps: int) -> None:
        """Start at the partition's committed ``position``, with ``steps`` as the step count."""
        assert not self.trained, "who has trained goes on from where it is"
        self.position, self.steps = position, steps

    def credit_head_start(self, slowest: int) -> None:
        """Credit steps to a worker that joins or returns, so that it is level with the slowest."""
        self._head_start = max(self._head_start, slowest - self.steps)

    def advance(self, position: Position, steps: int, now_s: float, *, published: bool) -> None:
        """Record a training step. A ``published`` one needs no urgent report besides its update."""
        self.position, self.steps = position, steps
        self.trained, self._active_s = True, now_s
        if published:
            self._report_flag.set_routine()
        else:
            self._report_flag.set()

    def set_activity(self, activity: Activity, now_s: float) -> None:
        """Record the activity; report it at once unless it changed between waiting and stepping."""
        known, self.activity, self._active_s = self.activity, activity, now_s
        if {known, activity} <= ALTERNATING:
            self._report_flag.set_routine()
        else:
            self._report_flag.set()

    def restart_step_deadline(self, now_s: float) -> None:
        """Restart the deadline of a step, because the trainer got or installed a replica."""
        self._active_s = now_s

    def set_final(self, last_seq: Seq) -> None:
        """Record the number (seq) of the trainer's last update; it publishes nothing more."""
        self.final = last_seq
        self._report_flag.set()

    def renumber_final(self, last_seq: Seq) -> None:
        """Replace the number of the last update, as updates were renumbered under a new id."""
        if self.final is not None:
            self.final = last_seq

    def set_audit(self, answer: AuditAnswer) -> None:
        """Record the hash of the replica at the final commit."""
        self.audit = answer
        self._report_flag.set()

    def set_counters(self, stats: dict[str, float]) -> None:
        """Record cumulative counters, which go to the master."""
        self.stats = stats
        self._report_flag.set_routine()

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadlines by a pause of the process, which does not count as waiting."""
        self._active_s = pause.shift(self._active_s)

    def overdue_wait(self, now_s: float, replica: ReplicaStage, *, paused: bool) -> Wait | None:
        """Return the wait for a step or for the installation of a replica if it is overdue.

        ``replica`` is the stage of the replica; ``paused``: whether the trainer has obeyed PAUSE.
        """
        busy = replica in INSTALLS or (self.activity is STEPPING and not paused)
        if busy and now_s - self._active_s > self._limits.step_s:
            return Wait(self._active_s, self._limits.step_s, TimeoutReason.STEP)
        return None
