"""Relaying: what a worker in a mesh does for those below it."""

from __future__ import annotations

from sparkstrom.codec.messages import (
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
    Update,
    UpdaterChunk,
)
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.child import Child
from sparkstrom.protocol.common.events import Effect, Send
from sparkstrom.protocol.worker.joining import drop_child
from sparkstrom.protocol.worker.optimizer_transfer import on_ask_updater, on_updater
from sparkstrom.protocol.worker.state import NodeState
from sparkstrom.protocol.worker.upstream import hand_up, send_all


def on_adopt(me: NodeState, order: Adopt, now_s: float) -> list[Effect]:
    """One child more; never the own parent, or there would be a circle for a moment."""
    if order.node == me.parent:
        return []
    known = me.family.children.get(order.node)
    if known is not None and known.edge < order.edge:
        me.ledger.forget(order.node)
    return me.family.adopt(order, now_s)


def on_disown(me: NodeState, order: Disown) -> list[Effect]:
    """One child less."""
    return drop_child(me, order.node, order.edge)


def on_child(me: NodeState, child: Child, message: Message, now_s: float) -> list[Effect]:
    """What comes up from below."""
    me.family.leases.renew(child.node, now_s)
    match message:
        case Attach():
            child.state_due = True
            return me.family.on_attach(child, message, now_s)
        case Update():
            size = me.family.on_update(child, message)
            if me.attached:
                return hand_up(me, message, child, now_s)
            child.passed += size  # its origin is told to send it again, once there is a parent
        case Heartbeat():
            for status in message.news:
                me.news = me.ledger.put(status, child.node) or me.news
            return me.family.on_report(child, message, now_s)
        case AskAfter(commit=commit) if commit <= me.received:
            return me.family.on_ask_after(child, commit, now_s)
        case AskChunk(index=index) if index < me.chunks:
            return me.family.on_ask_chunk(child, index, now_s)
        case AskUpdater():
            return on_ask_updater(me, message, child.node)
        case UpdaterChunk():
            child.arriving = 0
            return on_updater(me, message, child.node, now_s)
        case Leaving():
            return drop_child(me, child.node)
        case _:
            pass  # not for a parent
    return []


def on_again(me: NodeState, origin: int, now_s: float) -> list[Effect]:
    """Updates got lost above: whoever made them sends them again.

    Where an edge above is new, that is everybody, and at once.
    """
    if origin == 0:
        again = [Send(child, Again(0)) for child in me.family.children]
        return [*send_all(me, now_s, force=True), *again]
    if origin in me.ids:
        return send_all(me, now_s)
    via = me.ledger.via(origin)
    child = me.family.children.get(via) if via is not None else None
    return [] if child is None else [Send(child.node, Again(origin))]


def look_after_children(me: NodeState, now_s: float) -> list[Effect]:
    """Feed them, tell them the state, and complain of those that are silent."""
    lost = me.family.leases.expire(now_s)
    effects: list[Effect] = []
    if not me.family.children:
        return effects
    for node, _ in lost:
        child = me.family.children[node]
        me.family.leases.remind(node, now_s)
        effects.append(ev.Tell(Silent(me.node, node, child.edge)))
    if me.state is not None:
        effects += me.family.tick(me.state, now_s)
    return effects
