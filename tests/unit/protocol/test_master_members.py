"""Tests of memberships at the master: ids, evictions, returns, refusals and residual files."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import (
    Activity,
    AttachReply,
    Commit,
    IdClosed,
    LeaveNotice,
    Phase,
    ResidualCheckpoint,
    State,
    Welcome,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import IgnoreReason
from tests.unit.protocol.effect_filters import every, only, only_abort, sent, sent_by_master

# -- losing and returning ----------------------------------------------------------------------


def test_a_silent_node_is_evicted_and_noted(master: Any) -> None:
    """A child that is silent for a lease loses its edge and its id, and its departure is noted."""
    effects = master.running().evict(1)
    assert every(effects, ev.CloseEdge) == [ev.CloseEdge(1)]
    assert every(effects, ev.Note)[0].text.startswith("node 1 (partition 0 on h) left: silent for")
    assert master.machine.members.departures[0].node == 1


def test_evicted_process_is_notified_and_rejoins_under_new_id(master: Any, make: Any) -> None:
    """An evicted process that joins is notified, and may join again under a new id."""
    master.running()
    master.hear(1, make.update(1, 1))
    master.evict(1)
    (closed,) = sent_by_master(master.join(0), IdClosed)
    assert (closed.node, closed.seq, closed.free) == (1, 1, True)
    effects = master.enter(0, count=2, have=1, whole=True, ids=(1, 3))
    (welcome,) = sent_by_master(effects, Welcome)
    assert (welcome.node, welcome.closed) == (3, [(1, 1)])
    assert sent(effects, AttachReply, 3) == [AttachReply(base=1, snapshot=False, last=[])]
    assert master.hear(1, make.update(1, 2)) == []  # nothing of the old id is numbered
    assert master.machine.sequencer.head == 1


def test_returned_process_gets_commits_of_old_id_without_payload(master: Any, make: Any) -> None:
    """A returned process gets the commits of its old id without payload."""
    master.running()
    master.hear(1, make.update(1, 1))
    master.evict(1)
    effects = master.enter(0, count=2, have=0, whole=True, ids=(1, 3))
    assert [(c.origin, c.payload.data) for c in sent(effects, Commit, 3)] == [(1, b"")]


def test_evicted_process_is_refused_if_partition_was_taken_over(master: Any) -> None:
    """An evicted process is refused if another attempt has taken over its partition."""
    master.running().evict(1)
    assert sent_by_master(master.join(0, attempt=50, token=7), Welcome)
    (refused,) = sent_by_master(master.join(0, count=2))
    assert (refused.fatal, refused.reason[:15]) == (True, "another attempt")


def test_join_with_higher_attempt_closes_live_owner(master: Any) -> None:
    """A join with a higher attempt closes the partition's live owner."""
    effects = master.running().join(0, attempt=50, token=7)
    assert every(effects, ev.CloseEdge) == [ev.CloseEdge(1)]
    assert [welcome.node for welcome in sent_by_master(effects, Welcome)] == [3]
    (refused,) = sent_by_master(master.join(0))
    assert refused.fatal


def test_a_lower_attempt_of_another_process_is_refused(master: Any) -> None:
    """A join with a lower attempt is refused, and the owner stays."""
    master.running().join(0, attempt=50, token=7)
    (refused,) = sent_by_master(master.join(0, attempt=49, token=8))
    assert refused.fatal
    assert master.machine.partitions[0].owner == 3


def test_late_join_with_lower_count_is_ignored(master: Any) -> None:
    """A late join with a lower count is ignored after the process has returned."""
    master.running().evict(1)
    master.join(0, count=2)
    assert master.join(0) == []
    assert 3 in master.machine.members.live


def test_repeated_join_gets_same_welcome_and_no_new_edge(master: Any) -> None:
    """A repeated join gets the same welcome, and opens no further edge."""
    first = sent_by_master(master.join(0), Welcome)
    again = master.join(0)
    assert sent_by_master(again, Welcome) == first != []
    assert every(again, ev.OpenEdge) == []


def test_new_edge_of_live_node_keeps_its_status(master: Any) -> None:
    """A new edge of a live node keeps its recorded status; an older request is ignored."""
    master.running()
    master.say(1, steps=5, after_seq=1, batch=2, activity=Activity.STEPPING)
    effects = master.join(0, request=2)
    (welcome,) = sent_by_master(effects, Welcome)
    assert (welcome.node, welcome.request) == (1, 2)
    assert only(effects, ev.OpenEdge).edge == welcome.edge == 3
    member = master.member(1)
    assert (member.steps, member.activity) == (5, Activity.STEPPING)
    assert member.pending == (1, (0, 2))
    assert master.join(0, request=1) == []  # an older request


def test_address_change_of_master_replaces_edges_to_children(master: Any) -> None:
    """After a change of its address, the master replaces the edges to its children."""
    master.running()
    effects = master.step(ev.EndpointChanged("master", 2))
    assert every(effects, ev.CloseEdge) == [ev.CloseEdge(1), ev.CloseEdge(2)]
    effects = master.tick()
    assert [(w.node, w.up.port) for w in sent_by_master(effects, Welcome)] == [(1, 2), (2, 2)]
    assert [opened.node for opened in every(effects, ev.OpenEdge)] == [1, 2]


def test_welcome_is_repeated_until_node_attaches(master: Any) -> None:
    """A welcome is repeated until the node attaches."""
    (first,) = sent_by_master(master.join(0), Welcome)
    assert sent_by_master(master.tick(0.1), Welcome) == []
    assert sent_by_master(master.tick(0.5), Welcome) == [first]
    master.attach(1)
    assert sent_by_master(master.tick(0.6), Welcome) == []


def test_silent_unattached_node_is_closed_after_lease(master: Any) -> None:
    """A node that never attaches and stays silent is closed after a lease."""
    master.join(0)
    effects = [effect for _ in range(6) for effect in master.tick(2.0)]
    assert only(effects, ev.Note).text.startswith("node 1 (partition 0 on h) left: silent for")
    assert master.machine.members.live == {}


def test_node_that_repeats_its_join_is_not_closed(master: Any) -> None:
    """A node that keeps repeating its join is not closed."""
    master.join(0)
    for _ in range(12):
        master.tick(2.0)
        master.join(0)
    assert list(master.machine.members.live) == [1]


def test_leave_notice_closes_id_only_after_release_request(master: Any) -> None:
    """A leave notice closes the id and is confirmed, but only if the node was asked to leave."""
    leaving = LeaveNotice(node=1, reason="released", checkpoint=ResidualCheckpoint("p", 2.0))
    assert master.running().direct(leaving) == []  # it was not asked to leave
    assert list(master.machine.members.live) == [1, 2]
    assert master.machine.ignored.counts["LeaveNotice", IgnoreReason.EARLY] == 1
    master.machine.members.live[1].releasing = "a slot is needed"
    effects = master.direct(leaving)
    (closed,) = sent_by_master(effects, IdClosed)
    assert (closed.node, closed.free) == (1, False)
    assert every(effects, ev.Note) == []
    assert list(master.machine.members.live) == [2]
    assert master.machine.checkpoints.files == {"e": {"p": 2.0}}


def test_join_after_done_is_answered_with_state(master: Any) -> None:
    """When the fit is done, a member that joins again gets the state instead of a new edge."""
    master.running().machine.phases.phase = Phase.DONE
    (state,) = sent_by_master(master.join(0, request=2))
    assert isinstance(state, State)
    assert state.phase is Phase.DONE


# -- refusals ----------------------------------------------------------------------------------


def test_worker_with_other_version_aborts_fit(master: Any) -> None:
    """A worker with another version of sparkstrom aborts the fit."""
    abort = only_abort(master.join(0, version="w"))
    assert (abort.kind, abort.partition) == (ev.Failure.SETUP, 0)
    assert "v on the driver and w on the executor" in abort.reason


def test_second_attempt_with_other_rows_aborts_fit(master: Any) -> None:
    """A second attempt that read other rows aborts the fit as a usage error."""
    master.running().evict(1)
    abort = only_abort(master.join(0, attempt=50, token=7, rows=8))
    assert (abort.kind, abort.host, abort.partition) == (ev.Failure.USAGE, "h", 0)
    assert "partition 0 had 7 rows" in abort.reason


def test_join_for_unknown_partition_is_refused(master: Any) -> None:
    """A join for a partition that does not exist is refused."""
    (refused,) = sent_by_master(master.join(9))
    assert (refused.fatal, refused.reason) == (True, "there is no partition 9")


def test_new_attempt_at_trained_partition_is_refused_without_failure(
    master: Any, make: Any
) -> None:
    """A new attempt at a partition that is trained is refused without failure."""
    master.running()
    master.hear(1, make.update(1, 1, epoch=2, batch=0))
    master.evict(1)
    (refused,) = sent_by_master(master.join(0, attempt=50, token=7))
    assert not refused.fatal


# -- residual files and the state --------------------------------------------------------------


def test_process_that_rejoins_keeps_its_granted_file(master_with: Any) -> None:
    """A process that returns keeps its granted file; another process gets another file."""
    master = master_with(kept={"e": {"f1": 1.0, "f2": 2.0, "f3": 4.0}}).running()
    master.evict(1)
    (welcome,) = sent_by_master(master.join(0, count=2), Welcome)
    assert welcome.grants == ["f1"]
    (other,) = sent_by_master(master.join(0, attempt=50, token=7), Welcome)
    assert (other.node, other.grants) == (4, ["f3"])


def test_state_has_number_of_training_workers_and_minibatches(master: Any, make: Any) -> None:
    """The state has the number of training workers and of committed minibatches."""
    master.running()
    master.hear(1, make.update(1, 1, epoch=0, batch=2))
    master.say(2, steps=1, activity=Activity.FINISHED)
    states = sent(master.tick(0.1), State, 1)
    assert [(state.training, state.minibatches) for state in states] == [(1, 2)]


def test_welcome_has_steps_of_slowest_worker(master: Any) -> None:
    """A welcome has the steps of the slowest worker, as a new worker's head start."""
    master.running()
    for node, steps in ((1, 8), (2, 5)):
        master.say(node, steps=steps, activity=Activity.STEPPING)
    states = sent(master.tick(0.1), State, 1)
    assert [state.slowest for state in states] == [5]
    master.evict(1)
    (welcome,) = sent_by_master(master.join(0, attempt=50, token=7), Welcome)
    assert welcome.steps == 5


def test_assigning_same_id_twice_fails(master: Any) -> None:
    """An id is never given twice, because nonces begin with the id, and all nodes share one key."""
    master.running().evict(1)
    master.machine.members.next_id = 1
    with pytest.raises(AssertionError, match="node 1 again"):
        master.enter(0, count=2)
