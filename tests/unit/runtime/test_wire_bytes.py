"""Sent bytes: each media driver counts once, however many of its workers report it."""

from __future__ import annotations

from typing import Any

from benchmarks.memory_transport import MemoryNetwork
from sparkstrom.base.identity import Endpoint
from sparkstrom.observe.telemetry import LinkBytes, sum_link_bytes
from sparkstrom.runtime.node_thread import REPORTED_DRIVERS_MAX, LinkBytesCounter
from sparkstrom.transport.base import SentBytes


class Counted:
    """A transport with these counters."""

    def __init__(self, driver: str, driver_bytes: int, own_bytes: int) -> None:
        self.figures = SentBytes(driver, driver_bytes, own_bytes)

    def sent(self) -> SentBytes:
        return self.figures


def told(*sent: tuple[str, int, int]) -> LinkBytes:
    """Return a node's report after it used these transports: (driver, its bytes, correction)."""
    wire = LinkBytesCounter()
    figures, transports = LinkBytes({}, 0.0), dict[str, Any]()
    for driver, driver_bytes, own_bytes in sent:
        transport = transports.setdefault(driver, Counted(driver, 0, 0))
        transport.figures = SentBytes(driver, driver_bytes, own_bytes)
        figures = wire.update(transport)
    return figures


def test_workers_of_an_executor_share_what_their_media_driver_sent() -> None:
    """Of two workers on one driver, the larger total counts once, and both corrections."""
    here, beside = told(("a", 1000, 10)), told(("a", 1500, 20))
    elsewhere = told(("b", 300, 5))
    assert sum_link_bytes([here, beside, elsewhere]) == 1500 + 300 + 10 + 20 + 5


def test_what_a_media_driver_sent_before_it_died_counts_too() -> None:
    """The bytes of a node's former media driver are counted with those of its successor."""
    figures = told(("a", 1000, 10), ("a", 1200, 15), ("b", 50, 1))
    assert sum_link_bytes([figures]) == 1200 + 15 + 50 + 1


def test_a_client_that_joins_its_media_driver_again_keeps_its_correction() -> None:
    """The correction of a closed client is kept when the next client uses the same driver."""
    wire = LinkBytesCounter()
    closed: Any = Counted("a", 900, -800)
    again: Any = Counted("a", 950, -10)
    for transport in (closed, closed, again):  # ``update`` may be called twice for one transport
        figures = wire.update(transport)
    assert figures == LinkBytes({"a": 950.0}, -810.0)


def test_many_deaths_make_no_endless_message() -> None:
    """A report names at most ``REPORTED_DRIVERS_MAX`` drivers, but has all corrections."""
    figures = told(*((f"driver {number}", 1, 2) for number in range(100)))
    assert len(figures.drivers) == REPORTED_DRIVERS_MAX
    assert sum_link_bytes([figures]) == REPORTED_DRIVERS_MAX + 100 * 2


def test_nothing_leaves_a_process_by_memory() -> None:
    """A memory transport reports 0 bytes."""
    transport = MemoryNetwork().open("here")
    assert transport.sent() == SentBytes(str(Endpoint("here", 1)), 0, 0)
