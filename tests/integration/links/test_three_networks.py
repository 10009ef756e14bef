"""Tests of Spark's standalone mode on three hosts with networks for management, data and more.

All tests share one cluster and one application: a Master and a driver program on host 0, started
by the command of docs/standalone.md, and an executor on each of hosts 1 and 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.hosts import lacking
from tests.integration.links.networked_hosts import Sniffer, ThreeNetworks
from tests.integration.links.standalone_cluster import StandaloneCluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((reason := lacking()) is not None, reason=reason or ""),
]

HOSTS = 3
MANAGEMENT, DATA, THIRD = (
    [f"{port}{host}" for host in range(HOSTS)] for port in ("port", "wire", "line")
)
FOUND_S = 25.0  # without the check, a fit would wait for workers until start_timeout
PORTS = "ports 40123 to 40186"


@pytest.fixture(scope="module")
def hosts() -> Iterator[ThreeNetworks]:
    with ThreeNetworks(HOSTS) as made:
        yield made


@pytest.fixture(scope="module")
def sniffer(hosts: ThreeNetworks) -> Sniffer:
    return Sniffer(hosts, hosts.directory / "sniffer", [*MANAGEMENT, *DATA, *THIRD])


@pytest.fixture(scope="module")
def cluster_without_workers(hosts: ThreeNetworks, sniffer: Sniffer) -> Iterator[StandaloneCluster]:
    """A cluster without Workers."""
    made = StandaloneCluster(hosts)
    yield made
    made.close()


@pytest.fixture(scope="module")
def first_fits(cluster_without_workers: StandaloneCluster) -> tuple[dict[str, Any], dict[str, Any]]:
    """The results of a fit without Workers, and of a fit that begins before the Workers start."""
    refused = cluster_without_workers.fit(start_timeout=1.5)
    cluster_without_workers.order()
    cluster_without_workers.start_workers()
    return refused, cluster_without_workers.answer()


@pytest.fixture
def cluster(cluster_without_workers: StandaloneCluster, first_fits: object) -> StandaloneCluster:
    """The cluster with its executors."""
    return cluster_without_workers


def test_documented_command_waits_for_executors(first_fits: tuple[dict[str, Any], ...]) -> None:
    """With docs/standalone.md's command, a fit waits for executors, and fails if none registers."""
    refused, first = first_fits
    assert refused.get("error") == "SetupError", refused
    assert "no executor has registered with spark://10.77.0.1:7077 within 1.5 s" in refused["text"]
    assert "waits: 0 of 2 executors have registered" in refused["said"]
    assert "waits: 0 of 2 executors have registered" in first["said"]
    assert first["equal"], first
    assert len(first["hashes"]) == 3  # the driver's and two executors'


def test_a_rehearsal_measures_steps_and_links(
    hosts: ThreeNetworks, cluster: StandaloneCluster
) -> None:
    hosts.set_rate(2, "50mbit")
    try:
        found = cluster.fit(rehearsed={"measure": True, "workers": (2,)})
    finally:
        hosts.set_rate(2, None)
    assert "measured by 2 workers on 2 hosts: a step takes" in found["said"], found
    conditions = found["conditions"]
    assert 40e6 < conditions["link_bits_s"] < 55e6
    assert 0 < conditions["latency_s"] < 0.1
    assert 0 < conditions["times"]["step_s"] < 60


def test_updates_use_network_of_mask(
    hosts: ThreeNetworks, cluster: StandaloneCluster, sniffer: Sniffer
) -> None:
    """With a mask, updates use the matching network, and without one the management network."""
    before = sniffer.sent()
    # The first fit had no mask: its executors used the route to Spark's driver.
    assert all(before.get(port, 0) > 0 for port in MANAGEMENT)
    assert not any(before.get(port, 0) for port in DATA)
    done = cluster.fit(network_mask=hosts.DATA)
    after = sniffer.sent()
    sent = {port: after.get(port, 0) - before.get(port, 0) for port in after}
    assert done["equal"], done
    driver, *executors = (sent[port] for port in DATA)
    # The previous fit's media drivers still send heartbeats for some seconds.
    assert max(sent[port] for port in MANAGEMENT) < driver / 20
    assert sum(executors) > done["bytes_sent"] > 50_000
    assert min(executors) > 0.3 * done["bytes_sent"]
    assert driver > done["bytes_sent"]  # it forwards each update to the other executor


@pytest.mark.parametrize("mask", [ThreeNetworks.THIRD, ThreeNetworks.THIRD_SIX])
def test_updates_use_third_network_of_mask(
    cluster: StandaloneCluster, sniffer: Sniffer, mask: str
) -> None:
    sent = fit_and_count_udp_bytes(cluster, sniffer, network_mask=mask)
    assert max(sent[port] for port in (*MANAGEMENT, *DATA)) < sent[THIRD[0]] / 20
    assert min(sent[port] for port in THIRD) > 20_000


def test_controller_on_executor_uses_network_of_mask(
    hosts: ThreeNetworks, cluster: StandaloneCluster, sniffer: Sniffer
) -> None:
    """It uses the mask's network even if named by Spark's address; the driver receives no UDP."""
    named = f"{hosts.address(2)}:40140"
    before = Counter(sniffer.sent())
    with hosts.dropping(0):
        done = cluster.fit(network_mask=hosts.DATA, controller=named, workers_per_node=-1)
    sent = Counter(sniffer.sent()) - before
    assert done.get("equal"), done
    assert f" on 10.77.0.3, {hosts.data_address(2)}:40140" in done["said"]
    assert sent[DATA[1]] > max(5_000, 5 * sent[MANAGEMENT[1]])  # from the only worker
    assert sent[DATA[0]] == 0


def fit_and_count_udp_bytes(
    cluster: StandaloneCluster, sniffer: Sniffer, **options: Any
) -> Counter[str]:
    """Run a fit with these options; return its UDP bytes by port of the switch."""
    before = Counter(sniffer.sent())
    done = cluster.fit(**options)
    assert done.get("equal"), done
    return Counter(sniffer.sent()) - before


def test_mask_matching_no_or_several_interfaces_is_rejected(
    hosts: ThreeNetworks, cluster: StandaloneCluster
) -> None:
    """A fit fails before training if the mask matches none or several interfaces of a host."""
    none = cluster.fit(network_mask=hosts.LACKS)
    assert none.get("error") == "NetworkError", none
    assert f"{hosts.LACKS} matches no address of host2" in none["text"]
    assert "10.77.0.3 (eth0), 10.78.1.3 (eth1), 10.79.0.3 (eth2)" in none["text"]
    two = cluster.fit(network_mask=hosts.TWICE)
    assert two.get("error") == "NetworkError", two
    assert f"{hosts.TWICE} matches several interfaces of host1" in two["text"]
    assert "10.78.0.2 (eth1), 10.78.2.2 (spare); narrow the mask" in two["text"]
    here = cluster.fit(network_mask=hosts.BOTH, controller="driver")
    assert here.get("error") == "NetworkError", here
    assert f"{hosts.BOTH} matches several interfaces of host0" in here["text"]
    assert "10.78.0.1 (eth1), 10.79.0.1 (eth2); narrow the mask" in here["text"]
    for each in (none, two, here):
        assert each["seconds"] < FOUND_S
        assert "training" not in each["said"]


def test_dropped_udp_to_driver_error_names_ports_to_open(
    hosts: ThreeNetworks, cluster: StandaloneCluster
) -> None:
    """If UDP to the driver is dropped, the error names the ports to open; a later fit succeeds."""
    with hosts.dropping(0):
        found = cluster.fit(network_mask=hosts.DATA, controller="driver")
    assert found.get("error") == "NetworkError", found
    assert found["seconds"] < FOUND_S
    executor = 1 if "host1" in found["text"] else 2
    there = hosts.data_address(executor)
    assert f"the executor on host{executor} at {there}:401" in found["text"]
    assert "the driver at 10.78.0.1:40123 is dropped" in found["text"]
    assert f"allow UDP from {there} to 10.78.0.1 port 40123" in found["text"]
    assert f"from 10.78.0.1 to {there} {PORTS}" in found["text"]
    assert "no worker has joined so far" in found["text"]
    assert cluster.fit(network_mask=hosts.DATA)["equal"]  # the failure has no lasting effect


@pytest.mark.parametrize(
    ("udp", "words"),
    [
        ("", "the executor on host2 at 10.78.1.3:401"),
        # Like a stateful firewall, which admits replies to outgoing datagrams.
        ("dport 40123-40186", "hears the executor at 10.78.1.3:401"),
    ],
    ids=["all", "what is no answer"],
)
def test_dropped_udp_to_executor_error_names_executor_and_ports(
    hosts: ThreeNetworks, cluster: StandaloneCluster, udp: str, words: str
) -> None:
    """If UDP to one executor is dropped, the error names this executor and the ports to open."""
    with hosts.dropping(2, udp):
        found = cluster.fit(network_mask=hosts.DATA, controller="driver")
    assert found.get("error") == "NetworkError", found
    assert words in found["text"]
    assert f"from 10.78.0.1 to 10.78.1.3 {PORTS}" in found["text"]
    assert "host1" not in found["text"]
    assert found["seconds"] < 2 * FOUND_S  # rows may be read before
