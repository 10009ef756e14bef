"""Hosts with three networks, and hosts with IPv6 only, based on ``benchmarks.hosts``."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.hosts import Hosts

SNIFFER = """
import selectors, socket, sys
from collections import Counter
from multiprocessing.connection import Client

ANY, OUTGOING, UDP, IP, IPV6 = 3, 4, 17, 0x0800, 0x86DD
test, sent, watched = Client(sys.argv[1]), Counter(), selectors.DefaultSelector()
for name in sys.argv[2:]:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ANY))
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    port.bind((name, ANY))
    port.setblocking(False)
    watched.register(port, selectors.EVENT_READ, name)
watched.register(test, selectors.EVENT_READ)
test.send("ready")
while True:
    for key, _ in watched.select():
        if key.fileobj is test:
            test.recv()
            test.send(dict(sent))
            continue
        try:
            while True:
                packet, (_, protocol, kind, *_) = key.fileobj.recvfrom(64)
                length = int.from_bytes(packet[2:4], "big")
                number = packet[9]
                if protocol == IPV6:
                    length, number = 40 + int.from_bytes(packet[4:6], "big"), packet[6]
                if protocol in (IP, IPV6) and kind != OUTGOING and number == UDP:
                    sent[key.data] += length
        except BlockingIOError:
            pass
"""


class ThreeNetworks(Hosts):
    """Hosts with eth0 in the management network, eth1 in the data network and eth2 in a third.

    The data network is 10.78.0.0/16, with eth1 of hosts 0 and 1 in 10.78.0.0/24 and that of host 2
    in 10.78.1.0/24; host 1 has another interface, spare, in 10.78.2.0/24 and without a link. So
    10.78.0.0/23 matches one interface of each host, 10.78.0.0/24 no interface of host 2,
    10.78.0.0/16 two of host 1, and 10.78.0.0/15, which contains the data and the third network,
    two or more of each host. The third network has IPv6, too.
    """

    DATA, LACKS, TWICE = "10.78.0.0/23", "10.78.0.0/24", "10.78.0.0/16"
    THIRD, THIRD_SIX, BOTH = "10.79.0.0/24", "fd00:79::/64", "10.78.0.0/15"

    def _build(self) -> None:
        super()._build()
        self._wire("data", "wire", "eth1")
        self._wire("third", "line", "eth2")
        for host in range(self.count):
            self._run_inside(host, f"ip address add {self.data_address(host)}/16 dev eth1")
            self._run_inside(host, f"ip address add 10.79.0.{host + 1}/24 dev eth2")
            for interface in ("lo", "eth2"):
                self._run_inside(host, f"sysctl -w net.ipv6.conf.{interface}.disable_ipv6=0")
            self._run_inside(host, f"ip -6 address add fd00:79::{host + 1}/64 dev eth2 nodad")
            # A test's rules precede the table of local addresses, so they can drop what arrives.
            self._run_inside(host, "ip rule add pref 100 lookup local")
            self._run_inside(host, "ip rule del pref 0")
        self._run_inside(1, "ip link add spare type bridge")
        self._run_inside(1, "ip address add 10.78.2.2/24 dev spare")
        self._run_inside(1, "ip link set spare up")

    def _wire(self, switch: str, port: str, interface: str) -> None:
        """Connect all hosts to another switch; its ports are ``port`` plus the host's number."""
        self._run_inside(self.count, f"ip link add {switch} type bridge")
        self._run_inside(self.count, f"ip link set {switch} up")
        for host in range(self.count):
            inside = f"peer name {interface} netns {self._holders[host].pid}"
            self._run_inside(self.count, f"ip link add {port}{host} type veth {inside}")
            self._run_inside(self.count, f"ip link set {port}{host} master {switch} up")
            self._run_inside(host, f"ip link set {interface} up")

    @staticmethod
    def data_address(host: int) -> str:
        """Return the address of the host's eth1."""
        return f"10.78.{host // 2}.{host + 1}"

    @contextmanager
    def dropping(self, host: int, udp: str = "") -> Iterator[None]:
        """Silently drop UDP that arrives on the host's eth1; ``udp`` may restrict the rule."""
        rule = f"pref 50 iif eth1 ipproto udp {udp} blackhole"
        self._run_inside(host, f"ip rule add {rule}")
        try:
            yield
        finally:
            self._run_inside(host, f"ip rule del {rule}")


class Ipv6OnlyHosts(Hosts):
    """Hosts whose only IPv4 address is 127.0.0.1, by which Python and Java communicate."""

    @staticmethod
    def address(host: int) -> str:
        """Return the address of the host's only interface."""
        return f"fd00:77::{host + 1}"

    def _give_address(self, host: int) -> None:
        for interface in ("lo", "eth0"):
            self._run_inside(host, f"sysctl -w net.ipv6.conf.{interface}.disable_ipv6=0")
        self._run_inside(host, f"ip -6 address add {self.address(host)}/64 dev eth0 nodad")


@contextmanager
def listen_at(path: Path, seconds: float = 60.0) -> Iterator[Callable[[], Connection]]:
    """Listen on a socket at ``path``; yield a function that returns the next connection to it.

    The function raises TimeoutError if no process of any host connects within ``seconds``.
    """
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        listening.settimeout(seconds)
        yield lambda: Connection(listening.accept()[0].detach())


class Sniffer:
    """Counts the UDP bytes that hosts send to ports of the switch, with IP and UDP headers."""

    def __init__(self, hosts: Hosts, path: Path, ports: list[str]) -> None:
        with listen_at(path) as called:
            hosts.run(hosts.count, [sys.executable, "-c", SNIFFER, str(path), *ports])
            self._counter = called()
        assert self._counter.recv() == "ready"

    def sent(self) -> dict[str, int]:
        """Return the bytes sent so far, by port of the switch."""
        self._counter.send("?")
        counts: dict[str, int] = self._counter.recv()
        return counts
