"""Tests, with a fake clock, of how long an application's first fit waits for executors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.fit.fit_context import TaskSlots
from sparkstrom.spark import executor_slots as registering
from sparkstrom.spark.executor_slots import (
    REGISTRATION_INCOMPLETE_S,
    REGISTRATION_QUIET_S,
    await_slots,
)

NUMBERS = itertools.count()


class Clock:
    """A fake of the module time, whose time passes only in ``sleep``."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(registering, "time", made)
    return made


class RegisteringContext:
    """A fake SparkContext whose executors register at these times, in seconds from now."""

    def __init__(self, clock: Clock, *at_s: float, master: str = "spark://h:7077", **conf: str):
        self.master, self._conf = master, {f"spark.{k.replace('_', '.')}": conf[k] for k in conf}
        self.applicationId = f"app-{next(NUMBERS)}"
        self._clock, self._at_s = clock, [clock.now_s + at for at in at_s]
        self._jsc = SimpleNamespace(sc=lambda: self)

    def getExecutorMemoryStatus(self) -> Any:
        here = sum(at <= self._clock.now_s for at in self._at_s)
        return SimpleNamespace(size=lambda: here + 1)  # the driver counts, too

    def resourceProfileManager(self) -> Any:
        return SimpleNamespace(defaultResourceProfile=lambda: None)

    def maxNumConcurrentTasks(self, profile: None) -> int:
        return 4

    def getConf(self) -> Any:
        return SimpleNamespace(getAllWithPrefix=lambda prefix: [])


CORES = {"cores_max": "8", "executor_cores": "2"}


def test_fit_waits_for_all_executors_of_cores_max(clock: Clock) -> None:
    """A fit waits for all executors that cores.max allows, and shows how many have registered."""
    said: list[str] = []
    coming = RegisteringContext(clock, 2, 4, 7, 7.5, **CORES)
    assert await_slots(coming, 60, said.append) == TaskSlots(4, 2)
    assert clock.now_s == pytest.approx(107.5, abs=0.2)
    assert said[0] == "sparkstrom waits: 0 of 4 executors have registered"
    assert said[1] == "sparkstrom waits: 2 of 4 executors have registered"


def test_standalone_cluster_ignores_executor_instances(clock: Clock) -> None:
    """A fit on a standalone cluster does not wait for spark.executor.instances."""
    assert await_slots(
        RegisteringContext(clock, 2, executor_instances="3"), 60, print
    ) == TaskSlots(1, 4)


def test_fit_without_expected_number_starts_after_quiet_time(clock: Clock) -> None:
    """Without an expected number, a fit starts if no executor came for REGISTRATION_QUIET_S."""
    said: list[str] = []
    assert await_slots(RegisteringContext(clock, 2, 4), 60, said.append) == TaskSlots(2, 2)
    assert clock.now_s == pytest.approx(104 + REGISTRATION_QUIET_S, abs=0.3)
    assert said[0] == "sparkstrom waits: 0 executors have registered"


def test_fit_starts_with_fewer_executors_than_expected(clock: Clock) -> None:
    """If some expected executors do not come for REGISTRATION_INCOMPLETE_S, the fit starts."""
    said: list[str] = []
    assert await_slots(RegisteringContext(clock, 2, 4, **CORES), 60, said.append) == TaskSlots(2, 2)
    assert clock.now_s == pytest.approx(104 + REGISTRATION_INCOMPLETE_S, abs=0.3)
    assert said[-1].startswith("sparkstrom notes: 2 of 4 executors have registered")


def test_no_executor_within_start_timeout_raises_error(clock: Clock) -> None:
    """If no executor registers within the given time, SetupError is raised."""
    with pytest.raises(SetupError, match=r"with spark://h:7077 within 20 s \(start_timeout\)"):
        await_slots(RegisteringContext(clock, 21), 20, print)
    assert clock.now_s == pytest.approx(120, abs=0.3)


def test_second_fit_of_application_does_not_wait(clock: Clock) -> None:
    """A later fit of an application uses the executors that are there, without waiting."""
    coming = RegisteringContext(clock, 2, 4, 50)
    await_slots(coming, 60, print)
    clock.now_s = 160.0
    assert await_slots(coming, 60, print) == TaskSlots(3, 1)
    assert clock.now_s == 160.0


@pytest.mark.parametrize(
    ("master", "conf"),
    [
        ("local[4]", {}),
        ("yarn", {"executor_instances": "3", "executor_cores": "2"}),
    ],
)
def test_no_wait_in_local_mode_or_with_configured_executors(
    clock: Clock, master: str, conf: dict[str, str]
) -> None:
    """There is no wait in local mode, or if YARN's configuration gives the number of executors."""
    await_slots(RegisteringContext(clock, master=master, **conf), 60, print)
    assert clock.now_s == 100.0


def test_no_wait_with_dynamic_allocation(clock: Clock) -> None:
    """With dynamic allocation there is no wait: Spark requests executors once the fit has tasks."""
    slots = await_slots(RegisteringContext(clock, dynamicAllocation_enabled="true"), 60, print)
    assert (slots.executors, slots.is_estimate) == (2, True)
    assert clock.now_s == 100.0


def test_yarn_fit_waits_for_two_executors_by_default(clock: Clock) -> None:
    """Without a configured number, YARN starts two executors, and the fit waits for both."""
    assert await_slots(RegisteringContext(clock, 0, 1, master="yarn"), 60, print) == TaskSlots(2, 1)
    assert clock.now_s == pytest.approx(101, abs=0.2)
