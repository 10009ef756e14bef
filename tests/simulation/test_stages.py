"""Tests that all transitions in the table of stages happen, and no others.

A transition that is not in the table raises AssertionError, which the simulator reports as a
violation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sparkstrom.codec.messages import ChildSilent, ProbeReply, Release
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common import stages
from sparkstrom.protocol.common.stages import (
    ChildStage,
    FarewellStage,
    LinkStage,
    MemberStage,
    ReplicaStage,
    Stage,
    TaskStage,
    Trigger,
)
from sparkstrom.simulation.fuzzing import simulate_seed
from tests.unit.protocol.conftest import Make, MasterDriver, NodeDriver

KINDS = [LinkStage, ReplicaStage, TaskStage, FarewellStage, ChildStage, MemberStage]
Row = tuple[Stage, Trigger]
RUNS: list[tuple[str, int, range, dict[str, Any]]] = [
    ("mesh", 9, range(9), {"resumed": 0, "copies": 0, "last_copies": 0}),
    (
        "plain",
        4,
        range(4),
        {"stop": 0.0, "failure": 1.0, "resumed": 0, "copies": 0, "last_copies": 0},
    ),
    (
        "plain",
        4,
        range(4),
        {
            "crashes": 4,
            "restart_s_max": 8.0,
            "stop": 0.0,
            "copies": 0,
            "last_copies": 0,
            "resumed": 0,
        },
    ),
]


class RecordingTable(dict[Row, Stage]):
    """The table of transitions, which records the rows that are looked up."""

    def __init__(self) -> None:
        super().__init__(stages.TRANSITIONS)
        self.made: set[Row] = set()

    def get(self, row: Any, default: Any = None) -> Any:
        self.made.add(row)
        return super().get(row, default)


@pytest.fixture
def recording_table(monkeypatch: pytest.MonkeyPatch) -> RecordingTable:
    table = RecordingTable()
    monkeypatch.setattr(stages, "TRANSITIONS", table)
    return table


# -- transitions that are rare in simulations ----------------------------------------------------


def make_installing_node(make: Make) -> NodeDriver:
    """Return a node whose trainer is installing the complete first snapshot."""
    node = NodeDriver(make).joined()
    node.step(ev.TrainerPaused(1))
    node.hear(make.chunk(0))
    assert node.me.replication.stage is ReplicaStage.INSTALLING
    return node


def fall_behind_during_first_fetch(make: Make) -> NodeDriver:
    """Let a node fall behind during its first fetch."""
    node = NodeDriver(make).joined()
    node.hear(make.behind(7))
    assert node.me.replication.pauses == 2
    return node


def fall_behind_during_installation(make: Make) -> NodeDriver:
    """Let a node fall behind again while its trainer installs a snapshot."""
    node = make_installing_node(make)
    node.hear(make.behind(7))
    assert node.me.replication.stage is ReplicaStage.REFETCHING
    return node


def fall_behind_twice(make: Make) -> NodeDriver:
    """Let it fall behind once more before the installation is finished."""
    node = fall_behind_during_installation(make)
    node.hear(make.behind(9))
    return node


def finish_installation_while_refetching(make: Make) -> NodeDriver:
    """Finish the installation while the next snapshot is being fetched."""
    node = fall_behind_during_installation(make)
    node.step(ev.ReplicaInstalled())
    assert node.me.replication.stage is ReplicaStage.FETCHING
    assert node.order is ev.Command.PAUSE
    return node


def make_released_node(make: Make, times: int = 2) -> NodeDriver:
    """Return a training node that the master has asked to leave."""
    node = NodeDriver(make).training()
    for _ in range(times):
        node.told(Release("a slot is needed"))
    assert node.me.task.stage is TaskStage.RELEASING
    assert node.order is ev.Command.RELEASE
    return node


def make_leaving_node(make: Make) -> NodeDriver:
    """Return a node whose trainer has left, and which is asked once more."""
    node = make_released_node(make)
    node.step(ev.TrainerReleased(None))
    node.told(Release("a slot is needed"))
    assert node.me.task.stage is TaskStage.LEAVING
    return node


def fail_training(node: NodeDriver) -> NodeDriver:
    """Let training raise an exception."""
    node.step(ev.TrainerFailed("training raised", "trace"))
    return node


def fail_twice_after_release(make: Make) -> NodeDriver:
    """Let a released node fail twice, and ask it to leave once more."""
    node = fail_training(fail_training(make_released_node(make)))
    node.told(Release("a slot is needed"))
    assert node.me.task.stage is TaskStage.FAILING
    return node


def supersede_attempt(node: NodeDriver) -> NodeDriver:
    """Close the node's id because of a newer attempt, which ends the task."""
    node.told(node.make.closed(1, free=False))
    assert node.me.task.stage is TaskStage.ENDED
    assert node.order is ev.Command.FAIL
    return node


def deliver_events_after_end(make: Make) -> NodeDriver:
    """Deliver late requests and trainer events to a node that has ended; nothing changes."""
    node = supersede_attempt(make_released_node(make))
    node.told(Release("a slot is needed"))
    node.step(ev.TrainerReleased(None))
    fail_training(node)
    node.told(node.make.closed(1, free=False))
    assert node.order is ev.Command.FAIL
    assert node.me.task.stage is TaskStage.ENDED
    return node


def report_silent_child(master: MasterDriver) -> None:
    """Let node 1 report that it hears nothing from node 2 over the newest edge."""
    order = master.member(2).order
    assert order is not None
    master.direct(ChildSilent(1, 2, order.edge))


def make_master_with_ordered_node(make: Make) -> MasterDriver:
    """Return a master that has sent node 2 a place below node 1, which is not confirmed yet."""
    master = MasterDriver(make, partitions=2, fan_out=1, depth=2)
    master.enter(0)
    master.join(1)
    assert master.member(2).stage is MemberStage.ORDERED
    return master


def report_silent_child_twice(make: Make) -> MasterDriver:
    """Let the parent report twice that it hears nothing from node 2."""
    master = make_master_with_ordered_node(make)
    report_silent_child(master)
    report_silent_child(master)
    assert master.member(2).stage is MemberStage.UNHEARD
    return master


def confirm_place_after_reports(make: Make) -> None:
    """Let node 2 arrive after these reports."""
    master = report_silent_child_twice(make)
    master.say(2)
    assert master.member(2).placed
    assert 2 not in master.machine.placement.suspects


def get_new_edge_after_probe(make: Make) -> None:
    """Let node 2 answer a probe, so that the master gives it another edge."""
    master = report_silent_child_twice(make)
    before = master.member(2).order
    master.direct(ProbeReply(2))
    master.tick()
    after = master.member(2).order
    assert before is not None
    assert after is not None
    assert after.edge > before.edge


def expire_lease(master: MasterDriver) -> None:
    """Let time pass without messages until the lease of node 2 expires."""
    member = master.member(2)
    for _ in range(6):
        master.tick(master.machine.limits.lease_s / 5)
    assert member.stage is MemberStage.CLOSED


def die_before_order(make: Make) -> None:
    """Let node 2 die while its parent has no confirmed place."""
    master = MasterDriver(make, partitions=2, fan_out=1, depth=2)
    master.join(0)
    master.join(1)
    assert master.member(2).stage is MemberStage.WAITING
    expire_lease(master)


SCENES: dict[Callable[[Make], Any], set[Row]] = {
    fall_behind_during_first_fetch: {(ReplicaStage.FETCHING, Trigger.BEHIND)},
    fall_behind_twice: {
        (ReplicaStage.INSTALLING, Trigger.BEHIND),
        (ReplicaStage.REFETCHING, Trigger.BEHIND),
    },
    finish_installation_while_refetching: {(ReplicaStage.REFETCHING, Trigger.INSTALLED)},
    lambda make: fail_training(make_leaving_node(make)): {
        (TaskStage.TRAINING, Trigger.RELEASED),
        (TaskStage.RELEASING, Trigger.RELEASED),
        (TaskStage.LEAVING, Trigger.RELEASED),
        (TaskStage.RELEASING, Trigger.LEFT),
        (TaskStage.LEAVING, Trigger.FAILED),
    },
    fail_twice_after_release: {
        (TaskStage.RELEASING, Trigger.FAILED),
        (TaskStage.FAILING, Trigger.FAILED),
        (TaskStage.FAILING, Trigger.RELEASED),
    },
    deliver_events_after_end: {
        (TaskStage.RELEASING, Trigger.ENDED),
        (TaskStage.ENDED, Trigger.RELEASED),
        (TaskStage.ENDED, Trigger.LEFT),
        (TaskStage.ENDED, Trigger.FAILED),
        (TaskStage.ENDED, Trigger.ENDED),
    },
    confirm_place_after_reports: {
        (MemberStage.ORDERED, Trigger.COMPLAINED),
        (MemberStage.UNHEARD, Trigger.COMPLAINED),
        (MemberStage.UNHEARD, Trigger.CONFIRMED),
    },
    get_new_edge_after_probe: {(MemberStage.UNHEARD, Trigger.MOVED)},
    lambda make: expire_lease(report_silent_child_twice(make)): {
        (MemberStage.UNHEARD, Trigger.EXPELLED)
    },
    die_before_order: {(MemberStage.WAITING, Trigger.EXPELLED)},
}


@pytest.mark.parametrize("scene", SCENES)
def test_scene_causes_its_listed_transitions(
    recording_table: RecordingTable, scene: Callable[[Make], Any]
) -> None:
    """Each scene causes the transitions that are listed for it."""
    scene(Make())
    assert recording_table.made >= SCENES[scene]


def test_simulations_and_scenes_cause_exactly_listed_transitions(
    recording_table: RecordingTable,
) -> None:
    """Simulations and scenes together cause every transition in the table."""
    for mode, nodes, seeds, given in RUNS:
        for seed in seeds:
            assert simulate_seed(seed, nodes, mode, given).violations == []
    made = recording_table.made.union(*SCENES.values())
    assert {describe_row(row) for row in stages.TRANSITIONS} == {describe_row(row) for row in made}


def describe_row(row: Row) -> tuple[str, str, str]:
    """Return a transition as text: kind of stage, stage and trigger."""
    stage, cause = row
    return type(stage).__name__, stage.name, cause.name


# -- the table itself ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_is_reachable_from_first_stage(kind: type[Any]) -> None:
    first = next(iter(kind))
    reached, new = {first}, {first}
    while new:
        new = set(iterate_next_stages(new)) - reached
        reached |= new
    assert reached == set(kind)


def iterate_next_stages(found: set[Stage]) -> Iterator[Stage]:
    """Yield the stages that follow any of these."""
    return (to for (stage, _), to in stages.TRANSITIONS.items() if stage in found)


def test_unlisted_transition_raises_assertion_error() -> None:
    with pytest.raises(AssertionError, match="INSTALLED does not happen in"):
        stages.next_stage(ReplicaStage.EMPTY, Trigger.INSTALLED)
