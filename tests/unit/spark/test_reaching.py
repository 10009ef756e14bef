"""Tests of require_controller_reachable: which tasks send a probe, and what its error contains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.base.errors import DriverLost, NetworkError
from sparkstrom.base.identity import Endpoint
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.transport.bind_address import InterfaceAddress
from sparkstrom.worker import network_setup as interfaces
from sparkstrom.worker import network_setup as reaching
from sparkstrom.worker.network_setup import (
    JOIN_ATTEMPTS,
    ControllerRoute,
    require_controller_reachable,
)
from sparkstrom.worker.task_environment import TaskEnvironment

PLACE = TaskEnvironment(0, 0, "b", "7-8", Path("/scratch"))
MASK = {"network_mask": "10.0.0.0/24"}


def make_route(host: str = "10.0.0.1", **void: Any) -> ControllerRoute:
    """Return the route to a controller at this host."""
    return ControllerRoute(255, Endpoint(host, 40123), VoidConfiguration(**MASK, **void), 8, 0)


class FakeMediaDriver:
    """A fake of the media driver, with prepared answers to probes; it records requests for it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.endpoint = directory, Endpoint("10.0.0.7", 40125)
        self.answers: list[bool | Exception] = []
        self.keys: list[str] = []

    def ensure(self, key: str, options: Any) -> Any:
        self.keys.append(key)
        assert options.host == "10.0.0.7"
        return SimpleNamespace(directory=self.directory, endpoint=self.endpoint, close=lambda: None)

    def is_answered(self, handle: Any, there: Endpoint, seconds: float) -> bool:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def media_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMediaDriver:
    """Use the fake media driver on host b with the address 10.0.0.7."""
    made = FakeMediaDriver(tmp_path)
    monkeypatch.setattr(reaching, "ensure_driver", made.ensure)
    monkeypatch.setattr(reaching, "is_driver_reachable", made.is_answered)
    monkeypatch.setattr(reaching.socket, "gethostname", lambda: "b")
    monkeypatch.setattr(
        interfaces, "list_interface_addresses", lambda: [InterfaceAddress("eth1", "10.0.0.7")]
    )
    return made


def test_only_first_task_of_executor_sends_probe(media_driver: FakeMediaDriver) -> None:
    """Only the first task of an executor sends a probe."""
    media_driver.answers = [True]
    require_controller_reachable(make_route(), PLACE)
    require_controller_reachable(make_route(), PLACE)
    assert media_driver.answers == []
    assert media_driver.keys == ["00000000000000ff-7-8"] * 2


@pytest.mark.parametrize("host", ["10.0.0.7", "127.0.0.1"])
def test_no_probe_is_sent_on_machine_of_controller(
    media_driver: FakeMediaDriver, host: str
) -> None:
    """No probe is sent if the controller is on the same machine."""
    require_controller_reachable(make_route(host), PLACE)
    assert media_driver.keys == []


def test_unreachable_error_names_addresses_and_ports_to_open(media_driver: FakeMediaDriver) -> None:
    """The error names both addresses, and the addresses and ports to open for UDP."""
    media_driver.answers = [False]
    with pytest.raises(NetworkError) as found:
        require_controller_reachable(make_route(unicast_port=40123), PLACE)
    text = str(found.value)
    assert text.startswith(
        "UDP between the executor on b at 10.0.0.7:40125 and the driver at 10.0.0.1:40123 is "
    )
    assert "UDP from 10.0.0.7 to 10.0.0.1 port 40123, and from 10.0.0.1 to 10.0.0.7 ports" in text
    assert "ports 40123 to 40186, with the answers to both; or" in text
    assert "\n" not in text


def test_error_says_controller_if_on_executor(media_driver: FakeMediaDriver) -> None:
    media_driver.answers = [False]
    words = r"b at 10\.0\.0\.7:40125 and the controller at 10\.0\.0\.1:40123 is dropped"
    with pytest.raises(NetworkError, match=words):
        require_controller_reachable(make_route(controller="executor"), PLACE)


def test_unreachable_error_suggests_fixing_variable_ports(media_driver: FakeMediaDriver) -> None:
    """If ports are not fixed, the error names the present port and the option that fixes it."""
    media_driver.answers = [False]
    with pytest.raises(NetworkError, match=r"10\.0\.0\.7 port 40125, .*fix them by unicast_port"):
        require_controller_reachable(make_route(), PLACE)


@pytest.mark.parametrize("losses", [1, JOIN_ATTEMPTS])
def test_probe_is_repeated_if_media_driver_ends(media_driver: FakeMediaDriver, losses: int) -> None:
    """If the media driver ends during a probe, the probe is repeated, JOIN_ATTEMPTS in all."""
    lost = [DriverLost("asking", 0, "it ended") for _ in range(losses)]
    media_driver.answers = [*lost, True]
    if losses < JOIN_ATTEMPTS:
        require_controller_reachable(make_route(), PLACE)
        assert media_driver.answers == []
    else:
        with pytest.raises(DriverLost):
            require_controller_reachable(make_route(), PLACE)
