"""Wire bytes: what has left the interfaces, over one media driver after another, as figures.

All workers of an executor share a media driver, and each tells the counter of all: who adds them
up takes each driver's largest, once.
"""

from __future__ import annotations

from sparkstrom.observe.telemetry import LinkBytes
from sparkstrom.transport.contract import Transport

DRIVERS_TOLD = 8  # newest of those that died: a message has room for so many names


class WireBytes:
    """One node's figures. ``look`` before a transport is left, too."""

    def __init__(self) -> None:
        self._drivers: dict[str, int] = {}
        self._own: dict[str, int] = {}

    def look(self, transport: Transport) -> LinkBytes:
        """The figures with this transport's newest."""
        sent = transport.sent()
        self._drivers[sent.driver], self._own[sent.driver] = (
            sent.driver_bytes,
            sent.own_bytes,
        )
        newest = list(self._drivers.items())[-DRIVERS_TOLD:]
        drivers = {name: float(count) for name, count in newest}
        return LinkBytes(drivers, float(sum(self._own.values())))
