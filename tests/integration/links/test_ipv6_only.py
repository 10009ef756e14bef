"""Test of fits on three hosts with IPv6 only, with Spark's standalone daemons."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.hosts import lacking
from tests.integration.links.networked_hosts import Ipv6OnlyHosts
from tests.integration.links.standalone_cluster import StandaloneCluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((reason := lacking()) is not None, reason=reason or ""),
]

JAVA = "-Djava.net.preferIPv6Addresses=true"


@pytest.fixture
def cluster() -> Iterator[StandaloneCluster]:
    with Ipv6OnlyHosts(3) as hosts:
        made = StandaloneCluster(hosts, JAVA)
        made.start_workers()
        yield made
        made.close()


def test_fits_succeed_on_ipv6_only_hosts(cluster: StandaloneCluster) -> None:
    for options in ({}, {"network_mask": "fd00:77::/64"}, {"controller_address": "[fd00:77::1]"}):
        done = cluster.fit(**options)
        assert done.get("equal"), done
        assert len(done["hashes"]) == 3
    nowhere = cluster.fit(network_mask="fd00:78::/64")
    assert nowhere.get("error") == "NetworkError", nowhere
    assert "matches no address of host0: it has 127.0.0.1 (lo)" in nowhere["text"]
    assert "fd00:77::1 (eth0); widen the mask" in nowhere["text"]
