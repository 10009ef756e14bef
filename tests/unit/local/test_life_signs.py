"""A worker's count of life signs: who stands still is seen, who has not looked is not misled."""

from __future__ import annotations

import pytest

from sparkstrom.local import worker_pool as life_signs
from sparkstrom.local.worker_pool import FIRST_HEARTBEAT_S, HeartbeatMonitor, HeartbeatSender

LEASE_S = 10.0


class Hand:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    made = Hand()
    monkeypatch.setattr(life_signs, "time", made)
    return made


def test_who_counts_on_lives_and_who_does_not_is_silent_after_a_lease(hand: Hand) -> None:
    signs = HeartbeatMonitor(LEASE_S)
    pulse = HeartbeatSender(signs.descriptor)
    for _ in range(5):
        hand.now_s += LEASE_S + 1  # nobody has looked meanwhile, which is not the worker's fault
        pulse.beat()
        assert not signs.is_silent()
    hand.now_s += LEASE_S
    assert not signs.is_silent()
    hand.now_s += 0.1
    assert signs.is_silent()
    pulse.beat()
    assert not signs.is_silent()
    signs.close()
    signs.close()


def test_an_interpreter_takes_its_time_to_start(hand: Hand) -> None:
    signs = HeartbeatMonitor(LEASE_S)
    hand.now_s += FIRST_HEARTBEAT_S
    assert not signs.is_silent()
    hand.now_s += 0.1
    assert signs.is_silent()
    signs.close()
