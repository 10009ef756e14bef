"""A controller's task does nothing where it was not meant to begin, and nothing a second time."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from sparkstrom.base.identity import Endpoint
from sparkstrom.spark.controller import controller_entry
from sparkstrom.spark.controller.control_words import (
    PART_BYTES,
    ControllerPlace,
    LineOrder,
    MediaOrder,
    NotHere,
    in_parts,
    of_parts,
)
from sparkstrom.spark.controller.controller_entry import enter_controller, look_at_place
from sparkstrom.spark.driver.controller_choice import parse_controller
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.executor.entry import Unopened
from sparkstrom.spark.executor.reaching import WayToController
from sparkstrom.spark.executor.task_place import ExecutorName, TaskPlace
from sparkstrom.transport.addresses import Listed
from sparkstrom.transport.aeron.driver import DriverOptions

NOWHERE = LineOrder(None, bytes(32))
MEDIA = MediaOrder("0-driver", DriverOptions())
PLACE = TaskPlace(0, 7, "node7", "4711-99", Path("/scratch"))


@pytest.mark.parametrize(
    ("wanted", "again", "answer"),
    [
        ("node8/4711-99", False, NotHere("node7/4711-99", again=False)),
        ("node7/4711-99", True, NotHere("node7/4711-99", again=True)),
    ],
)
def test_it_says_so_and_ends(
    wanted: str, again: bool, answer: NotHere, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_entry, "here", lambda: PLACE)
    monkeypatch.setattr(controller_entry, "is_again", lambda: again)
    way = WayToController(1, Endpoint("127.0.0.1", 9), VoidConfiguration(), 1, 0)
    unopened = Unopened(b"no pickle at all", way)
    assert of_parts(enter_controller((NOWHERE, MEDIA), wanted, unopened, 0, [])) == answer


def test_a_result_is_cut_into_parts_that_spark_carries() -> None:
    whole = bytes(2 * PART_BYTES)
    parts = list(in_parts(whole))
    assert max(map(len, parts)) == PART_BYTES
    assert len(parts) == 3
    assert of_parts(parts) == whole


LISTED = [
    Listed("lo", "127.0.0.1"),
    Listed("eth0", "10.77.0.3"),
    Listed("eth1", "10.78.0.3"),
    Listed("eth2", "10.79.0.3"),
]
NAMES = {"node7": "10.77.0.3", "data7": "10.78.0.3", "localhost": "127.0.0.1"}
DATA = {"network_mask": "10.78.0.0/24"}


@pytest.mark.parametrize(
    ("controller", "void", "address"),
    [
        ("executor", {}, "10.77.0.3"),  # which Spark calls node7
        ("executor", DATA, "10.78.0.3"),
        ("node7", DATA, "10.78.0.3"),
        ("10.78.0.3", {}, "10.78.0.3"),
        ("data7", {}, "10.78.0.3"),
        ("localhost", {}, "10.77.0.3"),
        ("10.77.0.3", DATA, "10.78.0.3"),  # the machine that was meant, in the network that was
    ],
)
def test_its_address_is_in_the_network_that_was_named(
    monkeypatch: pytest.MonkeyPatch, controller: str, void: dict[str, Any], address: str
) -> None:
    def named(host: str, *given: Any, **more: Any) -> list[Any]:
        return [(0, 0, 0, "", (NAMES.get(host, host), 0))]

    monkeypatch.setattr(socket, "getaddrinfo", named)
    monkeypatch.setattr(controller_entry, "here", lambda: PLACE)
    monkeypatch.setattr(controller_entry, "executor_name", lambda: ExecutorName("1", "node7"))
    monkeypatch.setattr(controller_entry, "listed_addresses", lambda: LISTED)
    monkeypatch.setattr(controller_entry, "candidate_ports", lambda *given: iter([40123]))
    choice = parse_controller(controller)
    (place,) = look_at_place(VoidConfiguration(controller=controller, **void), choice, [])
    assert isinstance(place, ControllerPlace)
    assert place.endpoint == Endpoint(address, 40123)
