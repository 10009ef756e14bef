"""Tests that the table of messages matches the machines, and docs/protocol.md has both tables."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import pytest

from sparkstrom.codec import messages as m
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import IgnoreReason
from tests.unit.protocol.conftest import DIRECTLY, Make
from tests.unit.protocol.routes import ROUTES, Way, messages_table, stages_table

DOCUMENT = Path(__file__).parents[3] / "docs" / "protocol.md"
KINDS = [*get_args(m.Control), *get_args(m.Data)]
PARENT, CHILD = 3, 5
ELSEWHERE = (IgnoreReason.WRONG_WAY, IgnoreReason.STRANGER)
NAMED = {(route.kind, route.way): route.handler for route in ROUTES}


def sample(kind: type, make: Make) -> m.Message:
    """Return a message of this type, for a node under ``PARENT`` with ``CHILD`` or a master."""
    made: list[m.Message] = [
        make.join(), make.welcome(), make.adopt(6), make.attach(), make.attached(), make.report(),
        make.state(m.Phase.DONE), make.closed(1), make.behind(7), make.chunk(0), make.merged(0, 2),
        make.update(1, 1), make.committed(1), m.ChildSilent(1, 2, 1), m.ProbeReply(1),
        m.TrainingFailure(node=1, reason="raised", trace=""),
        m.WorkerLog(host="h", partition=0, lines=[("training", "hello")], skipped=0),
        m.CommitsRequest(0), m.ChunkRequest(0), m.OptimizerRequest(1, None, 0),
        m.LeaveNotice(node=1, reason="left", checkpoint=None),
        m.Disown(CHILD, 50),
        m.Probe(1), m.JoinRefusal(token=1, count=1, reason="no", fatal=True), m.Release("a slot"),
        m.ResendRequest(1), m.OptimizerChunk(asker=1, copy=1, index=0, count=1, payload=b""),
    ]  # fmt: skip
    return next(message for message in made if type(message) is kind)


def receiver(way: Way, make: Make, node_with: Any, master_with: Any) -> tuple[Any, int]:
    """Return the state machine that receives messages on this way, and their sender."""
    if way in (Way.UP_TO_MASTER, Way.LOBBY):
        return master_with().running().machine, 1 if way is Way.UP_TO_MASTER else DIRECTLY
    node = node_with(parent=PARENT).training().with_child(CHILD).machine
    return node, {Way.UP_TO_WORKER: CHILD, Way.DOWN: PARENT, Way.DIRECT: 0}[way]


def called_by(machine: Any, event: ev.Event) -> set[str]:
    """Return the qualified names of all functions that are called during this event."""
    called: set[str] = set()

    def note(frame: FrameType, what: str, _: Any) -> None:
        if what == "call":
            called.add(frame.f_code.co_qualname)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        machine.step(event, 1.0)
    finally:
        sys.setprofile(before)
    return called


@pytest.mark.parametrize("way", Way, ids=lambda way: way.name)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_message_reaches_only_its_handler_in_routes_table(
    kind: type, way: Way, make: Make, node_with: Any, master_with: Any
) -> None:
    """The handler in the table is called for a message; on any other way the message is ignored."""
    machine, sender = receiver(way, make, node_with, master_with)
    called = called_by(machine, ev.Received(sender, sample(kind, make)))
    elsewhere = any(machine.ignored.counts[kind.__name__, reason] for reason in ELSEWHERE)
    assert elsewhere == ((kind, way) not in NAMED)
    assert NAMED.get((kind, way), "IgnoredMessages.count") in called


def test_routes_table_covers_every_message_type() -> None:
    assert {route.kind for route in ROUTES} == set(KINDS)
    assert len(NAMED) == len(ROUTES)


@pytest.mark.parametrize("table", [messages_table, stages_table])
def test_protocol_document_contains_table(table: Any) -> None:
    assert table() in DOCUMENT.read_text(), f"put this into {DOCUMENT.name}:\n{table()}"
