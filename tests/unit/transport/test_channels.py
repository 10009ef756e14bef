"""Channel settings: the parameters of Aeron's channel URIs, datagram sizes, session ids."""

from __future__ import annotations

import pytest

from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.aeron.channel_settings import (
    LOCAL_SUBSCRIPTION_URI,
    choose_buffer_sizes,
    choose_mtu,
    local_publication_uri,
    publication_uri,
    random_session_id,
    stays_on_host,
    subscription_uri,
)

HERE, THERE = Endpoint("10.0.0.1", 4000), Endpoint("10.0.0.2", 5000)
SIZES = choose_buffer_sizes(2, (1 << 20, 1 << 17), (1 << 22, 1 << 22))


def parameters(uri: str, media: str = "udp") -> dict[str, str]:
    """Return the parameters in a channel URI."""
    kind, _, rest = uri.partition("?")
    assert kind == f"aeron:{media}"
    return dict(part.split("=", 1) for part in rest.split("|"))


def test_publication_uri_has_endpoint_session_and_sizes() -> None:
    """A publication's URI contains its endpoint, session, log size and other settings."""
    uri = publication_uri(THERE, HERE, SIZES, control=False, session=-5)
    assert parameters(uri) == {
        "endpoint": "10.0.0.2:5000",
        "session-id": "-5",
        "term-length": "1048576",
        "mtu": "1408",
        "sparse": "false",
        "linger": "1s",
    }


def test_control_publication_has_shorter_term_length() -> None:
    """A control stream has the shorter term length."""
    uri = publication_uri(THERE, HERE, SIZES, control=True, session=1)
    assert parameters(uri)["term-length"] == "131072"


@pytest.mark.parametrize(("control", "term"), [(False, "1048576"), (True, "131072")])
def test_local_publication_uses_ipc_with_same_term_length(control: bool, term: str) -> None:
    """A local publication uses IPC, with the endpoint as alias and the same term length."""
    uri = local_publication_uri(THERE, SIZES, control=control, session=-5)
    assert parameters(uri, "ipc") == {
        "alias": "10.0.0.2:5000",
        "session-id": "-5",
        "term-length": term,
        "mtu": "8192",
        "sparse": "false",
    }


def test_local_subscription_is_tethered() -> None:
    """Local subscriptions are tethered: a slow receiver is not cut off."""
    assert parameters(LOCAL_SUBSCRIPTION_URI, "ipc") == {"tether": "true"}


def test_udp_subscription_does_not_rejoin_lost_stream() -> None:
    """A UDP subscription does not rejoin a stream that it has lost."""
    assert parameters(subscription_uri(HERE))["rejoin"] == "false"


def test_ipv6_endpoint_is_bracketed_in_uri() -> None:
    assert parameters(subscription_uri(Endpoint("fd00::2", 7)))["endpoint"] == "[fd00::2]:7"


def test_mtu_is_large_only_within_host() -> None:
    """Datagrams have 8192 bytes within a host and 1408 bytes otherwise."""
    assert choose_mtu(THERE, HERE) == 1408
    assert choose_mtu(Endpoint(HERE.host, 1), HERE) == 8192
    assert choose_mtu(Endpoint("127.0.0.1", 1), HERE) == 8192


def test_random_session_ids_are_distinct_i32() -> None:
    sessions = {random_session_id() for _ in range(100)}
    assert len(sessions) == 100
    assert all(-(2**31) <= session < 2**31 for session in sessions)


@pytest.mark.parametrize(
    ("there", "stays"), [("10.0.0.1", True), ("10.0.0.2", False), ("127.0.0.1", False)]
)
def test_only_traffic_to_own_address_stays_on_host(there: str, stays: bool) -> None:
    """Traffic to the own address stays on the host; traffic over loopback uses an interface."""
    here = Endpoint("127.0.0.1" if there == "127.0.0.1" else "10.0.0.1", 1)
    assert stays_on_host(Endpoint(there, 2), here) is stays
