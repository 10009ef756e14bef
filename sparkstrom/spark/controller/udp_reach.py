"""UDP reach: do executors reach the driver program by UDP, both ways? Asked before a first fit.

The driver program answers datagrams at an address and a port as its media driver would have them;
a task on each executor sends some and waits for what comes back. A token makes sure that both are
of the same question. Nobody waits longer than ``PATIENCE_S``, and where it works it takes
milliseconds. A controller in a task answers so, too, before it has its media driver.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sparkstrom.base.errors import SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.spark.driver.settings import local_ip
from sparkstrom.transport.addresses import choose_address, listed_addresses
from sparkstrom.transport.aeron.ports import candidate_ports, none_free

log = logging.getLogger(__name__)

TOKEN_BYTES = 16
AGAIN_S, PATIENCE_S = 0.05, 2.0
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class ReachOrder:
    """The question."""

    endpoint: Endpoint  # of the driver program
    token: bytes
    mask: str | None
    ports: range | None  # that executors may have
    patience_s: float | None = None  # None: ``PATIENCE_S``


@dataclass(frozen=True, slots=True)
class Reached:
    """One task's answer."""

    host: str
    heard: bool


class EchoPort:
    """Sends back what has the token, to whoever sent it, until it is closed."""

    def __init__(self, address: str, ports: range | None, token: bytes = b"") -> None:
        """Raise SetupError where there is no such address or no port."""
        port = next((port for port in candidate_ports(address, ports, None) if port), None)
        if port is None:
            raise SetupError(none_free(address, ports))
        self.token = token or secrets.token_bytes(TOKEN_BYTES)
        self.answered = threading.Event()  # somebody, once
        self._socket = _bound(address, port)
        self.endpoint = Endpoint(address, self._socket.getsockname()[1])
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkstrom-echo", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._closing.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            if not select.select([self._socket], [], [], LOOK_S)[0]:
                continue
            datagram, sender = self._socket.recvfrom(2 * TOKEN_BYTES)
            if not secrets.compare_digest(datagram, self.token):
                continue
            try:
                self._socket.sendto(datagram, sender)
                self.answered.set()
            except OSError as error:  # a firewall of this machine; who asked says it heard nothing
                log.info("no answer can be sent to %s: %s", sender[0], error)


def reaches(order: ReachOrder, items: Iterable[Any]) -> Iterator[Reached]:
    """Does this executor hear the driver program, which has heard it?"""
    from sparkstrom.spark.executor.interfaces import route_to

    address = choose_address(
        mask=order.mask,
        explicit=None,
        listed=listed_addresses(),
        fallback=local_ip(os.environ) or route_to(order.endpoint),
    )
    port = next((port for port in candidate_ports(address, order.ports, None) if port), 0)
    with _bound(address, port) as asking:
        yield Reached(socket.gethostname(), _is_answered(asking, order))


def _is_answered(asking: socket.socket, order: ReachOrder) -> bool:
    end_s = time.monotonic() + (order.patience_s or PATIENCE_S)
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            asking.sendto(order.token, tuple(order.endpoint))
            if select.select([asking], [], [], min(AGAIN_S, left_s))[0]:
                datagram, sender = asking.recvfrom(2 * TOKEN_BYTES)
                if datagram == order.token and sender[1] == order.endpoint.port:
                    return True
        except OSError:  # a firewall that answers says so here; the next one may come through
            time.sleep(min(AGAIN_S, left_s))
    return False


def _bound(address: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
    made.bind((address, port))
    return made
