"""Orders: what a node's trainer is to do, as follows from where the node stands."""

from __future__ import annotations

from functools import lru_cache

from sparkstrom.codec.messages import Phase, State
from sparkstrom.protocol.events import Command, Order
from sparkstrom.protocol.standing import Standing

JOINING = Command(Order.WAIT, "joining")
GATHERING = Command(Order.WAIT, "the others have not joined yet")
WINDOW_FULL = Command(Order.WAIT, "its updates are not committed yet")
AHEAD = Command(Order.WAIT, "it is ahead of the slowest")
NOT_THERE = Command(Order.WAIT, "the last updates have not come yet")
DRAIN = Command(Order.DRAIN)
BORROWING = Command(Order.WAIT, "the updater's state of another worker is on its way")
LINGERING = Command(Order.WAIT, "others hear from it that the fit is done")
DONE = Command(Order.END, "done")


def order(me: Standing) -> Command:
    """The command that holds now."""
    if me.catchup is not None or (me.installing and me.pauses):  # not where it begins with one
        return Command(Order.PAUSE, "a replica is on its way", number=me.pauses)
    if me.state is None or not me.has_replica:
        return JOINING
    match me.state.phase:
        case Phase.RUNNING:  # first, as this is asked after every event
            return BORROWING if me.borrowing is not None else _while_running(me, me.state)
        case Phase.DONE if me.audit is not None:
            return DONE if me.may_end else LINGERING
        case Phase.AUDIT | Phase.DONE:
            at_final = me.received >= me.state.final
            return Command(Order.AUDIT, commit=me.state.final) if at_final else NOT_THERE
        case Phase.DRAINING:
            return DRAIN
        case Phase.GATHERING:
            return GATHERING


def _while_running(me: Standing, state: State) -> Command:
    most = me.limits.publications_max
    if most is None and not me.uplink.has_room():
        return WINDOW_FULL
    limit = None
    if me.limits.max_lead is not None:
        limit = state.slowest + me.limits.max_lead - me.head_start
        if me.steps >= limit:
            return AHEAD
    publishes = most is None or len(me.uplink) < most
    workers = max(1, state.training)  # itself, which the master may not have heard
    return _train(limit, publishes, me.uplink.round_s, workers, state.minibatches)


@lru_cache(maxsize=1024)  # asked after every event, and seldom answered anew
def _train(
    steps_max: int | None, publishes: bool, round_s: float, workers: int, minibatches: int
) -> Command:
    return Command(
        Order.TRAIN,
        steps_max=steps_max,
        publishes=publishes,
        round_s=round_s,
        workers=workers,
        minibatches=minibatches,
    )
