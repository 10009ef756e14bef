"""Tests of ``TopologyChecker``: which nodes without progress are excused by a node above them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.base.identity import MASTER
from sparkstrom.protocol.common.topology import Topology
from sparkstrom.simulation.invariants import TopologyChecker

HEAD, LEASE_S = 100, 2.0
LIMITS = SimpleNamespace(fan_out=1, depth=3)


@dataclass(eq=False)
class FakeProcess:
    """The attributes of a process that the checker reads."""

    name: str
    node: Any
    identity: Any
    has_replica: bool = True
    alive: bool = True


def make_process(
    name: str, number: int | None, parent: int | None, *, received: int, whole: bool = True
) -> FakeProcess:
    """Return a process with this id, parent and newest commit; ``whole``: it may be copied."""
    machine = SimpleNamespace(
        node=number,
        link=SimpleNamespace(parent=parent, attached=True),
        replication=SimpleNamespace(received=received, history=SimpleNamespace(whole=whole)),
    )
    return FakeProcess(name, machine, SimpleNamespace(token=number))


def make_master(live: dict[int, Any], tree: Topology) -> Any:
    """Return the attributes of the master that the checker reads."""
    members, placement = SimpleNamespace(live=live), SimpleNamespace(tree=tree)
    return SimpleNamespace(members=members, placement=placement, limits=LIMITS)


@pytest.mark.parametrize(
    ("whole", "installed", "goes_on", "cut_off"),
    [
        (False, True, True, set()),
        (False, True, False, {"above"}),  # reported itself, again and again
        (False, False, False, {"below"}),  # without a first replica it is not reported itself
        (True, True, True, {"below"}),
    ],
    ids=["the copy goes on", "a copy stands still", "its first one stands still", "no copy"],
)
def test_node_is_excused_only_while_parent_fetch_progresses(
    whole: bool, installed: bool, goes_on: bool, cut_off: set[str]
) -> None:
    """A node is excused while the node above fetches a snapshot and makes progress."""
    violations: list[str] = []
    shape = TopologyChecker(violations.append, LEASE_S)
    above = make_process("above", 1, MASTER, received=10, whole=whole)
    above.has_replica = installed
    below = make_process("below", 2, 1, received=5)
    for second in range(20):
        above.node.replication.received += goes_on
        shape.check_progress([above, below], HEAD, float(second))  # type: ignore[list-item]
    assert {text.split()[1] for text in violations} == cut_off


@pytest.mark.parametrize(
    ("above_is_placed", "places_go_on", "cut_off"),
    [(False, True, set()), (False, False, {"below"}), (True, True, {"below"})],
    ids=["one after the other", "nobody gets a place", "it has one"],
)
def test_node_below_unplaced_parent_is_excused_while_others_are_placed(
    above_is_placed: bool, places_go_on: bool, cut_off: set[str]
) -> None:
    """A node whose parent has no place yet is excused while other nodes get theirs."""
    violations: list[str] = []
    shape = TopologyChecker(violations.append, LEASE_S)
    below, tree = make_process("below", 2, 1, received=5), Topology(fan_out=1, depth_max=3)
    tree = tree.attach(1).attach(2)
    for second in range(20):
        live = {
            node: SimpleNamespace(
                placed=node > 1 or above_is_placed, join=SimpleNamespace(token=node)
            )
            for node in (1, 2, *range(10, 10 + second * places_go_on))
        }
        shape.record_places(make_master(live, tree), float(second))
        shape.check_progress([below], HEAD, float(second))  # type: ignore[list-item]
    assert {text.split()[1] for text in violations} == cut_off


@pytest.mark.parametrize("copies", [True, False], ids=["a copy above goes on", "none above it"])
def test_node_without_edge_is_excused_while_ancestor_fetches_snapshot(copies: bool) -> None:
    """A node without an edge is excused if a node above its place fetches a snapshot.

    The master has given new ids to two processes that do not know them yet, so only its tree shows
    their places.
    """
    violations: list[str] = []
    shape = TopologyChecker(violations.append, LEASE_S)
    relay = make_process("relay", 1, MASTER, received=10, whole=not copies)
    middle, last = (make_process(name, None, None, received=0) for name in ("middle", "last"))
    middle.identity.token, last.identity.token = 2, 3
    middle.node.replication.history.whole = middle.has_replica = False
    middle.node.link.attached = last.node.link.attached = False
    last.node.node = 9  # a closed id
    tree = Topology(fan_out=1, depth_max=3).attach(1).attach(2).attach(3)
    live = {
        node: SimpleNamespace(placed=node == 1, join=SimpleNamespace(token=node))
        for node in (1, 2, 3)
    }
    master = make_master(live, tree)
    shape.check_tree(master)
    everybody: Any = [relay, middle, last]
    for second in range(20):
        relay.node.replication.received += 1
        shape.record_places(master, float(second))
        shape.check_progress(everybody, HEAD, float(second))
        shape.check_closed_ids(everybody, master, float(second))
    for words in ("last is cut off", "closed id 9 is still last's"):
        assert any(words in text for text in violations) != copies
