"""Join a fit: get an id and a place from the master, and rejoin if the master closes the id.

The node asks the master for a place; the answer names an id, a parent and an edge, which is the
connection to that parent. Over the edge the node reports how current its replica is, and the parent
continues from there. A node that the master moves gets a new place without asking.

A process whose id is closed (``protocol.common.stages``, Ids) rejoins under a new id, or ends its
task.
"""

from __future__ import annotations

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import Attach, AttachReply, IdClosed, JoinRefusal, Welcome
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import (
    Command,
    Directive,
    Effect,
    IgnoredMessages,
    IgnoreReason,
    TaskEnding,
)
from sparkstrom.protocol.common.stages import ATTACHING
from sparkstrom.protocol.worker.heartbeats import Heartbeats
from sparkstrom.protocol.worker.identity import Membership
from sparkstrom.protocol.worker.node_state import FitView, Subtree, TaskEnd, TrainerView
from sparkstrom.protocol.worker.parent_link import (
    ATTACH_RETRY_S,
    JOIN_RETRY_S,
    InFlight,
    ParentLink,
)
from sparkstrom.protocol.worker.replication import Replication


class Joining:
    """The steps of joining and attaching, which change several parts of a node at once."""

    def __init__(
        self,
        *,
        membership: Membership,
        link: ParentLink,
        replication: Replication,
        in_flight: InFlight,
        trainer: TrainerView,
        fit: FitView,
        task: TaskEnd,
        subtree: Subtree,
        reporting: Heartbeats,
        ignored: IgnoredMessages,
    ) -> None:
        self._membership, self._link, self._replication = membership, link, replication
        self._in_flight, self._trainer, self._fit, self._task = in_flight, trainer, fit, task
        self._subtree, self._reporting, self._ignored = subtree, reporting, ignored

    def on_streams_opened(self, opened: ev.StreamsOpened, now_s: float) -> list[Effect]:
        """Ask the master for an edge to the fresh streams on which the node now listens."""
        effects = self._link.close_edge()
        if opened.alone:
            effects += self._subtree.drop_all()
        self._membership.set_address(opened.address, alone=opened.alone)
        self._link.on_join_requested(now_s)
        return effects + self._request_place(now_s)

    def retry_if_due(self, now_s: float) -> list[Effect]:
        """Repeat the join or the attach message, and direct messages that are not confirmed."""
        if not self._link.is_retry_due(now_s):
            return []
        effects: list[Effect] = [ev.SendDirect(word) for word in self._task.unconfirmed_messages]
        ask = self._request_place if self._link.parent is None else self._request_attach
        return [*effects, *ask(now_s)]

    def _request_place(self, now_s: float) -> list[Effect]:
        """Send a join message to the master, and schedule its repetition."""
        self._link.schedule_retry(JOIN_RETRY_S, now_s)
        if self._membership.node is None and self._task.unconfirmed_messages:
            return []  # the worker could not read its rows, so the join would state wrong ones
        return [ev.SendDirect(self._membership.make_join())]

    def on_welcome(self, welcome: Welcome, now_s: float) -> list[Effect]:
        """Take the place that the master assigns, and attach to the parent named in the welcome.

        Ignore a welcome for another process or an outdated request.
        """
        me, link = self._membership, self._link
        reason = me.mismatch_reason(welcome)
        if reason is None and (welcome.request != me.request or welcome.edge <= link.edge):
            reason = IgnoreReason.LATE
        if reason is not None or me.address is None:
            self._ignored.count(welcome, reason or IgnoreReason.EARLY)
            return []
        effects = self._subtree.drop(welcome.parent)
        effects += link.open_edge(welcome, me.address, now_s)
        self._fit.on_new_edge(now_s)
        me.alone = False
        if welcome.node != me.node:
            effects += self._take_id(welcome, now_s)
        self._replication.chunks = welcome.chunks
        return effects + self._request_attach(now_s)

    def _take_id(self, welcome: Welcome, now_s: float) -> list[Effect]:
        """Take a new id: renumber the uncommitted updates, and set where training starts."""
        me, trainer = self._membership, self._trainer
        returned = self._replication.has_begun
        self._reporting.on_new_id(me.node)
        closed = me.take_id(welcome.node, welcome.closed)
        self._in_flight.renumber(closed, me.id, now_s)
        trainer.renumber_final(self._in_flight.last_seq)
        if not returned:
            trainer.start_from(Position(welcome.epoch, welcome.batch), welcome.steps)
        trainer.credit_head_start(welcome.steps)
        return [
            ev.IdAssigned(
                me.id,
                welcome.epoch,
                welcome.batch,
                welcome.steps,
                tuple(welcome.grants),
                returned,
            )
        ]

    def _request_attach(self, now_s: float) -> list[Effect]:
        """Send the parent an attach message, which states how current this node's replica is."""
        self._link.schedule_retry(ATTACH_RETRY_S, now_s)
        attach = Attach(
            have=self._replication.received,
            whole=self._replication.needs_no_snapshot,
            catching=self._replication.fetch is not None,
            ids=list(self._membership.ids),
        )
        return [self._link.send(attach)]

    def on_attach_reply(self, attached: AttachReply, now_s: float) -> list[Effect]:
        """Continue over the new edge, and send again everything that the old edge may have lost.

        If the parent requires it, begin to fetch a snapshot first. Ignore a repeated reply.
        """
        if self._link.stage is not ATTACHING:
            self._ignored.count(attached, IgnoreReason.LATE)
            return []
        self._link.on_attached(now_s)
        self._subtree.statuses.resend_all()
        replication = self._replication
        if attached.snapshot:
            effects = replication.begin_fetch(attached.base, attached.last, now_s)
        else:
            effects = replication.follow(now_s)
        # Data, which have a stream of their own, may have overtaken this answer; they were dropped.
        if self._link.bytes_received:
            effects = replication.request_commits_now(now_s) + effects
        effects += self._link.resend_on_new_edge(now_s)
        effects += self._subtree.request_resend_from_all()
        return effects + self._reporting.report(now_s)

    def on_join_refusal(self, refused: JoinRefusal) -> None:
        """End the task if the refusal answers this node's join; a fatal refusal fails the task."""
        if (reason := self._membership.mismatch_reason(refused)) is not None:
            self._ignored.count(refused, reason)
            return
        order = Command.FAIL if refused.fatal else Command.END
        self._task.end(Directive(order, refused.reason, cause=TaskEnding.from_text(refused.reason)))

    def on_id_closed(self, closed: IdClosed) -> list[Effect]:
        """Join again under a new id, or end the task if that is impossible.

        The notice may also confirm that the worker failed or left, which ends its task.
        """
        me = self._membership
        if closed.node != me.node and (reason := me.mismatch_reason(closed)) is not None:
            self._ignored.count(closed, reason)
            return []
        if me.is_closed(closed.node):
            self._ignored.count(closed, IgnoreReason.LATE)
            return []
        if (end := self._task.directive_after_confirmation()) is not None:
            self._task.end(end)
            return []
        if not closed.free:
            self._task.end(
                Directive(Command.FAIL, closed.reason, cause=TaskEnding.from_text(closed.reason))
            )
            return []
        me.close(closed.node, closed.seq)
        return [*self._subtree.drop_all(), ev.ReopenStreams()]
