"""Tests of a machine's media driver: its successor, which any worker may start, has its port."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkstrom import VoidConfiguration
from sparkstrom.base.errors import DriverLost, SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.local.fit_runner import LocalMediaDriver, LocalRoute
from sparkstrom.transport.aeron.media_driver import DriverOptions
from sparkstrom.worker import network_setup as interfaces
from sparkstrom.worker.task_environment import TaskEnvironment


def test_restarted_media_driver_prefers_known_port(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A worker that starts the media driver asks for the master's known port."""
    asked: list[DriverOptions] = []
    monkeypatch.setattr(interfaces, "connect_transport", lambda key, options: asked.append(options))
    way = LocalRoute(
        7,
        Endpoint("127.0.0.1", 4711),
        VoidConfiguration(),
        2,
        2,
        driver=LocalMediaDriver.for_this_process(7, 2),
    )
    place = TaskEnvironment(0, 0, "localhost", "host", tmp_path, 1)
    opening = interfaces.transport_opener(way.driver_key(place), way.driver_options(place))
    opening(None)  # a new attempt, which knows of no endpoint before
    opening(Endpoint("127.0.0.1", 4712))
    assert [options.port_preferred for options in asked] == [4711, 4712]
    assert {options.watch for options in asked} == {LocalMediaDriver.for_this_process(7, 2).owner}
    assert os.getpid() in {options.watch.pid for options in asked if options.watch}


def test_failed_restart_of_media_driver_raises_driver_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a later start, not the first, may fail as ``DriverLost``: the host may be busy."""

    def connect(key: str, options: DriverOptions) -> None:
        raise SetupError("it did not come up within its deadline")

    monkeypatch.setattr(interfaces, "connect_transport", connect)
    opening = interfaces.transport_opener("key", DriverOptions())
    with pytest.raises(SetupError, match="did not come up"):
        opening(None)
    with pytest.raises(DriverLost, match="did not come up"):
        opening(Endpoint("127.0.0.1", 4712))
