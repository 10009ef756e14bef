"""Fixtures with a YARN cluster for all tests of this folder; they skip without its jars."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from scripts.mini_yarn import Cluster, mini_yarn
from tests.integration.udp_ports import bound_sockets, free_ports

UDP_PORTS = 16  # as if a user had opened them in a firewall
JARS = os.environ.get("SPARKSTROM_YARN_JARS")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A ResourceManager and two NodeManagers."""
    if not JARS:
        pytest.skip(
            "no YARN here: set SPARKSTROM_YARN_JARS to a directory with "
            "hadoop-client-minicluster, bcpkix-jdk18on, bcutil-jdk18on and jaxb-api"
        )
    site = {"yarn.resourcemanager.am.max-attempts": 3}
    with mini_yarn(Path(JARS), tmp_path_factory.mktemp("yarn") / "home", site=site) as running:
        yield running


@dataclass
class UdpRange:
    """A range of UDP ports for sparkstrom; ``seen`` are those that a process was bound to."""

    first: int
    size: int = UDP_PORTS
    seen: set[int] = field(default_factory=set)

    def conf(self) -> dict[str, str]:
        """Return the range as options of spark-submit."""
        return {
            "spark.sparkstrom.network_mask": "127.0.0.0/8",
            "spark.sparkstrom.unicast_port": str(self.first),
            "spark.sparkstrom.port_range": f"{self.first}-{self.first + self.size - 1}",
        }

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the ports of the range that are bound while the block runs."""
        done = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(done,))
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()

    def _watch(self, done: threading.Event) -> None:
        while not done.wait(0.2):
            ports = {endpoint.port for endpoint in bound_sockets()}
            self.seen |= ports & set(range(self.first, self.first + self.size))


@pytest.fixture
def udp_range() -> UdpRange:
    """Neighbouring UDP ports that are free now."""
    return UdpRange(free_ports(UDP_PORTS)[0])
