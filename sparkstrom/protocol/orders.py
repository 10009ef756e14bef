"""Orders: what a node's trainer is to do, as follows from where the node stands."""

from __future__ import annotations

from sparkstrom.codec.messages import Phase, State
from sparkstrom.protocol.events import Command, Order
from sparkstrom.protocol.standing import Standing


def order(me: Standing) -> Command:
    """The command that holds now."""
    if me.catchup is not None or me.installing:
        return Command(Order.PAUSE, "a replica is on its way", number=me.pauses)
    if me.state is None or not me.has_replica:
        return Command(Order.WAIT, "joining")
    match me.state.phase:
        case Phase.DONE if me.audit is not None:
            return Command(Order.END, "done")
        case Phase.AUDIT | Phase.DONE:
            at_final = me.received >= me.state.final
            return Command(Order.AUDIT, commit=me.state.final) if at_final else Command(Order.WAIT)
        case Phase.DRAINING:
            return Command(Order.DRAIN)
        case Phase.GATHERING:
            return Command(Order.WAIT, "the others have not joined yet")
        case Phase.RUNNING:
            return _while_running(me, me.state)


def _while_running(me: Standing, state: State) -> Command:
    if not me.uplink.has_room():
        return Command(Order.WAIT, "its updates are not committed yet")
    if me.limits.max_lead is None:
        return Command(Order.TRAIN)
    limit = state.slowest + me.limits.max_lead - me.head_start
    if me.steps >= limit:
        return Command(Order.WAIT, "it is ahead of the slowest")
    return Command(Order.TRAIN, steps_max=limit)
