"""Recovery: the transport is replaced when its media driver dies, unless deaths are frequent."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparkstrom.base.errors import DriverLost, SetupError
from sparkstrom.runtime.node_thread import HEALTHY_DRIVER_S, SUCCESSIVE_DEATHS_MAX, DriverRecovery


class ManualClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


class DyingDrivers:
    """A recovery whose next ``deaths`` calls of work or replacement raise DriverLost."""

    def __init__(self) -> None:
        self.clock, self.deaths, self.calls = ManualClock(), 0, list[str]()
        self.recovery = DriverRecovery("this executor", self._call("replace"), self.clock)

    def _call(self, name: str) -> Callable[[], None]:
        def call() -> None:
            self.calls.append(name)
            if self.deaths:
                self.deaths -= 1
                raise DriverLost(name, -1000, "no luck")

        return call

    def work(self, deaths: int = 0) -> list[str]:
        """Do work while the next ``deaths`` drivers die; return the calls that were made."""
        self.deaths, self.calls = deaths, []
        self.recovery.guard(self._call("work"))
        return self.calls


def test_transport_is_not_replaced_while_driver_lives() -> None:
    """Work during which the driver lives replaces no transport."""
    assert DyingDrivers().work() == ["work"]


@pytest.mark.parametrize("deaths", [1, 2, SUCCESSIVE_DEATHS_MAX])
def test_transport_is_replaced_until_its_driver_survives(deaths: int) -> None:
    """The transport is replaced until its driver does not die; the work is not repeated."""
    assert DyingDrivers().work(deaths) == ["work", *["replace"] * deaths]


def test_too_many_successive_deaths_raise_setup_error_with_hint() -> None:
    """After too many deaths in a row, the error has their number, the last cause and a hint."""
    with pytest.raises(
        SetupError, match=rf"died {SUCCESSIVE_DEATHS_MAX + 1} times in a row.*no luck.*shm"
    ):
        DyingDrivers().work(SUCCESSIVE_DEATHS_MAX + 1)


def test_deaths_after_short_service_count_as_successive() -> None:
    """Deaths after at most ``HEALTHY_DRIVER_S`` of service count as successive."""
    drivers = DyingDrivers()
    for _ in range(SUCCESSIVE_DEATHS_MAX):
        drivers.work(1)
        drivers.clock.now_s += HEALTHY_DRIVER_S
    with pytest.raises(SetupError, match="none lived for 60 s"):
        drivers.work(1)


def test_long_driver_service_resets_death_count() -> None:
    """A death after more than ``HEALTHY_DRIVER_S`` of service resets the count."""
    drivers = DyingDrivers()
    for _ in range(3 * SUCCESSIVE_DEATHS_MAX):
        drivers.work(1)
        drivers.clock.now_s += HEALTHY_DRIVER_S + 1.0


def test_driver_start_time_does_not_count_as_service() -> None:
    """Time spent on starting a driver is not service: Aeron waits 10 s for a dead one."""
    drivers = DyingDrivers()
    drivers.deaths = SUCCESSIVE_DEATHS_MAX + 1

    def slow() -> None:
        drivers.clock.now_s += HEALTHY_DRIVER_S + 1.0
        drivers._call("slow")()

    recovery = DriverRecovery("the driver program", slow, drivers.clock)
    with pytest.raises(SetupError, match="the driver program"):
        recovery.guard(slow)
