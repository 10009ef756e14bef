"""Tests of a worker's node that starts with the replica of commit 0, which came with its task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparkstrom.codec.messages import Activity, Attach, AttachReply, ChunkRequest, MergedRange
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command
from tests.unit.protocol.effect_filters import every, only, sent


@pytest.fixture
def ready_node(node_with: Callable[..., Any]) -> Any:
    """A node that has an id and offers its parent to continue from commit 0."""
    node = node_with(whole=True, optimizer_wait_s=5.0)
    node.opened()
    (attach,) = sent(node.told(node.make.welcome(grants=["f"], steps=4)), Attach)
    assert (attach.have, attach.whole, attach.catching) == (0, True, False)
    return node


def install_initial_replica(node: Any) -> Any:
    """Let the parent accept this, and the trainer install the initial replica."""
    node.hear(node.make.attached(0, snapshot=False))
    node.step(ev.ReplicaInstalled())
    return node


def test_trainer_uses_initial_replica_without_pause(ready_node: Any, make: Any) -> None:
    """If the log reaches back to commit 0, the trainer uses the initial replica without a pause."""
    effects = ready_node.hear(make.attached(0, snapshot=False))
    assert sent(effects, ChunkRequest) == []
    only(effects, ev.UseInitialReplica)
    assert ready_node.order is Command.WAIT  # the trainer need not pause
    assert only(ready_node.hear(make.committed(1)), ev.ApplyCommit).update.commit == 1
    assert not ready_node.me.replication.history.whole
    ready_node.step(ev.ReplicaInstalled())
    ready_node.step(ev.ActivityChanged(Activity.WAITING))
    ready_node.hear(make.state())
    assert "updater" in ready_node.machine.directive.reason  # the slowest worker has taken 4 steps
    only([effect for _ in range(3) for effect in ready_node.tick(2.0)], ev.InstallOptimizer)
    assert ready_node.order is Command.TRAIN
    assert ready_node.me.replication.history.whole


def test_initial_replica_is_used_once(ready_node: Any, make: Any) -> None:
    """The initial replica is used once; further edges do not repeat the effect."""
    ready_node.hear(make.attached(0, snapshot=False))
    for _ in range(2):
        ready_node.opened()
        edge, request = ready_node.me.link.edge + 1, ready_node.me.membership.request
        ready_node.told(make.welcome(edge=edge, request=request))
        assert not every(ready_node.hear(make.attached(0, snapshot=False)), ev.UseInitialReplica)
        if not ready_node.me.replication.has_replica:
            ready_node.step(ev.ReplicaInstalled())


def test_node_behind_log_fetches_snapshot_despite_initial_replica(
    ready_node: Any, make: Any
) -> None:
    """If the log no longer reaches back to commit 0, the node fetches a snapshot."""
    assert sent(ready_node.hear(make.attached(7)), ChunkRequest) == [ChunkRequest(0)]
    assert ready_node.order is Command.PAUSE
    ready_node.step(ev.TrainerPaused(1))
    effects = ready_node.hear(make.chunk(7))
    assert only(effects, ev.InstallSnapshot).commit == 7
    assert not every(effects, ev.UseInitialReplica)
    ready_node.step(ev.ReplicaInstalled())
    assert ready_node.me.replication.history.whole


def test_new_edge_during_fetch_does_not_use_initial_replica(ready_node: Any, make: Any) -> None:
    """A new edge during a fetch continues the fetch instead of using the initial replica."""
    ready_node.hear(make.attached(7))
    ready_node.opened()
    (attach,) = sent(ready_node.told(make.welcome(edge=2, request=2)), Attach)
    assert (attach.have, attach.whole, attach.catching) == (7, False, True)
    assert not every(ready_node.hear(make.attached(7, snapshot=False)), ev.UseInitialReplica)


def test_node_that_rejoins_before_start_gets_its_granted_files(ready_node: Any, make: Any) -> None:
    """A process that rejoins before it began gets its files; later it counts as returned."""
    ready_node.told(make.closed(1, 0))
    ready_node.opened()
    again = {"count": 2, "request": 2, "closed": [(1, 0)], "grants": ["f"]}
    admitted = only(ready_node.told(make.welcome(5, edge=2, **again)), ev.IdAssigned)
    assert (admitted.returned, admitted.grants) == (False, ("f",))
    install_initial_replica(ready_node)
    ready_node.told(make.closed(5, 0))
    ready_node.opened()
    again |= {"count": 3, "request": 3, "closed": [(5, 0)]}
    assert only(ready_node.told(make.welcome(6, edge=3, **again)), ev.IdAssigned).returned


def test_late_node_fetches_optimizer_state_and_adopts_slowest_steps(
    ready_node: Any, make: Any
) -> None:
    """A late node fetches an optimizer state, and starts at the slowest worker's steps."""
    ready_node.hear(make.state(slowest=9))
    install_initial_replica(ready_node)
    assert ready_node.me.transfers.fetch is not None
    assert ready_node.me.trainer.pace == 9


def test_node_started_from_initial_replica_is_not_paused(ready_node: Any, make: Any) -> None:
    """A node that starts without a snapshot is not paused, so the deadline of a step applies."""
    install_initial_replica(ready_node)
    assert not ready_node.me.replication.paused


def test_relay_sends_log_to_child_with_replica_of_commit_0(node: Any, make: Any) -> None:
    """A relay sends a child that has the replica of commit 0 all commits in its log."""
    relay = node.training()
    for commit in (1, 2, 3):
        relay.hear(make.committed(commit))
    relay.told(make.adopt(5))
    effects = relay.hear(make.attach(0, 5, whole=True), sender=5)
    assert sent(effects, AttachReply, 5) == [AttachReply(base=0, snapshot=False, last=[])]
    assert [c.commit for c in sent(effects, type(make.committed(1)), 5)] == [1, 2, 3]
    assert sent(effects, MergedRange, 5) == []
