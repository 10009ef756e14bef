"""Residual age: when the residual is measured, and how long learned changes wait in it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from sparkstrom.runtime.theta import Replica
from sparkstrom.runtime.trainer_thread import MEASURING_SHARE_MAX, RESIDUAL_AGE_POLL_S, ResidualAge
from tests.unit.runtime.trainer_harness import TAU, N, TrainerHarness, steps


class MeasuredReplica:
    """A replica and clock that count measurements; each takes ``cost_s`` seconds."""

    mass, looks, now_s, cost_s = 2.0, 0, 100.0, 0.0

    def residual_mass(self) -> float:
        self.looks += 1
        self.now_s += self.cost_s
        return self.mass

    def monotonic_s(self) -> float:
        return self.now_s


@pytest.fixture
def measured_replica() -> MeasuredReplica:
    return MeasuredReplica()


def test_residual_is_measured_at_doubling_steps_and_every_second(
    measured_replica: MeasuredReplica,
) -> None:
    """The residual is measured after 1, 2, 4 ... steps, and every second."""
    unsent, replica = ResidualAge(measured_replica), cast(Replica, measured_replica)
    for step in range(1, 1025):
        unsent.measure_if_due(replica, step)
    assert measured_replica.looks == 11  # 1, 2, 4 ... 1024
    measured_replica.now_s += RESIDUAL_AGE_POLL_S
    unsent.measure_if_due(replica, 1025)
    unsent.measure_if_due(replica, 1026)
    assert measured_replica.looks == 12


def test_slow_measurements_take_limited_share_of_time(measured_replica: MeasuredReplica) -> None:
    """Slow measurements take at most ``MEASURING_SHARE_MAX`` of the time."""
    measured_replica.cost_s = 0.1
    unsent, replica = ResidualAge(measured_replica), cast(Replica, measured_replica)
    unsent.measure_if_due(replica, 1024)
    measured_replica.now_s += 0.99 * 0.1 / MEASURING_SHARE_MAX
    unsent.measure_if_due(replica, 1025)
    assert measured_replica.looks == 1
    measured_replica.now_s += 0.02 * 0.1 / MEASURING_SHARE_MAX
    unsent.measure_if_due(replica, 1026)
    assert measured_replica.looks == 2


def test_residual_mass_is_interpolated_linearly_between_measurements(
    measured_replica: MeasuredReplica,
) -> None:
    """Between two measurements, the mass is assumed to change linearly."""
    unsent, replica = ResidualAge(measured_replica), cast(Replica, measured_replica)
    unsent.measure(replica, 4)  # from 0 to 2
    unsent.measure(replica, 10)
    measured_replica.mass = 0.0
    unsent.measure(replica, 11)
    unsent.measure(replica, 11)
    assert unsent.waited == 4 * 1.0 + 6 * 2.0 + 1 * 1.0


def test_trainer_reports_waited_and_left_residual_mass(make_trainer: Any) -> None:
    """With half a tau per step, every second step sends all; measured after 1, 2, 4 and 6 steps."""
    made: TrainerHarness = make_trainer(steps(6), push=TAU / 2)
    made.run()
    made.trainer._report_counters(now=True)
    told = made.channel.stats
    assert told is not None
    assert told.mass_left == 3 * N * TAU
    assert told.mass_waited == (1 + 1) * N * TAU / 4
