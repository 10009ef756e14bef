"""Tests of ``Placement``: the order in which nodes get places, probes, and lost nodes.

The tree has fan-out 2. Each node has its own partition; node n listens at host w(n-1). Children:

    1: 3, 4     3: 7, 8
    2: 5, 6     4: 9, 10
"""

from __future__ import annotations

from typing import Any

from sparkstrom.codec.messages import (
    Adopt,
    ChildSilent,
    Disown,
    LeaveNotice,
    Phase,
    Probe,
    ProbeReply,
    Welcome,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.master.tree_placement import (
    ORDER_RETRY_S,
    PROBE_SPACING_S,
    QUIET_PER_LEASE,
)
from tests.unit.protocol.meshes import MESH, host, keep_alive, lose, silent
from tests.unit.protocol.spoken import aborted, answers, every, only


def ordered(effects: list[ev.Effect]) -> list[tuple[int, int]]:
    """Return (node, parent) of each welcome."""
    return [(welcome.node, welcome.parent) for welcome in answers(effects, Welcome)]


def probed(effects: list[ev.Effect]) -> list[int]:
    """Return the nodes that are probed."""
    return [probe.node for probe in answers(effects, Probe)]


# -- from the top down -------------------------------------------------------------------------


def test_nobody_is_ordered_under_one_that_is_not_there_yet(master_with: Any) -> None:
    """A node gets a place only after its parent's is confirmed; both learn the same edge."""
    master = master_with(partitions=3, **MESH)
    assert ordered(master.join(0, executor="e0")) == [(1, 0)]
    assert ordered(master.join(1, executor="e1")) == [(2, 0)]
    assert ordered(master.join(2, executor="e2")) == []
    assert ordered(master.tick(0.1)) == []
    master.attach(1)
    effects = master.tick(0.1)
    assert ordered(effects) == [(3, 1)]
    (adopt,) = answers(effects, Adopt, host(1))
    (welcome,) = answers(effects, Welcome, host(3))
    assert (adopt.node, adopt.edge, adopt.local) == (3, welcome.edge, welcome.up)
    assert adopt.peer.host == host(3)
    assert (welcome.up.host, welcome.up.port) == (host(1), 7)


def test_an_order_is_repeated_to_both_until_its_edge_is_confirmed(mesh_of: Any) -> None:
    """Welcome and Adopt are repeated until a status over the new edge confirms the place."""
    master = mesh_of(2)
    (welcome,) = answers(master.join(2, executor="e2"), Welcome)
    effects = master.tick(ORDER_RETRY_S)
    assert answers(effects, Welcome, host(3)) == [welcome]
    assert [adopt.edge for adopt in answers(effects, Adopt, host(1))] == [welcome.edge]
    master.say(3, edge=welcome.edge - 1)  # a status over another edge
    assert ordered(master.tick(ORDER_RETRY_S)) == [(3, 1)]
    master.say(3, edge=welcome.edge)
    assert ordered(master.tick(ORDER_RETRY_S)) == []
    assert master.member(3).placed


def test_each_edge_has_a_number_and_streams_of_its_own(mesh_of: Any) -> None:
    orders = [mesh_of(8).member(node).order for node in range(1, 9)]
    assert [order.edge for order in orders] == list(range(1, 9))
    streams = [s for o in orders for s in (o.up.control_stream, o.up.data_stream)]
    assert len(set(streams)) == len(streams)


def test_another_edge_of_a_node_has_other_streams(mesh_of: Any) -> None:
    """A new edge of a node gets new streams, because data may still arrive on the old ones."""
    master = mesh_of(2)
    before = master.member(2).order.up
    (welcome,) = answers(master.join(1, request=2, executor="e1"), Welcome)
    streams = {welcome.up.control_stream, welcome.up.data_stream}
    assert streams.isdisjoint({before.control_stream, before.data_stream})


def test_once_it_is_there_its_parent_holds_its_lease(mesh_of: Any) -> None:
    """Once a place is confirmed, the parent holds the lease; the master holds its children's."""
    master = mesh_of(3)
    keep_alive(master, 30.0)
    assert list(master.machine.members.live) == [1, 2, 3]
    assert [master.machine.leases.holds(node) for node in (1, 2, 3)] == [True, True, False]


def test_a_parent_without_a_replica_costs_nobody_below_it_the_id(mesh_of: Any) -> None:
    """A node whose parent has no replica yet keeps its id, and its place is sent again."""
    master = mesh_of(2)
    master.join(2, executor="e2")
    keep_alive(master, 35.0)
    assert list(master.machine.members.live) == [1, 2, 3]
    assert ordered(master.tick(ORDER_RETRY_S)) == [(3, 1)]


def test_who_waits_for_its_parent_to_arrive_is_not_closed_with_it(mesh_of: Any) -> None:
    """Children of a lost node are not closed when the node's successor dies before it arrives."""
    master = mesh_of(8)
    master.evict(1)
    keep_alive(master, 11.0, 8)
    gone = [departure.node for departure in master.machine.members.departures]
    assert gone == [1, 8]
    assert {3, 4} <= master.machine.members.live.keys()


def test_whoever_does_not_say_that_it_is_here_is_closed_before_it_arrives(mesh_of: Any) -> None:
    """A node that does not answer probes is closed before its place is confirmed."""
    master = mesh_of(2)
    master.join(2, executor="e2")
    keep_alive(master, 11.0, 3)
    assert list(master.machine.members.live) == [1, 2]


def test_one_too_many_ends_the_fit_by_name(master_with: Any) -> None:
    """A worker for which the tree has no place aborts the fit as a usage error."""
    master = master_with(partitions=3, fan_out=2, depth=1)
    master.enter(0)
    master.enter(1)
    abort = aborted(master.join(2))
    assert (abort.kind, abort.partition) == (ev.Failure.USAGE, 2)
    assert abort.reason.startswith("there is no place for worker 3: a mesh of fan-out 2")


def test_in_a_flat_tree_everybody_is_under_the_master(master_with: Any) -> None:
    """In a flat tree every node is a child of the master."""
    master = master_with(partitions=5)
    for partition in range(5):
        assert [parent for _, parent in ordered(master.enter(partition))] == [0]


# -- executors ---------------------------------------------------------------------------------


def test_tasks_of_one_executor_stand_under_its_first(master_with: Any) -> None:
    """A node is placed below the topmost node of its executor while that one has a free place."""
    master = master_with(partitions=6, fan_out=2, depth=3)
    for partition, executor in enumerate(("a", "b", "b", "a", "b", "b")):
        master.enter(partition, executor=executor)
    parents = [master.machine.placement.tree.parent(node) for node in range(1, 7)]
    assert parents == [0, 0, 2, 1, 2, 1]  # node 2 has no third place


def test_a_task_that_is_gone_is_nobodys_first(master_with: Any) -> None:
    """A node that has left is not chosen as the parent for later tasks of its executor."""
    master = master_with(partitions=4, fan_out=2, depth=3)
    for partition, executor in enumerate(("a", "b", "b")):
        master.enter(partition, executor=executor)
    master.machine.members.live[2].releasing = "a slot is needed"
    master.direct(LeaveNotice(node=2, reason="released", checkpoint=None))
    master.enter(3, executor="b")
    assert master.machine.placement.tree.parent(4) == 3


# -- probes ------------------------------------------------------------------------------------


def test_a_silent_child_and_all_below_it_are_asked(mesh_of: Any) -> None:
    """After a report of a silent child, it and all nodes below it are probed until they answer."""
    master = mesh_of(8)
    effects = silent(master, 1, 3)
    assert probed(effects) == [3, 7, 8]
    assert answers(effects, Probe, host(7)) == [Probe(7)]
    assert probed(master.tick(PROBE_SPACING_S / 2)) == []
    quiet_s = master.machine.limits.lease_s / QUIET_PER_LEASE
    assert probed(master.tick(quiet_s)) == [3, 7, 8]  # the first probes may be lost
    master.direct(ProbeReply(7))
    assert probed(master.tick(PROBE_SPACING_S)) == [3, 8]


def test_who_is_asked_already_is_not_asked_twice_as_often(mesh_of: Any) -> None:
    """Further reports cause no additional probes of nodes that are already suspected."""
    master = mesh_of(8)
    silent(master, 1, 3)
    assert probed(silent(master, 1, 3)) == []
    assert probed(silent(master, 3, 7)) == []


def test_those_who_stay_silent_go_in_one_change(mesh_of: Any) -> None:
    """Silent nodes are closed together: here 3, 4 and 8, of which node 1 reports 3 and 4."""
    master = mesh_of(10)  # 3: 7, 8  4: 9, 10
    before = master.machine.placement.tree
    silent(master, 1, 3)
    silent(master, 1, 4)
    effects = keep_alive(master, 11.0, 3, 8, 4)
    assert sorted(departure.node for departure in master.machine.members.departures) == [3, 4, 8]
    assert len({note.text.split(": ")[1] for note in every(effects, ev.Note)}) == 1
    tree = master.machine.placement.tree
    assert tree.version == before.version + 3
    assert tree.nodes[before.places[3]] == 7  # the child of 3 that answered
    assert tree.nodes[before.places[4]] in (9, 10)


def test_those_who_answer_go_back_to_their_parents(mesh_of: Any) -> None:
    """A suspect that answers is PLACED again, and its parent holds its lease again."""
    master = mesh_of(8)
    silent(master, 1, 3)
    assert master.machine.leases.holds(7)
    stages = [master.member(node).stage.name for node in (1, 3, 7)]
    assert stages == ["PLACED", "BROKEN", "SUSPECT"]
    master.direct(ProbeReply(7))
    assert master.member(7).stage.name == "PLACED"
    assert not master.machine.leases.holds(7)
    assert 7 not in master.machine.placement.moving


def test_who_lives_on_a_broken_edge_gets_another(mesh_of: Any) -> None:
    """A node that answers probes but is not heard by its parent gets a new edge."""
    master = mesh_of(8)
    old = master.member(3).order
    silent(master, 1, 3)
    master.direct(ProbeReply(3))
    (welcome,) = answers(master.tick(), Welcome, host(3))
    assert (welcome.parent, welcome.request) == (1, 1)
    assert welcome.edge > old.edge
    assert master.machine.leases.holds(3)
    master.say(3, edge=old.edge)
    assert not master.member(3).placed
    master.say(3, edge=welcome.edge)
    assert master.member(3).placed
    keep_alive(master, 30.0)
    assert len(master.machine.members.live) == 8


def test_a_complaint_of_an_edge_that_is_gone_is_answered_with_its_end(mesh_of: Any) -> None:
    """A report of silence on an old edge, or of an unknown child, is answered with Disown."""
    master = mesh_of(8)
    edge = master.member(3).order.edge
    assert answers(master.direct(ChildSilent(1, 3, edge - 1)), Disown, host(1)) == [
        Disown(3, edge - 1)
    ]
    assert answers(master.direct(ChildSilent(1, 77, 5)), Disown, host(1)) == [Disown(77, 5)]
    assert master.machine.placement.suspects == {}


def test_a_strangers_complaint_is_nothing(mesh_of: Any) -> None:
    """A report of silence from an unknown node is ignored."""
    master = mesh_of(3)
    assert master.direct(ChildSilent(77, 3, master.member(3).order.edge)) == []


# -- requests for a new edge -------------------------------------------------------------------


def test_who_asks_gets_another_edge_and_its_parent_is_asked(mesh_of: Any) -> None:
    """A node that asks gets a new edge; its parent and all nodes below that are probed."""
    master = mesh_of(8)
    effects = master.join(2, request=2, executor="e2")
    assert ordered(effects) == [(3, 1)]
    assert probed(effects) == [4, 7, 8]  # 3 has just asked; the master hears from 1
    assert 7 not in master.machine.placement.moving


def test_who_has_lost_all_its_edges_is_followed_by_its_children(mesh_of: Any) -> None:
    """If a node has lost all its edges, its children get new edges after its own is confirmed."""
    master = mesh_of(8)
    effects = master.join(2, request=2, alone=True, executor="e2")
    assert ordered(effects) == [(3, 1)]
    assert ordered(master.tick(0.1)) == []
    master.say(3)
    assert ordered(master.tick(0.1)) == [(7, 3), (8, 3)]


# -- lost nodes --------------------------------------------------------------------------------


def test_a_lost_nodes_children_wait_for_its_successor(mesh_of: Any) -> None:
    """Children of a lost node get their places once the successor's place is confirmed."""
    master = mesh_of(8)
    master.evict(1)
    tree = master.machine.placement.tree
    assert [tree.parent(node) for node in (8, 3, 4)] == [0, 8, 8]
    assert set(master.machine.placement.moving) == {8, 3, 4}
    master.attach(8)
    master.tick()
    assert {master.member(node).order.parent for node in (3, 4)} == {8}


def test_who_has_answered_takes_the_place_and_not_who_may_be_gone_as_well(mesh_of: Any) -> None:
    """A node that answered its probe becomes the successor, not a deeper silent leaf."""
    master = mesh_of(8)
    keep_alive(master, 5.0, 1, 8)
    for node in (3, 4):
        master.join(node - 1, request=2, executor=f"e{node - 1}")
    master.direct(ProbeReply(7))
    keep_alive(master, 6.0, 1, 8)
    assert [departure.node for departure in master.machine.members.departures] == [1]
    assert master.machine.placement.tree.path(7) == [7]


def test_a_lost_leaf_moves_nobody(mesh_of: Any) -> None:
    """The loss of a leaf moves no other node."""
    master = mesh_of(8)
    lose(master, 3, 7)
    assert master.machine.placement.moving == {}


def test_nothing_is_ordered_when_all_is_done(mesh_of: Any) -> None:
    """No places are sent when the fit is done."""
    master = mesh_of(8)
    master.evict(1)
    master.machine.phases.phase = Phase.DONE
    assert ordered(master.tick(1.0)) == []


def test_a_moved_masters_children_keep_theirs(mesh_of: Any) -> None:
    """After a change of the master's address, only its own children get new edges."""
    master = mesh_of(8)
    effects = master.step(ev.EndpointChanged("master", 2)) + master.tick()
    assert ordered(effects) == [(1, 0), (2, 0)]
    assert set(master.machine.placement.moving) == {1, 2}


def test_only_one_edge_is_opened_for_an_order_that_is_repeated(mesh_of: Any) -> None:
    """Repeated orders open the edge once."""
    master = mesh_of(1)
    effects = master.join(1, executor="e1") + master.tick(ORDER_RETRY_S)
    assert only(effects, ev.OpenEdge).node == 2
