"""Tests of the doctor's UDP probe between two hosts, which are network namespaces.

A firewall drops UDP in one direction, or a link carries no long datagrams.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.hosts import Hosts, lacking
from sparkstrom.spark.doctor.checks import Level, build_matrix, check_udp
from sparkstrom.transport.udp_probe import PeerResult

pytestmark = pytest.mark.skipif((reason := lacking()) is not None, reason=reason or "")

PORT = 40123
SECONDS = 4.0
PROBE = """
import json, sys
from dataclasses import asdict
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.udp_probe import ProbeGroup, UdpProbe

own, seconds, *hosts = sys.argv[1:]
endpoints = tuple(Endpoint(host, 40123) for host in hosts)
group = ProbeGroup(endpoints, b"sixteen bytes...", float(seconds))
with UdpProbe(group, int(own), lambda endpoint: 1408) as probe:
    print(json.dumps({peer: asdict(one) for peer, one in probe.run().items()}))
"""
# Silently drop UDP from host 0, by a rule before the table of local addresses.
DROP_UDP = (
    "ip rule add pref 100 lookup local",
    "ip rule add pref 50 from 10.77.0.1 ipproto udp blackhole",
    "ip rule del pref 0",
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2, "20mbit") as made:
        yield made


def run_probes(hosts: Hosts) -> dict[int, dict[int, PeerResult]]:
    """Return what each host's probe received from the other host."""
    addresses = [hosts.address(host) for host in range(hosts.count)]
    programs = [
        hosts.run(
            host,
            [sys.executable, "-c", PROBE, str(host), str(SECONDS), *addresses],
            output=subprocess.PIPE,
        )
        for host in range(hosts.count)
    ]
    said = [program.communicate(timeout=120)[0].decode().splitlines() for program in programs]
    told: list[dict[str, Any]] = [json.loads(lines[-1]) for lines in said]
    return {
        host: {int(peer): PeerResult(**one) for peer, one in peers.items()}
        for host, peers in enumerate(told)
    }


def test_probe_measures_round_trip_and_rate_of_open_link(hosts: Hosts) -> None:
    matrix = build_matrix(["driver", "host1"], run_probes(hosts))
    there, back = matrix["driver"]["host1"], matrix["host1"]["driver"]
    assert there.heard
    assert there.whole
    assert back.heard
    assert there.round_trip_ms is not None
    rates = [way.bytes_s for way in (there, back) if way.bytes_s is not None]
    assert rates
    assert all(0.2e6 < rate < 4e6 for rate in rates)  # 20 Mbit/s, exceeded by bursts


def test_probe_finds_direction_of_dropped_udp(hosts: Hosts) -> None:
    """The probe finds in which direction UDP is dropped, and the check names the port to open."""
    for command in DROP_UDP:
        hosts._run_inside(1, command)
    began_s = time.monotonic()
    matrix = build_matrix(["driver", "host1"], run_probes(hosts))
    assert time.monotonic() - began_s < 10 * SECONDS
    assert not matrix["driver"]["host1"].heard
    assert matrix["host1"]["driver"].heard
    (found,) = check_udp(matrix, {"driver": PORT, "host1": PORT})
    assert found.level is Level.FAILURE
    assert found.where == "host1"
    assert "receives nothing at port 40123 from driver" in found.found
    assert "open UDP to port 40123 of host1" in found.remedy


def test_fragmenting_path_gives_mtu_warning(hosts: Hosts) -> None:
    """The check warns of a path whose MTU fragments datagrams."""
    hosts._run_inside(0, "ip link set eth0 mtu 1300")
    matrix = build_matrix(["driver", "host1"], run_probes(hosts))
    way = matrix["driver"]["host1"]
    assert way.heard
    assert way.pieces
    assert not way.whole
    found = check_udp(matrix, {"driver": PORT, "host1": PORT})
    warned = [each for each in found if each.level is Level.WARNING]
    (cut,) = [each for each in warned if each.check == "path mtu"]
    assert "driver to host1" in cut.found
