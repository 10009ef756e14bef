"""Directives: what a node's trainer is to do, as follows from where the node stands."""

from __future__ import annotations

from functools import lru_cache

from sparkstrom.codec.messages import Phase, State
from sparkstrom.protocol.common.events import Directive, Order
from sparkstrom.protocol.worker.state import NodeState

JOINING = Directive(Order.WAIT, "joining")
GATHERING = Directive(Order.WAIT, "the others have not joined yet")
WINDOW_FULL = Directive(Order.WAIT, "its updates are not committed yet")
STALE = Directive(Order.WAIT, "what the others sent a round ago is not here yet")
AHEAD = Directive(Order.WAIT, "it is ahead of the slowest")
NOT_THERE = Directive(Order.WAIT, "the last updates have not come yet")
DRAIN = Directive(Order.DRAIN)
BORROWING = Directive(Order.WAIT, "the updater's state of another worker is on its way")
LINGERING = Directive(Order.WAIT, "others hear from it that the fit is done")
DONE = Directive(Order.END, "done")


def order(me: NodeState) -> Directive:
    """The command that holds now."""
    if me.catchup is not None or (me.installing and me.pauses):  # not where it begins with one
        return Directive(Order.PAUSE, "a replica is on its way", number=me.pauses)
    if me.state is None or not me.has_replica:
        return JOINING
    match me.state.phase:
        case Phase.RUNNING:  # first, as this is asked after every event
            return BORROWING if me.borrowing is not None else _while_running(me, me.state)
        case Phase.DONE if me.audit is not None:
            return DONE if me.may_end else LINGERING
        case Phase.AUDIT | Phase.DONE:
            at_final = me.received >= me.state.final
            return Directive(Order.AUDIT, commit=me.state.final) if at_final else NOT_THERE
        case Phase.DRAINING:
            return DRAIN
        case Phase.GATHERING:
            return GATHERING


def _while_running(me: NodeState, state: State) -> Directive:
    most = me.limits.publications_max
    if most is None and not me.uplink.has_room():
        return WINDOW_FULL
    workers = max(1, state.training)  # itself, which the master may not have heard
    limit = None
    if workers > 1:
        limit, waits = _steps_max(me, state, workers)
        if limit is not None and me.steps >= limit:
            return waits
    publishes = most is None or len(me.uplink) < most
    return _train(limit, publishes, _round_s(me, state), workers, state.minibatches)


def _round_s(me: NodeState, state: State) -> float:
    """From a publication to its commit, lately. Or until the last one has it, where all wait.

    Links that are too narrow for every update carry sums, late: what takes a step together then
    waits for these, and has to send less, whoever's link it is.
    """
    if me.limits.max_lead is None or not me.uplink.round_s:
        return me.uplink.round_s
    waits_s = max(state.wait_ms / 1000, round(me.family.wait_s, 3))
    return max(me.uplink.round_s, waits_s)


def _steps_max(me: NodeState, state: State, workers: int) -> tuple[int | None, Directive]:
    """How far it may go, None: to the end; and what it waits for there.

    Its own update, once committed, shows that all that the others had sent by then is here, too:
    ``max_staleness`` counts the steps that go on meanwhile. ``max_lead`` counts from the slowest.
    """
    limits = me.limits
    limit, waits = None, AHEAD
    if limits.max_lead is not None:
        limit = state.slowest + limits.max_lead - me.head_start
    if limits.max_staleness is not None:
        beside = max(limits.max_staleness, limits.age_of_updates // workers - limits.steps_each)
        oldest = me.uplink.oldest
        sent = me.steps + 1 if oldest is None else oldest.steps  # with the step that comes
        if limit is None or sent + beside < limit:
            limit, waits = sent + beside, STALE
    return limit, waits


@lru_cache(maxsize=1024)  # asked after every event, and seldom answered anew
def _train(
    steps_max: int | None, publishes: bool, round_s: float, workers: int, minibatches: int
) -> Directive:
    return Directive(
        Order.TRAIN,
        steps_max=steps_max,
        publishes=publishes,
        round_s=round_s,
        workers=workers,
        minibatches=minibatches,
    )
