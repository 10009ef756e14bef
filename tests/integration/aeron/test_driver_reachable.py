"""``is_driver_reachable``: whether a media driver without clients answers Aeron's datagrams."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from sparkstrom.base.errors import DriverLost
from sparkstrom.transport.aeron.media_driver import is_driver_reachable


def test_running_driver_is_reachable_and_probe_logs_are_deleted(drivers: Any) -> None:
    """A running media driver answers, and both drivers delete the logs of the test."""
    here, there = drivers.ensure("a"), drivers.ensure("b", host="127.0.0.2")
    for _ in range(3):
        assert is_driver_reachable(here, there.endpoint, 30.0)
    logs = [here.aeron_directory / "publications", there.aeron_directory / "images"]
    drivers.wait_until(lambda: not any(path for log in logs for path in log.iterdir()))


def test_stopped_driver_is_unreachable_after_timeout(drivers: Any) -> None:
    """If the other driver is stopped, the result is False after the given time."""
    here, there = drivers.ensure("a"), drivers.ensure("b", host="127.0.0.2")
    drivers.stop(there.pid)
    began_s = time.monotonic()
    try:
        assert not is_driver_reachable(here, there.endpoint, 0.5)
    finally:
        os.kill(there.pid, signal.SIGCONT)
    assert time.monotonic() - began_s >= 0.5
    assert is_driver_reachable(here, there.endpoint, 30.0)


def test_killed_own_driver_raises_driver_lost(drivers: Any) -> None:
    """DriverLost is raised if this host's own media driver was killed."""
    here, there = drivers.ensure("a"), drivers.ensure("b", host="127.0.0.2")
    here_port_lost = there.endpoint._replace(port=9)
    os.kill(here.pid, signal.SIGKILL)
    with pytest.raises(DriverLost):
        is_driver_reachable(here, here_port_lost, 30.0)
