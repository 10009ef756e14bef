"""Tests of workers' heartbeats on one machine: silent workers are found, without false alarms."""

from __future__ import annotations

import pytest

from sparkstrom.local import worker_pool as life_signs
from sparkstrom.local.worker_pool import FIRST_HEARTBEAT_S, HeartbeatMonitor, HeartbeatSender

LEASE_S = 10.0


class ManualClock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def manual_clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    made = ManualClock()
    monkeypatch.setattr(life_signs, "time", made)
    return made


def poll_for(signs: HeartbeatMonitor, hand: ManualClock, seconds: float) -> bool:
    """Check twice a second for this long, and return the last result."""
    for _ in range(int(2 * seconds)):
        hand.now_s += 0.5
        signs.is_silent()
    return signs.is_silent()


def test_worker_is_silent_after_lease_without_heartbeat(manual_clock: ManualClock) -> None:
    """A worker is silent if no heartbeat was seen for a lease of regular checks."""
    signs = HeartbeatMonitor(LEASE_S)
    pulse = HeartbeatSender(signs.descriptor)
    for _ in range(5):
        manual_clock.now_s += LEASE_S + 1  # no check in time, which is not the worker's fault
        pulse.beat()
        assert not signs.is_silent()
    assert not poll_for(signs, manual_clock, LEASE_S)
    assert poll_for(signs, manual_clock, 0.5)
    pulse.beat()
    assert not signs.is_silent()
    signs.close()
    signs.close()


def test_worker_suspended_together_with_monitor_is_not_silent(manual_clock: ManualClock) -> None:
    """A worker is not silent if it was suspended together with the process that checks it."""
    signs = HeartbeatMonitor(LEASE_S)
    pulse = HeartbeatSender(signs.descriptor)
    pulse.beat()
    assert not signs.is_silent()
    for _ in range(5):
        manual_clock.now_s += 10 * LEASE_S
        assert not poll_for(signs, manual_clock, 1)  # the checking process runs before the worker
    assert not poll_for(signs, manual_clock, LEASE_S - 2.5)
    assert poll_for(signs, manual_clock, 0.5)
    signs.close()


def test_first_heartbeat_may_take_longer(manual_clock: ManualClock) -> None:
    """A new worker has a longer time for its first heartbeat."""
    signs = HeartbeatMonitor(LEASE_S)
    assert not poll_for(signs, manual_clock, FIRST_HEARTBEAT_S)
    assert poll_for(signs, manual_clock, 0.5)
    signs.close()
