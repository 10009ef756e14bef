"""A worker's machine: join, catch up, publish, apply in commit order, come back, drain.

Its trainer stands beside it: it reads ``command`` at each batch boundary and says what it did
through events. The machine owns no replica; ``Deliver`` and ``Install`` change the one that the
trainer owns, in the order in which they come.
"""

from __future__ import annotations

from sparkstrom.base.identity import MASTER, Position
from sparkstrom.codec.messages import (
    Activity,
    Again,
    AuditAnswer,
    Behind,
    Chunk,
    Closed,
    Committed,
    Failed,
    Final,
    Leaving,
    Message,
    Phase,
    Refused,
    Release,
    State,
    Stats,
    Update,
    Welcome,
)
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.events import Command, Effect, Order, Send
from sparkstrom.protocol.following import (
    ask_if_hungry,
    catch_up,
    on_behind,
    on_chunk,
    on_committed,
    send_all,
    send_overdue,
)
from sparkstrom.protocol.joining import ask_to_join, on_closed, on_opened, on_refused, on_welcome
from sparkstrom.protocol.orders import order
from sparkstrom.protocol.reporting import report_if_due
from sparkstrom.protocol.standing import Identity, NodeLimits, Standing
from sparkstrom.protocol.uplink import Uplink
from sparkstrom.protocol.waiting import forget_sleep, is_edge_dead, waited_too_long

__all__ = ["Identity", "Node", "NodeLimits"]


class Node:
    """One worker. ``step(event, now_s)`` returns the effects; ``command`` is for its trainer."""

    def __init__(self, identity: Identity, limits: NodeLimits, now_s: float) -> None:
        self.standing = Standing(identity, limits, Uplink(limits.window_bytes), now_s)
        self.command = Command(Order.WAIT, "joining")

    @property
    def node(self) -> int:
        """Its present id; -1 before the first welcome."""
        return self.standing.node

    # -- events ----------------------------------------------------------------------------------

    def step(self, event: ev.Event, now_s: float) -> list[Effect]:
        """React, then decide what the trainer is to do."""
        effects = self._react(event, now_s)
        leaving = self._ended or self.command.order is Order.RELEASE
        if not leaving and self.standing.failed is None:
            self.command = order(self.standing)
        return effects

    @property
    def _ended(self) -> bool:
        return self.command.order in (Order.END, Order.FAIL)

    def _end(self, command: Command | None) -> None:
        """The task is over, or about to leave; how it ended first stays."""
        if command is not None and not self._ended:
            self.command = command

    def _react(self, event: ev.Event, now_s: float) -> list[Effect]:
        me = self.standing
        match event:
            case ev.Received(message=message):
                me.heard_s = me.edge_heard_s = now_s
                me.unanswered = 0
                return self._on_message(message, now_s)
            case ev.Tick():
                return self._on_tick(now_s)
            case ev.Opened(address=address):
                return on_opened(me, address, now_s)
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
                if not me.has_replica and me.state is not None:
                    me.keep_pace(me.state.slowest)
                me.installing, me.paused, me.has_replica = False, False, True
                me.activity_s = now_s
            case ev.Drained():
                me.final = Final(me.uplink.last_seq)
                return [Send(MASTER, me.final)]
            case ev.Hashed(commit=commit, digest=digest, kept=kept):
                me.audit = AuditAnswer(commit, digest, kept)
                return [Send(MASTER, me.audit)]
            case ev.Released(kept=kept):
                me.leaving, me.leaving_s = Leaving("released", kept), now_s
                return [Send(MASTER, me.leaving)]
            case ev.TrainerFailed(reason=reason, trace=trace):
                me.failed, me.failed_s = Failed(reason=reason, trace=trace), now_s
                return [Send(MASTER, me.failed)]
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
        return [Send(MASTER, update)] if me.joined else []

    # -- messages --------------------------------------------------------------------------------

    def _on_message(self, message: Message, now_s: float) -> list[Effect]:
        me = self.standing
        match message:
            case Welcome():
                return on_welcome(me, message, now_s)
            case Refused():
                self._end(on_refused(me, message))
            case Closed():
                return self._on_closed(message)
            case _ if not me.joined:
                pass  # of an older edge, or overtaking the welcome: it will come again
            case Committed():
                return on_committed(me, message, now_s)
            case Chunk():
                return on_chunk(me, message, now_s)
            case State():
                return self._on_state(message, now_s)
            case Again():
                return send_all(me, now_s)
            case Behind():
                return on_behind(me, message, now_s)
            case Release(reason=reason):
                self._end(Command(Order.RELEASE, reason))
            case _:
                pass  # a message that only masters take
        return []

    def _on_closed(self, closed: Closed) -> list[Effect]:
        outcome = on_closed(self.standing, closed)
        if isinstance(outcome, Command):
            self._end(outcome)
            return []
        return outcome

    def _on_state(self, state: State, now_s: float) -> list[Effect]:
        """Phases only go forward: a state that was overtaken by a newer one is history."""
        me = self.standing
        if me.state is not None and (state.phase, state.head) < (me.state.phase, me.state.head):
            return []
        if not me.behind:
            me.got_s = now_s
        me.state = state
        done = state.phase is Phase.DONE and me.audit is not None
        return [Send(MASTER, Leaving("done", None))] if done else []

    # -- time ------------------------------------------------------------------------------------

    def _on_tick(self, now_s: float) -> list[Effect]:
        me = self.standing
        forget_sleep(me, now_s)
        self._end(waited_too_long(me, now_s))
        if self._ended:
            return []
        if me.address is None:
            return []
        if is_edge_dead(me, now_s):
            me.joined, me.edge_heard_s = False, now_s
            me.unanswered += 1
            return [ev.Reopen()]
        if not me.joined:
            return ask_to_join(me, now_s) if now_s >= me.join_due_s else []
        return [
            *catch_up(me, now_s),
            *ask_if_hungry(me, now_s),
            *send_overdue(me, now_s),
            *report_if_due(me, now_s),
        ]

    def stats(self, values: dict[str, float]) -> list[Effect]:
        """Report counters to the master; best effort, the next ones are cumulative."""
        return [Send(MASTER, Stats(values))] if self.standing.joined else []
