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


def way(host: str = "10.0.0.1", **void: Any) -> ControllerRoute:
    """Return the route to a controller at this host."""
    return ControllerRoute(255, Endpoint(host, 40123), VoidConfiguration(**MASK, **void), 8, 0)


class Asked:
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
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Asked:
    """Use the fake media driver on host b with the address 10.0.0.7."""
    made = Asked(tmp_path)
    monkeypatch.setattr(reaching, "ensure_driver", made.ensure)
    monkeypatch.setattr(reaching, "is_driver_reachable", made.is_answered)
    monkeypatch.setattr(reaching.socket, "gethostname", lambda: "b")
    monkeypatch.setattr(
        interfaces, "list_interface_addresses", lambda: [InterfaceAddress("eth1", "10.0.0.7")]
    )
    return made


def test_one_task_of_an_executor_asks(asked: Asked) -> None:
    """Only the first task of an executor sends a probe."""
    asked.answers = [True]
    require_controller_reachable(way(), PLACE)
    require_controller_reachable(way(), PLACE)
    assert asked.answers == []
    assert asked.keys == ["00000000000000ff-7-8"] * 2


@pytest.mark.parametrize("host", ["10.0.0.7", "127.0.0.1"])
def test_on_one_machine_nobody_asks(asked: Asked, host: str) -> None:
    """No probe is sent if the controller is on the same machine."""
    require_controller_reachable(way(host), PLACE)
    assert asked.keys == []


def test_both_addresses_and_the_rule_are_told(asked: Asked) -> None:
    """The error names both addresses, and the addresses and ports to open for UDP."""
    asked.answers = [False]
    with pytest.raises(NetworkError) as found:
        require_controller_reachable(way(unicast_port=40123), PLACE)
    text = str(found.value)
    assert text.startswith(
        "UDP between the executor on b at 10.0.0.7:40125 and the driver at 10.0.0.1:40123 is "
    )
    assert "UDP from 10.0.0.7 to 10.0.0.1 port 40123, and from 10.0.0.1 to 10.0.0.7 ports" in text
    assert "ports 40123 to 40186, with the answers to both; or" in text
    assert "\n" not in text


def test_a_controller_on_an_executor_is_not_called_the_driver(asked: Asked) -> None:
    asked.answers = [False]
    words = r"b at 10\.0\.0\.7:40125 and the controller at 10\.0\.0\.1:40123 is dropped"
    with pytest.raises(NetworkError, match=words):
        require_controller_reachable(way(controller="executor"), PLACE)


def test_ports_that_change_are_said_to(asked: Asked) -> None:
    """If ports are not fixed, the error names the present port and the option that fixes it."""
    asked.answers = [False]
    with pytest.raises(NetworkError, match=r"10\.0\.0\.7 port 40125, .*fix them by unicast_port"):
        require_controller_reachable(way(), PLACE)


@pytest.mark.parametrize("losses", [1, JOIN_ATTEMPTS])
def test_a_media_driver_that_ends_meanwhile_is_asked_for_again(asked: Asked, losses: int) -> None:
    """If the media driver ends during a probe, the probe is repeated, JOIN_ATTEMPTS in all."""
    lost = [DriverLost("asking", 0, "it ended") for _ in range(losses)]
    asked.answers = [*lost, True]
    if losses < JOIN_ATTEMPTS:
        require_controller_reachable(way(), PLACE)
        assert asked.answers == []
    else:
        with pytest.raises(DriverLost):
            require_controller_reachable(way(), PLACE)
