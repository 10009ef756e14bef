"""Joining: how a node gets its id and its place, and comes back after its id was closed.

It asks the master for a place; the answer is an id, a parent and an edge to it.
Over that edge the node says what it holds, and the parent goes on from there. Being moved is the
same without the request.
"""

from __future__ import annotations

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import Attach, Attached, Closed, Refused, Welcome
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.endings import Ending
from sparkstrom.protocol.common.events import Directive, Effect, Order
from sparkstrom.protocol.common.ignored import Ignored, Reason
from sparkstrom.protocol.common.stages import ATTACHING
from sparkstrom.protocol.worker.fit_view import FitView
from sparkstrom.protocol.worker.heartbeats import Heartbeats
from sparkstrom.protocol.worker.in_flight import InFlight
from sparkstrom.protocol.worker.membership import Membership
from sparkstrom.protocol.worker.parent_link import ATTACH_RETRY_S, JOIN_RETRY_S, ParentLink
from sparkstrom.protocol.worker.replication import Replication
from sparkstrom.protocol.worker.subtree import Subtree
from sparkstrom.protocol.worker.task_end import TaskEnd
from sparkstrom.protocol.worker.trainer_view import TrainerView


class Joining:
    """The steps in which several parts of a node move together."""

    def __init__(
        self,
        *,
        membership: Membership,
        link: ParentLink,
        replication: Replication,
        own: InFlight,
        trainer: TrainerView,
        fit: FitView,
        task: TaskEnd,
        subtree: Subtree,
        reporting: Heartbeats,
        ignored: Ignored,
    ) -> None:
        self._membership, self._link, self._replication = membership, link, replication
        self._own, self._trainer, self._fit, self._task = own, trainer, fit, task
        self._subtree, self._reporting, self._ignored = subtree, reporting, ignored

    def on_opened(self, opened: ev.Opened, now_s: float) -> list[Effect]:
        """The node listens on fresh streams: ask for an edge there."""
        effects = self._link.leave()
        if opened.alone:
            effects += self._subtree.drop_all()
        self._membership.listens_at(opened.address, alone=opened.alone)
        self._link.on_request_for_place(now_s)
        return effects + self._request_place(now_s)

    def ask_if_due(self, now_s: float) -> list[Effect]:
        """For a place, or for the parent's answer; the last words go to the master meanwhile."""
        if not self._link.asks(now_s):
            return []
        effects: list[Effect] = [ev.Tell(word) for word in self._task.last_words]
        ask = self._request_place if self._link.parent is None else self._ask_to_attach
        return [*effects, *ask(now_s)]

    def _request_place(self, now_s: float) -> list[Effect]:
        self._link.on_request(JOIN_RETRY_S, now_s)
        if self._membership.node is None and self._task.last_words:
            return []  # it could not read its rows, and would join with others than it should have
        return [ev.Tell(self._membership.join())]

    def on_welcome(self, welcome: Welcome, now_s: float) -> list[Effect]:
        """Take the place."""
        me, link = self._membership, self._link
        reason = me.is_not_for(welcome)
        if reason is None and (welcome.request != me.request or welcome.edge <= link.edge):
            reason = Reason.LATE
        if reason is not None or me.address is None:
            self._ignored.count(welcome, reason or Reason.EARLY)
            return []
        effects = self._subtree.drop(welcome.parent)
        effects += link.take_place(welcome, me.address, now_s)
        self._fit.begins_anew(now_s)
        me.alone = False
        if welcome.node != me.node:
            effects += self._take_id(welcome, now_s)
        self._replication.chunks = welcome.chunks
        return effects + self._ask_to_attach(now_s)

    def _take_id(self, welcome: Welcome, now_s: float) -> list[Effect]:
        me, trainer = self._membership, self._trainer
        returned = self._replication.has_begun
        self._reporting.goes_by_another_id(me.node)
        closed = me.take_id(welcome.node, welcome.closed)
        self._own.rekey(closed, me.id, now_s)
        trainer.rekeyed(self._own.last_seq)
        if not returned:
            trainer.begins_at(Position(welcome.epoch, welcome.batch), welcome.steps)
        trainer.keep_pace(welcome.steps)
        return [
            ev.Admitted(
                me.id,
                welcome.epoch,
                welcome.batch,
                welcome.steps,
                tuple(welcome.grants),
                returned,
            )
        ]

    def _ask_to_attach(self, now_s: float) -> list[Effect]:
        """Tell the parent what this node holds."""
        self._link.on_request(ATTACH_RETRY_S, now_s)
        attach = Attach(
            have=self._replication.received,
            whole=self._replication.claims_whole,
            catching=self._replication.is_fetching,
            ids=list(self._membership.ids),
        )
        return [self._link.send(attach)]

    def on_attached(self, attached: Attached, now_s: float) -> list[Effect]:
        """The parent goes on from here; whatever may have been lost before goes up again."""
        if self._link.stage is not ATTACHING:
            self._ignored.count(attached, Reason.LATE)
            return []
        self._link.answered(now_s)
        self._reporting.resend_all()
        replication = self._replication
        if attached.snapshot:
            effects = replication.begin_fetch(attached.base, attached.last, now_s)
        else:
            effects = replication.follow(now_s)
        if (
            self._link.bytes_received
        ):  # data, on a stream of its own, overtook this answer and was dropped
            effects = replication.ask_at_once(now_s) + effects
        effects += self._link.send_anew(now_s)
        effects += self._subtree.ask_all_again()
        return effects + self._reporting.report(now_s)

    def on_refused(self, refused: Refused) -> None:
        """The task ends, if the refusal is meant for this join."""
        if (reason := self._membership.is_not_for(refused)) is not None:
            self._ignored.count(refused, reason)
            return
        order = Order.FAIL if refused.fatal else Order.END
        self._task.end(Directive(order, refused.reason, why=Ending.of(refused.reason)))

    def on_closed(self, closed: Closed) -> list[Effect]:
        """The id is gone: come back under another one, or the task ends."""
        me = self._membership
        if closed.node != me.node and (reason := me.is_not_for(closed)) is not None:
            self._ignored.count(closed, reason)
            return []
        if me.is_closed(closed.node):
            self._ignored.count(closed, Reason.LATE)
            return []
        if (end := self._task.on_refusal()) is not None:
            self._task.end(end)
            return []
        if not closed.free:
            self._task.end(Directive(Order.FAIL, closed.reason, why=Ending.of(closed.reason)))
            return []
        me.close(closed.node, closed.seq)
        return [*self._subtree.drop_all(), ev.Reopen()]
