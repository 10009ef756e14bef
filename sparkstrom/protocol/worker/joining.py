"""Joining: how a node gets its id and its place, and comes back after its id was closed.

It knocks at the master's; the master answers with its place: an id, a parent and an edge to it.
Over that edge the node says what it holds, and the parent goes on from there. Being moved is the
same without the knock.
"""

from __future__ import annotations

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import (
    Attach,
    Attached,
    Closed,
    Join,
    Refused,
    Welcome,
)
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Directive, Effect, Order, Send
from sparkstrom.protocol.common.send_window import SendWindow
from sparkstrom.protocol.worker.heartbeats import report
from sparkstrom.protocol.worker.replication import ask, begin_catchup, catch_up
from sparkstrom.protocol.worker.state import NOBODY, NodeState
from sparkstrom.protocol.worker.upstream import start_anew

JOIN_RETRY_S = 0.5
ATTACH_RETRY_S = 0.25


def on_opened(me: NodeState, opened: ev.Opened, now_s: float) -> list[Effect]:
    """The node listens on fresh streams: ask for an edge there."""
    effects: list[Effect] = leave_parent(me)
    if opened.alone:
        effects += leave_children(me)
    me.address, me.alone = opened.address, opened.alone or me.alone
    me.knock += 1
    me.edge_heard_s = now_s
    return effects + ask_to_join(me, now_s)


def leave_parent(me: NodeState) -> list[Effect]:
    """Hear nothing more over the present edge upwards."""
    parent, me.parent, me.attached = me.parent, NOBODY, False
    return [ev.CloseEdge(parent)] if parent != NOBODY else []


def leave_children(me: NodeState) -> list[Effect]:
    """Drop all edges downwards; the children will find out."""
    effects: list[Effect] = []
    for child in list(me.family.children):
        effects += drop_child(me, child)
    return effects


def drop_child(me: NodeState, node: int, edge: int | None = None) -> list[Effect]:
    """One child less, unless it is there by a newer edge than this one."""
    effects = me.family.disown(node, edge)
    if effects:
        me.ledger.forget(node)
    return effects


def ask_to_join(me: NodeState, now_s: float) -> list[Effect]:
    """Join, or join again over a new edge."""
    assert me.address is not None
    me.ask_s = now_s + JOIN_RETRY_S
    who = me.identity
    join = Join(
        token=who.token,
        count=me.count,
        knock=me.knock,
        partition=who.partition,
        attempt=who.attempt,
        rows=who.rows,
        checksum=who.checksum,
        batches=who.batches,
        address=me.address,
        host=who.host,
        executor=who.executor,
        pid=who.pid,
        version=who.version,
        alone=me.alone,
    )
    return [ev.Tell(join)]


def on_welcome(me: NodeState, welcome: Welcome, now_s: float) -> list[Effect]:
    """Take the place."""
    mine = (me.identity.token, me.count, me.knock)
    if (welcome.token, welcome.count, welcome.knock) != mine or welcome.edge <= me.edge:
        return []
    assert me.address is not None
    effects: list[Effect] = []
    if welcome.parent in me.family.children:
        effects += drop_child(me, welcome.parent)
    if me.parent != welcome.parent:
        effects += leave_parent(me)
    me.parent, me.edge, me.attached = welcome.parent, welcome.edge, False
    me.opened_s = me.owed_s = me.edge_heard_s = me.steady_s = now_s
    me.up, me.taken, me.arriving = SendWindow(me.limits.serving.window_max, now_s), 0, 0
    me.alone = False
    effects.append(ev.OpenEdge(me.parent, me.edge, me.address, welcome.up))
    if welcome.node != me.node:
        effects += _take_id(me, welcome, now_s)
    me.chunks = welcome.chunks
    return effects + ask_to_attach(me, now_s)


def ask_to_attach(me: NodeState, now_s: float) -> list[Effect]:
    """Tell the parent what this node holds."""
    me.ask_s = now_s + ATTACH_RETRY_S
    catching = me.catchup is not None
    attach = Attach(
        have=me.received,
        whole=(me.has_replica or me.installing or me.identity.whole) and not catching,
        catching=catching,
        ids=list(me.ids),
    )
    return [Send(me.parent, attach)]


def on_attached(me: NodeState, attached: Attached, now_s: float) -> list[Effect]:
    """The parent goes on from here; whatever may have been lost before goes up again."""
    if me.attached:
        return []
    me.attached, me.news = True, True
    me.opened_s = now_s
    me.ledger.tell_all_again()
    effects: list[Effect] = []
    if attached.snapshot:
        effects += begin_catchup(me, attached.base, attached.last, now_s)
    elif me.catchup is not None:
        me.catchup.resume()
        effects += catch_up(me, now_s)
    elif not (me.has_replica or me.installing):
        me.installing, me.activity_s = True, now_s
        effects.append(ev.Begin())
    if me.taken:  # data, on a stream of its own, overtook this answer and was dropped
        me.ask_due_s = now_s
        effects = ask(me, now_s) + effects
    return effects + start_anew(me, now_s) + report(me, now_s)


def _take_id(me: NodeState, welcome: Welcome, now_s: float) -> list[Effect]:
    returned = me.has_replica or me.installing
    me.ledger.forget(me.node)
    for node, seq in welcome.closed:
        me.ids[node] = seq
    me.ids[welcome.node] = None
    me.node, me.status = welcome.node, None
    closed = {node: seq for node, seq in me.ids.items() if seq is not None}
    me.uplink.rekey(closed, me.node, now_s)
    if me.final is not None:
        me.final = me.uplink.last_seq
    if not returned:
        me.position, me.steps = Position(welcome.epoch, welcome.batch), welcome.steps
    me.keep_pace(welcome.steps)
    return [
        ev.Admitted(
            me.node,
            welcome.epoch,
            welcome.batch,
            welcome.steps,
            tuple(welcome.grants),
            returned,
        )
    ]


def on_refused(me: NodeState, refused: Refused) -> Directive | None:
    """The command that ends the task, if the refusal is meant for this join."""
    if (refused.token, refused.count) != (me.identity.token, me.count):
        return None
    return Directive(Order.FAIL if refused.fatal else Order.END, refused.reason)


def on_closed(me: NodeState, closed: Closed) -> Directive | list[Effect]:
    """The id is gone: come back under another one, or the command that ends the task."""
    mine = (me.identity.token, me.count)
    if closed.node != me.node and (closed.token, closed.count) != mine:
        return []
    if me.ids.get(closed.node) is not None:
        return []  # heard before; the next join is under way
    if me.failed is not None:
        return Directive(Order.FAIL, me.failed.reason)
    if me.leaving is not None:
        return Directive(Order.END, me.leaving.reason)
    if not closed.free:
        return Directive(Order.FAIL, closed.reason)
    me.ids[closed.node] = closed.seq
    me.count += 1
    return [*leave_children(me), ev.Reopen()]
