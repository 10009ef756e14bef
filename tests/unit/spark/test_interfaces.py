"""Tests of choosing network addresses on driver and executors, and of joining media drivers."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.base.errors import DriverLost, SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.transport.aeron.media_driver import DriverOptions
from sparkstrom.transport.bind_address import InterfaceAddress
from sparkstrom.worker import network_setup as interfaces
from sparkstrom.worker.network_setup import (
    choose_driver_address,
    choose_executor_address,
    local_address_towards,
    resolve_host,
    transport_opener,
)

LISTED = [
    InterfaceAddress("lo", "127.0.0.1"),
    InterfaceAddress("eth0", "10.1.2.3"),
    InterfaceAddress("eth1", "192.168.7.8"),
]
MASK = VoidConfiguration(network_mask="10.0.0.0/8")


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a host with the addresses LISTED, and without the two environment variables."""
    monkeypatch.setattr(interfaces, "list_interface_addresses", lambda: LISTED)
    for name in ("SPARKSTROM_LOCAL_IP", "DL4J_VOID_IP"):
        monkeypatch.delenv(name, raising=False)


def test_driver_prefers_most_explicit_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver uses controller_address, mask, environment or Spark's host, in this order."""
    assert choose_driver_address(VoidConfiguration(), "192.168.7.8") == "192.168.7.8"
    assert choose_driver_address(MASK, "192.168.7.8") == "10.1.2.3"
    monkeypatch.setenv("DL4J_VOID_IP", "192.168.7.8")
    assert choose_driver_address(VoidConfiguration(), "127.0.0.1") == "192.168.7.8"
    assert choose_driver_address(MASK, "127.0.0.1") == "10.1.2.3"
    both = VoidConfiguration(network_mask="10.0.0.0/8", controller_address="127.0.0.1")
    assert choose_driver_address(both, "192.168.7.8") == "127.0.0.1"
    alone = VoidConfiguration(controller_address="10.1.2.3")
    assert choose_driver_address(alone, "127.0.0.1") == "10.1.2.3"


def test_executor_prefers_mask_then_environment_then_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor uses mask, environment or the route to the controller, in this order."""
    controller = Endpoint("127.0.0.1", 9)
    assert choose_executor_address(VoidConfiguration(), controller) == "127.0.0.1"
    assert choose_executor_address(MASK, controller) == "10.1.2.3"
    monkeypatch.setenv("SPARKSTROM_LOCAL_IP", "192.168.7.8")
    assert choose_executor_address(VoidConfiguration(), controller) == "192.168.7.8"
    assert choose_executor_address(MASK, controller) == "10.1.2.3"


def test_rejects_controller_address_of_another_machine() -> None:
    with pytest.raises(SetupError, match=r"10\.9\.9\.9 is not an address of"):
        choose_driver_address(VoidConfiguration(controller_address="10.9.9.9"), "127.0.0.1")


def test_rejects_network_mask_without_matching_address() -> None:
    with pytest.raises(SetupError, match="matches no address"):
        choose_executor_address(
            VoidConfiguration(network_mask="172.16.0.0/12"), Endpoint("127.0.0.1", 9)
        )


def test_rejects_host_name_that_cannot_be_resolved() -> None:
    """A host name that cannot be resolved is refused."""
    with pytest.raises(SetupError, match="'no such host' cannot be resolved"):
        resolve_host("no such host")


def test_ipv6_address_may_have_brackets() -> None:
    """An IPv6 address may have brackets, as Spark writes it in spark.driver.host."""
    assert resolve_host("[fd00:77::1]") == resolve_host("fd00:77::1") == "fd00:77::1"


def test_missing_route_error_names_controller() -> None:
    """If there is no route to the controller, SetupError names its address."""
    with pytest.raises(SetupError, match=r"no route .* to the controller at no such host:9"):
        local_address_towards(Endpoint("no such host", 9))


@pytest.mark.parametrize("losses", [0, 2, 3])
def test_media_driver_lost_during_join_is_replaced(
    monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    """If a media driver ends while a task joins it, another one is tried, JOIN_ATTEMPTS in all."""
    joined: list[Any] = []

    def join(handle: object) -> object:
        joined.append(handle)
        if len(joined) <= losses:
            raise DriverLost("connecting", -1000, "no cnc.dat")
        return handle

    monkeypatch.setattr(interfaces, "ensure_driver", lambda key, options: object())
    monkeypatch.setattr("sparkstrom.transport.aeron.client.AeronTransport", join)
    open_transport = transport_opener("k", DriverOptions(edges=1))
    if losses < interfaces.JOIN_ATTEMPTS:
        assert open_transport(None) is joined[-1]
        assert len(set(map(id, joined))) == losses + 1
    else:
        with pytest.raises(DriverLost):
            open_transport(None)
