"""Interfaces: which interface of this machine the driver or an executor uses, and its transport."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from sparkstrom.base.errors import DriverLost, NetworkError, SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.driver.settings import local_ip
from sparkstrom.transport.addresses import choose_address, listed_addresses
from sparkstrom.transport.aeron.driver import DriverOptions, ensure_driver
from sparkstrom.transport.aeron.library import load_library
from sparkstrom.transport.contract import Transport

log = logging.getLogger(__name__)

OpenTransport = Callable[[Endpoint | None], Transport]

ATTEMPTS: Final = 3  # a media driver may end while it is joined; the next one is a new one


def driver_address(void: VoidConfiguration, spark_driver_host: str) -> str:
    """The driver's: controller_address, then the mask, the environment, and Spark's own choice."""
    explicit = resolve(void.controller_address) if void.controller_address else None
    return choose_address(
        mask=void.network_mask,
        explicit=explicit,
        listed=listed_addresses(),
        fallback=local_ip(os.environ) or resolve(spark_driver_host),
    )


def executor_address(void: VoidConfiguration, controller: Endpoint) -> str:
    """An executor's: the mask, then its environment, then whichever leads to the controller."""
    return choose_address(
        mask=void.network_mask,
        explicit=None,
        listed=listed_addresses(),
        fallback=local_ip(os.environ) or route_to(controller),
    )


def resolve(host: str) -> str:
    """A host's address. Raise SetupError where the name means nothing here.

    Spark writes an IPv6 address of its own in brackets.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return str(socket.getaddrinfo(bare, None, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError as error:
        raise SetupError(
            f"controller address {host!r} cannot be resolved on this machine: {error}; "
            "write an IP address of the driver's machine"
        ) from None


def route_to(controller: Endpoint) -> str:
    """The local address from which datagrams to the controller would leave; nothing is sent."""
    children = socket.AF_INET6 if ":" in controller.host else socket.AF_INET
    with socket.socket(children, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((controller.host, controller.port))
        except OSError as error:
            raise NetworkError(
                f"there is no route from {socket.gethostname()} to the controller at {controller}: "
                f"{error}; set network_mask to the network that driver and executors share"
            ) from None
        return str(probe.getsockname()[0])


def ports_beside(ports: range | None, host: str, controller: Endpoint) -> range | None:
    """An executor's, without the one that a controller at this address has, or will have."""
    if ports is None or controller.host != host or controller.port not in ports:
        return ports
    at = ports.index(controller.port)
    return max(ports[:at], ports[at + 1 :], key=len)


def opener(key: str, given: DriverOptions) -> OpenTransport:
    """How to open a transport here; with the former endpoint given, on its port again."""

    def open_transport(before: Endpoint | None) -> Transport:
        options = given if before is None else replace(given, port_preferred=before.port)
        for _ in range(1, ATTEMPTS):
            try:
                return connected(key, options)
            except DriverLost as lost:
                log.warning("the media driver ended while it was joined (%s)", lost)
        return connected(key, options)

    return open_transport


def ends_of(ports: range | None) -> tuple[int, int] | None:
    """First and last."""
    return (ports[0], ports[-1]) if ports is not None else None


def connected(key: str, options: DriverOptions) -> Transport:
    """A transport on the media driver of ``key``."""
    from sparkstrom.transport.aeron.client import AeronTransport  # compiled when it is imported

    return AeronTransport(ensure_driver(key, options))


def need_library() -> None:
    """Raise SetupError where this host has no Aeron library; it costs nothing the second time.

    In one line with the host's name: Spark's errors are told by their last line.
    """
    try:
        load_library()
    except SetupError as error:
        words = " ".join(str(error).split())
        raise SetupError(f"on {socket.gethostname()}: {words}") from None


def warm_up_transport() -> None:
    """Have the transport's kernels in memory, so that no lease runs out over a compiler."""
    import sparkstrom.transport.aeron.client  # noqa: F401
