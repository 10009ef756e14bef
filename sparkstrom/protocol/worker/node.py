"""A worker's machine: join, catch up, publish, apply in commit order, relay, come back, drain.

Its trainer stands beside it: it reads ``command`` at each batch boundary and says what it did
through events. The machine owns no replica; ``Deliver`` and ``Install`` change the one that the
trainer owns, in the order in which they come.

Each part owns what it knows, its deadlines, and what becomes of these in a sleep; here each event
goes to the part that it concerns.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from sparkstrom.base.identity import MASTER, NodeId, Position, Seq
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
    Probe,
    Refused,
    Release,
    Says,
    State,
    Update,
    UpdaterChunk,
    Welcome,
)
from sparkstrom.observe.telemetry import NodeCounters, WorkerCounters, to_wire
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.endings import Ending
from sparkstrom.protocol.common.events import Directive, Effect, Order
from sparkstrom.protocol.common.ignored import Reason
from sparkstrom.protocol.common.stages import ATTACHED, CLOSED, DISMISSED, ENDED, TRAINING
from sparkstrom.protocol.worker.directives import DONE
from sparkstrom.protocol.worker.fit_view import OVER
from sparkstrom.protocol.worker.limits import Identity, NodeLimits
from sparkstrom.protocol.worker.parts import NodeParts

__all__ = ["Identity", "Node", "NodeLimits"]


class Node(NodeParts):
    """One worker. ``step(event, now_s)`` returns the effects; ``command`` is for its trainer."""

    def __init__(self, identity: Identity, limits: NodeLimits, now_s: float) -> None:
        super().__init__(identity, limits, now_s)
        self.command = Directive(Order.WAIT, "joining")

    @property
    def node(self) -> NodeId | None:
        """Its present id; None before the first welcome."""
        return self.membership.node

    @property
    def has_news(self) -> bool:
        """It will tell them with its next report."""
        return self.news.waits

    @property
    def is_brief(self) -> bool:
        """It has news that it will tell within milliseconds, and wants a Tick for it."""
        return self.news.waits or self.children.is_brief

    # -- events ----------------------------------------------------------------------------------

    def step(self, event: ev.Event, now_s: float) -> list[Effect]:
        """React, then decide what the trainer is to do."""
        effects = self._react(event, now_s)
        if self.task.stage is TRAINING:
            self.command = self._orders.now()
            if self.command is DONE:
                self.task.end(DONE)
        elif self.task.command is not None:
            self.command = self.task.command
        return effects

    def _react(self, event: ev.Event, now_s: float) -> list[Effect]:
        match event:
            case ev.Received(sender=sender, message=message):
                assert sender is not None, "nobody tells a worker directly but the master"
                return self._on_message(sender, message, now_s)
            case ev.Tick():
                return self._on_tick(now_s)
            case ev.Arriving(sender=sender, bytes=size):
                return self._on_arriving(event, sender, size, now_s)
            case ev.Opened():
                return self._joining.on_opened(event, now_s)
            case _:
                return self._on_trainer(event, now_s)

    def _on_trainer(self, event: ev.Event, now_s: float) -> list[Effect]:
        match event:
            case ev.Published():
                return self._on_published(event, now_s)
            case ev.Progressed():
                position = Position(event.epoch, event.batch)
                self.trainer.advance(position, event.steps, now_s)
            case ev.Busy(activity=activity):
                self.trainer.is_at(Activity(activity), now_s)
            case ev.Paused(number=number):
                self.replication.on_paused(number)
            case ev.Installed():
                if not self.replication.has_replica:
                    self.trainer.keep_pace(self.fit.slowest)
                    self.transfers.begin_if_late(now_s)
                self.replication.installed(now_s)
            case ev.Applied(commit=commit):
                self.replication.applied(commit)
            case ev.Drained():
                self.trainer.drained(self.own.last_seq)
            case ev.Hashed(commit=commit, digest=digest, checkpoint=checkpoint):
                self.trainer.hashed(AuditAnswer(commit, digest, checkpoint))
            case ev.Released(checkpoint=checkpoint):
                leaving = Leaving(
                    node=self.membership.id, reason=Ending.RELEASED.value, checkpoint=checkpoint
                )
                self.task.left(leaving, now_s)
                return [ev.Tell(leaving)]
            case ev.Said(lines=lines, skipped=skipped):
                return [ev.Tell(self._says(lines, skipped))]
            case ev.TrainerFailed():
                return self._on_failed(event, now_s)
            case _:
                raise AssertionError(f"no rule for {event}")
        return []

    def _says(self, lines: list[tuple[str, str]], skipped: int) -> Says:
        who = self.membership.identity
        return Says(host=who.host, partition=who.partition, lines=lines, skipped=skipped)

    def _on_failed(self, event: ev.TrainerFailed, now_s: float) -> list[Effect]:
        who = self.membership.identity
        failed = Failed(
            node=self.membership.node,
            host=who.host,
            partition=who.partition,
            reason=event.reason,
            trace=event.trace,
            phase=event.phase,
        )
        self.task.failed(failed, now_s)
        return [ev.Tell(failed)]

    def _on_published(self, made: ev.Published, now_s: float) -> list[Effect]:
        self.trainer.advance(Position(made.epoch, made.batch), made.steps, now_s)
        update = Update(
            origin=self.membership.id,
            seq=Seq(self.own.last_seq + 1),
            seen=made.seen,
            epoch=made.epoch,
            batch=made.batch,
            steps=self.trainer.pace,
            payload=made.payload,
        )
        self.own.add(update, now_s)
        return self.link.hand_up(update, None, now_s) if self.link.attached else []

    # -- messages --------------------------------------------------------------------------------

    def _on_message(self, sender: NodeId, message: Message, now_s: float) -> list[Effect]:
        """Over which edge it came says what it may be."""
        if sender == MASTER:
            self.fit.hear(now_s)
        self.link.hear(sender, message, now_s)
        child = self.children.by_node.get(sender)
        if child is not None:
            return self.relaying.on_child(child, message, now_s)
        if sender == MASTER and (effects := self._on_direct(message, now_s)) is not None:
            return effects
        if sender == self.link.parent:
            return self._on_parent(message, now_s)
        self.ignored.count(message, Reason.STRANGER)
        return []

    def _on_direct(self, message: Message, now_s: float) -> list[Effect] | None:
        """What only the master says, whoever stands between; None for anything else."""
        match message:
            case Welcome():
                return self._joining.on_welcome(message, now_s)
            case Adopt():
                return self.relaying.on_adopt(message, now_s)
            case Disown():
                return self.relaying.on_disown(message)
            case AskUpdater():
                return self.transfers.on_ask(message, self.link.parent)
            case Probe(node=node) if node == self.node:
                return [ev.Tell(Here(node))]
            case Probe():
                self.ignored.count(message, Reason.FOR_ANOTHER)
            case Refused():
                self._joining.on_refused(message)
            case Closed():
                return self._joining.on_closed(message)
            case Release(reason=reason):
                self.task.release(reason)
            case State() if message.phase is OVER:
                return self._on_state(message, now_s)
            case _:
                return None
        return []

    def _on_arriving(
        self, event: ev.Arriving, sender: NodeId, size: int, now_s: float
    ) -> list[Effect]:
        """Part of a message: it is no news but that the stream lives, and how fast."""
        child = self.children.by_node.get(sender)
        if child is not None:
            self.children.arriving(child, size)
        elif sender == self.link.parent:
            self.link.on_part(size)
            self.replication.got_data(now_s)
        else:
            self.ignored.count(event, Reason.STRANGER)
        return []

    def _on_parent(self, message: Message, now_s: float) -> list[Effect]:
        link, replication = self.link, self.replication
        if isinstance(message, Data):
            link.on_data(message)
        match message:  # what comes most comes first
            case Committed() if link.stage is ATTACHED:
                return replication.on_committed(message, now_s)
            case State():
                return self._on_state(message, now_s)
            case Attached():
                return self._joining.on_attached(message, now_s)
            case Committed() | MergedRange() | Chunk() | UpdaterChunk() | Again() | Behind():
                if link.stage is not ATTACHED:
                    self.ignored.count(message, Reason.EARLY)  # it overtook the answer
                    return []
                return self._on_attached_parent(message, now_s)
            case _:
                self.ignored.count(message, Reason.WRONG_WAY)
        return []

    def _on_attached_parent(
        self,
        message: Committed | MergedRange | Chunk | UpdaterChunk | Again | Behind,
        now_s: float,
    ) -> list[Effect]:
        match message:
            case MergedRange():
                return self.replication.on_merged(message, now_s)
            case Chunk():
                return self.replication.on_chunk(message, now_s)
            case UpdaterChunk():
                assert self.link.parent is not None
                return self.transfers.on_chunk(message, self.link.parent, now_s)
            case Again():
                return self.relaying.on_again(message, now_s)
            case Behind():
                return self.replication.on_behind(message, now_s)
            case Committed():
                return self.replication.on_committed(message, now_s)

    def _on_state(self, state: State, now_s: float) -> list[Effect]:
        """The newest counts, once the node has taken from it what is for its own edge."""
        fit, link, known = self.fit, self.link, self.fit.state
        if self.subtree.statuses.on_ack(state.stamp):
            self.news.add()
        link.on_state(state, now_s)
        if self.membership.node in state.closed:
            return [ev.Reopen()]  # the master will say what that means
        if not fit.take(state, now_s):
            self.ignored.count(state, Reason.LATE)
            return []
        if known is None or state.beat > known.beat:
            link.master_lives()
        self.replication.lacks_nothing(state, now_s)
        if link.parent != MASTER and not state.head:
            link.owes_nothing(now_s)  # a relay may have no replica yet
        if self.children.by_node and (known is None or _shared(state) != _shared(known)):
            self.children.announce()
        return []

    # -- time ------------------------------------------------------------------------------------

    def _on_tick(self, now_s: float) -> list[Effect]:
        link = self.link
        self._deadlines.forget_sleep(now_s)
        if (end := self._deadlines.expired(now_s)) is not None:
            self.task.end(end)
        if self.task.stage is ENDED or link.stage is CLOSED:
            return []
        effects = self.relaying.tick(self.fit.state, now_s)
        if self.fit.done:
            effects += self._look_for_the_end(now_s)
        if self.transfers.fetch is not None:
            effects += self.transfers.request_chunks(now_s)
        if self.fit.farewell is DISMISSED:
            return effects
        if (silent := link.is_silent(now_s)) or self._is_starved(now_s):  # time for fresh streams
            link.give_up(now_s, silent=silent)
            return [*effects, ev.Reopen()]
        if link.stage is not ATTACHED:
            return effects + self._joining.ask_if_due(now_s)
        if self.replication.fetch is not None:
            effects += self.replication.catch_up(now_s)
        if link.waiting:
            effects += link.send_up(now_s)
        if self.own.overdue(now_s):
            effects += link.send_overdue(now_s)
        return effects + self.reporting.report_if_due(now_s)

    def _is_starved(self, now_s: float) -> bool:
        missing_since_s = self.replication.missing_since_s(self.fit.state)
        return self.link.is_starved(self.fit, missing_since_s, now_s)

    def _look_for_the_end(self, now_s: float) -> list[Effect]:
        """A fit that is done ends here once all below have heard so."""
        audited, needed = self.trainer.audit is not None, bool(self.children.by_node)
        if not self.fit.over(now_s, audited=audited, needed=needed) or self.link.parent is None:
            return []
        return [
            self.link.send(
                Leaving(node=self.membership.id, reason=Ending.DONE.value, checkpoint=None)
            )
        ]

    def stats(self, told: WorkerCounters) -> None:
        """Counters for the master; they go with the next report, and are cumulative.

        The machine adds its own: of the links downwards, the one that was found too slow last.
        """
        narrow, node = self.children.narrow, told.node or NodeCounters()
        slow, ignored = (narrow[-1] if narrow else None), self.ignored.total
        node = replace(node, round_s=self.own.round_s, ignored=ignored, slow_link=slow)
        self.trainer.counts(to_wire(replace(told, node=node)))


def _shared(state: State) -> State:
    """What of a state is the same for all who hear it, and they must hear at once."""
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
