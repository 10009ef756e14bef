"""Deaths: a media driver dies in the middle of what a machine wants done."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from sparkstrom.base.errors import DriverLost
from sparkstrom.protocol import performing
from sparkstrom.protocol.events import Effect, Send
from sparkstrom.protocol.performing import BY_DRIVER


class Doom:
    """So many media drivers of one process die, each at some effect of a list; one after the other.

    Lists of one effect are no prey, nor are those that only send: nothing in them depends on more
    than what may get lost anyway.
    """

    def __init__(self, chance: random.Random, deaths: int) -> None:
        self._chance, self._deaths = chance, deaths

    def over(
        self, effects: Sequence[Effect], perform: Callable[[Effect], None]
    ) -> Callable[[Effect], None]:
        """``perform`` for this list, in which the driver may die."""
        if not self._deaths or len(effects) < 2 or all(type(e) is Send for e in effects):
            return perform
        left = self._chance.randrange(len(effects))

        def until_it_dies(effect: Effect) -> None:
            nonlocal left
            left -= 1
            if left < 0 and type(effect) in BY_DRIVER:
                self._deaths -= 1
                raise DriverLost("performing", -1000, "a media driver died on purpose")
            perform(effect)

        return until_it_dies


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
