"""Replication: a node takes the commits in order, or a snapshot where they are out of reach.

Whatever it takes goes into its log, too, and from there to its children.
"""

from __future__ import annotations

from sparkstrom.codec.messages import (
    BUFFERS,
    AskAfter,
    AskChunk,
    Behind,
    Chunk,
    Committed,
    LastSeqs,
    MergedRange,
    Update,
)
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Effect, Send
from sparkstrom.protocol.worker.snapshot_fetch import SnapshotFetch
from sparkstrom.protocol.worker.state import NodeState

ASK_SPACING_S = 1.0  # what is under way behind a gap shows the same gap


def on_committed(me: NodeState, committed: Committed, now_s: float) -> list[Effect]:
    """The next commit is delivered, or held; after a gap what is missing is asked for."""
    received = me.received
    if committed.commit <= received:
        me.news = True  # the parent does not know how far this node is
        return []
    if committed.commit > received + 1:
        me.seen = committed.commit
        return ask(me, now_s)
    own = committed.origin in me.ids
    if own:
        update = me.uplink.strike(committed.origin, committed.seq, now_s)
        assert update is not None, f"own update {committed.seq} was not kept until committed"
        if update.form != BUFFERS:  # of those the average came back
            committed = replace_payload(committed, update)
    _take(me, committed, now_s)
    if me.catchup is None:
        return _deliver(committed, own=own) + me.family.feed_all(now_s)
    return _catch_up_with(me, now_s)


def _deliver(committed: Committed, *, own: bool) -> list[Effect]:
    if not own:
        return [ev.Deliver(committed)]
    passed = ev.Passed(committed.commit)
    return [ev.Deliver(committed), passed] if committed.form == BUFFERS else [passed]


def _catch_up_with(me: NodeState, now_s: float) -> list[Effect]:
    """The log has one entry more, perhaps some fewer."""
    assert me.catchup is not None
    me.catchup.forget_useless()
    return catch_up(me, now_s) + me.family.feed_all(now_s)


def on_merged(me: NodeState, merged: MergedRange, now_s: float) -> list[Effect]:
    """Many commits at once: only for a replica that is exactly where the sum begins."""
    if merged.after != me.received:
        me.news = True
        if merged.commit <= me.received:
            return []
        me.seen = merged.commit
        return ask(me, now_s)
    last = dict(merged.last)
    own = [u for u in me.uplink.uncommitted if u.seq <= last.get(u.origin, 0)]
    for update in own:
        me.uplink.strike(update.origin, update.seq, now_s)
    _take(me, merged, now_s)
    if me.catchup is not None:
        return _catch_up_with(me, now_s)
    return [ev.DeliverMerged(merged, tuple(own)), *me.family.feed_all(now_s)]


def _take(me: NodeState, entry: Committed | MergedRange, now_s: float) -> None:
    me.history.append(entry)
    me.news, me.got_s = True, now_s


def ask(me: NodeState, now_s: float) -> list[Effect]:
    """For all that follows what is here, unless it was asked for a moment ago."""
    if now_s < me.ask_due_s:
        return []
    me.ask_due_s, me.asked = now_s + ASK_SPACING_S, me.received
    return [Send(me.parent, AskAfter(me.received))]


# -- snapshots ---------------------------------------------------------------------------------


def on_behind(me: NodeState, behind: Behind, now_s: float) -> list[Effect]:
    """The log does not reach back to what this node has: take a snapshot."""
    if behind.base <= me.received:  # what was missing has come meanwhile
        me.news = True
        if me.catchup is None:
            return []
        me.catchup.resume()  # the parent begins anew, and has forgotten what was asked for
        return catch_up(me, now_s)
    effects = begin_catchup(me, behind.base, behind.last, now_s)
    seen, me.seen = me.seen, 0
    if seen > behind.base:  # data, on a stream of its own, overtook this and was dropped
        me.ask_due_s = now_s
        effects = ask(me, now_s) + effects
    return effects


def begin_catchup(me: NodeState, base: int, last: LastSeqs, now_s: float) -> list[Effect]:
    """Fetch a replica as of ``base`` or later; commits after ``base`` are held meanwhile."""
    me.uplink.strike_up_to(last, set(me.ids), now_s)
    me.history.begin_at(base, last)
    me.news, me.got_s = True, now_s
    me.pauses += 1
    me.paused = False
    me.catchup = SnapshotFetch(me.history.log, me.chunks, now_s, me.catchup)
    return catch_up(me, now_s)


def on_chunk(me: NodeState, chunk: Chunk, now_s: float) -> list[Effect]:
    """Part of the snapshot is here; before it on its stream came the commits that are in it."""
    if me.catchup is None:
        return []
    me.got_s, me.news = now_s, True
    me.catchup.take(chunk, now_s)
    effects = catch_up(me, now_s)
    if chunk.commit > me.received and me.asked != me.received:
        effects = ask(me, now_s) + effects
    return effects


def catch_up(me: NodeState, now_s: float) -> list[Effect]:
    """Ask for chunks; once all is there and the trainer stands still, install."""
    catchup = me.catchup
    if catchup is None or me.installing or not me.attached:
        return []
    ready = catchup.ready(now_s)
    if ready:
        me.got_s = now_s
    if not (ready and me.paused):
        return [Send(me.parent, AskChunk(index)) for index in catchup.wanted()]
    me.installing, me.catchup, me.news, me.activity_s = True, None, True, now_s
    return [ev.Install(catchup.chunks, catchup.held, me.uplink.uncommitted, me.received)]


def replace_payload(committed: Committed, update: Update) -> Committed:
    """A number that came without its payload, completed from the origin's own copy."""
    return Committed(
        commit=committed.commit,
        origin=committed.origin,
        seq=committed.seq,
        form=update.form,
        tau_quanta=update.tau_quanta,
        count=update.count,
        payload=update.payload,
    )
