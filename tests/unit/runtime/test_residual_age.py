"""Residual age: when the residual is measured, and how long learned changes wait in it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from sparkstrom.runtime.theta import Replica
from sparkstrom.runtime.trainer_thread import MEASURING_SHARE_MAX, RESIDUAL_AGE_POLL_S, ResidualAge
from tests.unit.runtime.benches import TAU, Bench, N, steps


class Measured:
    """A replica and clock that count measurements; each takes ``cost_s`` seconds."""

    mass, looks, now_s, cost_s = 2.0, 0, 100.0, 0.0

    def residual_mass(self) -> float:
        self.looks += 1
        self.now_s += self.cost_s
        return self.mass

    def monotonic_s(self) -> float:
        return self.now_s


@pytest.fixture
def measured() -> Measured:
    return Measured()


def test_it_looks_seldom(measured: Measured) -> None:
    """The residual is measured after 1, 2, 4 ... steps, and every second."""
    unsent, replica = ResidualAge(measured), cast(Replica, measured)
    for step in range(1, 1025):
        unsent.measure_if_due(replica, step)
    assert measured.looks == 11  # 1, 2, 4 ... 1024
    measured.now_s += RESIDUAL_AGE_POLL_S
    unsent.measure_if_due(replica, 1025)
    unsent.measure_if_due(replica, 1026)
    assert measured.looks == 12


def test_a_look_that_takes_long_is_made_less_often(measured: Measured) -> None:
    """Slow measurements take at most ``MEASURING_SHARE_MAX`` of the time."""
    measured.cost_s = 0.1
    unsent, replica = ResidualAge(measured), cast(Replica, measured)
    unsent.measure_if_due(replica, 1024)
    measured.now_s += 0.99 * 0.1 / MEASURING_SHARE_MAX
    unsent.measure_if_due(replica, 1025)
    assert measured.looks == 1
    measured.now_s += 0.02 * 0.1 / MEASURING_SHARE_MAX
    unsent.measure_if_due(replica, 1026)
    assert measured.looks == 2


def test_mass_is_taken_to_change_evenly(measured: Measured) -> None:
    """Between two measurements, the mass is assumed to change linearly."""
    unsent, replica = ResidualAge(measured), cast(Replica, measured)
    unsent.measure(replica, 4)  # from 0 to 2
    unsent.measure(replica, 10)
    measured.mass = 0.0
    unsent.measure(replica, 11)
    unsent.measure(replica, 11)
    assert unsent.waited == 4 * 1.0 + 6 * 2.0 + 1 * 1.0


def test_a_trainer_tells_what_waited_and_what_left(bench: Any) -> None:
    """With half a tau per step, every second step sends all; measured after 1, 2, 4 and 6 steps."""
    made: Bench = bench(steps(6), push=TAU / 2)
    made.run()
    made.trainer._report_counters(now=True)
    told = made.channel.stats
    assert told is not None
    assert told.mass_left == 3 * N * TAU
    assert told.mass_waited == (1 + 1) * N * TAU / 4
