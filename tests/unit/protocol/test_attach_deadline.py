"""Tests of the deadline for attaching: a node that never attaches to its parent loses its place."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import Activity, Disown, IdClosed, Probe, ProbeReply, Welcome
from sparkstrom.protocol.common import events_and_effects as ev
from tests.unit.protocol.effect_filters import every, sent_by_master

ATTACH_S = 40.0


@pytest.fixture
def mesh(master_with: Any) -> Any:
    """A master with node 1 in its place and with a replica, and node 2 ordered below node 1."""
    made = master_with(partitions=4, fan_out=1, depth=4, attach_s=ATTACH_S)
    made.enter(0, executor="e0")
    made.say(1, activity=Activity.WAITING, whole=True)
    made.join(1, executor="e1")
    assert list(made.machine.placement.moving) == [2]
    return made


def request_edges(mesh: Any, seconds: float, partition: int = 1) -> list[ev.Effect]:
    """Let time pass in which a partition's node answers probes and asks for edges every 2 s."""
    effects: list[ev.Effect] = []
    for second in range(int(seconds)):
        now = mesh.tick(1.0)
        for probe in sent_by_master(now, Probe):
            mesh.direct(ProbeReply(probe.node))
        if 1 in mesh.machine.members.live and 1 in mesh.machine.children.by_node:
            mesh.hear(1, mesh.make.report())
        node = partition + 1
        if second % 2 and node in mesh.machine.members.live:
            request = mesh.member(node).join.request + 1
            now += mesh.join(partition, executor=f"e{partition}", request=request)
        effects += now
    return effects


def test_unattached_node_is_closed_after_attach_s_with_reason(mesh: Any) -> None:
    """A node that never attached is closed after ``attach_s``, with a reason, for good."""
    assert every(request_edges(mesh, ATTACH_S - 2), ev.Note) == []
    assert 2 in mesh.machine.members.live
    effects = request_edges(mesh, 4)
    assert 2 not in mesh.machine.members.live
    (note,) = every(effects, ev.Note)
    assert "h and node 1 on h have had no edge for 41 s" in note.text
    assert "ports, security group" in note.text
    closed = sent_by_master(effects, IdClosed, "w1")[0]
    assert closed.node == 2
    assert not closed.free  # it would fail again, so Spark should try another executor
    assert "no edge for 41 s" in closed.reason
    assert sent_by_master(effects, Disown, "w0")


def test_unattached_child_of_master_is_closed_naming_driver(master_with: Any) -> None:
    """A master's child that never attaches is closed, too; the reason names the driver program."""
    master = master_with(partitions=2, attach_s=ATTACH_S)
    master.join(0)
    effects: list[ev.Effect] = []
    for _ in range(int(ATTACH_S) + 2):
        effects += master.tick(1.0)
        master.direct(ProbeReply(1))
    assert sent_by_master(effects, IdClosed, "w0")[0].reason.startswith(
        "h and the driver program have had"
    )


def test_previously_attached_node_may_return_under_new_id(mesh: Any) -> None:
    """A node that was attached before may return under a new id."""
    mesh.say(2)
    assert list(mesh.machine.placement.moving) == []
    closed = sent_by_master(request_edges(mesh, ATTACH_S + 4), IdClosed, "w1")[0]
    assert closed.free


def test_new_attempt_at_closed_nodes_partition_is_admitted(mesh: Any) -> None:
    """A new attempt at the closed node's partition is admitted."""
    request_edges(mesh, ATTACH_S + 4)
    again = mesh.join(1, token=999, attempt=99, executor="e1")
    assert sent_by_master(again, Welcome, "w1")[0].node == 3


def test_confirmed_place_ends_attach_deadline(mesh: Any) -> None:
    """A confirmed place ends the wait."""
    request_edges(mesh, ATTACH_S - 4)
    mesh.say(2)
    for _ in range(4):
        mesh.tick(ATTACH_S / 10)
        mesh.hear(1, mesh.make.report())
    assert 2 in mesh.machine.members.live


def test_deadline_pauses_until_parent_has_first_replica(master_with: Any) -> None:
    """The deadline does not run while the parent has not received its first replica."""
    master = master_with(partitions=4, fan_out=1, depth=4, attach_s=ATTACH_S)
    master.enter(0, executor="e0")
    master.join(1, executor="e1")
    request_edges(master, 3 * ATTACH_S)
    assert 2 in master.machine.members.live


def test_deadline_pauses_while_parent_fetches_another_snapshot(mesh: Any) -> None:
    """The deadline does not run while the parent fetches another snapshot."""
    mesh.say(1, whole=False)
    request_edges(mesh, 3 * ATTACH_S)
    assert 2 in mesh.machine.members.live
    mesh.say(1, whole=True)
    request_edges(mesh, ATTACH_S + 4)
    assert 2 not in mesh.machine.members.live


def test_deadline_pauses_while_indirect_parent_fetches_snapshot(mesh: Any) -> None:
    """The same is true if the parent, node 2, reports its snapshot through another relay."""
    mesh.say(2, activity=Activity.STEPPING, whole=True)
    mesh.join(2, executor="e2")
    mesh.say(2, whole=False)
    request_edges(mesh, 3 * ATTACH_S, partition=2)
    assert 3 in mesh.machine.members.live
    mesh.say(2, whole=True)
    request_edges(mesh, ATTACH_S + 4, partition=2)
    assert 3 not in mesh.machine.members.live


def test_deadline_pauses_until_parent_has_confirmed_place(mesh: Any) -> None:
    """The deadline of node 3 does not run while its parent, node 2, has no confirmed place."""
    mesh.join(2, executor="e2")
    effects = request_edges(mesh, ATTACH_S + 4)
    assert [note.text.split()[1] for note in every(effects, ev.Note)] == ["2"]
    assert 3 in mesh.machine.members.live
