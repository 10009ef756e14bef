"""Tests that the checkers of simulated meshes report the bug that a test plants in the code."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from sparkstrom.codec import messages as copies
from sparkstrom.codec.messages import Commit, Status, Update
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common import optimizer_fetch
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.topology import Topology
from sparkstrom.protocol.master.commit_sequencer import Sequencer
from sparkstrom.protocol.master.members import Member
from sparkstrom.protocol.master.statuses import Statuses
from sparkstrom.protocol.master.tree_placement import Placement
from sparkstrom.protocol.worker.joining import Joining
from sparkstrom.protocol.worker.parent_link import ParentLink
from sparkstrom.simulation.fuzzing import simulate_seed
from sparkstrom.simulation.invariants import TopologyChecker
from sparkstrom.simulation.process import OPTIMIZER_STRUCT
from sparkstrom.simulation.replica import SimReplica
from tests.simulation.planted import (
    CALM,
    ROUGH,
    SEEDS,
    Plant,
    drops_a_residual,
    drops_the_rest,
    hashes_something_else,
    says_not_alone,
    waits_without_deadline,
)


def violations(given: dict[str, Any], seeds: range) -> Iterator[str]:
    """Yield the violations of meshes with nine workers, seed by seed."""
    for seed in seeds:
        yield from simulate_seed(seed, 9, "mesh", given).violations


def misses_the_tenth(patch: pytest.MonkeyPatch, times: int) -> None:
    """Apply commit 10 ``times`` times to each replica."""
    apply = SimReplica.apply_update

    def odd(self: SimReplica, committed: Commit) -> None:
        for _ in range(times if committed.commit == 10 else 1):
            apply(self, committed)
        self.commit = committed.commit

    patch.setattr(SimReplica, "apply_update", odd)


def applies_twice(patch: pytest.MonkeyPatch) -> None:
    misses_the_tenth(patch, 2)


def forgets_one(patch: pytest.MonkeyPatch) -> None:
    misses_the_tenth(patch, 0)


def cuts_a_subtree_off(patch: pytest.MonkeyPatch) -> None:
    """Give no new edges to nodes that had a place, even if they ask."""
    move = Placement.move

    def only_newcomers(self: Placement, member: Member, now_s: float) -> None:
        if member.order is None:
            move(self, member, now_s)

    patch.setattr(Placement, "move", only_newcomers)
    patch.setattr(Placement, "on_new_request", lambda self, member, join, now_s: [])


def takes_no_notice_that_it_is_closed(patch: pytest.MonkeyPatch) -> None:
    """Ignore notices that the node's id is closed."""
    patch.setattr(Joining, "on_id_closed", lambda self, closed: [])


def keeps_the_edge_to_its_former_parent(patch: pytest.MonkeyPatch) -> None:
    """Leave a parent without closing the edge to it."""
    close_edge = ParentLink.close_edge

    def clinging(self: ParentLink) -> list[ev.Effect]:
        close_edge(self)
        return []

    patch.setattr(ParentLink, "close_edge", clinging)


def stands_under_the_master(patch: pytest.MonkeyPatch) -> None:
    """Place every node under the master, beyond its fan-out."""
    patch.setattr(Topology, "parent", lambda self, node: 0)


def skips_a_lost_update(patch: pytest.MonkeyPatch) -> None:
    """Number an update after a gap, as if the missing ones were committed."""
    number = Sequencer.number

    def hasty(self: Sequencer, update: Update, *how: Any) -> Commit | None:
        if update.seq > self.last.get(update.origin, update.seq):
            self.last[update.origin] = update.seq - 1
        return number(self, update, *how)

    patch.setattr(Sequencer, "number", hasty)


def overruns_a_child(patch: pytest.MonkeyPatch) -> None:
    """Ignore send windows and memory limits."""
    patch.setattr(Children, "_has_room", lambda self, child, size: True)


def adds_its_own_again_with_a_sum(patch: pytest.MonkeyPatch) -> None:
    """Do not subtract the worker's own updates from a received sum."""
    apply = SimReplica.apply_range

    def blind(self: SimReplica, item: ev.ApplyMergedRange) -> None:
        own = [self.own.popleft() for _ in item.own]
        apply(self, msgspec.structs.replace(item, own=()))
        assert len(own) == len(item.own)

    patch.setattr(SimReplica, "apply_range", blind)


def numbers_copies_by_steps(patch: pytest.MonkeyPatch) -> None:
    """Number optimizer copies by their steps, so copies of two sources may get the same number."""

    def by_steps(content: bytes) -> int:
        return 1 + OPTIMIZER_STRUCT.unpack_from(content)[1]

    for module in (copies, optimizer_fetch):
        patch.setattr(module, "hash_optimizer_copy", by_steps)


def never_says_that_it_copies_again(patch: pytest.MonkeyPatch) -> None:
    """Treat a member that once had a replica as if it always had one."""
    on_status = Statuses.on_status

    def sticking(self: Statuses, status: Status, now_s: float) -> list[ev.Effect]:
        member = self._members.live.get(status.node)
        was_whole = member is not None and member.whole
        effects = on_status(self, status, now_s)
        if member is not None:
            member.whole |= was_whole
        return effects

    patch.setattr(Statuses, "on_status", sticking)


INNER = CALM | {"fan_out": 2, "crashes": 3, "step_s_max": 0.6, "epochs": 5}
SUMS = CALM | {"loss": 0.2, "merged_bytes": 100, "downlink_bytes": 300, "log_bytes": 4_000}
PAUSED = CALM | {
    "fan_out": 2, "downlink_bytes": 1, "log_bytes": 300, "window_bytes": 10_000, "max_lead": None,
    "publish_every": 1, "epochs": 12, "step_s_max": 0.1, "pauses": 9,
}  # fmt: skip
BROKEN = {"fan_out": 2, "edge_deaths": 12, "epochs": 6, "publish_every": 1, "max_lead": 6}
BROKEN |= {"crashes": 0, "stop": 0.0, "failure": 0.0}
DYING = INNER | {"crashes": 0, "edge_deaths": 3, "driver_deaths": 3}
LENDERS = ROUGH | {
    "crashes": 40, "loss": 0.25, "max_lead": 1, "publish_every": 1, "epochs": 6,
    "fan_out": 2, "step_s_max": 0.2, "restart_s_max": 0.2, "delay_ms_max": 200.0,
}  # fmt: skip
COPIES = {
    "log_bytes": 1, "downlink_bytes": 1, "window_bytes": 10_000, "fan_out": 2, "max_lead": None,
    "publish_every": 1, "epochs": 4, "step_s_max": 0.03, "loss": 0.25, "delay_ms_max": 400.0,
    "crashes": 3, "edge_deaths": 6, "stop": 0.0, "failure": 0.0, "end_s": 2_000.0,
}  # fmt: skip
MESHED: list[tuple[Plant, str, dict[str, Any]]] = [
    (cuts_a_subtree_off, "I4: p", INNER),
    (takes_no_notice_that_it_is_closed, "I4: the closed id", CALM | {"isolations": 1}),
    (keeps_the_edge_to_its_former_parent, "I4: p", INNER),
    (stands_under_the_master, "I4: node 0 has", {"fan_out": 2}),
    (overruns_a_child, "I4: node", PAUSED),
    (skips_a_lost_update, "I2: commit", BROKEN),
    (adds_its_own_again_with_a_sum, "I3: p", SUMS),
    (numbers_copies_by_steps, "I3: p", LENDERS),
    (never_says_that_it_copies_again, "I5: p", COPIES),
    (applies_twice, "I3: p", ROUGH),
    (forgets_one, "I3: p", ROUGH),
    (hashes_something_else, "I3: node", ROUGH),
    (drops_a_residual, "I1: p", {}),
    (drops_the_rest, "I4: p", ROUGH | {"driver_deaths": 12}),
    (says_not_alone, "I4: p", DYING),
    (waits_without_deadline, "I4: p", {"exiles": 1, "stop": 0.0, "failure": 0.0}),
]


@pytest.mark.parametrize(
    ("plant", "begins", "given"), MESHED, ids=lambda p: getattr(p, "__name__", "")
)
def test_a_bug_planted_in_a_mesh_is_caught(
    plant: Plant, begins: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the seeds shows a violation that begins with the expected text."""
    plant(monkeypatch)
    assert any(text.startswith(begins) for text in violations(given, SEEDS))


@pytest.mark.parametrize(
    "given",
    [INNER, SUMS, PAUSED, DYING, LENDERS, COPIES],
    ids=["inner", "sums", "paused", "dying", "lenders", "copies"],
)
def test_the_same_meshes_are_clean_without_the_bug(given: dict[str, Any]) -> None:
    assert list(violations(given, range(5))) == []


def test_a_tree_of_others_than_the_living_and_one_that_is_too_deep_are_seen() -> None:
    """A tree whose nodes are not the live members, or that is too deep, is reported."""
    found: list[str] = []
    tree = Topology(fan_out=1, depth_max=3).attach(1).attach(2).attach(3)

    def master(live: list[int], depth: int) -> Any:
        limits = SimpleNamespace(fan_out=1, depth=depth)
        members = SimpleNamespace(live=dict.fromkeys(live))
        placement = SimpleNamespace(tree=tree)
        return SimpleNamespace(placement=placement, members=members, limits=limits)

    TopologyChecker(found.append, 2.0).check_tree(master([1, 2, 3], 3))
    assert found == []
    TopologyChecker(found.append, 2.0).check_tree(master([1, 2], 3))
    TopologyChecker(found.append, 2.0).check_tree(master([1, 2, 3], 2))
    assert found == [
        "I4: the tree and the live nodes differ in [3]",
        "I4: node 3 is 3 hops below the master",
    ]


def test_a_circle_of_edges_is_seen() -> None:
    """A cycle of edges is reported."""
    found: list[str] = []

    def standing(node: int, parent: int) -> SimpleNamespace:
        children = SimpleNamespace(by_node={})
        link = SimpleNamespace(parent=parent, attached=True)
        machine = SimpleNamespace(node=node, link=link, children=children)
        return SimpleNamespace(alive=True, node=machine, slots={})

    shape = TopologyChecker(found.append, 2.0)
    straight = [standing(1, 0), standing(2, 1), standing(3, 2)]
    shape.check_edges(cast(Any, straight))
    assert found == []
    shape.check_edges(cast(Any, [standing(1, 3), *straight[1:]]))
    assert found == ["I4: a circle of edges through [1, 2, 3]"]
