"""Joining: how a node gets its id and its edge, and comes back after its id was closed."""

from __future__ import annotations

from sparkstrom.base.identity import MASTER, Position
from sparkstrom.codec.messages import Address, Closed, Final, Join, Refused, Welcome
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.events import Command, Effect, Order, Send
from sparkstrom.protocol.following import begin_catchup, send_all
from sparkstrom.protocol.reporting import report
from sparkstrom.protocol.standing import Standing

JOIN_RETRY_S = 0.5


def on_opened(me: Standing, address: Address, now_s: float) -> list[Effect]:
    """The node listens on fresh streams: ask for an edge there."""
    me.address, me.joined = address, False
    me.edge += 1
    me.edge_heard_s = me.opened_s = now_s
    return ask_to_join(me, now_s)


def ask_to_join(me: Standing, now_s: float) -> list[Effect]:
    """Join, or join again over a new edge."""
    assert me.address is not None
    me.join_due_s = now_s + JOIN_RETRY_S
    who = me.identity
    return [
        Send(
            MASTER,
            Join(
                token=who.token,
                count=me.count,
                edge=me.edge,
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
                have=me.received,
                has_replica=me.has_replica and me.catchup is None,
            ),
        )
    ]


def on_welcome(me: Standing, welcome: Welcome, now_s: float) -> list[Effect]:
    """Take the place, and send what the master may lack."""
    mine = (me.identity.token, me.count, me.edge)
    if me.joined or (welcome.token, welcome.count, welcome.edge) != mine:
        return []
    assert me.address is not None
    me.joined, me.news = True, True
    effects: list[Effect] = [ev.OpenEdge(MASTER, me.edge, me.address, welcome.up)]
    if welcome.node != me.node:
        effects += _take_id(me, welcome, now_s)
    if welcome.snapshot:
        effects += begin_catchup(me, welcome.base, welcome.chunks, welcome.last, now_s)
    elif welcome.base > me.received:
        raise AssertionError("welcomed beyond what this node holds, without a snapshot")
    return effects + send_all(me, now_s, force=True) + report(me, now_s)


def _take_id(me: Standing, welcome: Welcome, now_s: float) -> list[Effect]:
    returned = me.has_replica or me.installing
    for node, seq in welcome.closed:
        me.ids[node] = seq
    me.ids[welcome.node] = None
    me.node = welcome.node
    closed = {node: seq for node, seq in me.ids.items() if seq is not None}
    me.uplink.rekey(closed, me.node, now_s)
    if me.final is not None:
        me.final = Final(me.uplink.last_seq)
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


def on_refused(me: Standing, refused: Refused) -> Command | None:
    """The command that ends the task, if the refusal is meant for this join."""
    if (refused.token, refused.count) != (me.identity.token, me.count):
        return None
    return Command(Order.FAIL if refused.fatal else Order.END, refused.reason)


def on_closed(me: Standing, closed: Closed) -> Command | list[Effect]:
    """The id is gone: come back under another one, or the command that ends the task."""
    mine = (me.identity.token, me.count)
    if closed.node != me.node and (closed.token, closed.count) != mine:
        return []
    if me.ids.get(closed.node) is not None:
        return []  # heard before; the next join is under way
    if me.failed is not None:
        return Command(Order.FAIL, me.failed.reason)
    if me.leaving is not None:
        return Command(Order.END, me.leaving.reason)
    if not closed.free:
        return Command(Order.FAIL, closed.reason)
    me.ids[closed.node] = closed.seq
    me.count += 1
    me.joined = False
    return [ev.Reopen()]
