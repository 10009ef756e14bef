"""UDP ports of this machine, for tests that choose their ports."""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from sparkstrom.base.identity import Endpoint


def bound_sockets() -> set[Endpoint]:
    """Return this machine's bound IPv4 UDP sockets, from the kernel's table."""
    lines = Path("/proc/net/udp").read_text().splitlines()[1:]
    found = set()
    for line in lines:
        host, port = line.split()[1].split(":")
        address = ipaddress.IPv4Address(int.from_bytes(bytes.fromhex(host), "little"))
        found.add(Endpoint(str(address), int(port, 16)))
    return found


def free_ports(count: int) -> range:
    """Return a range of UDP ports that are free now."""
    taken = {endpoint.port for endpoint in bound_sockets()}
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
        ports = range(first, first + count)
        if not taken.intersection(ports) and ports[-1] <= 65_535:
            return ports
