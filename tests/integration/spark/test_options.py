"""Tests of options whose effect shows only with real sockets or real executors."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sparkstrom import AdaptiveThreshold, SparkNetwork, VoidConfiguration
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.aeron.media_driver import DriverOptions
from sparkstrom.worker.network_setup import (
    choose_driver_address,
    choose_executor_address,
    port_bounds,
    transport_opener,
)
from tests.integration.udp_ports import bound_sockets, free_ports

# -- sockets ---------------------------------------------------------------------------------------


@contextmanager
def start_media_driver(host: str, ports: range | None, scratch: Path) -> Iterator[Endpoint]:
    """Start a media driver like a fit; yield its endpoint, which is in the kernel's table."""
    before = bound_sockets()
    options = DriverOptions(host=host, ports=port_bounds(ports), edges=2, scratch=scratch)
    open_transport = transport_opener(secrets.token_hex(8), options)
    with closing(open_transport(None)) as transport:
        assert transport.endpoint in bound_sockets() - before
        yield transport.endpoint


@pytest.mark.flips("VoidConfiguration.unicast_port")
def test_media_drivers_use_ports_from_unicast_port_on(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    void = VoidConfiguration(unicast_port=port)
    with start_media_driver("127.0.0.1", void.controller_ports(), tmp_path) as controller:
        assert controller.port == port
        with start_media_driver("127.0.0.1", void.executor_ports(), tmp_path) as executor:
            assert port < executor.port < port + 64  # the next free one


@pytest.mark.flips("VoidConfiguration.port_range")
def test_media_drivers_use_ports_of_port_range(tmp_path: Path) -> None:
    ports = free_ports(3)
    void = VoidConfiguration(port_range=(ports[0], ports[-1]))
    with (
        start_media_driver("127.0.0.1", void.executor_ports(), tmp_path) as one,
        start_media_driver("127.0.0.1", void.executor_ports(), tmp_path) as other,
    ):
        assert one != other
        assert {one.port, other.port} <= set(ports)


@pytest.mark.flips("VoidConfiguration.controller_address")
@pytest.mark.parametrize(("address", "host"), [(None, "127.0.0.1"), ("127.0.0.2", "127.0.0.2")])
def test_media_driver_binds_controller_address(
    tmp_path: Path, address: str | None, host: str
) -> None:
    void = VoidConfiguration(controller_address=address)
    with start_media_driver(
        choose_driver_address(void, "127.0.0.1"), void.controller_ports(), tmp_path
    ) as endpoint:
        assert endpoint.host == host


@pytest.mark.flips("VoidConfiguration.network_mask")
@pytest.mark.parametrize(("mask", "host"), [(None, "127.0.0.3"), ("127.0.0.0/8", "127.0.0.1")])
def test_network_mask_selects_interface_address(
    tmp_path: Path, mask: str | None, host: str
) -> None:
    """Without a mask, Spark's address 127.0.0.3 is used; with one, the matching interface's."""
    void = VoidConfiguration(network_mask=mask)
    with start_media_driver(choose_driver_address(void, "127.0.0.3"), None, tmp_path) as controller:
        assert controller.host == host
        if mask is not None:
            assert choose_executor_address(void, controller) == "127.0.0.1"


# -- executors -------------------------------------------------------------------------------------


@pytest.fixture
def rows(digits: Any) -> list[Any]:
    return digits.rows()[:240]


MakeNetwork = Callable[..., SparkNetwork]


@pytest.mark.flips("SharedTrainingMaster.repartition")
@pytest.mark.parametrize(
    ("repartition", "workers", "shares"), [("always", 4, [60] * 4), ("never", 2, [120] * 2)]
)
def test_repartition_determines_number_of_workers(
    spark: Any,
    make_network: MakeNetwork,
    rows: list[Any],
    repartition: str,
    workers: int,
    shares: list[int],
) -> None:
    network = make_network(repartition=repartition, batch_size_per_worker=1)
    summary = network.fit(spark.sparkContext.parallelize(rows, 2), epochs=1)
    assert summary.replicas_equal
    assert summary.workers == workers
    assert summary.minibatches == sum(shares)


@pytest.mark.flips("SharedTrainingMaster.workers_per_node")
def test_workers_per_node_limits_number_of_workers(
    spark: Any, make_network: MakeNetwork, rows: list[Any]
) -> None:
    network = make_network(workers_per_node=1)
    summary = network.fit(spark.sparkContext.parallelize(rows, 4), epochs=1)
    assert summary.workers == 2  # of the four slots on two executors
    assert len(summary.hashes) == 3


@pytest.mark.flips(
    "SharedTrainingMaster.collect_training_stats", "SharedTrainingMaster.encoding_debug_mode"
)
@pytest.mark.parametrize("shown", [False, True])
def test_training_stats_and_encoding_figures_are_optional(
    spark: Any,
    make_network: MakeNetwork,
    rows: list[Any],
    caplog: pytest.LogCaptureFixture,
    shown: bool,
) -> None:
    """Workers' seconds and encoding figures are recorded only if the options request them."""
    network = make_network(
        collect_training_stats=shown,
        encoding_debug_mode=shown,
        threshold=AdaptiveThreshold(1e-3),
    )
    with caplog.at_level(logging.INFO, "sparkstrom.encoding"):
        summary = network.fit(spark.sparkContext.parallelize(rows, 4), epochs=3)
    lines = [record for record in caplog.records if record.name == "sparkstrom.encoding"]
    assert bool(lines) is shown
    nodes = set(summary.hashes) - {"driver"} if shown else set()
    assert set(summary.worker_seconds) == set(summary.encoding) == nodes
    for seconds in summary.worker_seconds.values():
        assert {"reading", "stepping", "encoding", "waiting"} <= set(seconds)
        assert 0 < seconds["stepping"] < summary.seconds
    for figures in summary.encoding.values():
        assert 0 < figures["p50"] <= figures["p95"] <= figures["p99.99"] <= figures["max"]
        assert figures["tau"] > 0
