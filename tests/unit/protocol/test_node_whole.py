"""Tests of a worker's node that starts with the replica of commit 0, which came with its task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sparkstrom.codec.messages import Activity, Attach, AttachReply, ChunkRequest, MergedRange
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command
from tests.unit.protocol.spoken import every, only, sent


@pytest.fixture
def whole(node_with: Callable[..., Any]) -> Any:
    """A node that has an id and offers its parent to continue from commit 0."""
    node = node_with(whole=True, optimizer_wait_s=5.0)
    node.opened()
    (attach,) = sent(node.told(node.make.welcome(grants=["f"], steps=4)), Attach)
    assert (attach.have, attach.whole, attach.catching) == (0, True, False)
    return node


def begun(node: Any) -> Any:
    """Let the parent accept this, and the trainer install the initial replica."""
    node.hear(node.make.attached(0, snapshot=False))
    node.step(ev.ReplicaInstalled())
    return node


def test_its_trainer_begins_at_once_and_follows(whole: Any, make: Any) -> None:
    """If the log reaches back to commit 0, the trainer uses the initial replica without a pause."""
    effects = whole.hear(make.attached(0, snapshot=False))
    assert sent(effects, ChunkRequest) == []
    only(effects, ev.UseInitialReplica)
    assert whole.order is Command.WAIT  # the trainer need not pause
    assert only(whole.hear(make.committed(1)), ev.ApplyCommit).update.commit == 1
    assert not whole.me.replication.history.whole
    whole.step(ev.ReplicaInstalled())
    whole.step(ev.ActivityChanged(Activity.WAITING))
    whole.hear(make.state())
    assert "updater" in whole.machine.directive.reason  # the slowest worker has taken 4 steps
    only([effect for _ in range(3) for effect in whole.tick(2.0)], ev.InstallOptimizer)
    assert whole.order is Command.TRAIN
    assert whole.me.replication.history.whole


def test_it_begins_once(whole: Any, make: Any) -> None:
    """The initial replica is used once; further edges do not repeat the effect."""
    whole.hear(make.attached(0, snapshot=False))
    for _ in range(2):
        whole.opened()
        edge, request = whole.me.link.edge + 1, whole.me.membership.request
        whole.told(make.welcome(edge=edge, request=request))
        assert not every(whole.hear(make.attached(0, snapshot=False)), ev.UseInitialReplica)
        if not whole.me.replication.has_replica:
            whole.step(ev.ReplicaInstalled())


def test_too_late_for_the_log_it_takes_a_snapshot(whole: Any, make: Any) -> None:
    """If the log no longer reaches back to commit 0, the node fetches a snapshot."""
    assert sent(whole.hear(make.attached(7)), ChunkRequest) == [ChunkRequest(0)]
    assert whole.order is Command.PAUSE
    whole.step(ev.TrainerPaused(1))
    effects = whole.hear(make.chunk(7))
    assert only(effects, ev.InstallSnapshot).commit == 7
    assert not every(effects, ev.UseInitialReplica)
    whole.step(ev.ReplicaInstalled())
    assert whole.me.replication.history.whole


def test_a_new_edge_in_the_middle_of_a_snapshot_goes_on_with_it(whole: Any, make: Any) -> None:
    """A new edge during a fetch continues the fetch instead of using the initial replica."""
    whole.hear(make.attached(7))
    whole.opened()
    (attach,) = sent(whole.told(make.welcome(edge=2, request=2)), Attach)
    assert (attach.have, attach.whole, attach.catching) == (7, False, True)
    assert not every(whole.hear(make.attached(7, snapshot=False)), ev.UseInitialReplica)


def test_an_id_that_is_closed_before_it_began_leaves_its_grants_to_the_next(
    whole: Any, make: Any
) -> None:
    """A process that rejoins before it began gets its files; later it counts as returned."""
    whole.told(make.closed(1, 0))
    whole.opened()
    again = {"count": 2, "request": 2, "closed": [(1, 0)], "grants": ["f"]}
    admitted = only(whole.told(make.welcome(5, edge=2, **again)), ev.IdAssigned)
    assert (admitted.returned, admitted.grants) == (False, ("f",))
    begun(whole)
    whole.told(make.closed(5, 0))
    whole.opened()
    again |= {"count": 3, "request": 3, "closed": [(5, 0)]}
    assert only(whole.told(make.welcome(6, edge=3, **again)), ev.IdAssigned).returned


def test_in_mid_training_it_borrows_an_updaters_state(whole: Any, make: Any) -> None:
    """A late node fetches an optimizer state, and starts at the slowest worker's steps."""
    whole.hear(make.state(slowest=9))
    begun(whole)
    assert whole.me.transfers.fetch is not None
    assert whole.me.trainer.pace == 9


def test_a_pause_before_its_beginning_does_not_count_later(whole: Any, make: Any) -> None:
    """A node that starts without a snapshot is not paused, so the deadline of a step applies."""
    begun(whole)
    assert not whole.me.replication.paused


def test_a_relay_serves_such_a_child_from_its_log(node: Any, make: Any) -> None:
    """A relay sends a child that has the replica of commit 0 all commits in its log."""
    relay = node.training()
    for commit in (1, 2, 3):
        relay.hear(make.committed(commit))
    relay.told(make.adopt(5))
    effects = relay.hear(make.attach(0, 5, whole=True), sender=5)
    assert sent(effects, AttachReply, 5) == [AttachReply(base=0, snapshot=False, last=[])]
    assert [c.commit for c in sent(effects, type(make.committed(1)), 5)] == [1, 2, 3]
    assert sent(effects, MergedRange, 5) == []
