"""How long learning waits in a residual, from a replica whose mass is known."""

from __future__ import annotations

from typing import Any, cast

import pytest

from sparkstrom.runtime.theta import Replica
from sparkstrom.runtime.trainer_thread import MEASURING_SHARE_MAX, RESIDUAL_AGE_POLL_S, ResidualAge
from tests.unit.runtime.benches import TAU, Bench, N, steps


class Measured:
    """A replica that says how often it was looked at; one look takes ``cost_s``."""

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
    unsent, replica = ResidualAge(measured), cast(Replica, measured)
    for step in range(1, 1025):
        unsent.measure_if_due(replica, step)
    assert measured.looks == 11  # 1, 2, 4 ... 1024
    measured.now_s += RESIDUAL_AGE_POLL_S
    unsent.measure_if_due(replica, 1025)
    unsent.measure_if_due(replica, 1026)
    assert measured.looks == 12


def test_a_look_that_takes_long_is_made_less_often(measured: Measured) -> None:
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
    unsent, replica = ResidualAge(measured), cast(Replica, measured)
    unsent.measure(replica, 4)  # from 0 to 2
    unsent.measure(replica, 10)
    measured.mass = 0.0
    unsent.measure(replica, 11)
    unsent.measure(replica, 11)
    assert unsent.waited == 4 * 1.0 + 6 * 2.0 + 1 * 1.0


def test_a_trainer_tells_what_waited_and_what_left(bench: Any) -> None:
    """Half a tau more in each step, so that every other one sends all; looked at: 1, 2, 4, 6."""
    made: Bench = bench(steps(6), push=TAU / 2)
    made.run()
    made.trainer._report_counters(now=True)
    told = made.channel.stats
    assert told is not None
    assert told.mass_left == 3 * N * TAU
    assert told.mass_waited == (1 + 1) * N * TAU / 4
