"""The master's machine: admits nodes, numbers updates, feeds them down, ends the fit.

It is the root of the tree and the one authority on membership, order and phase. It holds a
replica, which ``Deliver`` changes, and does not train.
"""

from __future__ import annotations

import math

from sparkstrom.base.identity import MASTER, Endpoint, NodeId, Seq
from sparkstrom.codec.messages import (
    AskAfter,
    AskChunk,
    AskUpdater,
    Attach,
    Closed,
    Failed,
    Heartbeat,
    Here,
    Join,
    Leaving,
    Message,
    Phase,
    Says,
    Silent,
    Update,
    UpdaterChunk,
)
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.child import Child
from sparkstrom.protocol.common.endings import Ending
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.common.ignored import Reason
from sparkstrom.protocol.common.stages import PROBE
from sparkstrom.protocol.master.master_parts import MasterParts
from sparkstrom.protocol.master.members import Member, answer

SCAN_S_PER_NODE = 20e-6  # looking at everybody takes its time: not more often than this allows
SCAN_ALWAYS_NODES = 64  # below that, it takes none


class Master(MasterParts):
    """The driver's node. ``step(event, now_s)`` returns the effects."""

    aborted = False
    _scan_due_s = -math.inf  # at once

    def step(self, event: ev.Event, now_s: float) -> list[Effect]:
        """React, then go on to the next phase where it is time."""
        if self.aborted:
            return self._after_abort(event)
        effects = self._react(event, now_s)
        if now_s >= self._scan_due_s:
            nodes = len(self.members.live)
            self._scan_due_s = now_s
            if nodes > SCAN_ALWAYS_NODES:
                self._scan_due_s += nodes * SCAN_S_PER_NODE
            effects += self._move_phase(now_s)
        self.aborted = any(isinstance(effect, ev.Abort) for effect in effects)
        if self.aborted:
            effects += [self._farewell(member) for member in self.members.live.values()]
        return effects

    def _react(self, event: ev.Event, now_s: float) -> list[Effect]:
        children = self.children
        match event:
            case ev.Received(sender=sender, message=message):
                child = None if sender is None else children.by_node.get(sender)
                if child is None:
                    return self._on_direct(message, now_s)
                self.leases.renew(child.node, now_s)
                return self._on_child(child, message, now_s)
            case ev.Arriving(sender=sender, bytes=size):
                if (child := children.by_node.get(sender)) is not None:
                    children.arriving(child, size)
                    self.copies.arriving(now_s)
            case ev.Tick():
                return self._on_tick(now_s)
            case ev.GivenUp(reason=reason):
                return [ev.Abort(reason)]
            case ev.StopRequested(reason=reason):
                self.phases.stop(reason)
            case ev.Moved(host=host, port=port):
                return self.placement.reopen_all(Endpoint(host, port), now_s)
            case ev.Hashed(digest=digest):
                self.phases.hashed(digest)
            case ev.CopyUpdater():
                return self.copies.begin(event, now_s)
            case _:
                raise AssertionError(f"no rule for {event}")
        return []

    # -- what nodes say to the master itself -----------------------------------------------------

    def _on_direct(self, message: Message, now_s: float) -> list[Effect]:
        live = self.members.live
        if isinstance(message, Join):
            if self.members.of(message) in live and self.phases.phase is Phase.DONE:
                return [answer(message, self.broadcast.state)]
            return self.admission.on_join(message, now_s)
        if isinstance(message, Says):  # whoever has the key may, a member or not
            return [ev.Spoken(message)]
        node: NodeId | None = getattr(message, "node", None)
        member = None if node is None else live.get(node)
        match message:
            case Failed(node=None) if self.phases.phase is not Phase.DONE:
                where = (message.host, message.partition)
                return [ev.Abort(message.reason, message.trace, *where, phase=message.phase)]
            case _ if member is None:
                self.ignored.count(message, Reason.STRANGER)
                return []
        match message:
            case Silent():
                return self.placement.on_silent(message, now_s)
            case Here():
                self.placement.is_here(member, now_s)
            case Failed():
                return self._on_failed(member, message)
            case Leaving():
                return self._on_leaving(member, message, now_s)
            case _:
                self.ignored.count(message, Reason.WRONG_WAY)
        return []

    def _on_leaving(self, member: Member, leaving: Leaving, now_s: float) -> list[Effect]:
        """A released one stays until it knows that what it left behind is known."""
        if member.releasing is None:
            self.ignored.count(leaving, Reason.EARLY)
            return []
        self.checkpoints.keep(member.join.executor, member.node, leaving.checkpoint)
        effects = self.closing.close(member.node, leaving.reason, now_s, released=True)
        self.notices.is_known(member.node)
        return [*effects, answer(member.join, farewell(member, leaving.reason))]

    def _on_failed(self, member: Member, failed: Failed) -> list[Effect]:
        """One failure ends the fit, unless the fit is done already."""
        if self.phases.phase is Phase.DONE:
            return [self._farewell(member)]
        where = (member.join.host, member.join.partition)
        return [ev.Abort(failed.reason, failed.trace, *where, phase=failed.phase)]

    def _after_abort(self, event: ev.Event) -> list[Effect]:
        """Nothing counts any more; whoever still speaks is told so.

        Spark does not end the tasks of a stage that it is about to repeat.
        """
        live = self.members.live
        match event:
            case ev.Received(sender=sender, message=Heartbeat(news=news)):
                speakers = {sender, *(status.node for status in news)}
            case ev.Received(sender=sender, message=Join() as join):
                speakers = {sender, self.members.of(join)}
            case ev.Received(sender=sender, message=message):
                speakers = {sender, getattr(message, "node", None)}
            case _:
                return []
        return [self._farewell(live[node]) for node in sorted(live.keys() & speakers)]

    def _farewell(self, member: Member) -> Effect:
        return answer(member.join, farewell(member, Ending.FIT_FAILED.value))

    # -- what comes up from the children ---------------------------------------------------------

    def _on_child(self, child: Child, message: Message, now_s: float) -> list[Effect]:
        children = self.children
        match message:
            case Update():
                return self.order.on_update(child, message, now_s)
            case Heartbeat():
                effects: list[Effect] = []
                for status in message.news:
                    effects += self.statuses.on_status(status, now_s)
                if message.received > child.received:  # slow links carry something, too
                    self.phases.progressed(now_s)
                return effects + children.on_report(child, message, now_s)
            case Attach():
                child.state_due = True
                effects = children.on_attach(child, message, now_s)
                if child.stage is not PROBE and child.node in self.members.live:
                    self.placement.confirm(self.members.live[child.node], child.edge)
                return effects
            case AskAfter(commit=commit) if commit <= self.sequencer.head:
                return children.on_ask_after(child, commit, now_s)
            case AskChunk(index=index) if index < self.chunks:
                return children.on_ask_chunk(child, index, now_s)
            case AskUpdater():
                return self.sources.on_ask(message)
            case UpdaterChunk(asker=asker) if asker == MASTER:
                child.arriving = 0
                return self.copies.on_chunk(message, now_s)
            case UpdaterChunk(asker=asker) if asker in self.placement.tree:
                child.arriving = 0
                return [ev.Send(self.placement.tree.path(asker)[0], message)]
            case Leaving():
                return children.disown(child.node)
            case AskAfter() | AskChunk():
                self.ignored.count(message, Reason.EARLY)  # there is no such commit, or chunk
            case UpdaterChunk():
                self.ignored.count(message, Reason.UNSERVED)
            case _:
                self.ignored.count(message, Reason.WRONG_WAY)
        return []

    # -- time ------------------------------------------------------------------------------------

    def _on_tick(self, now_s: float) -> list[Effect]:
        children, placement = self.children, self.placement
        done = self.phases.phase is Phase.DONE
        effects = [] if done else self.closing.tick(now_s)
        if now_s >= self._scan_due_s:
            self.broadcast.look_around()
            effects += self.vacancies.look(now_s)
        self.broadcast.beat(now_s)
        if not done:
            effects += placement.order_all(now_s) + placement.ask_again(now_s)
            effects += self.notices.say_again(now_s) + self.copies.ask_on(now_s)
        effects += children.tick(self.broadcast.state, now_s) + self.vacancies.ask_again(now_s)
        found, children.narrow = children.narrow, []
        return effects + self.statuses.report_slow(found)

    def _move_phase(self, now_s: float) -> list[Effect]:
        before, last = self.phases.phase, self.limits.last_copies
        effects = self.phases.move(now_s)
        if self.phases.phase is not before:
            self.broadcast.look_around()  # who only measures hears of the last epoch by the audit
        if last is not None and self.phases.phase is Phase.DRAINING is not before:
            self.copies.begin_last(last, now_s)
        for node, reason in self.phases.overdue(now_s):
            effects += self.closing.close(node, reason, now_s)
        return effects


def farewell(member: Member, reason: str) -> Closed:
    """To a node that failed or leaves, and may not know its id: it was heard, and may end."""
    join, node = member.join, member.node
    return Closed(
        token=join.token, count=join.count, node=node, seq=Seq(0), reason=reason, free=False
    )
