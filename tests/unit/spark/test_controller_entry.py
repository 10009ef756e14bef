"""A controller's task does nothing where it was not meant to begin, and nothing a second time."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkstrom.base.identity import Endpoint
from sparkstrom.spark.controller import controller_entry
from sparkstrom.spark.controller.control_words import (
    PART_BYTES,
    LineOrder,
    NotHere,
    in_parts,
    of_parts,
)
from sparkstrom.spark.controller.controller_entry import enter_controller
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.executor.entry import Unopened
from sparkstrom.spark.executor.reaching import WayToController
from sparkstrom.spark.executor.task_place import TaskPlace

NOWHERE = LineOrder(None, bytes(32))
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
    assert of_parts(enter_controller(NOWHERE, wanted, unopened, 0, [])) == answer


def test_a_result_is_cut_into_parts_that_spark_carries() -> None:
    whole = bytes(2 * PART_BYTES)
    parts = list(in_parts(whole))
    assert max(map(len, parts)) == PART_BYTES
    assert len(parts) == 3
    assert of_parts(parts) == whole
