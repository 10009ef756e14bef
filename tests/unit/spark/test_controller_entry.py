"""Tests of the controller's task: its place and address, and when it refuses to start."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from sparkstrom.base.identity import Endpoint
from sparkstrom.fit.master_setup import MediaDriverConfig
from sparkstrom.options.network import VoidConfiguration, parse_controller
from sparkstrom.spark.controller import task as controller_entry
from sparkstrom.spark.controller.driver_messages import (
    RESULT_PART_BYTES,
    ControlEndpoint,
    ControllerPlace,
    PlacementMismatch,
    join_message,
    split_message,
)
from sparkstrom.spark.controller.task import propose_place, run_controller_task
from sparkstrom.spark.executor.entry_points import LazyPickle
from sparkstrom.transport.aeron.media_driver import DriverOptions
from sparkstrom.transport.bind_address import InterfaceAddress
from sparkstrom.worker.network_setup import ControllerRoute
from sparkstrom.worker.task_environment import ExecutorInfo, TaskEnvironment

NOWHERE = ControlEndpoint(None, bytes(32))
MEDIA = MediaDriverConfig("0-driver", DriverOptions())
PLACE = TaskEnvironment(0, 7, "node7", "4711-99", Path("/scratch"))


@pytest.mark.parametrize(
    ("wanted", "again", "answer"),
    [
        ("node8/4711-99", False, PlacementMismatch("node7/4711-99", is_retry=False)),
        ("node7/4711-99", True, PlacementMismatch("node7/4711-99", is_retry=True)),
    ],
)
def test_misplaced_or_retried_task_reports_mismatch(
    wanted: str, again: bool, answer: PlacementMismatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry, or a task on the wrong executor, reports this without unpickling its job."""
    monkeypatch.setattr(controller_entry, "get_task_context", lambda: PLACE)
    monkeypatch.setattr(controller_entry, "is_retry", lambda: again)
    way = ControllerRoute(1, Endpoint("127.0.0.1", 9), VoidConfiguration(), 1, 0)
    unopened = LazyPickle(b"no pickle at all", way)
    assert join_message(run_controller_task((NOWHERE, MEDIA), wanted, unopened, [])) == answer


def test_large_result_is_split_into_parts() -> None:
    whole = bytes(2 * RESULT_PART_BYTES)
    parts = list(split_message(whole))
    assert max(map(len, parts)) == RESULT_PART_BYTES
    assert len(parts) == 3
    assert join_message(parts) == whole


LISTED = [
    InterfaceAddress("lo", "127.0.0.1"),
    InterfaceAddress("eth0", "10.77.0.3"),
    InterfaceAddress("eth1", "10.78.0.3"),
    InterfaceAddress("eth2", "10.79.0.3"),
]
NAMES = {"node7": "10.77.0.3", "data7": "10.78.0.3", "localhost": "127.0.0.1"}
DATA = {"network_mask": "10.78.0.0/24"}


@pytest.mark.parametrize(
    ("controller", "void", "address"),
    [
        ("executor", {}, "10.77.0.3"),  # Spark's name for it is node7
        ("executor", DATA, "10.78.0.3"),
        ("node7", DATA, "10.78.0.3"),
        ("10.78.0.3", {}, "10.78.0.3"),
        ("data7", {}, "10.78.0.3"),
        ("localhost", {}, "10.77.0.3"),
        ("10.77.0.3", DATA, "10.78.0.3"),  # the named host, in the named network
    ],
)
def test_controller_address_is_in_network_mask(
    monkeypatch: pytest.MonkeyPatch, controller: str, void: dict[str, Any], address: str
) -> None:
    """The controller's address is the host's address in network_mask, if that is set."""

    def named(host: str, *given: Any, **more: Any) -> list[Any]:
        return [(0, 0, 0, "", (NAMES.get(host, host), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", named)
    monkeypatch.setattr(controller_entry, "get_task_context", lambda: PLACE)
    monkeypatch.setattr(controller_entry, "read_executor_info", lambda: ExecutorInfo("1", "node7"))
    monkeypatch.setattr(controller_entry, "list_interface_addresses", lambda: LISTED)
    monkeypatch.setattr(controller_entry, "candidate_ports", lambda *given: iter([40123]))
    choice = parse_controller(controller)
    (place,) = propose_place(VoidConfiguration(controller=controller, **void), choice, [])
    assert isinstance(place, ControllerPlace)
    assert place.endpoint == Endpoint(address, 40123)
