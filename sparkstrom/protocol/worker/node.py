"""A worker's machine: join, catch up, publish, apply in commit order, relay, come back, drain.

Its trainer stands beside it: it reads ``command`` at each batch boundary and says what it did
through events. The machine owns no replica; ``Deliver`` and ``Install`` change the one that the
trainer owns, in the order in which they come.
"""

from __future__ import annotations

import msgspec

from sparkstrom.base.identity import MASTER, Position
from sparkstrom.codec.messages import (
    Activity,
    Adopt,
    Again,
    AskUpdater,
    Attached,
    AuditAnswer,
    Behind,
    Chunk,
    Closed,
    Committed,
    Data,
    Disown,
    Failed,
    Here,
    Leaving,
    MergedRange,
    Message,
    Phase,
    Probe,
    Refused,
    Release,
    State,
    Update,
    UpdaterChunk,
    Welcome,
)
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import ENDS, Directive, Effect, Order, Send
from sparkstrom.protocol.common.send_window import weight
from sparkstrom.protocol.worker.deadlines import (
    FAREWELL_S,
    forget_sleep,
    is_silent,
    is_starved,
    waited_too_long,
)
from sparkstrom.protocol.worker.directives import order
from sparkstrom.protocol.worker.heartbeats import report_if_due
from sparkstrom.protocol.worker.in_flight import InFlight
from sparkstrom.protocol.worker.joining import (
    ask_to_attach,
    ask_to_join,
    on_attached,
    on_closed,
    on_opened,
    on_refused,
    on_welcome,
)
from sparkstrom.protocol.worker.optimizer_transfer import (
    borrow,
    borrow_if_late,
    on_ask_updater,
    on_updater,
)
from sparkstrom.protocol.worker.relaying import (
    look_after_children,
    on_adopt,
    on_again,
    on_child,
    on_disown,
)
from sparkstrom.protocol.worker.replication import (
    catch_up,
    on_behind,
    on_chunk,
    on_committed,
    on_merged,
)
from sparkstrom.protocol.worker.state import NOBODY, Identity, NodeLimits, NodeState
from sparkstrom.protocol.worker.upstream import hand_up, send_overdue, send_up

__all__ = ["Identity", "Node", "NodeLimits"]

LAST_ORDERS = (*ENDS, Order.RELEASE)  # no other order follows


class Node:
    """One worker. ``step(event, now_s)`` returns the effects; ``command`` is for its trainer."""

    def __init__(self, identity: Identity, limits: NodeLimits, now_s: float) -> None:
        self.standing = NodeState(identity, limits, InFlight(limits.window_bytes), now_s)
        self.command = Directive(Order.WAIT, "joining")

    @property
    def node(self) -> int:
        """Its present id; -1 before the first welcome."""
        return self.standing.node

    @property
    def is_brief(self) -> bool:
        """It has news that it will tell within milliseconds, and wants a Tick for it."""
        return self.standing.news or self.standing.family.is_brief

    # -- events ----------------------------------------------------------------------------------

    def step(self, event: ev.Event, now_s: float) -> list[Effect]:
        """React, then decide what the trainer is to do."""
        effects = self._react(event, now_s)
        if self.command.order not in LAST_ORDERS and self.standing.failed is None:
            self.command = order(self.standing)
        return effects

    @property
    def _ended(self) -> bool:
        return self.command.order in ENDS

    def _end(self, command: Directive | None) -> None:
        """The task is over, or about to leave; how it ended first stays."""
        if command is not None and not self._ended:
            self.command = command

    def _react(self, event: ev.Event, now_s: float) -> list[Effect]:
        match event:
            case ev.Received():
                return self._on_message(event.sender, event.message, now_s)
            case ev.Tick():
                return self._on_tick(now_s)
            case ev.Arriving(sender=sender, bytes=size):
                return self._on_arriving(sender, size, now_s)
            case ev.Opened():
                return on_opened(self.standing, event, now_s)
            case _:
                return self._on_trainer(event, now_s)

    def _on_trainer(self, event: ev.Event, now_s: float) -> list[Effect]:
        me = self.standing
        match event:
            case ev.Published():
                return self._on_published(event, now_s)
            case ev.Progressed():
                me.advance(Position(event.epoch, event.batch), event.steps, now_s)
            case ev.Busy(activity=activity):
                me.activity, me.activity_s, me.news = Activity(activity), now_s, True
            case ev.Paused(number=number):
                me.paused = number == me.pauses
            case ev.Installed():
                if not me.has_replica:
                    me.keep_pace(0 if me.state is None else me.state.slowest)
                    borrow_if_late(me, now_s)
                me.installing, me.paused, me.has_replica = False, False, True
                me.history.whole = me.catchup is None
                me.activity_s = now_s
            case ev.Applied(commit=commit):
                me.history.applied = max(me.history.applied, commit)
            case ev.Drained():
                me.final, me.news = me.uplink.last_seq, True
            case ev.Hashed(commit=commit, digest=digest, kept=kept):
                me.audit, me.news = AuditAnswer(commit, digest, kept), True
            case ev.Released(kept=kept):
                me.leaving = Leaving(node=me.node, reason="released", kept=kept)
                me.leaving_s = now_s
                return [ev.Tell(me.leaving)]
            case ev.TrainerFailed(reason=reason, trace=trace):
                who = me.identity
                me.failed = Failed(
                    node=max(0, me.node),
                    host=who.host,
                    partition=who.partition,
                    reason=reason,
                    trace=trace,
                )
                me.failed_s = now_s
                return [ev.Tell(me.failed)]
            case _:
                raise AssertionError(f"no rule for {event}")
        return []

    def _on_published(self, made: ev.Published, now_s: float) -> list[Effect]:
        me = self.standing
        me.advance(Position(made.epoch, made.batch), made.steps, now_s)
        update = Update(
            origin=me.node,
            seq=me.uplink.last_seq + 1,
            seen=made.seen,
            epoch=made.epoch,
            batch=made.batch,
            steps=me.pace,
            form=made.form,
            tau_quanta=made.tau_quanta,
            count=made.count,
            payload=made.payload,
        )
        me.uplink.add(update, now_s)
        return hand_up(me, update, None, now_s) if me.attached else []

    # -- messages --------------------------------------------------------------------------------

    def _on_message(self, sender: int, message: Message, now_s: float) -> list[Effect]:
        """Over which edge it came says what it may be."""
        me = self.standing
        if sender == MASTER:
            me.heard_s = now_s
        if self._is_by_the_edge(sender, message):
            me.edge_heard_s = now_s
            me.unanswered = 0 if sender == me.parent else me.unanswered
        child = me.family.children.get(sender)
        if child is not None:
            return on_child(me, child, message, now_s)
        if sender == MASTER and (effects := self._on_direct(message, now_s)) is not None:
            return effects
        return self._on_parent(message, now_s) if sender == me.parent else []

    def _is_by_the_edge(self, sender: int, message: Message) -> bool:
        """Does this show that the edge's control stream, or without an edge the lobby, is alive?

        What the master says directly shows nothing, nor does data, which has a stream of its own.
        """
        parent = self.standing.parent
        if parent == NOBODY:
            return sender == MASTER
        return sender == parent and isinstance(message, (State, Attached))

    def _on_direct(self, message: Message, now_s: float) -> list[Effect] | None:
        """What only the master says, whoever stands between; None for anything else."""
        me = self.standing
        match message:
            case Welcome():
                return on_welcome(me, message, now_s)
            case Adopt():
                return on_adopt(me, message, now_s)
            case Disown():
                return on_disown(me, message)
            case AskUpdater():
                return on_ask_updater(me, message, me.parent)
            case Probe(node=node) if node == me.node:
                return [ev.Tell(Here(node))]
            case Refused():
                self._end(on_refused(me, message))
            case Closed():
                return self._on_closed(message)
            case Release(reason=reason):
                self._end(Directive(Order.RELEASE, reason))
            case State(phase=Phase.DONE):
                return self._on_state(message, now_s)
            case _:
                return None
        return []

    def _on_arriving(self, sender: int, size: int, now_s: float) -> list[Effect]:
        """Part of a message: it is no news but that the stream lives, and how fast."""
        me = self.standing
        child = me.family.children.get(sender)
        if child is not None:
            me.family.arriving(child, size)
        elif sender == me.parent:
            me.arriving, me.got_s, me.news, me.starved = size, now_s, True, 0
        return []

    def _on_parent(self, message: Message, now_s: float) -> list[Effect]:
        me = self.standing
        if isinstance(message, Data):
            me.taken += weight(message, me.limits.serving.chunk_bytes)
            me.arriving, me.news, me.starved = 0, True, 0
        match message:  # what comes most comes first
            case Committed() if me.attached:
                return on_committed(me, message, now_s)
            case State():
                return self._on_state(message, now_s)
            case Attached():
                return on_attached(me, message, now_s)
            case _ if not me.attached:
                pass  # it overtook the answer to the attach: it will come again
            case MergedRange():
                return on_merged(me, message, now_s)
            case Chunk():
                return on_chunk(me, message, now_s)
            case UpdaterChunk():
                return on_updater(me, message, me.parent, now_s)
            case Again(origin=origin):
                return on_again(me, origin, now_s)
            case Behind():
                return on_behind(me, message, now_s)
            case _:
                pass  # a message that only masters take
        return []

    def _on_closed(self, closed: Closed) -> list[Effect]:
        outcome = on_closed(self.standing, closed)
        if isinstance(outcome, Directive):
            self._end(outcome)
            return []
        return outcome

    def _on_state(self, state: State, now_s: float) -> list[Effect]:
        """Phases only go forward: a state that was overtaken by a newer one is history."""
        me, known = self.standing, self.standing.state
        me.news = me.ledger.heard(state.heard) or me.news
        if me.up.told(state.taken, state.passed, now_s):
            me.uplink.moves(now_s)
            me.starved = 0
        if me.node in state.closed:
            return [ev.Reopen()]  # the master will say what that means
        if known is not None and (state.phase, state.beat) < (known.phase, known.beat):
            return []
        if known is None or state.beat > known.beat:
            if now_s - me.heard_s > me.limits.lease_s / 2:
                me.steady_s = now_s
            me.heard_s, me.unanswered = now_s, 0
        if state.sent <= me.received and me.catchup is None:
            me.got_s = now_s
        if me.parent != MASTER and not state.head:
            me.owed_s = now_s  # a relay may have no replica yet, and so no answer
        me.state = state
        if me.family.children and (known is None or _shared(state) != _shared(known)):
            me.family.tell_all()
        return []

    # -- time ------------------------------------------------------------------------------------

    def _on_tick(self, now_s: float) -> list[Effect]:
        me = self.standing
        forget_sleep(me, now_s)
        self._end(waited_too_long(me, now_s))
        if self._ended:
            return []
        if me.address is None:
            return []
        effects = look_after_children(me, now_s) + self._look_for_the_end(now_s)
        effects += borrow(me, now_s)
        if me.may_end:
            return effects
        if (silent := is_silent(me, now_s)) or is_starved(me, now_s):  # time for fresh streams
            me.attached, me.edge_heard_s = False, now_s
            me.unanswered += 1
            me.starved += not silent
            return [*effects, ev.Reopen()]
        if not me.attached:
            return effects + self._ask_for_a_place(now_s)
        return [
            *effects,
            *catch_up(me, now_s),
            *send_up(me, now_s),
            *send_overdue(me, now_s),
            *report_if_due(me, now_s),
        ]

    def _ask_for_a_place(self, now_s: float) -> list[Effect]:
        me = self.standing
        if now_s < me.ask_s:
            return []
        effects = [ev.Tell(m) for m in (me.failed, me.leaving) if m is not None]
        ask = ask_to_join if me.parent == NOBODY else ask_to_attach
        return [*effects, *ask(me, now_s)]

    def _look_for_the_end(self, now_s: float) -> list[Effect]:
        """A fit that is done ends here once all below have heard so."""
        me = self.standing
        if me.state is None or me.state.phase is not Phase.DONE or me.audit is None:
            return []
        me.done_s = now_s if me.done_s is None else me.done_s
        if me.may_end or (me.family.children and now_s - me.done_s <= FAREWELL_S):
            return []
        me.may_end = True
        return [Send(me.parent, Leaving(node=me.node, reason="done", kept=None))]

    def stats(self, values: dict[str, float]) -> None:
        """Counters for the master; they go with the next report, and are cumulative.

        With them, of the links downwards the one that was found to be too slow last.
        """
        me = self.standing
        slow = me.family.narrow[-1].counters() if me.family.narrow else {}
        me.stats, me.news = {**values, **slow, "round_s": me.uplink.round_s}, True


def _shared(state: State) -> State:
    """What of a state is the same for all who hear it, and they must hear at once."""
    return msgspec.structs.replace(
        state, head=0, minibatches=0, wait_ms=0, heard=0, sent=0, taken=0, passed=0
    )
