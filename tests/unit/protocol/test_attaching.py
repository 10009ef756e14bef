"""Tests of the deadline for attaching: a node that never attaches to its parent loses its place."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import Activity, Disown, IdClosed, Probe, ProbeReply, Welcome
from sparkstrom.protocol.common import events_and_effects as ev
from tests.unit.protocol.spoken import answers, every

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


def asking(mesh: Any, seconds: float, partition: int = 1) -> list[ev.Effect]:
    """Let time pass in which a partition's node answers probes and asks for edges every 2 s."""
    effects: list[ev.Effect] = []
    for second in range(int(seconds)):
        now = mesh.tick(1.0)
        for probe in answers(now, Probe):
            mesh.direct(ProbeReply(probe.node))
        if 1 in mesh.machine.members.live and 1 in mesh.machine.children.by_node:
            mesh.hear(1, mesh.make.report())
        node = partition + 1
        if second % 2 and node in mesh.machine.members.live:
            request = mesh.member(node).join.request + 1
            now += mesh.join(partition, executor=f"e{partition}", request=request)
        effects += now
    return effects


def test_it_is_closed_in_time_and_told_why(mesh: Any) -> None:
    """A node that never attached is closed after ``attach_s``, with a reason, for good."""
    assert every(asking(mesh, ATTACH_S - 2), ev.Note) == []
    assert 2 in mesh.machine.members.live
    effects = asking(mesh, 4)
    assert 2 not in mesh.machine.members.live
    (note,) = every(effects, ev.Note)
    assert "h and node 1 on h have had no edge for 41 s" in note.text
    assert "ports, security group" in note.text
    closed = answers(effects, IdClosed, "w1")[0]
    assert closed.node == 2
    assert not closed.free  # it would fail again, so Spark should try another executor
    assert "no edge for 41 s" in closed.reason
    assert answers(effects, Disown, "w0")


def test_right_under_the_master_it_is_told_too(master_with: Any) -> None:
    """A master's child that never attaches is closed, too; the reason names the driver program."""
    master = master_with(partitions=2, attach_s=ATTACH_S)
    master.join(0)
    effects: list[ev.Effect] = []
    for _ in range(int(ATTACH_S) + 2):
        effects += master.tick(1.0)
        master.direct(ProbeReply(1))
    assert answers(effects, IdClosed, "w0")[0].reason.startswith(
        "h and the driver program have had"
    )


def test_one_that_stood_in_a_place_before_comes_back(mesh: Any) -> None:
    """A node that was attached before may return under a new id."""
    mesh.say(2)
    assert list(mesh.machine.placement.moving) == []
    closed = answers(asking(mesh, ATTACH_S + 4), IdClosed, "w1")[0]
    assert closed.free


def test_a_new_attempt_at_its_partition_is_welcome(mesh: Any) -> None:
    """A new attempt at the closed node's partition is admitted."""
    asking(mesh, ATTACH_S + 4)
    again = mesh.join(1, token=999, attempt=99, executor="e1")
    assert answers(again, Welcome, "w1")[0].node == 3


def test_a_place_that_is_confirmed_ends_the_wait(mesh: Any) -> None:
    """A confirmed place ends the wait."""
    asking(mesh, ATTACH_S - 4)
    mesh.say(2)
    for _ in range(4):
        mesh.tick(ATTACH_S / 10)
        mesh.hear(1, mesh.make.report())
    assert 2 in mesh.machine.members.live


def test_who_waits_for_the_replica_of_the_one_above_has_time(master_with: Any) -> None:
    """The deadline does not run while the parent has not received its first replica."""
    master = master_with(partitions=4, fan_out=1, depth=4, attach_s=ATTACH_S)
    master.enter(0, executor="e0")
    master.join(1, executor="e1")
    asking(master, 3 * ATTACH_S)
    assert 2 in master.machine.members.live


def test_who_waits_for_one_above_that_takes_another_snapshot_has_time_as_well(mesh: Any) -> None:
    """The deadline does not run while the parent fetches another snapshot."""
    mesh.say(1, whole=False)
    asking(mesh, 3 * ATTACH_S)
    assert 2 in mesh.machine.members.live
    mesh.say(1, whole=True)
    asking(mesh, ATTACH_S + 4)
    assert 2 not in mesh.machine.members.live


def test_so_has_who_waits_below_a_relay_that_the_master_has_no_edge_to(mesh: Any) -> None:
    """The same is true if the parent, node 2, reports its snapshot through another relay."""
    mesh.say(2, activity=Activity.STEPPING, whole=True)
    mesh.join(2, executor="e2")
    mesh.say(2, whole=False)
    asking(mesh, 3 * ATTACH_S, partition=2)
    assert 3 in mesh.machine.members.live
    mesh.say(2, whole=True)
    asking(mesh, ATTACH_S + 4, partition=2)
    assert 3 not in mesh.machine.members.live


def test_who_is_not_even_ordered_a_place_waits_for_those_above(mesh: Any) -> None:
    """The deadline of node 3 does not run while its parent, node 2, has no confirmed place."""
    mesh.join(2, executor="e2")
    effects = asking(mesh, ATTACH_S + 4)
    assert [note.text.split()[1] for note in every(effects, ev.Note)] == ["2"]
    assert 3 in mesh.machine.members.live
