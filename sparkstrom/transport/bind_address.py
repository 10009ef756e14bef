"""Choose which of this host's IP addresses to bind, by CIDR mask, explicit address or fallback.

Masks have their CIDR meaning: 10.0.0.0/16 is 65,536 addresses, and 192.168.1.12/32 is one. They may
be IPv6. (DL4J's NetworkOrganizer cuts most masks down to /24 and supports IPv4 only.)
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Sequence
from typing import NamedTuple

from sparkstrom.base.errors import NetworkError, SetupError, UsageError

IFF_UP = 1


class InterfaceAddress(NamedTuple):
    """One IP address of this host and the interface that has it."""

    interface: str  # its name, such as "eth0"
    address: str  # IPv4 or IPv6, as text


def choose_address(
    mask: str | None,
    explicit: str | None,
    addresses: Sequence[InterfaceAddress],
    fallback: str | None = None,
) -> str:
    """Return the address to bind: ``explicit``, else the first in ``mask``, else ``fallback``.

    Args:
        mask: CIDR network, such as 10.0.0.0/16; its addresses must all be on one interface.
        explicit: IP address of this host; takes precedence over the mask.
        addresses: addresses of this host, from ``list_interface_addresses``.
        fallback: IP address of this host, used if neither mask nor explicit address is given.

    Returns:
        The IP address as text.

    Raises:
        UsageError: ``mask`` or an address cannot be parsed.
        NetworkError: this host does not have the address, has none in the mask, or has several
            interfaces in the mask.
        SetupError: neither mask nor address is given.
    """
    if explicit is not None:
        return _check_own_address(explicit, addresses)
    if mask is not None:
        return _find_address_in_mask(mask, addresses)
    if fallback is not None:
        return _check_own_address(fallback, addresses)
    raise SetupError(
        f"no network mask and no address given for {socket.gethostname()}: choose one of "
        f"{_format_addresses(addresses)}"
    )


def _check_own_address(address: str, addresses: Sequence[InterfaceAddress]) -> str:
    """Return the address in canonical form; raise an error if it is not one of this host's."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError as error:
        raise UsageError(f"{address!r} is not an IP address: {error}") from None
    # Every address in 127.0.0.0/8 is this host, though only 127.0.0.1 is in ``addresses``.
    if parsed.is_loopback or any(
        ipaddress.ip_address(entry.address) == parsed for entry in addresses
    ):
        return str(parsed)
    raise NetworkError(
        f"{address} is not an address of {socket.gethostname()}: it has "
        f"{_format_addresses(addresses)}; name one of these, or a network mask that contains one"
    )


def _find_address_in_mask(mask: str, addresses: Sequence[InterfaceAddress]) -> str:
    """Return the first address in the mask; raise NetworkError if no or several interfaces fit."""
    try:
        network = ipaddress.ip_network(mask, strict=False)
    except ValueError as error:
        raise UsageError(f"network mask {mask!r}: {error}; write e.g. 10.0.0.0/16") from None
    inside = [entry for entry in addresses if ipaddress.ip_address(entry.address) in network]
    if not inside:
        raise NetworkError(
            f"network mask {mask} matches no address of {socket.gethostname()}: it has "
            f"{_format_addresses(addresses)}; widen the mask or choose the network that all hosts "
            "share"
        )
    if len({entry.interface for entry in inside}) > 1:
        raise NetworkError(
            f"network mask {mask} matches several interfaces of {socket.gethostname()}: "
            f"{_format_addresses(inside)}; narrow the mask until it contains only the network that "
            "all hosts share for training"
        )
    return inside[0].address


def _format_addresses(addresses: Sequence[InterfaceAddress]) -> str:
    """Format addresses with their interfaces for an error message."""
    return ", ".join(f"{entry.address} ({entry.interface})" for entry in addresses) or "no address"


class _Sockaddr(ctypes.Structure):
    """C's ``struct sockaddr``, with room for an IPv6 address."""

    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _Ifaddrs(ctypes.Structure):
    """C's ``struct ifaddrs``, a linked list."""


_Ifaddrs._fields_ = (
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Sockaddr)),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)


def list_interface_addresses() -> list[InterfaceAddress]:
    """Return the addresses of all interfaces that are up, in the kernel's order.

    Link-local IPv6 addresses are omitted: they need a scope, which an Aeron channel cannot contain.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    try:
        found, cursor = [], first
        while cursor:
            entry = cursor.contents
            address = _decode_address(entry)
            if address is not None:
                found.append(InterfaceAddress(entry.name.decode(), address))
            cursor = entry.next
        return found
    finally:
        libc.freeifaddrs(first)


def _decode_address(entry: _Ifaddrs) -> str | None:
    """Return an entry's IP address; None if the interface is down or the address is unusable."""
    if not entry.flags & IFF_UP or not entry.address:
        return None
    sockaddr = entry.address.contents
    if sockaddr.family == socket.AF_INET:  # port u16 | address u8[4]
        return socket.inet_ntop(socket.AF_INET, bytes(sockaddr.data[2:6]))
    if sockaddr.family == socket.AF_INET6:  # port u16 | flow u32 | address u8[16] | scope u32
        address = ipaddress.IPv6Address(bytes(sockaddr.data[6:22]))
        return None if address.is_link_local else str(address)
    return None
