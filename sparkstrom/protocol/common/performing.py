"""Performing: a machine has moved on when it names its effects, so each of them must happen.

Where a media driver dies between two of them, what needs it is void: whoever drives the machine
says ``Opened(alone=True)`` or ``Moved`` next, and the machine asks for all edges anew. Ids,
commits, phases and failures need no media driver, and no machine names them twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sparkstrom.base.errors import DriverLost
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Effect

BY_DRIVER = frozenset(
    {
        ev.Send, ev.Tell, ev.Answer, ev.OpenEdge, ev.CloseEdge, ev.Reopen,
        ev.SendChunk, ev.SendMerged, ev.SendUpdater,
    }
)  # fmt: skip


def perform_all(effects: Iterable[Effect], perform: Callable[[Effect], None]) -> None:
    """Perform them in order; raise the first DriverLost once all that can happen has happened."""
    lost: DriverLost | None = None
    for effect in effects:
        if lost is not None and type(effect) in BY_DRIVER:
            continue
        try:
            perform(effect)
        except DriverLost as error:
            lost = lost or error
    if lost is not None:
        raise lost
