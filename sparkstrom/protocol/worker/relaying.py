"""Relaying: what a worker in a mesh does for those below it."""

from __future__ import annotations

from sparkstrom.codec.messages import (
    EVERYBODY,
    Adopt,
    Again,
    AskAfter,
    AskChunk,
    AskUpdater,
    Attach,
    Disown,
    Heartbeat,
    Leaving,
    Message,
    Silent,
    State,
    Update,
    UpdaterChunk,
)
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.child import Child
from sparkstrom.protocol.common.events import Effect, Send
from sparkstrom.protocol.common.ignored import Ignored, Reason
from sparkstrom.protocol.common.stages import PROBE
from sparkstrom.protocol.worker.membership import Membership
from sparkstrom.protocol.worker.news import News
from sparkstrom.protocol.worker.optimizer_transfer import OptimizerTransfers
from sparkstrom.protocol.worker.parent_link import ParentLink
from sparkstrom.protocol.worker.replication import Replication
from sparkstrom.protocol.worker.subtree import Subtree


class Relaying:
    """Between those below it and its parent."""

    def __init__(
        self,
        *,
        membership: Membership,
        link: ParentLink,
        replication: Replication,
        transfers: OptimizerTransfers,
        subtree: Subtree,
        news: News,
        ignored: Ignored,
    ) -> None:
        self._membership, self._link, self._replication = membership, link, replication
        self._transfers, self._subtree = transfers, subtree
        self._children, self._statuses = subtree.children, subtree.statuses
        self._news, self._ignored = news, ignored

    # -- who is below ----------------------------------------------------------------------------

    def on_adopt(self, order: Adopt, now_s: float) -> list[Effect]:
        """One child more; never the own parent, or there would be a circle for a moment."""
        if order.node == self._link.parent:
            self._ignored.count(order, Reason.EARLY)
            return []
        known = self._children.by_node.get(order.node)
        if known is not None and known.edge >= order.edge:
            self._ignored.count(order, Reason.LATE)
            return []
        if known is not None:
            self._statuses.forget(order.node)
        return self._children.adopt(order, now_s)

    def on_disown(self, order: Disown) -> list[Effect]:
        """One child less."""
        effects = self._subtree.drop(order.node, order.edge)
        if not effects:
            self._ignored.count(order, Reason.LATE)
        return effects

    # -- what comes up ---------------------------------------------------------------------------

    def on_child(self, child: Child, message: Message, now_s: float) -> list[Effect]:
        """Something from one of them, over its edge."""
        self._children.leases.renew(child.node, now_s)
        match message:
            case Attach():
                return self._on_attach(child, message, now_s)
            case Update():
                return self._on_update(child, message, now_s)
            case Heartbeat():
                for status in message.news:
                    if self._statuses.put(status, child.node):
                        self._news.add()
                return self._children.on_report(child, message, now_s)
            case AskAfter(commit=commit) if commit <= self._replication.received:
                return self._children.on_ask_after(child, commit, now_s)
            case AskChunk(index=index) if index < self._replication.chunks:
                return self._children.on_ask_chunk(child, index, now_s)
            case AskUpdater():
                return self._transfers.on_ask(message, child.node)
            case UpdaterChunk():
                child.arriving = 0
                return self._transfers.on_chunk(message, child.node, now_s)
            case Leaving():
                return self._subtree.drop(child.node)
            case AskAfter() | AskChunk():
                self._ignored.count(message, Reason.EARLY)  # it knows more than this node
            case _:
                self._ignored.count(message, Reason.WRONG_WAY)
        return []

    def _on_attach(self, child: Child, attach: Attach, now_s: float) -> list[Effect]:
        child.state_due = True
        effects = self._children.on_attach(child, attach, now_s)
        if child.stage is PROBE:
            self._ignored.count(attach, Reason.EARLY)
        return effects

    def _on_update(self, child: Child, update: Update, now_s: float) -> list[Effect]:
        size = self._children.on_update(child, update)
        if self._link.attached:
            return self._link.hand_up(update, child, now_s)
        self._ignored.count(update, Reason.EARLY)
        child.bytes_forwarded += size  # its origin is told to send it again, once there is a parent
        return []

    # -- what goes down --------------------------------------------------------------------------

    def on_again(self, again: Again, now_s: float) -> list[Effect]:
        """Updates got lost above: whoever made them sends them again.

        Where an edge above is new, that is everybody, and at once.
        """
        origin = again.origin
        if origin == EVERYBODY:
            below = self._subtree.ask_all_again()
            return [*self._link.send_all(now_s, force=True), *below]
        if origin in self._membership.ids:
            return self._link.send_all(now_s)
        child = self._subtree.towards(origin)
        if child is None:
            self._ignored.count(again, Reason.UNSERVED)
            return []
        return [Send(child.node, again)]

    def tick(self, state: State | None, now_s: float) -> list[Effect]:
        """Feed them, tell them the state, and complain of those that are silent."""
        lost = self._children.leases.expire(now_s)
        effects: list[Effect] = []
        if not self._children.by_node:
            return effects
        for node, _ in lost:
            child = self._children.by_node[node]
            self._children.leases.remind(node, now_s)
            effects.append(ev.Tell(Silent(self._membership.id, node, child.edge)))
        if state is not None:
            effects += self._children.tick(state, now_s)
        return effects
