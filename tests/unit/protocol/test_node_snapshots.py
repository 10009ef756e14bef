"""Tests of a worker's node that fetches a snapshot, applies sums, or loses its id and returns."""

from __future__ import annotations

from typing import Any

from sparkstrom.codec.messages import (
    Activity,
    Attach,
    ChunkRequest,
    CommitsRequest,
    Heartbeat,
    Join,
    Update,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command
from tests.unit.protocol.effect_filters import every, only, sent, sent_directly

# -- a snapshot --------------------------------------------------------------------------------


def test_a_node_that_fell_behind_pauses_and_takes_a_snapshot(node: Any, make: Any) -> None:
    """A node that fell behind pauses, fetches and installs a snapshot, and trains again."""
    node.training()
    for batch in (1, 2):
        node.step(make.published(batch))
    asked = node.hear(make.behind(7, [(1, 1)]))
    assert sent(asked, ChunkRequest) == [ChunkRequest(0)]
    assert (node.order, node.machine.directive.number) == (Command.PAUSE, 2)
    node.hear(make.committed(8, 1, b"", seq=2))  # commits its own second update
    node.step(make.published(3))
    node.step(ev.TrainerPaused(2))
    assert node.hear(make.committed(9)) == []
    install = only(node.hear(make.chunk(8)), ev.InstallSnapshot)
    assert [held.commit for held in install.held] == [8, 9]
    assert install.held[0].payload.data == b"abcd"
    assert [update.seq for update in install.own] == [3]
    assert install.commit == 9
    assert node.order is Command.PAUSE
    node.step(ev.ReplicaInstalled())
    assert node.order is Command.TRAIN
    assert only(node.hear(make.committed(10)), ev.ApplyCommit).update.commit == 10


def test_trainer_paused_for_older_pause_is_ignored(node: Any, make: Any) -> None:
    """TrainerPaused for an older PAUSE does not start the installation."""
    node.training()
    node.hear(make.behind(3))
    node.hear(make.behind(5))
    assert node.machine.directive.number == 3
    node.step(ev.TrainerPaused(2))
    assert not every(node.hear(make.chunk(5)), ev.InstallSnapshot)
    node.step(ev.TrainerPaused(3))
    assert only(node.tick(), ev.InstallSnapshot).commit == 5


def test_snapshot_required_with_reached_base_is_ignored(node: Any, make: Any) -> None:
    """SnapshotRequired with a base that the node has already reached is ignored."""
    node.training()
    node.hear(make.committed(1))
    assert node.hear(make.behind(1)) == []
    assert node.order is Command.TRAIN


def test_commits_that_overtook_snapshot_required_are_requested_again(node: Any, make: Any) -> None:
    """Commits that overtook SnapshotRequired were dropped, so they are requested again at once."""
    node.training()
    assert sent(node.hear(make.committed(8)), CommitsRequest) == [CommitsRequest(0)]
    node.hear(make.committed(9))
    effects = node.hear(make.behind(7))
    assert sent(effects, CommitsRequest) == [CommitsRequest(7)]
    assert sent(effects, ChunkRequest) == [ChunkRequest(0)]
    assert sent(node.hear(make.behind(8)), CommitsRequest) == []  # once is enough


def test_chunk_with_missing_commits_requests_those_commits(node: Any, make: Any) -> None:
    """A chunk with a commit that the node lacks makes it request the missing commits."""
    node.training()
    node.hear(make.behind(7))
    assert sent(node.hear(make.chunk(9)), CommitsRequest) == [CommitsRequest(7)]
    node.step(ev.TrainerPaused(2))
    node.hear(make.committed(8))
    assert only(node.hear(make.committed(9)), ev.InstallSnapshot).commit == 9


def test_second_snapshot_required_repeats_chunk_requests(node: Any, make: Any) -> None:
    """A second SnapshotRequired means that requests were forgotten, so they are repeated."""
    node.training()
    node.hear(make.behind(7))
    node.hear(make.committed(8))
    assert sent(node.hear(make.behind(8)), ChunkRequest) == [ChunkRequest(0)]


def test_snapshot_required_during_installation_starts_another_fetch(node: Any, make: Any) -> None:
    """SnapshotRequired during an installation starts another fetch, installed afterwards."""
    node.training()
    node.hear(make.behind(3))
    node.step(ev.TrainerPaused(2))
    only(node.hear(make.chunk(3)), ev.InstallSnapshot)
    node.hear(make.behind(9))
    assert node.machine.directive.number == 3
    assert not every(node.hear(make.chunk(9)), ev.InstallSnapshot)
    node.step(ev.ReplicaInstalled())
    assert (node.order, node.machine.directive.number) == (Command.PAUSE, 3)
    node.step(ev.TrainerPaused(3))
    assert only(node.tick(), ev.InstallSnapshot).commit == 9


def test_new_edge_keeps_chunks_and_commits_of_running_fetch(node: Any, make: Any) -> None:
    """Over a new edge, a fetch keeps its chunks and commits and requests the missing chunks."""
    node.training()
    node.me.replication.chunks = 2
    node.hear(make.behind(3))
    node.hear(make.chunk(3, 0))
    node.hear(make.committed(4))
    node.opened()
    effects = node.told(make.welcome(edge=2, request=2, parent=4, chunks=2))
    (attach,) = sent(effects, Attach, 4)
    assert (attach.have, attach.whole, attach.catching) == (4, False, True)
    asked = node.hear(make.attached(4, snapshot=False), sender=4)
    assert sent(asked, ChunkRequest, 4) == [ChunkRequest(1)]
    node.step(ev.TrainerPaused(2))
    install = only(node.hear(make.chunk(4, 1), sender=4), ev.InstallSnapshot)
    assert [chunk.commit for chunk in install.chunks] == [3, 4]
    assert ([held.commit for held in install.held], install.commit) == ([4], 4)


def test_fetch_restarts_if_new_parents_log_is_too_short(node: Any, make: Any) -> None:
    """A fetch starts again if the new parent's log does not reach back to the node's commit."""
    node.joined().opened()
    node.told(make.welcome(edge=2, request=2, parent=4))
    asked = node.hear(make.attached(6), sender=4)
    assert sent(asked, ChunkRequest, 4) == [ChunkRequest(0)]
    node.step(ev.TrainerPaused(2))
    assert not every(node.hear(make.chunk(5), sender=4), ev.InstallSnapshot)
    assert only(node.hear(make.chunk(6), sender=4), ev.InstallSnapshot).commit == 6


# -- sums of many commits ----------------------------------------------------------------------


def test_sum_right_after_newest_commit_is_applied(node: Any, make: Any) -> None:
    """A sum of commits is applied if it begins right after the node's newest commit."""
    node.training()
    node.hear(make.committed(1))
    merged = make.merged(1, 5)
    assert node.hear(merged) == [ev.ApplyMergedRange(merged, ())]
    assert node.me.replication.received == 5
    assert only(node.hear(make.committed(6)), ev.ApplyCommit).update.commit == 6


def test_sum_not_right_after_newest_commit_is_not_applied(node: Any, make: Any) -> None:
    """A sum that does not begin right after the node's newest commit is not applied."""
    node.training()
    node.hear(make.committed(1))
    for merged in (make.merged(0, 5), make.merged(2, 5)):
        assert node.hear(merged, 1.0) == [ev.Send(0, CommitsRequest(1))]
    assert node.hear(make.merged(0, 1), 1.0) == []  # the node has all of it
    assert node.me.replication.received == 1


def test_sum_during_fetch_is_held_and_commits_own_updates(node: Any, make: Any) -> None:
    """A sum during a fetch is held for older chunks; own updates in it are committed."""
    node.training()
    node.step(make.published(1))
    node.me.replication.chunks = 2
    node.hear(make.behind(3))
    node.step(ev.TrainerPaused(2))
    node.hear(make.chunk(3, 0))
    merged = make.merged(3, 9, [(9, 4), (1, 1)])
    assert node.hear(merged) == []
    assert node.me.replication.received == 9
    assert node.me.in_flight.uncommitted == ()
    install = only(node.hear(make.chunk(9, 1)), ev.InstallSnapshot)
    assert ([chunk.commit for chunk in install.chunks], install.commit) == ([3, 9], 9)
    assert install.held == (merged,)


def test_chunk_with_part_of_sum_is_requested_again(node: Any, make: Any) -> None:
    """A chunk with part of a later sum is requested again, once."""
    node.training()
    node.me.replication.chunks = 2
    node.hear(make.behind(3))
    node.hear(make.chunk(5, 0))
    assert sent(node.hear(make.merged(3, 9)), ChunkRequest) == [ChunkRequest(0)]
    assert sent(node.tick(60.0), ChunkRequest) == []


def test_own_updates_in_sum_are_reported_and_no_longer_in_flight(node: Any, make: Any) -> None:
    """Own updates in a sum are reported with it, to be subtracted, and are no longer in flight."""
    node.training()
    for batch in (1, 2, 3):
        node.step(make.published(batch))
    delivered = only(node.hear(make.merged(0, 6, [(9, 4), (1, 2)])), ev.ApplyMergedRange)
    assert [(update.origin, update.seq) for update in delivered.own] == [(1, 1), (1, 2)]
    assert [update.seq for update in node.me.in_flight.uncommitted] == [3]


def test_own_updates_of_former_ids_are_found_in_sum(node: Any, make: Any) -> None:
    """Own updates in a sum are found under all ids that the process has had."""
    node.training()
    for batch in (1, 2, 3):
        node.step(make.published(batch))
    return_node(node, make, 1)  # update 1 stays under id 1; the others become 1 and 2 under id 5
    delivered = only(node.hear(make.merged(0, 6, [(1, 1), (9, 3), (5, 1)])), ev.ApplyMergedRange)
    assert [(update.origin, update.seq) for update in delivered.own] == [(1, 1), (5, 1)]
    assert [(u.origin, u.seq) for u in node.me.in_flight.uncommitted] == [(5, 2)]


def test_repeated_sum_has_no_effect(node: Any, make: Any) -> None:
    node.training()
    node.step(make.published(1))
    merged = make.merged(0, 4, [(1, 1)])
    assert len(only(node.hear(merged), ev.ApplyMergedRange).own) == 1
    assert node.hear(merged) == []


# -- returning under a new id ------------------------------------------------------------------


def return_node(node: Any, make: Any, committed: int) -> list[ev.Effect]:
    """Close id 1 with ``committed`` updates committed; let the node rejoin and attach as node 5."""
    assert only(node.told(make.closed(1, committed)), ev.ReopenStreams)
    (join,) = sent_directly(node.opened(), Join)
    assert (join.count, join.request) == (2, 2)
    welcome = make.welcome(
        5, count=2, request=2, edge=2, closed=[(1, committed)], batch=committed, steps=9
    )
    effects = list(node.told(welcome))
    (attach,) = sent(effects, Attach)
    assert (attach.whole, attach.ids) == (True, [1, 5])
    return effects + list(node.hear(make.attached(attach.have, snapshot=False)))


def test_returned_node_resends_uncommitted_updates_under_new_id(node: Any, make: Any) -> None:
    """A returned node resends uncommitted updates under its new id, and keeps its position."""
    node.training()
    for batch in (1, 2, 3):
        node.step(make.published(batch))
    effects = return_node(node, make, 1)
    admitted = only(effects, ev.IdAssigned)
    assert (admitted.node, admitted.returned) == (5, True)
    assert [(u.origin, u.seq, u.batch) for u in sent(effects, Update)] == [(5, 1, 2), (5, 2, 3)]
    (status,) = sent(effects, Heartbeat)[0].statuses
    assert (status.node, status.after_seq, status.batch) == (5, 2, 3)  # its own position


def test_commit_of_old_id_removes_update_of_returned_node(node: Any, make: Any) -> None:
    """A commit of the old id still removes that update from those in flight."""
    node.training()
    for batch in (1, 2):
        node.step(make.published(batch))
    return_node(node, make, 1)
    assert node.hear(make.committed(1, origin=1, payload=b"")) == [ev.OwnCommitted(1)]
    assert [u.origin for u in node.me.in_flight.uncommitted] == [5]


def test_updates_between_closing_and_welcome_are_renumbered(node: Any, make: Any) -> None:
    node.training()
    node.step(make.published(1))
    node.told(make.closed(1, 0))
    node.opened()
    assert node.step(make.published(2)) == []
    node.told(make.welcome(5, count=2, request=2, edge=2, closed=[(1, 0)]))
    updates = sent(node.hear(make.attached(snapshot=False)), Update)
    assert [(u.origin, u.seq, u.batch) for u in updates] == [(5, 1, 1), (5, 2, 2)]


def test_node_closed_again_before_welcome_joins_again(node: Any, make: Any) -> None:
    """A node whose new id 5 is closed before its welcome arrives joins again, as node 6."""
    node.training()
    node.step(make.published(1))
    node.told(make.closed(1, 0))
    node.opened()
    assert only(node.told(make.closed(5, 0, count=2)), ev.ReopenStreams)
    (join,) = sent_directly(node.opened(), Join)
    assert join.count == 3
    node.told(make.welcome(6, count=3, request=3, edge=3, closed=[(1, 0), (5, 0)]))
    updates = sent(node.hear(make.attached(snapshot=False)), Update)
    assert [(u.origin, u.seq) for u in updates] == [(6, 1)]


def test_repeated_closed_notice_has_no_effect(node: Any, make: Any) -> None:
    """A repeated notice of a closed id has no effect."""
    node.training()
    node.told(make.closed(1, 0))
    assert node.told(make.closed(1, 0)) == []
    assert node.me.membership.count == 2


def test_closed_notice_for_other_process_is_ignored(node: Any, make: Any) -> None:
    """A notice about another process's id is ignored."""
    node.training()
    assert node.told(make.closed(7, 0, token=0, count=0, free=False)) == []
    assert node.order is Command.TRAIN


def test_a_superseded_node_fails(node: Any, make: Any) -> None:
    """A node whose id is closed without permission to return fails with the notice's reason."""
    node.training()
    node.told(make.closed(1, 0, free=False, reason="another attempt"))
    assert (node.order, node.machine.directive.reason) == (Command.FAIL, "another attempt")


def test_node_with_closed_id_drops_its_children(node: Any, make: Any) -> None:
    """A node whose id is closed drops its children."""
    node.training().with_child(7)
    effects = node.told(make.closed(1, 0))
    assert every(effects, ev.CloseEdge) == [ev.CloseEdge(7)]
    assert node.me.children.by_node == {}


def test_node_that_rejoins_without_replica_starts_as_new_worker(node: Any, make: Any) -> None:
    """A node that rejoins before it had a replica starts as a new worker."""
    node.joined()
    node.told(make.closed(1, 0))
    node.opened()
    welcome = make.welcome(
        5, count=2, request=2, edge=2, closed=[(1, 0)], epoch=1, grants=["f"]
    )  # fmt: skip
    admitted = only(node.told(welcome), ev.IdAssigned)
    assert (admitted.returned, admitted.epoch, admitted.grants) == (False, 1, ("f",))


def test_node_rejoining_during_first_installation_counts_as_returned(node: Any, make: Any) -> None:
    """A node that rejoins while its first replica is being installed counts as returned.

    The trainer handles InstallSnapshot before IdAssigned, so it has already added its residual
    files.
    """
    node.joined()
    node.step(ev.TrainerPaused(1))
    only(node.hear(make.chunk(0)), ev.InstallSnapshot)
    node.told(make.closed(1, 0))
    node.opened()
    welcome = make.welcome(5, count=2, request=2, edge=2, closed=[(1, 0)], grants=["f"])
    assert only(node.told(welcome), ev.IdAssigned).returned


def reported_steps(effects: list[ev.Effect]) -> int:
    """Return the steps in the newest status that these effects report."""
    news = {
        status.node: status for report in sent(effects, Heartbeat) for status in report.statuses
    }
    return int(max(news.values(), key=lambda status: status.age).steps)


def test_returned_node_is_credited_with_slowest_workers_steps(node_with: Any, make: Any) -> None:
    """A returned node is credited with the slowest worker's steps, so that nobody waits for it."""
    node = node_with(max_lead=2).training()
    effects = return_node(node, make, 0)  # the slowest is at 9 now
    assert reported_steps(effects) == 9
    node.hear(make.state(training=2, slowest=9))
    assert node.machine.directive.steps_max == 2  # of its own steps, 0 so far
    node.step(ev.StepCompleted(0, 2, 2))
    assert node.order is Command.WAIT
    assert reported_steps(node.tick(0.1)) == 11


def test_new_workers_steps_start_at_slowest_workers_on_installation(
    node_with: Any, make: Any
) -> None:
    """A new worker's steps count from the slowest worker's at the time of installation."""
    node = node_with(max_lead=2).joined()
    node.hear(make.state(slowest=50))
    node.hear(make.chunk(0))
    node.step(ev.TrainerPaused(1))
    node.tick()
    node.step(ev.ReplicaInstalled())
    node.step(ev.ActivityChanged(Activity.WAITING))
    assert reported_steps(node.tick(0.1)) == 50
