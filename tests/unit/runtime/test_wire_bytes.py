"""What left the interfaces: each media driver counts once, whoever tells of it."""

from __future__ import annotations

from typing import Any

from benchmarks.memory_transport import MemoryNetwork
from sparkstrom.base.identity import Endpoint
from sparkstrom.observe.telemetry import LinkBytes, sum_link_bytes
from sparkstrom.runtime.node_thread import REPORTED_DRIVERS_MAX, LinkBytesCounter
from sparkstrom.transport.base import SentBytes


class Counted:
    """A transport that has sent so much."""

    def __init__(self, driver: str, driver_bytes: int, own_bytes: int) -> None:
        self.figures = SentBytes(driver, driver_bytes, own_bytes)

    def sent(self) -> SentBytes:
        return self.figures


def told(*sent: tuple[str, int, int]) -> LinkBytes:
    """What one node tells after these figures, with one transport for each media driver."""
    wire = LinkBytesCounter()
    figures, transports = LinkBytes({}, 0.0), dict[str, Any]()
    for driver, driver_bytes, own_bytes in sent:
        transport = transports.setdefault(driver, Counted(driver, 0, 0))
        transport.figures = SentBytes(driver, driver_bytes, own_bytes)
        figures = wire.update(transport)
    return figures


def test_workers_of_an_executor_share_what_their_media_driver_sent() -> None:
    here, beside = told(("a", 1000, 10)), told(("a", 1500, 20))
    elsewhere = told(("b", 300, 5))
    assert sum_link_bytes([here, beside, elsewhere]) == 1500 + 300 + 10 + 20 + 5


def test_what_a_media_driver_sent_before_it_died_counts_too() -> None:
    figures = told(("a", 1000, 10), ("a", 1200, 15), ("b", 50, 1))
    assert sum_link_bytes([figures]) == 1200 + 15 + 50 + 1


def test_a_client_that_joins_its_media_driver_again_keeps_its_correction() -> None:
    wire = LinkBytesCounter()
    closed: Any = Counted("a", 900, -800)
    again: Any = Counted("a", 950, -10)
    for transport in (closed, closed, again):  # its replacement may be tried twice
        figures = wire.update(transport)
    assert figures == LinkBytes({"a": 950.0}, -810.0)


def test_many_deaths_make_no_endless_message() -> None:
    figures = told(*((f"driver {number}", 1, 2) for number in range(100)))
    assert len(figures.drivers) == REPORTED_DRIVERS_MAX
    assert sum_link_bytes([figures]) == REPORTED_DRIVERS_MAX + 100 * 2


def test_nothing_leaves_a_process_by_memory() -> None:
    transport = MemoryNetwork().open("here")
    assert transport.sent() == SentBytes(str(Endpoint("here", 1)), 0, 0)
