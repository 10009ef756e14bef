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
from tests.unit.protocol.effect_filters import every, only, only_abort, sent_by_master
from tests.unit.protocol.meshes import MESH, expire_lease, host, keep_alive, report_silent_child


def ordered_places(effects: list[ev.Effect]) -> list[tuple[int, int]]:
    """Return (node, parent) of each welcome."""
    return [(welcome.node, welcome.parent) for welcome in sent_by_master(effects, Welcome)]


def probed_nodes(effects: list[ev.Effect]) -> list[int]:
    """Return the nodes that are probed."""
    return [probe.node for probe in sent_by_master(effects, Probe)]


# -- from the top down -------------------------------------------------------------------------


def test_node_gets_place_only_after_parents_place_is_confirmed(master_with: Any) -> None:
    """A node gets a place only after its parent's is confirmed; both learn the same edge."""
    master = master_with(partitions=3, **MESH)
    assert ordered_places(master.join(0, executor="e0")) == [(1, 0)]
    assert ordered_places(master.join(1, executor="e1")) == [(2, 0)]
    assert ordered_places(master.join(2, executor="e2")) == []
    assert ordered_places(master.tick(0.1)) == []
    master.attach(1)
    effects = master.tick(0.1)
    assert ordered_places(effects) == [(3, 1)]
    (adopt,) = sent_by_master(effects, Adopt, host(1))
    (welcome,) = sent_by_master(effects, Welcome, host(3))
    assert (adopt.node, adopt.edge, adopt.local) == (3, welcome.edge, welcome.up)
    assert adopt.peer.host == host(3)
    assert (welcome.up.host, welcome.up.port) == (host(1), 7)


def test_welcome_and_adopt_are_repeated_until_place_is_confirmed(make_mesh: Any) -> None:
    """Welcome and Adopt are repeated until a status over the new edge confirms the place."""
    master = make_mesh(2)
    (welcome,) = sent_by_master(master.join(2, executor="e2"), Welcome)
    effects = master.tick(ORDER_RETRY_S)
    assert sent_by_master(effects, Welcome, host(3)) == [welcome]
    assert [adopt.edge for adopt in sent_by_master(effects, Adopt, host(1))] == [welcome.edge]
    master.say(3, edge=welcome.edge - 1)  # a status over another edge
    assert ordered_places(master.tick(ORDER_RETRY_S)) == [(3, 1)]
    master.say(3, edge=welcome.edge)
    assert ordered_places(master.tick(ORDER_RETRY_S)) == []
    assert master.member(3).placed


def test_each_edge_has_own_number_and_streams(make_mesh: Any) -> None:
    orders = [make_mesh(8).member(node).order for node in range(1, 9)]
    assert [order.edge for order in orders] == list(range(1, 9))
    streams = [s for o in orders for s in (o.up.control_stream, o.up.data_stream)]
    assert len(set(streams)) == len(streams)


def test_new_edge_of_node_has_new_streams(make_mesh: Any) -> None:
    """A new edge of a node gets new streams, because data may still arrive on the old ones."""
    master = make_mesh(2)
    before = master.member(2).order.up
    (welcome,) = sent_by_master(master.join(1, request=2, executor="e1"), Welcome)
    streams = {welcome.up.control_stream, welcome.up.data_stream}
    assert streams.isdisjoint({before.control_stream, before.data_stream})


def test_parent_holds_lease_of_node_with_confirmed_place(make_mesh: Any) -> None:
    """Once a place is confirmed, the parent holds the lease; the master holds its children's."""
    master = make_mesh(3)
    keep_alive(master, 30.0)
    assert list(master.machine.members.live) == [1, 2, 3]
    assert [master.machine.leases.holds(node) for node in (1, 2, 3)] == [True, True, False]


def test_node_below_parent_without_replica_keeps_its_id(make_mesh: Any) -> None:
    """A node whose parent has no replica yet keeps its id, and its place is sent again."""
    master = make_mesh(2)
    master.join(2, executor="e2")
    keep_alive(master, 35.0)
    assert list(master.machine.members.live) == [1, 2, 3]
    assert ordered_places(master.tick(ORDER_RETRY_S)) == [(3, 1)]


def test_children_survive_successor_that_dies_before_it_arrives(make_mesh: Any) -> None:
    """Children of a lost node are not closed when the node's successor dies before it arrives."""
    master = make_mesh(8)
    master.evict(1)
    keep_alive(master, 11.0, 8)
    gone = [departure.node for departure in master.machine.members.departures]
    assert gone == [1, 8]
    assert {3, 4} <= master.machine.members.live.keys()


def test_unplaced_node_that_answers_no_probes_is_closed(make_mesh: Any) -> None:
    """A node that does not answer probes is closed before its place is confirmed."""
    master = make_mesh(2)
    master.join(2, executor="e2")
    keep_alive(master, 11.0, 3)
    assert list(master.machine.members.live) == [1, 2]


def test_worker_without_place_in_tree_aborts_fit(master_with: Any) -> None:
    """A worker for which the tree has no place aborts the fit as a usage error."""
    master = master_with(partitions=3, fan_out=2, depth=1)
    master.enter(0)
    master.enter(1)
    abort = only_abort(master.join(2))
    assert (abort.kind, abort.partition) == (ev.Failure.USAGE, 2)
    assert abort.reason.startswith("there is no place for worker 3: a mesh of fan-out 2")


def test_flat_tree_places_every_node_under_master(master_with: Any) -> None:
    """In a flat tree every node is a child of the master."""
    master = master_with(partitions=5)
    for partition in range(5):
        assert [parent for _, parent in ordered_places(master.enter(partition))] == [0]


# -- executors ---------------------------------------------------------------------------------


def test_node_is_placed_below_topmost_node_of_its_executor(master_with: Any) -> None:
    """A node is placed below the topmost node of its executor while that one has a free place."""
    master = master_with(partitions=6, fan_out=2, depth=3)
    for partition, executor in enumerate(("a", "b", "b", "a", "b", "b")):
        master.enter(partition, executor=executor)
    parents = [master.machine.placement.tree.parent(node) for node in range(1, 7)]
    assert parents == [0, 0, 2, 1, 2, 1]  # node 2 has no third place


def test_departed_node_is_no_parent_for_its_executor(master_with: Any) -> None:
    """A node that has left is not chosen as the parent for later tasks of its executor."""
    master = master_with(partitions=4, fan_out=2, depth=3)
    for partition, executor in enumerate(("a", "b", "b")):
        master.enter(partition, executor=executor)
    master.machine.members.live[2].releasing = "a slot is needed"
    master.direct(LeaveNotice(node=2, reason="released", checkpoint=None))
    master.enter(3, executor="b")
    assert master.machine.placement.tree.parent(4) == 3


# -- probes ------------------------------------------------------------------------------------


def test_silent_child_and_nodes_below_are_probed_until_they_answer(make_mesh: Any) -> None:
    """After a report of a silent child, it and all nodes below it are probed until they answer."""
    master = make_mesh(8)
    effects = report_silent_child(master, 1, 3)
    assert probed_nodes(effects) == [3, 7, 8]
    assert sent_by_master(effects, Probe, host(7)) == [Probe(7)]
    assert probed_nodes(master.tick(PROBE_SPACING_S / 2)) == []
    quiet_s = master.machine.limits.lease_s / QUIET_PER_LEASE
    assert probed_nodes(master.tick(quiet_s)) == [3, 7, 8]  # the first probes may be lost
    master.direct(ProbeReply(7))
    assert probed_nodes(master.tick(PROBE_SPACING_S)) == [3, 8]


def test_repeated_silence_reports_cause_no_additional_probes(make_mesh: Any) -> None:
    """Further reports cause no additional probes of nodes that are already suspected."""
    master = make_mesh(8)
    report_silent_child(master, 1, 3)
    assert probed_nodes(report_silent_child(master, 1, 3)) == []
    assert probed_nodes(report_silent_child(master, 3, 7)) == []


def test_silent_nodes_are_closed_together(make_mesh: Any) -> None:
    """Silent nodes are closed together: here 3, 4 and 8, of which node 1 reports 3 and 4."""
    master = make_mesh(10)  # 3: 7, 8  4: 9, 10
    before = master.machine.placement.tree
    report_silent_child(master, 1, 3)
    report_silent_child(master, 1, 4)
    effects = keep_alive(master, 11.0, 3, 8, 4)
    assert sorted(departure.node for departure in master.machine.members.departures) == [3, 4, 8]
    assert len({note.text.split(": ")[1] for note in every(effects, ev.Note)}) == 1
    tree = master.machine.placement.tree
    assert tree.version == before.version + 3
    assert tree.nodes[before.places[3]] == 7  # the child of 3 that answered
    assert tree.nodes[before.places[4]] in (9, 10)


def test_suspect_that_answers_is_placed_again(make_mesh: Any) -> None:
    """A suspect that answers is PLACED again, and its parent holds its lease again."""
    master = make_mesh(8)
    report_silent_child(master, 1, 3)
    assert master.machine.leases.holds(7)
    stages = [master.member(node).stage.name for node in (1, 3, 7)]
    assert stages == ["PLACED", "BROKEN", "SUSPECT"]
    master.direct(ProbeReply(7))
    assert master.member(7).stage.name == "PLACED"
    assert not master.machine.leases.holds(7)
    assert 7 not in master.machine.placement.moving


def test_responding_node_with_broken_edge_gets_new_edge(make_mesh: Any) -> None:
    """A node that answers probes but is not heard by its parent gets a new edge."""
    master = make_mesh(8)
    old = master.member(3).order
    report_silent_child(master, 1, 3)
    master.direct(ProbeReply(3))
    (welcome,) = sent_by_master(master.tick(), Welcome, host(3))
    assert (welcome.parent, welcome.request) == (1, 1)
    assert welcome.edge > old.edge
    assert master.machine.leases.holds(3)
    master.say(3, edge=old.edge)
    assert not master.member(3).placed
    master.say(3, edge=welcome.edge)
    assert master.member(3).placed
    keep_alive(master, 30.0)
    assert len(master.machine.members.live) == 8


def test_silence_report_on_old_edge_is_answered_with_disown(make_mesh: Any) -> None:
    """A report of silence on an old edge, or of an unknown child, is answered with Disown."""
    master = make_mesh(8)
    edge = master.member(3).order.edge
    assert sent_by_master(master.direct(ChildSilent(1, 3, edge - 1)), Disown, host(1)) == [
        Disown(3, edge - 1)
    ]
    assert sent_by_master(master.direct(ChildSilent(1, 77, 5)), Disown, host(1)) == [Disown(77, 5)]
    assert master.machine.placement.suspects == {}


def test_silence_report_of_unknown_node_is_ignored(make_mesh: Any) -> None:
    """A report of silence from an unknown node is ignored."""
    master = make_mesh(3)
    assert master.direct(ChildSilent(77, 3, master.member(3).order.edge)) == []


# -- requests for a new edge -------------------------------------------------------------------


def test_edge_request_opens_edge_and_probes_parents_subtree(make_mesh: Any) -> None:
    """A node that asks gets a new edge; its parent and all nodes below that are probed."""
    master = make_mesh(8)
    effects = master.join(2, request=2, executor="e2")
    assert ordered_places(effects) == [(3, 1)]
    assert probed_nodes(effects) == [4, 7, 8]  # 3 has just asked; the master hears from 1
    assert 7 not in master.machine.placement.moving


def test_children_of_node_without_edges_get_new_edges_after_it(make_mesh: Any) -> None:
    """If a node has lost all its edges, its children get new edges after its own is confirmed."""
    master = make_mesh(8)
    effects = master.join(2, request=2, alone=True, executor="e2")
    assert ordered_places(effects) == [(3, 1)]
    assert ordered_places(master.tick(0.1)) == []
    master.say(3)
    assert ordered_places(master.tick(0.1)) == [(7, 3), (8, 3)]


# -- lost nodes --------------------------------------------------------------------------------


def test_children_of_lost_node_wait_for_confirmed_successor(make_mesh: Any) -> None:
    """Children of a lost node get their places once the successor's place is confirmed."""
    master = make_mesh(8)
    master.evict(1)
    tree = master.machine.placement.tree
    assert [tree.parent(node) for node in (8, 3, 4)] == [0, 8, 8]
    assert set(master.machine.placement.moving) == {8, 3, 4}
    master.attach(8)
    master.tick()
    assert {master.member(node).order.parent for node in (3, 4)} == {8}


def test_successor_is_node_that_answered_its_probe(make_mesh: Any) -> None:
    """A node that answered its probe becomes the successor, not a deeper silent leaf."""
    master = make_mesh(8)
    keep_alive(master, 5.0, 1, 8)
    for node in (3, 4):
        master.join(node - 1, request=2, executor=f"e{node - 1}")
    master.direct(ProbeReply(7))
    keep_alive(master, 6.0, 1, 8)
    assert [departure.node for departure in master.machine.members.departures] == [1]
    assert master.machine.placement.tree.path(7) == [7]


def test_lost_leaf_moves_no_other_node(make_mesh: Any) -> None:
    """The loss of a leaf moves no other node."""
    master = make_mesh(8)
    expire_lease(master, 3, 7)
    assert master.machine.placement.moving == {}


def test_no_place_is_ordered_after_done(make_mesh: Any) -> None:
    """No places are sent when the fit is done."""
    master = make_mesh(8)
    master.evict(1)
    master.machine.phases.phase = Phase.DONE
    assert ordered_places(master.tick(1.0)) == []


def test_address_change_of_master_replaces_only_its_own_edges(make_mesh: Any) -> None:
    """After a change of the master's address, only its own children get new edges."""
    master = make_mesh(8)
    effects = master.step(ev.EndpointChanged("master", 2)) + master.tick()
    assert ordered_places(effects) == [(1, 0), (2, 0)]
    assert set(master.machine.placement.moving) == {1, 2}


def test_repeated_order_opens_edge_once(make_mesh: Any) -> None:
    """Repeated orders open the edge once."""
    master = make_mesh(1)
    effects = master.join(1, executor="e1") + master.tick(ORDER_RETRY_S)
    assert only(effects, ev.OpenEdge).node == 2
