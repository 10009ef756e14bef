"""Laws of ``Topology``: after any joins and losses, it is one tree of exactly the present nodes."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import MASTER
from sparkstrom.protocol.common.topology import DEPTH, FAN_OUT, FLAT, Topology

SHAPES = [(1, 4), (2, 3), (3, 2), (8, 5), FLAT]

Frozen = tuple[int, dict[int, int], dict[int, int]]


def copy_content(tree: Topology) -> Frozen:
    """Return a copy of the tree's content."""
    return tree.version, dict(tree.nodes), dict(tree.places)


def parents(tree: Topology) -> dict[int, int]:
    """Return each node's parent."""
    return {node: tree.parent(node) for node in tree.places if node != MASTER}


def assert_is_valid_tree(tree: Topology, live: set[int]) -> None:
    """Assert that this is one tree of these nodes, within its limits, and its methods agree."""
    above = parents(tree)
    assert set(above) == live
    assert len(tree) == len(live)
    assert all(node in tree for node in (MASTER, *live))
    children: dict[int, set[int]] = {node: set() for node in (MASTER, *live)}
    for node, parent in above.items():
        children[parent].add(node)  # every parent is in the tree
    for node, below in children.items():
        found = list(tree.children(node))
        assert len(found) == len(set(found)) <= tree.fan_out
        assert set(found) == below
    reached = tree.descendants(MASTER)
    assert sorted(reached) == sorted(live)  # each is reached once: no cycle, no separate part
    depths = [tree.depth(node) for node in reached]
    assert depths == sorted(depths)  # nearest first
    for node, depth in zip(reached, depths, strict=True):
        path = tree.path(node)
        assert 1 <= depth == len(path) <= tree.depth_max
        assert path[-1] == node
        assert [above[step] for step in path] == [MASTER, *path[:-1]]
        assert all(node in tree.descendants(step) for step in path[:-1])
    assert tree.depth(MASTER) == 0
    assert tree.path(MASTER) == []


class TreeMachine(RuleBasedStateMachine):
    """A tree to which nodes are added, near another one or not, and from which some leave."""

    shape = (2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.tree = Topology(*self.shape)
        self.live: list[int] = []
        self.next_id = 1
        self.past: list[tuple[Topology, Frozen]] = []

    def changed(self, tree: Topology, versions: int) -> None:
        """Replace the tree, and keep the old version to see that it never changes."""
        assert tree.version == self.tree.version + versions
        self.past.append((self.tree, copy_content(self.tree)))
        self.tree = tree

    @precondition(lambda self: len(self.live) < self.tree.capacity)
    @rule(near=st.none() | st.integers(0, 10**6))
    def comes(self, near: int | None) -> None:
        """Add a node: below ``near`` if that has room, or else as high as possible."""
        known = [MASTER, *self.live, 10**7]  # the last one is not in the tree
        beside = None if near is None else known[near % len(known)]
        node, self.next_id = self.next_id, self.next_id + 1
        room = self.room(beside)
        high = min(self.tree.depth(n) for n in (MASTER, *self.live) if self.room(n))
        before = parents(self.tree)
        self.changed(self.tree.attach(node, beside), 1)
        self.live.append(node)
        if room:
            assert self.tree.parent(node) == beside
        else:
            assert self.tree.depth(node) == high + 1  # as high as possible
        assert before.items() <= parents(self.tree).items()  # no other node is moved

    def room(self, node: int | None) -> bool:
        """Return whether this node can have another child."""
        if node is None or node not in self.tree:
            return False
        full = len(list(self.tree.children(node))) >= self.tree.fan_out
        return not full and self.tree.depth(node) < self.tree.depth_max

    @precondition(lambda self: len(self.live) == self.tree.capacity)
    @rule()
    def is_full(self) -> None:
        """A full tree refuses another node."""
        number = self.tree.capacity + 1
        with pytest.raises(UsageError, match=f"no place for worker {number}: a mesh of fan-out"):
            self.tree.attach(self.next_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        """Remove some nodes; only their successors move."""
        gone = data.draw(st.sets(st.sampled_from(self.live), min_size=1, max_size=6))
        before = self.tree
        self.changed(before.detach(gone), len(gone))
        self.live = [node for node in self.live if node not in gone]
        self.only_successors_moved(before, gone)

    def only_successors_moved(self, before: Topology, gone: set[int]) -> None:
        """At most one node per lost node has moved, up into the place of a lost node above it."""
        moved = [n for n in self.live if before.places[n] != self.tree.places[n]]
        assert len(moved) <= len(gone)
        places_of_the_gone = {before.places[node] for node in gone}
        for node in moved:
            assert self.tree.places[node] in places_of_the_gone
            assert set(before.path(node)) & gone
        for node in self.live:
            if node not in moved and not gone & set(before.path(node)):
                assert self.tree.path(node) == before.path(node)  # its path is unchanged

    @invariant()
    def it_is_one_tree(self) -> None:
        assert_is_valid_tree(self.tree, set(self.live))

    @invariant()
    def what_was_is_as_it_was(self) -> None:
        """Earlier versions of the tree have not changed."""
        assert all(copy_content(tree) == then for tree, then in self.past[-5:])


def make_test_case(shape: tuple[int, int]) -> type:
    """Return the test case for a tree of this fan-out and depth."""
    case: type = type(f"Tree{shape[0]}x{shape[1]}", (TreeMachine,), {"shape": shape}).TestCase
    case.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
    return case


TestChain, TestSmall, TestWide, TestMesh, TestFlat = map(make_test_case, SHAPES)


@given(shape=st.tuples(st.integers(1, 4), st.integers(1, 4)), seed=st.randoms())
def test_full_tree_rejects_node_until_another_is_removed(
    shape: tuple[int, int], seed: object
) -> None:
    """A full tree refuses one more node, and takes it once another has left."""
    tree = attach_nodes(Topology(*shape), range(1, Topology(*shape).capacity + 1))
    assert_is_valid_tree(tree, set(range(1, tree.capacity + 1)))
    with pytest.raises(UsageError, match=f"worker {tree.capacity + 1}: a mesh of fan-out"):
        tree.attach(10**6)
    gone = seed.choice(list(parents(tree)))  # type: ignore[attr-defined]
    tree = tree.detach([gone]).attach(10**6)
    assert len(tree) == tree.capacity
    assert 10**6 in tree
    assert gone not in tree


def attach_nodes(tree: Topology, nodes: Iterable[int]) -> Topology:
    """Return the tree with these nodes added."""
    for node in nodes:
        tree = tree.attach(node)
    return tree


def test_default_mesh_holds_37448_workers_and_rejects_next() -> None:
    """A mesh has room for 37,448 workers; one more is refused by name."""
    tree = Topology()
    assert (tree.fan_out, tree.depth_max) == (FAN_OUT, DEPTH) == (8, 5)
    assert tree.capacity == 37_448
    full = attach_nodes(tree, range(1, tree.capacity + 1))
    assert len(full) == 37_448
    assert max(full.depth(node) for node in full.places) == 5
    with pytest.raises(UsageError) as refused:
        full.attach(37_449)
    assert str(refused.value) == (
        "there is no place for worker 37449: a mesh of fan-out 8 and depth 5 is full; use fewer "
        "partitions, or more workers in one task"
    )
    thinned = full.detach([1])
    assert len(thinned) == 37_447
    assert thinned.parent(37_448) == full.parent(37_448) != 1
    assert thinned.attach(37_449).depth(37_449) == 5


def test_deepest_leaf_takes_place_of_lost_inner_node() -> None:
    tree = attach_nodes(Topology(2, 3), range(1, 15))  # 1 2 | 3 4 5 6 | 7 8 9 10 11 12 13 14
    after = tree.detach([1])
    assert after.nodes[1] == 10  # the last of those at depth 3 under 1
    assert list(after.children(10)) == [3, 4]
    assert list(after.children(4)) == [9]
    assert after.path(2) == [2]


def test_removed_nodes_are_not_chosen_as_successors() -> None:
    tree = attach_nodes(Topology(2, 3), range(1, 15))
    after = tree.detach([1, 10, 9, 4])
    assert set(after.nodes.values()) == set(range(15)) - {1, 4, 9, 10}
    assert after.nodes[1] in (7, 8)


def test_suspected_leaf_succeeds_only_if_all_leaves_are_suspected() -> None:
    """A suspected leaf becomes a successor only if all leaves below the lost node are suspected."""
    tree = attach_nodes(Topology(2, 3), range(1, 15))
    assert tree.detach([1], {10}).nodes[1] == 9
    assert tree.detach([1], {10, 9, 8, 7}).nodes[1] == 10  # 3 and 4 are not leaves
    spread = tree.detach([10, 9])
    assert spread.detach([1], {7, 8}).nodes[1] == 4


def test_attaching_node_twice_fails() -> None:
    with pytest.raises(AssertionError, match="one place"):
        Topology().attach(1).attach(1)


def test_flat_tree_places_every_node_under_master() -> None:
    """In a flat tree every node is a child of the master."""
    tree = attach_nodes(Topology(*FLAT), range(1, 300))
    assert {tree.parent(node) for node in range(1, 300)} == {MASTER}
    assert set(tree.detach(range(2, 300, 2)).children(MASTER)) == set(range(1, 300, 2))
    assert tree.attach(300, near=1).parent(300) == MASTER  # no node is placed under a worker
