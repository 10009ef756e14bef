"""Upstream: own updates and those from below go up, as the link takes them.

What the link has no room for waits here, in the order in which it came. A child's bytes count as
passed only when they have gone on, so that its own link fills up and it publishes less: up waits
for up, and nothing is dropped.
"""

from __future__ import annotations

from sparkstrom.codec.messages import Again, Update
from sparkstrom.protocol.common.child import Child
from sparkstrom.protocol.common.events import Effect, Send
from sparkstrom.protocol.common.send_window import weight
from sparkstrom.protocol.worker.state import NodeState


def hand_up(me: NodeState, update: Update, child: Child | None, now_s: float) -> list[Effect]:
    """One more update is to go up; ``child``: over whose edge it came, None: its own."""
    me.waiting.append((update, child))
    return send_up(me, now_s)


def send_up(me: NodeState, now_s: float) -> list[Effect]:
    """As much as the link takes."""
    out: list[Effect] = []
    while me.waiting and me.attached:
        update, child = me.waiting[0]
        size = weight(update, 0)
        if not me.up.has_room(size):
            break
        me.waiting.popleft()
        me.up.hand(size, now_s)
        if child is not None:
            child.passed, child.state_due = child.passed + size, True
        out.append(Send(me.parent, update))
    return out


def send_all(me: NodeState, now_s: float, *, force: bool = False) -> list[Effect]:
    """All own uncommitted updates, again."""
    updates = me.uplink.again(me.node, now_s, force=force)
    if not updates:
        return []
    others = [(update, child) for update, child in me.waiting if child is not None]
    me.waiting.clear()
    me.waiting.extend(others)
    me.waiting.extend((update, None) for update in updates)
    return send_up(me, now_s)


def start_anew(me: NodeState, now_s: float) -> list[Effect]:
    """Over a new edge: everybody at and below this node sends again what may have been lost."""
    for update, child in me.waiting:
        if child is not None:
            child.passed, child.state_due = child.passed + weight(update, 0), True
    me.waiting.clear()
    effects: list[Effect] = [Send(child, Again(0)) for child in me.family.children]
    return [*send_all(me, now_s, force=True), *effects]


def send_overdue(me: NodeState, now_s: float) -> list[Effect]:
    """The own updates again, where the oldest has waited far too long for its commit."""
    if not me.uplink.overdue(now_s):
        return []
    me.uplink.back_off(now_s)
    return send_all(me, now_s)
