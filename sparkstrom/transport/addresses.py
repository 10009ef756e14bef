"""Which of a host's addresses to use: a pure choice over a list, by CIDR mask or by name.

A mask means what CIDR says: 10.0.0.0/16 is 65,536 addresses, 192.168.1.12/32 is one, and IPv6 has
masks too. (DL4J's NetworkOrganizer cuts most masks down to /24 and knows IPv4 only.)
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
from collections.abc import Sequence
from typing import NamedTuple

from sparkstrom.base.errors import NetworkError, SetupError, UsageError

IFF_UP = 1


class Listed(NamedTuple):
    """One address of this host."""

    interface: str
    address: str


def choose_address(
    mask: str | None,
    explicit: str | None,
    listed: Sequence[Listed],
    fallback: str | None = None,
) -> str:
    """The address to bind: ``explicit`` if given, else the one in ``mask``, else ``fallback``.

    Where an interface has several addresses in the mask, it is the first of them. Raise UsageError
    for what is no mask or address, NetworkError where this host has no such one, or has several
    interfaces in the mask.
    """
    if explicit is not None:
        return _require(explicit, listed)
    if mask is not None:
        return _only_in(mask, listed)
    if fallback is not None:
        return _require(fallback, listed)
    raise SetupError(
        f"no network mask and no address given for {socket.gethostname()}: choose one of "
        f"{_spelt(listed)}"
    )


def _require(address: str, listed: Sequence[Listed]) -> str:
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError as error:
        raise UsageError(f"{address!r} is no IP address: {error}") from None
    # All of 127.0.0.0/8 is this host, though only 127.0.0.1 is listed.
    if wanted.is_loopback or any(ipaddress.ip_address(has.address) == wanted for has in listed):
        return str(wanted)
    raise NetworkError(
        f"{address} is no address of {socket.gethostname()}: it has {_spelt(listed)}; name one of "
        "these, or a network mask that contains one"
    )


def _only_in(mask: str, listed: Sequence[Listed]) -> str:
    try:
        network = ipaddress.ip_network(mask, strict=False)
    except ValueError as error:
        raise UsageError(f"network mask {mask!r}: {error}; write e.g. 10.0.0.0/16") from None
    inside = [has for has in listed if ipaddress.ip_address(has.address) in network]
    if not inside:
        raise NetworkError(
            f"network mask {mask} matches no address of {socket.gethostname()}: it has "
            f"{_spelt(listed)}; widen the mask or choose the network that all hosts share"
        )
    if len({has.interface for has in inside}) > 1:
        raise NetworkError(
            f"network mask {mask} matches several interfaces of {socket.gethostname()}: "
            f"{_spelt(inside)}; narrow the mask until it holds only the network that all hosts "
            "share for training"
        )
    return inside[0].address


def _spelt(listed: Sequence[Listed]) -> str:
    return ", ".join(f"{has.address} ({has.interface})" for has in listed) or "no address"


class _Sockaddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _Ifaddrs(ctypes.Structure):
    pass


_Ifaddrs._fields_ = (
    ("next", ctypes.POINTER(_Ifaddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_Sockaddr)),
    ("netmask", ctypes.c_void_p),
    ("broadcast", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
)


def listed_addresses() -> list[Listed]:
    """All addresses of interfaces that are up, in the kernel's order.

    Link-local IPv6 ones are left out: they need a scope that an Aeron channel cannot carry.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Ifaddrs)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "getifaddrs failed")
    try:
        found, at = [], first
        while at:
            entry = at.contents
            address = _address_of(entry)
            if address is not None:
                found.append(Listed(entry.name.decode(), address))
            at = entry.next
        return found
    finally:
        libc.freeifaddrs(first)


def _address_of(entry: _Ifaddrs) -> str | None:
    if not entry.flags & IFF_UP or not entry.address:
        return None
    where = entry.address.contents
    if where.family == socket.AF_INET:  # port u16 | address u8[4]
        return socket.inet_ntop(socket.AF_INET, bytes(where.data[2:6]))
    if where.family == socket.AF_INET6:  # port u16 | flow u32 | address u8[16] | scope u32
        address = ipaddress.IPv6Address(bytes(where.data[6:22]))
        return None if address.is_link_local else str(address)
    return None
