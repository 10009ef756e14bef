"""Deadlines: every wait of a node has a deadline, counted from the last progress, and a reason."""

from __future__ import annotations

from sparkstrom.codec.messages import Activity
from sparkstrom.protocol.common.events import Directive, Order
from sparkstrom.protocol.worker.state import NOBODY, NodeState

DOUBLINGS_MAX = 4  # of the patience with an edge that stays silent, on a network that is slow
LEVELS_ABOVE = 4  # in a mesh: each may have to fetch its replica before the next gets its place
FAREWELL_S = 5.0  # how long a failing or leaving node waits for the master to have heard


def forget_sleep(me: NodeState, now_s: float) -> None:
    """Time in which this process stood still counts for no wait: it could hear nobody."""
    slept_s, me.ticked_s = now_s - me.ticked_s, now_s
    if slept_s <= me.limits.lease_s / 4:
        return

    def later(since_s: float) -> float:
        return min(now_s, since_s + slept_s)

    me.began_s, me.heard_s, me.got_s = later(me.began_s), later(me.heard_s), later(me.got_s)
    me.activity_s = later(me.activity_s)
    me.opened_s, me.owed_s = later(me.opened_s), later(me.owed_s)
    if me.done_s is not None:
        me.done_s = later(me.done_s)
    me.failed_s, me.leaving_s = later(me.failed_s), later(me.leaving_s)
    me.uplink.progress_s = later(me.uplink.progress_s)
    me.up.slept(slept_s)
    if me.catchup is not None:
        me.catchup.progress_s = later(me.catchup.progress_s)


def is_silent(me: NodeState, now_s: float) -> bool:
    """Was nothing at all heard over the edge for too long, also no answer to a join?"""
    patience_s: float = me.limits.lease_s / 2 * 2 ** min(me.unanswered, DOUBLINGS_MAX)
    return now_s - me.edge_heard_s > patience_s


def is_starved(me: NodeState, now_s: float) -> bool:
    """Do signs of the master's life come over the edge, and nothing else gets through?

    Data does not, one way or the other, or the word that asks for it: a stream may have broken
    off for good, each for itself. Where the master is silent, the trouble is further up.
    """
    lease_s = me.limits.lease_s
    steady = now_s - max(me.opened_s, me.steady_s) > lease_s and now_s - me.heard_s <= lease_s / 2
    if me.parent == NOBODY or not steady:
        return False
    waits = [] if me.attached else [me.owed_s]
    if me.attached and me.is_sent_more:
        waits.append(me.got_s)
    if me.up.since_s is not None:
        waits.append(me.up.since_s)
    patience_s = lease_s * 2 ** min(me.starved, DOUBLINGS_MAX)
    return any(now_s - max(since_s, me.steady_s) > patience_s for since_s in waits)


def waited_too_long(me: NodeState, now_s: float) -> Directive | None:
    """The end, with what was waited for in vain, for how long, and what to do; None before."""
    since_s, limit_s, what = _longest_wait(me, now_s)
    if now_s - since_s > limit_s:
        return Directive(Order.FAIL, what.format(now_s - since_s))
    if me.failed is not None and now_s - me.failed_s > FAREWELL_S:
        return Directive(Order.FAIL, me.failed.reason)
    if me.leaving is not None and now_s - me.leaving_s > FAREWELL_S:
        return Directive(Order.END, me.leaving.reason)
    return None


def _longest_wait(me: NodeState, now_s: float) -> tuple[float, float, str]:
    """Since when, for how long at most, and what: the first wait that is over its limit.

    Asked at each tick, so it looks at each wait only once and builds nothing.
    """
    limits, catchup, uplink = me.limits, me.catchup, me.uplink
    stuck_s = limits.stuck_s
    begun_s = now_s - stuck_s  # whoever waits since before this is stuck
    if me.node < 0:
        if now_s - me.heard_s > limits.join_s:
            return me.heard_s, limits.join_s, JOIN_FAILED
        if now_s - me.began_s > LEVELS_ABOVE * stuck_s:
            return me.began_s, LEVELS_ABOVE * stuck_s, NO_PLACE
    elif now_s - me.heard_s > limits.master_silent_s:
        return me.heard_s, limits.master_silent_s, MASTER_SILENT
    if catchup is not None and catchup.progress_s < begun_s:
        return catchup.progress_s, stuck_s, NO_SNAPSHOT
    if me.opened_s < begun_s and me.parent != NOBODY and not me.attached:
        return me.opened_s, LEVELS_ABOVE * stuck_s, NO_PARENT
    if uplink.progress_s < begun_s and len(uplink) > 0:
        return uplink.progress_s, stuck_s, no_commits(me)
    if me.got_s < begun_s and me.behind:
        return me.got_s, stuck_s, NOT_FED
    if me.installing or (me.activity is Activity.STEPPING and not me.paused):
        return me.activity_s, limits.step_s, STEP_STUCK
    return now_s, stuck_s, ""


def no_commits(me: NodeState) -> str:
    """With what waits, and how fast it went."""
    figures = {"bytes": me.uplink.bytes, "under_way": me.up.under_way, "rate": me.up.rate / 1e6}
    return NO_COMMITS.format(parent=me.parent, **figures)


JOIN_FAILED = (
    "no answer from the master for {:.0f} s: is UDP open between executors and driver in both "
    "directions (ports, security group), and do network mask and controller address name the "
    "network that both share?"
)
NO_PLACE = (
    "no place in the mesh for {:.0f} s, although the master answers: those above it do not get "
    "their replicas; look at their logs"
)
MASTER_SILENT = (
    "nothing heard from the master for {:.0f} s: the driver program has ended, or the network "
    "between this executor and it is down"
)
NO_SNAPSHOT = (
    "catching up made no progress for {:.0f} s: no part of the replica arrived, or each was out of "
    "date before the last one came; raise log_bytes, or publish less often"
)
NO_PARENT = (
    "the node that it stands under has had no replica for it for {:.0f} s, although it answers"
)
NO_COMMITS = (
    "none of its updates was committed for {{:.0f}} s, although the master answers: {bytes:,} bytes"
    " of them wait, {under_way:,} bytes are under way to node {parent}, and the link there carried"
    " {rate:.2f} MB/s; look at that link and at the driver's, use mesh_build_mode='mesh', or send"
    " less (threshold='auto', publish_every='auto')"
)
NOT_FED = (
    "the updates of the others did not arrive for {:.0f} s, although the master answers: look at "
    "the link of this executor and at that of the node it stands under"
)
STEP_STUCK = "one training step took longer than {:.0f} s: raise step_timeout if that is normal"
