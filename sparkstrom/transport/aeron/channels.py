"""Aeron's channel URIs, spelt in one place, because Aeron ignores keys that it does not know.

Socket buffers and windows come from the driver's own settings and never from a URI: all users of
one endpoint must agree on them.
"""

from __future__ import annotations

import ipaddress
import secrets

from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.aeron.sizes import MTU_LOCAL, MTU_NETWORK, Sizes

LINGER = "1s"


def publication_uri(
    there: Endpoint, here: Endpoint, sizes: Sizes, *, control: bool, session: int
) -> str:
    """The channel of one sender: its own session, a log of the right size, no sparse file."""
    term = sizes.control_term if control else sizes.data_term
    return (
        f"aeron:udp?endpoint={there}|session-id={session}|term-length={term}"
        f"|mtu={mtu(there, here)}|sparse=false|linger={LINGER}"
    )


def subscription_uri(here: Endpoint) -> str:
    """The channel of every receiver of a driver; ``rejoin=false``: what broke off stays broken."""
    return f"aeron:udp?endpoint={here}|rejoin=false|reliable=true|sparse=false"


def local_publication_uri(there: Endpoint, sizes: Sizes, *, control: bool, session: int) -> str:
    """The channel of one sender to a peer on the same media driver: no socket, one shared log.

    ``there`` is a label for counters and messages. Without a socket nothing lingers.
    """
    term = sizes.control_term if control else sizes.data_term
    return (
        f"aeron:ipc?alias={there}|session-id={session}|term-length={term}"
        f"|mtu={MTU_LOCAL}|sparse=false"
    )


# Tethered: a receiver that is slow is waited for, never dropped.
LOCAL_SUBSCRIPTION_URI = "aeron:ipc?tether=true"


def trial_uri(there: Endpoint, session: int, term: int) -> str:
    """The channel of who only looks whether something gets through."""
    return (
        f"aeron:udp?endpoint={there}|session-id={session}|term-length={term}"
        f"|mtu={MTU_NETWORK}|sparse=false|linger=0"
    )


def mtu(there: Endpoint, here: Endpoint) -> int:
    """Datagram length: large where it never leaves the machine, else what every network carries."""
    local = there.host == here.host or ipaddress.ip_address(there.host).is_loopback
    return MTU_LOCAL if local else MTU_NETWORK


def stays_on_host(there: Endpoint, here: Endpoint) -> bool:
    """Does what goes there leave no interface? Where all use loopback, that is the interface."""
    return there.host == here.host and not ipaddress.ip_address(there.host).is_loopback


def random_session() -> int:
    """A session id nobody can guess from the last one (any i32)."""
    return secrets.randbits(32) - 2**31
