"""Deaths: a media driver dies in the middle of what a machine wants done."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from sparkstrom.base.errors import DriverLost
from sparkstrom.protocol.common import performing
from sparkstrom.protocol.common.events import CloseEdge, Effect, OpenEdge, Reopen
from sparkstrom.protocol.common.performing import BY_DRIVER

EDGES = frozenset({OpenEdge, CloseEdge, Reopen})


class Doom:
    """So many media drivers of one process die, each at some effect of a list; one after the other.

    Prey are the lists in which something depends on the driver's life: they open or close an edge,
    or want something else after what needs the driver; there it dies more often.
    """

    def __init__(self, chance: random.Random, deaths: int) -> None:
        self._chance, self._deaths = chance, deaths

    def over(
        self, effects: Sequence[Effect], perform: Callable[[Effect], None]
    ) -> Callable[[Effect], None]:
        """``perform`` for this list, in which the driver may die."""
        moments = _moments(effects) if self._deaths else []
        if not moments:
            return perform
        left = self._chance.choice(moments)

        def until_it_dies(effect: Effect) -> None:
            nonlocal left
            left -= 1
            if left < 0 and type(effect) in BY_DRIVER:
                self._deaths -= 1
                raise DriverLost("performing", -1000, "a media driver died on purpose")
            perform(effect)

        return until_it_dies


def _moments(effects: Sequence[Effect]) -> list[int]:
    """At which effects a driver may die, the telling ones twice."""
    kinds = [type(effect) for effect in effects]
    needing = [i for i, kind in enumerate(kinds) if kind in BY_DRIVER]
    telling = [i for i in needing if not BY_DRIVER.issuperset(kinds[i:])]
    if len(kinds) < 2 or (EDGES.isdisjoint(kinds) and not telling):
        return []
    return [*needing, *telling, *telling]


def outlives(
    effects: Sequence[Effect], perform: Callable[[Effect], None], doom: Doom | None
) -> bool:
    """Perform them as the threads do; does the media driver live through it?"""
    carry = perform if doom is None else doom.over(effects, perform)
    try:
        performing.perform_all(effects, carry)
    except DriverLost:
        return False
    return True
