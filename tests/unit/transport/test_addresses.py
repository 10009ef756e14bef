"""Bind addresses: masks, explicit addresses, fallbacks, and the errors that list addresses."""

from __future__ import annotations

import pytest

from sparkstrom.base.errors import NetworkError, SetupError, UsageError
from sparkstrom.transport.bind_address import (
    InterfaceAddress,
    choose_address,
    list_interface_addresses,
)

HOST = [
    InterfaceAddress("lo", "127.0.0.1"),
    InterfaceAddress("eth0", "10.0.2.4"),
    InterfaceAddress("eth1", "192.168.1.200"),
    InterfaceAddress("eth0", "fd00::2"),
]


@pytest.mark.parametrize(
    ("mask", "address"),
    [
        ("10.0.0.0/8", "10.0.2.4"),
        ("10.0.2.4/16", "10.0.2.4"),  # DL4J would use 10.0.2.0/24
        ("192.168.1.128/25", "192.168.1.200"),  # DL4J would use 192.168.1.0/24
        ("192.168.1.200", "192.168.1.200"),
        ("fd00::/8", "fd00::2"),
        ("127.0.0.0/8", "127.0.0.1"),
        ("::/0", "fd00::2"),
    ],
)
def test_address_matching_mask_is_chosen(mask: str, address: str) -> None:
    assert choose_address(mask, None, HOST) == address


def test_first_matching_address_of_interface_is_chosen() -> None:
    more = [*HOST, InterfaceAddress("eth0", "10.0.2.5")]
    assert choose_address("10.0.0.0/8", None, more) == "10.0.2.4"


@pytest.mark.parametrize("mask", ["0.0.0.0/0", "0.0.0.0/1"])
def test_mask_matching_several_interfaces_lists_their_addresses(mask: str) -> None:
    """A mask with addresses of several interfaces is an error that lists these addresses."""
    with pytest.raises(NetworkError, match=rf"{mask} matches several interfaces of ") as caught:
        choose_address(mask, None, HOST, fallback="127.0.0.1")
    assert "127.0.0.1 (lo), 10.0.2.4 (eth0)" in str(caught.value)
    assert "fd00::2" not in str(caught.value)
    assert "narrow the mask" in str(caught.value)


@pytest.mark.parametrize("mask", ["10.1.0.0/16", "192.168.1.0/25", "fe80::/10"])
def test_mask_without_match_lists_all_addresses(mask: str) -> None:
    """A mask without a match is an error that lists all addresses of the host."""
    with pytest.raises(SetupError, match=mask) as caught:
        choose_address(mask, None, HOST, fallback="127.0.0.1")
    for listed in HOST:
        assert f"{listed.address} ({listed.interface})" in str(caught.value)


@pytest.mark.parametrize("mask", ["192.256.1.1/24", "10.0.0.0/33", "eth0", ""])
def test_invalid_mask_raises_usage_error_with_example(mask: str) -> None:
    """An invalid mask is a UsageError with an example."""
    with pytest.raises(UsageError, match=r"10\.0\.0\.0/16"):
        choose_address(mask, None, HOST)


def test_explicit_address_precedes_mask_and_mask_precedes_fallback() -> None:
    """An explicit address has priority over the mask, and the mask over the fallback."""
    assert choose_address("10.0.0.0/8", "192.168.1.200", HOST, "127.0.0.1") == "192.168.1.200"
    assert choose_address("10.0.0.0/8", None, HOST, "127.0.0.1") == "10.0.2.4"
    assert choose_address(None, None, HOST, "127.0.0.1") == "127.0.0.1"


def test_any_loopback_address_is_accepted() -> None:
    """Any address in 127.0.0.0/8 is accepted, though only 127.0.0.1 is listed."""
    assert choose_address(None, "127.0.0.7", HOST) == "127.0.0.7"


def test_ipv6_address_is_returned_in_short_form() -> None:
    """An IPv6 address is returned in its short form."""
    assert choose_address(None, "FD00:0::2", HOST) == "fd00::2"


@pytest.mark.parametrize(("explicit", "fallback"), [("10.9.9.9", None), (None, "10.9.9.9")])
def test_address_of_other_host_raises_setup_error(
    explicit: str | None, fallback: str | None
) -> None:
    with pytest.raises(
        SetupError, match=r"10\.9\.9\.9 is not an address of .*10\.0\.2\.4 \(eth0\)"
    ):
        choose_address(None, explicit, HOST, fallback)


def test_host_name_instead_of_address_raises_usage_error() -> None:
    """A host name instead of an address is a UsageError."""
    with pytest.raises(UsageError, match="'localhost' is not an IP address"):
        choose_address(None, "localhost", HOST)


def test_missing_mask_and_address_lists_choices() -> None:
    """Without any input, the error lists the addresses to choose from."""
    with pytest.raises(SetupError, match=r"choose one of 127\.0\.0\.1"):
        choose_address(None, None, HOST)


def test_host_addresses_include_loopback_and_exclude_link_local() -> None:
    """The addresses of this host include loopback and exclude link-local ones."""
    listed = list_interface_addresses()
    assert InterfaceAddress("lo", "127.0.0.1") in listed
    assert not [has for has in listed if has.address.startswith("fe80")]
