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
    claim_open_child_edges,
    disable_wait_deadlines,
    discard_residual,
    return_wrong_digest,
    skip_effects_after_driver_death,
)


def violations(given: dict[str, Any], seeds: range) -> Iterator[str]:
    """Yield the violations of meshes with nine workers, seed by seed."""
    for seed in seeds:
        yield from simulate_seed(seed, 9, "mesh", given).violations


def apply_tenth_commit(patch: pytest.MonkeyPatch, times: int) -> None:
    """Apply commit 10 ``times`` times to each replica."""
    apply = SimReplica.apply_update

    def odd(self: SimReplica, committed: Commit) -> None:
        for _ in range(times if committed.commit == 10 else 1):
            apply(self, committed)
        self.commit = committed.commit

    patch.setattr(SimReplica, "apply_update", odd)


def apply_commit_twice(patch: pytest.MonkeyPatch) -> None:
    apply_tenth_commit(patch, 2)


def skip_one_commit(patch: pytest.MonkeyPatch) -> None:
    apply_tenth_commit(patch, 0)


def refuse_new_edges_to_placed_nodes(patch: pytest.MonkeyPatch) -> None:
    """Give no new edges to nodes that had a place, even if they ask."""
    move = Placement.move

    def only_newcomers(self: Placement, member: Member, now_s: float) -> None:
        if member.order is None:
            move(self, member, now_s)

    patch.setattr(Placement, "move", only_newcomers)
    patch.setattr(Placement, "on_new_request", lambda self, member, join, now_s: [])


def ignore_closed_notices(patch: pytest.MonkeyPatch) -> None:
    """Ignore notices that the node's id is closed."""
    patch.setattr(Joining, "on_id_closed", lambda self, closed: [])


def keep_edge_to_former_parent(patch: pytest.MonkeyPatch) -> None:
    """Leave a parent without closing the edge to it."""
    close_edge = ParentLink.close_edge

    def clinging(self: ParentLink) -> list[ev.Effect]:
        close_edge(self)
        return []

    patch.setattr(ParentLink, "close_edge", clinging)


def place_every_node_under_master(patch: pytest.MonkeyPatch) -> None:
    """Place every node under the master, beyond its fan-out."""
    patch.setattr(Topology, "parent", lambda self, node: 0)


def skip_lost_updates(patch: pytest.MonkeyPatch) -> None:
    """Number an update after a gap, as if the missing ones were committed."""
    number = Sequencer.number

    def hasty(self: Sequencer, update: Update, *how: Any) -> Commit | None:
        if update.seq > self.last.get(update.origin, update.seq):
            self.last[update.origin] = update.seq - 1
        return number(self, update, *how)

    patch.setattr(Sequencer, "number", hasty)


def ignore_flow_limits(patch: pytest.MonkeyPatch) -> None:
    """Ignore send windows and memory limits."""
    patch.setattr(Children, "_has_room", lambda self, child, size: True)


def add_own_updates_again_with_sum(patch: pytest.MonkeyPatch) -> None:
    """Do not subtract the worker's own updates from a received sum."""
    apply = SimReplica.apply_range

    def blind(self: SimReplica, item: ev.ApplyMergedRange) -> None:
        own = [self.own.popleft() for _ in item.own]
        apply(self, msgspec.structs.replace(item, own=()))
        assert len(own) == len(item.own)

    patch.setattr(SimReplica, "apply_range", blind)


def number_optimizer_copies_by_steps(patch: pytest.MonkeyPatch) -> None:
    """Number optimizer copies by their steps, so copies of two sources may get the same number."""

    def by_steps(content: bytes) -> int:
        return 1 + OPTIMIZER_STRUCT.unpack_from(content)[1]

    for module in (copies, optimizer_fetch):
        patch.setattr(module, "hash_optimizer_copy", by_steps)


def ignore_replica_loss(patch: pytest.MonkeyPatch) -> None:
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
    (refuse_new_edges_to_placed_nodes, "I4: p", INNER),
    (ignore_closed_notices, "I4: the closed id", CALM | {"isolations": 1}),
    (keep_edge_to_former_parent, "I4: p", INNER),
    (place_every_node_under_master, "I4: node 0 has", {"fan_out": 2}),
    (ignore_flow_limits, "I4: node", PAUSED),
    (skip_lost_updates, "I2: commit", BROKEN),
    (add_own_updates_again_with_sum, "I3: p", SUMS),
    (number_optimizer_copies_by_steps, "I3: p", LENDERS),
    (ignore_replica_loss, "I5: p", COPIES),
    (apply_commit_twice, "I3: p", ROUGH),
    (skip_one_commit, "I3: p", ROUGH),
    (return_wrong_digest, "I3: node", ROUGH),
    (discard_residual, "I1: p", {}),
    (skip_effects_after_driver_death, "I4: p", ROUGH | {"driver_deaths": 12}),
    (claim_open_child_edges, "I4: p", DYING),
    (disable_wait_deadlines, "I4: p", {"exiles": 1, "stop": 0.0, "failure": 0.0}),
]


@pytest.mark.parametrize(
    ("plant", "begins", "given"), MESHED, ids=lambda p: getattr(p, "__name__", "")
)
def test_mesh_checker_reports_planted_bug(
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
def test_meshes_have_no_violations_without_planted_bug(given: dict[str, Any]) -> None:
    assert list(violations(given, range(5))) == []


def test_topology_checker_reports_dead_node_or_excessive_depth() -> None:
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


def test_topology_checker_reports_cycle_of_edges() -> None:
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
