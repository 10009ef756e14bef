"""Tests of the master: numbering and distributing updates, positions, and failures."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import (
    NOTHING,
    ChunkRequest,
    Commit,
    CommitsRequest,
    IdClosed,
    Probe,
    ProbeReply,
    ResendRequest,
    SnapshotRequired,
    State,
    TrainingFailure,
    Welcome,
    WorkerLog,
)
from sparkstrom.observe.telemetry import TrainingCounters, WorkerCounters
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import IgnoreReason
from sparkstrom.protocol.common.flow_control import message_weight
from tests.unit.protocol.effect_filters import every, only_abort, sent, sent_by_master

# -- updates -----------------------------------------------------------------------------------


def test_new_commit_is_sent_to_all_children_without_payload_to_origin(
    master: Any, make: Any
) -> None:
    """All children get a new commit; its origin gets the commit without the payload."""
    master.running()
    effects = master.hear(1, make.update(1, 1))
    assert every(effects, ev.ApplyCommit)[0].update.commit == 1
    (mine,) = sent(effects, Commit, 1)
    (others,) = sent(effects, Commit, 2)
    assert (mine.commit, mine.origin, mine.seq, mine.payload) == (1, 1, 1, NOTHING)
    assert others.payload.data == b"abcd"


def test_gap_causes_one_resend_request_until_next_gap(master: Any, make: Any) -> None:
    """After a gap the origin is asked once to resend, and asked again after the next gap."""
    master.running()
    assert sent(master.hear(1, make.update(1, 2)), ResendRequest, 1) == [ResendRequest(1)]
    assert sent(master.hear(1, make.update(1, 3)), ResendRequest, 1) == []
    master.hear(1, make.update(1, 1))
    assert sent(master.hear(1, make.update(1, 3), 0.1), ResendRequest, 1) == [ResendRequest(1)]


def test_bytes_of_repeated_updates_are_acknowledged(master: Any, make: Any) -> None:
    """Bytes of repeated updates are acknowledged, too, as received and as forwarded."""
    master.running()
    for _ in range(2):
        master.hear(1, make.update(1, 1))
    state = sent(master.tick(0.1), State, 1)[-1]
    assert state.bytes_received == state.bytes_forwarded == 2 * message_weight(make.update(1, 1), 0)


def test_state_acknowledges_bytes_of_incomplete_message(master: Any, make: Any) -> None:
    """A state acknowledges the received bytes of an incomplete message."""
    master.running()
    for size in (1000, 2000):
        master.step(ev.DataArriving(1, size))
        state = sent(master.tick(0.1), State, 1)[-1]
        assert (state.bytes_received, state.bytes_forwarded) == (size, 0)
    master.step(ev.DataArriving(77, 1000))  # from an edge that was just closed
    master.hear(1, make.update(1, 1))
    assert sent(master.tick(0.1), State, 1)[-1].bytes_received == message_weight(
        make.update(1, 1), 0
    )


def test_repeated_update_gets_no_commit_and_no_resend_request(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.update(1, 1))
    assert master.hear(1, make.update(1, 1)) == []
    assert master.machine.sequencer.head == 1


def test_resend_request_goes_to_child_that_delivered_update(master: Any, make: Any) -> None:
    """A resend request goes to the child that delivered the update, which may be a relay."""
    master.running()
    assert every(master.hear(2, make.update(1, 1)), ev.ApplyCommit)
    assert sent(master.hear(2, make.update(1, 3)), ResendRequest, 2) == [ResendRequest(1)]


def test_message_of_unknown_sender_is_ignored_and_counted(master: Any, make: Any) -> None:
    """A message from an unknown sender is ignored and counted."""
    master.running()
    assert master.hear(77, make.report()) == []
    assert master.machine.ignored.counts == {("Heartbeat", IgnoreReason.STRANGER): 1}


def test_commits_request_is_answered_with_later_commits(master: Any, make: Any) -> None:
    """A CommitsRequest is answered with the later commits; one beyond the head is ignored."""
    master.running()
    for seq in (1, 2):
        master.hear(1, make.update(1, seq))
    commits = sent(master.hear(2, CommitsRequest(0)), Commit, 2)
    assert [committed.commit for committed in commits] == [1, 2]
    assert master.hear(2, CommitsRequest(9)) == []  # no such commit exists


def test_child_behind_log_fetches_snapshot_then_gets_commits(master_with: Any, make: Any) -> None:
    """A child that the log no longer reaches fetches a snapshot, and then gets commits again."""
    master = master_with(log_bytes=1).running()
    for seq in (1, 2, 3):
        master.hear(1, make.update(1, seq))
    assert sent(master.hear(1, CommitsRequest(0)), SnapshotRequired, 1) == [
        SnapshotRequired(3, [(1, 3)])
    ]
    everything = master.machine.children.by_node[1].link.sent
    master.hear(1, make.report(bytes_received=everything))
    assert every(master.hear(1, ChunkRequest(0)), ev.SendChunk) == [ev.SendChunk(1, 0)]
    assert every(master.hear(1, ChunkRequest(1)), ev.SendChunk) == []
    master.hear(1, make.report(bytes_received=2 * everything + 10**6))
    following = sent(master.hear(2, make.update(2, 1)), Commit, 1)
    assert [committed.commit for committed in following] == [4]


def test_commit_is_sent_once_despite_late_acknowledgement(master: Any, make: Any) -> None:
    """A commit is sent once, even if its acknowledgement takes a minute while heartbeats come."""
    master.running()
    assert len(sent(master.hear(1, make.update(1, 1)), Commit, 2)) == 1
    for _ in range(120):
        effects = master.tick(0.5) + master.hear(1, make.report()) + master.hear(2, make.report())
        assert sent(effects, Commit) == []
    assert len(master.machine.members.live) == 2


def test_commits_received_by_any_child_count_as_progress(master: Any, make: Any) -> None:
    """Commits that any child receives are progress: new commits may be rare on slow links."""
    master.running().tick(5.0)
    before_s = master.machine.phases.progress_s
    master.hear(1, make.report(received=0), 1.0)
    assert master.machine.phases.progress_s == before_s
    master.hear(1, make.update(1, 1))
    master.hear(2, make.report(received=1), 1.0)
    assert master.machine.phases.progress_s == master.now_s


def test_overtaken_heartbeat_is_no_progress(master: Any, make: Any) -> None:
    """A heartbeat with an older count neither counts as progress nor lowers the recorded one."""
    master.running()
    for seq in (1, 2):
        master.hear(1, make.update(1, seq))
    master.hear(2, make.report(received=2), 1.0)
    at_s = master.now_s
    for received in (1, 2):
        master.hear(2, make.report(received=received), 1.0)
    assert master.machine.children.by_node[2].received == 2
    assert master.machine.phases.progress_s == at_s


# -- positions ---------------------------------------------------------------------------------


def position(master: Any, partition: int = 0) -> Position:
    """Return the committed position of a partition."""
    found: Position = master.machine.partitions[partition].position
    return found


def test_position_in_update_counts_with_its_commit(master: Any, make: Any) -> None:
    """The position in an update counts once that update is committed."""
    master.running()
    master.hear(1, make.update(1, 1, batch=2))
    assert position(master) == (0, 2)


def test_position_in_status_waits_for_commit_of_its_update(master: Any, make: Any) -> None:
    """The position in a status counts once the update named there is committed."""
    master.running().say(1, after_seq=1, batch=2)
    assert position(master) == (0, 0)
    master.hear(1, make.update(1, 1, batch=1))
    assert position(master) == (0, 2)


def test_status_naming_older_update_keeps_pending_position(master: Any, make: Any) -> None:
    """A later status that names an older update does not replace the pending position."""
    master.running().say(1, after_seq=2, batch=3)
    master.say(1, after_seq=1, batch=1)
    master.hear(1, make.update(1, 1, batch=1))
    assert position(master) == (0, 1)
    master.hear(1, make.update(1, 2, batch=2))
    assert position(master) == (0, 3), "it was lost with the later status"


def test_pending_position_is_dropped_when_id_closes(master: Any) -> None:
    """A pending position is dropped when the node's id is closed."""
    master.running().say(1, after_seq=1, batch=2)
    master.evict(1)
    (welcome,) = sent_by_master(master.join(0, attempt=50, token=7), Welcome)
    assert (welcome.node, welcome.epoch, welcome.batch) == (3, 0, 0)
    assert position(master) == (0, 0)


@pytest.mark.parametrize("age", [{"edge": 1, "count": 9}, {"edge": 3, "count": 1}])
def test_status_of_older_edge_or_count_is_ignored(
    master: Any, make: Any, age: dict[str, int]
) -> None:
    """A status of an older edge, or with a lower or equal count on the same edge, is ignored."""
    master.running()
    master.join(0, request=2)  # its new edge has number 3
    master.attach(1)
    master.say(1, steps=1, edge=3, count=1)
    news = make.status(1, steps=5, batch=2, **age)
    assert master.hear(1, make.report(news)) == []
    assert (master.member(1).steps, position(master)) == (1, (0, 0))


def test_status_counts_from_any_delivering_child(master: Any, make: Any) -> None:
    """A status counts, whichever child delivers it."""
    master.running()
    news = make.status(1, edge=1, count=9, steps=5, batch=2)
    master.hear(2, make.report(news))
    assert (master.member(1).steps, position(master)) == (5, (0, 2))


# -- failures ----------------------------------------------------------------------------------


def test_a_failure_ends_the_fit_with_host_partition_and_trace(master: Any) -> None:
    """A failure aborts the fit with host, partition and traceback, and notifies all members."""
    effects = master.running().direct(TrainingFailure(node=2, reason="NaN", trace="t"))
    abort = only_abort(effects)
    assert (abort.reason, abort.trace, abort.host, abort.partition) == ("NaN", "t", "h", 1)
    assert [closed.node for closed in sent_by_master(effects, IdClosed)] == [1, 2]


def test_nodes_that_send_after_abort_are_notified(master: Any, make: Any) -> None:
    """After an abort, each node that still sends messages is notified; nothing else happens."""
    master.running().direct(TrainingFailure(node=2, reason="NaN", trace="t"))
    assert [closed.node for closed in sent_by_master(master.hear(1, make.report()), IdClosed)] == [
        1
    ]
    assert [closed.node for closed in sent_by_master(master.join(1), IdClosed)] == [2]
    assert sent_by_master(master.direct(ProbeReply(2)), IdClosed, "w1")
    handed_on = master.hear(1, make.report(make.status(2)))
    assert [closed.node for closed in sent_by_master(handed_on, IdClosed)] == [1, 2]
    update_effects = master.hear(1, make.update(1, 1))
    assert [closed.node for closed in sent_by_master(update_effects)] == [1]
    assert len(update_effects) == 1
    assert master.machine.sequencer.head == 0
    assert master.tick(100.0) == []


def test_unplaced_node_that_joins_again_after_abort_is_notified(master_with: Any) -> None:
    """After an abort, a node that joins again is notified, even if it does not know its id."""
    master = master_with(partitions=3, fan_out=1, depth=3)
    master.join(0)
    master.join(1)
    master.direct(TrainingFailure(node=1, reason="NaN", trace="t"))
    (closed,) = sent_by_master(master.join(1), IdClosed, "w1")
    assert (closed.token, closed.count, closed.node, closed.free) == (101, 1, 2, False)


def test_counters_in_status_are_reported(master: Any) -> None:
    """Counters in a status are reported."""
    effects = master.running().say(1, stats={"steps": 1.0})
    counters = WorkerCounters(TrainingCounters(steps=1))
    assert every(effects, ev.ReportCounters) == [ev.ReportCounters(1, counters)]
    assert master.machine.ignored.counts == {}


def test_reported_counters_name_former_ids_of_process(master: Any) -> None:
    """Reported counters name former ids, so that cumulative counters are not added twice."""
    master.running().evict(1)
    master.enter(0, count=2, ids=(1, 3))
    (told,) = every(master.say(3, stats={"steps": 1.0}), ev.ReportCounters)
    assert (told.node, told.former) == (3, frozenset({1}))


def test_unknown_counters_are_reported_and_counted(master: Any) -> None:
    """Counters with unknown names are reported as unknown, and the status is counted."""
    effects = master.running().say(1, stats={"of_tomorrow": 1.0, "steps": 0.5})
    counters = WorkerCounters(unknown=("of_tomorrow", "steps"))
    assert every(effects, ev.ReportCounters) == [ev.ReportCounters(1, counters)]
    assert master.machine.ignored.counts == {("Status", IgnoreReason.UNKNOWN): 1}


@pytest.mark.parametrize("sender", [None, 1])
def test_messages_meant_for_nodes_are_ignored_and_counted(master: Any, sender: int) -> None:
    """Messages that only nodes should receive are ignored and counted."""
    master.running().hear(sender, Probe(1))
    assert master.machine.ignored.counts == {("Probe", IgnoreReason.WRONG_WAY): 1}


def test_direct_message_of_unknown_node_is_ignored_and_counted(master: Any) -> None:
    """A direct message of an unknown node is ignored and counted."""
    assert master.running().direct(ProbeReply(77)) == []
    assert master.machine.ignored.counts == {("ProbeReply", IgnoreReason.STRANGER): 1}


def test_worker_log_of_any_process_with_key_is_shown(master: Any) -> None:
    """Printed lines of any process with the key, member or not, are shown; no other effect."""
    says = WorkerLog(host="h", partition=77, lines=[("training", "hello")], skipped=0)
    assert master.direct(says) == [ev.ShowWorkerLog(says)]
    assert master.running().direct(says) == [ev.ShowWorkerLog(says)]
    assert not master.machine.ignored.counts


def test_failure_without_id_aborts_fit(master: Any, make: Any) -> None:
    """A failure of a worker that has no id aborts the fit."""
    failed = TrainingFailure(
        node=None, reason="no room", trace="t", host="h", partition=1, attempt=11
    )
    effects = master.running().direct(failed)
    assert ev.Abort("no room", "t", "h", 1) in effects


def test_failure_of_older_attempt_without_id_is_ignored(master: Any) -> None:
    """A failure without an id is ignored if a newer attempt owns the partition."""
    failed = TrainingFailure(
        node=None, reason="no room", trace="t", host="h", partition=1, attempt=10
    )
    assert master.running().direct(failed) == []
    assert not master.machine.aborted
    assert master.machine.ignored.counts == {("TrainingFailure", IgnoreReason.LATE): 1}


def test_failure_before_any_join_aborts_fit(master: Any) -> None:
    """A failure without an id aborts the fit, even if no attempt has joined."""
    failed = TrainingFailure(node=None, reason="no room", trace="t", host="h", partition=1)
    assert ev.Abort("no room", "t", "h", 1) in master.direct(failed)


@pytest.mark.parametrize("node", [None, 1])
def test_abort_states_what_worker_was_doing(master: Any, node: int | None) -> None:
    """The abort states what the worker was doing, with or without an id."""
    failed = TrainingFailure(
        node=node, reason="NaN", trace="t", host="h", partition=0, attempt=10, phase="training"
    )
    effects = master.running().direct(failed)
    assert ev.Abort("NaN", "t", "h", 0, phase="training") in effects
