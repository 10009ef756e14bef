"""Sent bytes: each media driver counts once, however many of its workers report it."""

from __future__ import annotations

from typing import Any

from benchmarks.memory_transport import MemoryNetwork
from sparkstrom.base.identity import Endpoint
from sparkstrom.observe.telemetry import LinkBytes, sum_link_bytes
from sparkstrom.runtime.node_thread import REPORTED_DRIVERS_MAX, LinkBytesCounter
from sparkstrom.transport.base import SentBytes


class FixedCountersTransport:
    """A transport with these counters."""

    def __init__(self, driver: str, driver_bytes: int, own_bytes: int) -> None:
        self.figures = SentBytes(driver, driver_bytes, own_bytes)

    def sent(self) -> SentBytes:
        return self.figures


def report_of_transports(*sent: tuple[str, int, int]) -> LinkBytes:
    """Return a node's report after it used these transports: (driver, its bytes, correction)."""
    wire = LinkBytesCounter()
    figures, transports = LinkBytes({}, 0.0), dict[str, Any]()
    for driver, driver_bytes, own_bytes in sent:
        transport = transports.setdefault(driver, FixedCountersTransport(driver, 0, 0))
        transport.figures = SentBytes(driver, driver_bytes, own_bytes)
        figures = wire.update(transport)
    return figures


def test_shared_media_driver_bytes_count_once_per_executor() -> None:
    """Of two workers on one driver, the larger total counts once, and both corrections."""
    here, beside = report_of_transports(("a", 1000, 10)), report_of_transports(("a", 1500, 20))
    elsewhere = report_of_transports(("b", 300, 5))
    assert sum_link_bytes([here, beside, elsewhere]) == 1500 + 300 + 10 + 20 + 5


def test_bytes_of_dead_media_driver_are_added_to_successor() -> None:
    """The bytes of a node's former media driver are counted with those of its successor."""
    figures = report_of_transports(("a", 1000, 10), ("a", 1200, 15), ("b", 50, 1))
    assert sum_link_bytes([figures]) == 1200 + 15 + 50 + 1


def test_reconnected_client_keeps_correction_of_closed_client() -> None:
    """The correction of a closed client is kept when the next client uses the same driver."""
    wire = LinkBytesCounter()
    closed: Any = FixedCountersTransport("a", 900, -800)
    again: Any = FixedCountersTransport("a", 950, -10)
    for transport in (closed, closed, again):  # ``update`` may be called twice for one transport
        figures = wire.update(transport)
    assert figures == LinkBytes({"a": 950.0}, -810.0)


def test_report_names_limited_number_of_drivers() -> None:
    """A report names at most ``REPORTED_DRIVERS_MAX`` drivers, but has all corrections."""
    figures = report_of_transports(*((f"driver {number}", 1, 2) for number in range(100)))
    assert len(figures.drivers) == REPORTED_DRIVERS_MAX
    assert sum_link_bytes([figures]) == REPORTED_DRIVERS_MAX + 100 * 2


def test_memory_transport_reports_zero_sent_bytes() -> None:
    """A memory transport reports 0 bytes."""
    transport = MemoryNetwork().open("here")
    assert transport.sent() == SentBytes(str(Endpoint("here", 1)), 0, 0)
