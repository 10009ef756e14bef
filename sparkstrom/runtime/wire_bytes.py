"""Wire bytes: what has left the interfaces, over one media driver after another, as figures.

All workers of an executor share a media driver, and each tells the counter of all: who adds them
up takes each driver's largest, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparkstrom.transport.contract import Transport

DRIVER = "wire_driver "  # and its name: what it has sent
OWN = "wire_own"  # what one node adds for its own frames
DRIVERS_TOLD = 8  # newest of those that died: a message has room for so many names


class WireBytes:
    """One node's figures. ``look`` before a transport is left, too."""

    def __init__(self) -> None:
        self._drivers: dict[str, int] = {}
        self._own: dict[str, int] = {}

    def look(self, transport: Transport) -> dict[str, float]:
        """The figures with this transport's newest."""
        sent = transport.sent()
        self._drivers[sent.driver], self._own[sent.driver] = (
            sent.driver_bytes,
            sent.own_bytes,
        )
        newest = list(self._drivers.items())[-DRIVERS_TOLD:]
        return {f"{DRIVER}{name}": float(count) for name, count in newest} | {
            OWN: float(sum(self._own.values()))
        }


def wire_bytes(told: Iterable[Mapping[str, float]]) -> int:
    """All that left, of what all nodes told: each media driver once, what each node adds."""
    drivers: dict[str, float] = {}
    own = 0.0
    for figures in told:
        own += figures.get(OWN, 0.0)
        for name, count in figures.items():
            if name.startswith(DRIVER):
                drivers[name] = max(count, drivers.get(name, 0.0))
    return int(own + sum(drivers.values()))
