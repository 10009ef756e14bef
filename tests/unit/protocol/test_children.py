"""Tests of ``Children``: where each child continues, and which commits and states it is sent."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sparkstrom.codec.messages import (
    AttachReply,
    Commit,
    MergedRange,
    ResendRequest,
    SnapshotRequired,
    State,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import AGAIN_FIRST_S, AGAIN_LONGEST_S, STATE_SPACING_S
from sparkstrom.protocol.common.flow_control import (
    HEADER_BYTES,
    PROMPT_ACK_BYTES,
    QUEUE_S,
    ROUTINE_SPACING_S,
    message_weight,
)
from tests.unit.protocol.effect_filters import every, only, sent
from tests.unit.protocol.parents import CHUNK_BYTES, ONE, sent_commits

# -- edges -------------------------------------------------------------------------------------


def test_repeated_or_older_adopt_opens_no_second_edge(parent: Any, make: Any) -> None:
    """A repeated or older order to adopt a child opens no second edge."""
    order = make.adopt(5, 50)
    opened = ev.OpenEdge(5, 50, order.local, order.peer)
    assert parent.children.adopt(order, 0.0) == [opened]
    assert parent.children.adopt(order, 0.0) == []
    assert parent.children.adopt(make.adopt(5, 49), 0.0) == []
    assert parent.leases.holds(5)


def test_newer_edge_resets_child_record(parent: Any, make: Any) -> None:
    """A newer edge resets the record of a child."""
    parent.attach()
    parent.commit(2)
    assert parent.children.adopt(make.adopt(5, 51), 0.0)
    child = parent.children.by_node[5]
    assert (child.edge, child.answer, child.link.sent) == (51, None, 0)
    assert sent_commits(parent.attach(1)) == [2]


def test_disown_with_older_edge_is_ignored(parent: Any) -> None:
    """An order to disown a child is ignored if the child has a newer edge."""
    parent.child(5, 50)
    assert parent.children.disown(5, 49) == []
    assert parent.children.disown(5, 50) == [ev.CloseEdge(5)]
    assert parent.children.disown(5) == []
    assert not parent.leases.holds(5)


# -- attaching ---------------------------------------------------------------------------------


def test_child_within_log_continues_from_its_commit(parent: Any) -> None:
    """A child whose commit the log reaches continues from there."""
    parent.commit(3)
    effects = parent.attach(1)
    assert sent(effects, AttachReply) == [AttachReply(base=1, snapshot=False, last=[])]
    assert sent_commits(effects) == [2, 3]
    assert sent_commits(parent.commit()) == [4]


def test_child_without_replica_gets_snapshot(parent: Any) -> None:
    """A child without a replica gets a snapshot as of the parent's applied commit."""
    parent.commit(3)
    parent.history.applied = 2
    effects = parent.attach(0, whole=False)
    assert sent(effects, AttachReply) == [AttachReply(base=2, snapshot=True, last=[(9, 2)])]
    assert sent_commits(effects) == [3]


def test_child_behind_log_gets_snapshot_on_attach(parent_with: Any) -> None:
    """A child whose commit the log no longer reaches gets a snapshot."""
    parent = parent_with(log_bytes=2 * ONE)
    parent.commit(5)
    assert [a.snapshot for a in sent(parent.attach(2, node=5), AttachReply)] == [True]
    assert [a.snapshot for a in sent(parent.attach(3, node=6), AttachReply)] == [False]


def test_child_continues_snapshot_fetch_only_within_log(parent_with: Any) -> None:
    """A child's fetch continues if the log reaches its commit; otherwise another one starts."""
    parent = parent_with(log_bytes=2 * ONE)
    parent.commit(5)
    answers = sent(parent.attach(4, whole=False, catching=True), AttachReply)
    assert answers == [AttachReply(base=4, snapshot=False, last=[])]
    answers = sent(parent.attach(1, node=6, whole=False, catching=True), AttachReply)
    assert [a.snapshot for a in answers] == [True]


def test_child_ahead_of_parent_gets_only_newer_commits(parent: Any) -> None:
    """A child that has newer commits than its parent is sent nothing until the parent has more."""
    parent.commit(2)
    effects = parent.attach(4)
    assert sent(effects, AttachReply) == [AttachReply(base=4, snapshot=False, last=[])]
    assert sent_commits(parent.commit(2)) == []
    assert sent_commits(parent.commit()) == [5]


def test_parent_without_replica_ignores_children_that_need_snapshot(parent: Any) -> None:
    """A parent without a replica ignores children that need a snapshot, and serves the others."""
    parent.commit(3)
    parent.history.whole = False
    assert parent.attach(0, whole=False) == []
    assert parent.child().answer is None
    assert sent_commits(parent.commit()) == []
    assert sent_commits(parent.attach(2, node=6), 6) == [3, 4]  # this child needs no snapshot
    parent.history.whole = True
    assert [a.base for a in sent(parent.attach(0, whole=False), AttachReply)] == [4]


def test_repeated_attach_gets_same_reply(parent: Any) -> None:
    """A repeated attach message gets the same reply, as the child may have used the first."""
    first = sent(parent.attach(0, whole=False), AttachReply)
    parent.commit(2)
    again = parent.attach(0, whole=False)
    assert sent(again, AttachReply) == first
    assert sent_commits(again) == []


# -- sending commits ---------------------------------------------------------------------------


def test_child_gets_no_commits_before_it_attaches(parent: Any) -> None:
    """A child gets no commits before it has attached."""
    parent.child()
    assert parent.commit(2) == []


def test_child_gets_own_commits_without_payload_under_all_its_ids(parent: Any, make: Any) -> None:
    """The process that made an update gets its commit without the payload, under any of its ids."""
    parent.attach(0, 3, 5)
    parent.attach(0, node=6)
    effects = parent.append(make.committed(1, 3), make.committed(2, 5), make.committed(3, 6))
    assert [len(c.payload) for c in sent(effects, Commit, 5)] == [0, 0, 4]
    assert [len(c.payload) for c in sent(effects, Commit, 6)] == [4, 4, 0]
    number = sent(effects, Commit, 5)[0]
    assert (number.commit, number.origin, number.seq, number.payload.form) == (1, 3, 1, 0)


def test_full_window_of_child_does_not_delay_other_children(parent_with: Any) -> None:
    """A child with a full window does not delay the others."""
    parent = parent_with(window_bytes=2 * ONE, n_params=1)
    parent.attach(node=5)
    parent.attach(node=6)
    parent.commit(2)
    parent.report(2, node=6)
    effects = parent.commit(1)
    assert (sent_commits(effects, 5), sent_commits(effects, 6)) == ([], [3])
    assert sent_commits(parent.report(1, node=5, bytes_received=ONE)) == [3]


def test_late_acknowledgements_cause_no_repeated_sends(parent: Any, make: Any) -> None:
    """Nothing is sent twice, even if acknowledgements take a minute."""
    parent.attach()
    assert sent_commits(parent.commit(2)) == [1, 2]
    parent.asks(0)
    for _ in range(600):
        parent.now_s += 0.1
        effects = parent.children.tick(make.state(), parent.now_s)
        assert [type(e.message) for e in every(effects, ev.Send)] in ([], [State])
        assert every(effects, ev.SendChunk) == []
    assert sent_commits(parent.report(2)) == []
    assert sent_commits(parent.commit()) == [3]


def test_commits_request_resends_all_later_commits(parent: Any) -> None:
    """After a CommitsRequest, all later commits are sent again."""
    parent.attach()
    parent.commit(4)
    assert sent_commits(parent.children.on_commits_request(parent.child(), 2, 0.0)) == [3, 4]


def test_empty_link_takes_message_of_any_size(parent_with: Any, make: Any) -> None:
    """An empty link takes one message of any size."""
    parent = parent_with(window_bytes=10)
    parent.attach()
    assert sent_commits(parent.append(make.committed(1, payload=b"x" * 10**5))) == [1]
    assert sent_commits(parent.append(make.committed(2, payload=b"x" * 10**5))) == []
    assert sent_commits(parent.report(1)) == [2]


# -- sums of commits ---------------------------------------------------------------------------


def fill_link_then_acknowledge(parent: Any, backlog: int, *own: int) -> list[ev.Effect]:
    """Let commits pile up while the child's link is full, then acknowledge; return the effects."""
    parent.attach(0, *own)
    parent.commit()
    assert parent.commit(backlog) == []
    return list(parent.report(1))


def test_commits_beyond_window_are_sent_as_sum(parent_with: Any) -> None:
    """Commits are sent as a sum if more of them wait than the window holds."""
    merged = only(fill_link_then_acknowledge(parent_with(window_bytes=ONE), 3), ev.SendMerged)
    assert (merged.to, merged.after, merged.commit, merged.last) == (5, 1, 4, [(9, 4)])
    assert [entry.commit for entry in merged.entries] == [2, 3, 4]
    assert merged.count == 12


def test_commits_within_window_are_sent_singly(parent_with: Any) -> None:
    """Commits that fit into the window are sent singly, as each of them then arrives sooner."""
    parent = parent_with(window_bytes=3 * ONE)
    parent.commit(3)
    assert sent_commits(parent.attach()) == [1, 2, 3]


@pytest.mark.parametrize("lighter", [True, False])
def test_commits_are_summed_only_if_sum_is_smaller(
    parent_with: Any, make: Any, lighter: bool
) -> None:
    """Commits are not summed if the sum is larger, as it may be for four-bit entries."""
    parent = parent_with(window_bytes=ONE)
    parent.attach()
    parent.commit()
    count = 10 if lighter else 1000  # in 100 bytes
    for commit in (2, 3):
        parent.append(make.committed(commit, payload=b"x" * 100, count=count))
    effects = parent.report(1)
    assert bool(every(effects, ev.SendMerged)) == lighter
    assert sent_commits(effects) == ([] if lighter else [2])


def test_childs_own_commits_are_summed_only_if_smaller_than_headers(parent_with: Any) -> None:
    """A child's own commits are sent singly, unless their sum is smaller than the headers."""
    own = [9]
    effects = fill_link_then_acknowledge(parent_with(window_bytes=ONE), 2, *own)
    assert every(effects, ev.SendMerged)  # two headers weigh more than a few entries
    parent = parent_with(window_bytes=ONE)
    parent.attach(0, *own)
    parent.commit()
    for commit in (2, 3):
        parent.append(parent.make.committed(commit, payload=b"x" * 100, count=30))
    assert sent_commits(parent.report(1)) == [2]


def test_sum_counts_same_bytes_as_child_will_count(parent_with: Any) -> None:
    """A sum counts as many bytes as the child will count, so that acknowledgements are right."""
    parent = parent_with(window_bytes=ONE)
    effects = fill_link_then_acknowledge(parent, 5)
    sum_ = only(effects, ev.SendMerged)
    merged = MergedRange(
        after=sum_.after, commit=sum_.commit, last=sum_.last, count=sum_.count, payload=b""
    )
    assert parent.child().link.under_way == message_weight(merged, CHUNK_BYTES)


def test_sum_larger_than_window_waits_for_empty_link(parent_with: Any) -> None:
    """A sum that is larger than the window waits until the link is empty."""
    parent = parent_with(window_bytes=2 * ONE)
    parent.attach()
    parent.commit(2)
    assert parent.commit(60) == []
    assert parent.report(1, bytes_received=ONE) == []
    assert only(parent.report(2), ev.SendMerged).commit == 62


def test_commits_after_acknowledged_sum_are_sent_singly(parent_with: Any) -> None:
    """After a sum was acknowledged, further commits are sent singly."""
    parent = parent_with(window_bytes=ONE)
    fill_link_then_acknowledge(parent, 5)
    parent.report(6)
    assert sent_commits(parent.commit()) == [7]


def test_sum_has_newest_seq_of_each_origin(parent_with: Any, make: Any) -> None:
    """A sum has each origin's newest sequence number, also from sums inside it."""
    parent = parent_with(window_bytes=1)
    parent.append(make.merged(0, 4, [(7, 2), (8, 3)]))
    parent.append(make.committed(5, 8, seq=4), make.committed(6, 9, seq=1))
    merged = only(parent.attach(), ev.SendMerged)
    assert (merged.after, merged.commit) == (0, 6)
    assert dict(merged.last) == {7: 2, 8: 4, 9: 1}


def test_received_sum_is_forwarded_unchanged(parent: Any, make: Any) -> None:
    """A received sum is passed on as it is to each child that has the commits before it."""
    parent.commit(2)
    parent.attach(2, node=5)
    parent.attach(1, node=6)
    parent.report(2, node=5)
    merged = make.merged(2, 6)
    effects = parent.append(merged)
    assert sent(effects, MergedRange, 5) == [merged]
    assert sent(effects, MergedRange, 6) == [merged]  # after the second commit


def test_child_at_commit_inside_sum_gets_snapshot(parent: Any, make: Any) -> None:
    """A child whose commit lies inside a sum in the log gets a snapshot."""
    parent.append(make.merged(0, 6))
    (answer,) = sent(parent.attach(3), AttachReply)
    assert (answer.snapshot, answer.base) == (True, 6)


def test_child_with_snapshot_fetch_gets_sums(parent: Any, make: Any) -> None:
    """A fetching child gets sums, too; it requests chunks with part of a sum again."""
    parent.commit(2)
    parent.append(make.merged(2, 6))
    effects = parent.attach(1, whole=False, catching=True)
    assert sent_commits(effects) == [2]
    assert [merged.commit for merged in sent(effects, MergedRange)] == [6]
    assert sent(effects, SnapshotRequired) == []


# -- falling behind ----------------------------------------------------------------------------


def test_attached_child_behind_log_is_sent_snapshot_required(parent_with: Any) -> None:
    """A child that the log no longer reaches is sent SnapshotRequired, and then later commits."""
    parent = parent_with(log_bytes=2 * ONE, window_bytes=2 * ONE)
    parent.attach()
    parent.commit(2)
    effects = parent.commit(4)
    assert sent(effects, SnapshotRequired) == [SnapshotRequired(6, [(9, 6)])]
    assert sent_commits(effects) == []
    parent.report(2)
    assert sent_commits(parent.commit()) == [7]


def test_parent_without_replica_sends_no_snapshot_required(parent_with: Any) -> None:
    """A parent without a replica does not send SnapshotRequired until it has one."""
    parent = parent_with(log_bytes=2 * ONE, window_bytes=2 * ONE)
    parent.attach()
    parent.commit(2)
    parent.history.whole = False
    assert parent.commit(4) == []
    assert parent.report(2) == []
    parent.history.whole = True
    assert sent(parent.children.feed_all(0.0), SnapshotRequired) == [SnapshotRequired(6, [(9, 6)])]


# -- resend requests and states ----------------------------------------------------------------


def test_wait_between_resend_requests_doubles(parent: Any) -> None:
    """The time between resend requests doubles, as updates under way show the same gap."""
    child, now_s, waits = parent.child(), 0.0, []
    assert parent.children.request_resend(child, 7, 3, now_s) == [ev.Send(5, ResendRequest(7))]
    for _ in range(9):
        before_s = now_s
        while not parent.children.request_resend(child, 7, 3, now_s):
            now_s += AGAIN_FIRST_S / 4
        waits.append(now_s - before_s)
    assert waits[:3] == [AGAIN_FIRST_S, 2 * AGAIN_FIRST_S, 4 * AGAIN_FIRST_S]
    assert waits[-1] == AGAIN_LONGEST_S


def test_gap_after_newer_commits_requests_resend_at_once(parent: Any) -> None:
    """A gap after newer commits of the origin, or of another origin, causes a request at once."""
    child = parent.child()
    parent.children.request_resend(child, 7, 3, 1.0)
    assert parent.children.request_resend(child, 7, 3, 1.0 + AGAIN_FIRST_S / 2) == []
    assert parent.children.request_resend(child, 8, 3, 1.0) == [ev.Send(5, ResendRequest(8))]
    assert parent.children.request_resend(child, 7, 4, 1.0 + AGAIN_FIRST_S / 2) == [
        ev.Send(5, ResendRequest(7))
    ]


def test_state_has_newest_commit_sent_and_bytes_received(parent: Any, make: Any) -> None:
    """A state has the newest commit sent, the bytes received so far and the bytes forwarded."""
    parent.attach()
    child = parent.child()
    parent.commit(2)
    assert parent.children.on_update(child, make.update(5, 1, b"12345")) == HEADER_BYTES + 5
    child.bytes_forwarded = 3
    (state,) = sent(parent.children.tick(make.state(), 1.0), State)
    assert (state.sent, state.bytes_received, state.bytes_forwarded) == (2, HEADER_BYTES + 5, 3)
    parent.children.on_data_arriving(child, 1000)
    (state,) = sent(parent.children.tick(make.state(), 2.0), State)
    assert (state.bytes_received, state.bytes_forwarded) == (HEADER_BYTES + 1005, 3)
    parent.children.on_update(child, make.update(5, 2, b"12345"))
    (state,) = sent(parent.children.tick(make.state(), 3.0), State)
    assert state.bytes_received == 2 * (HEADER_BYTES + 5)


def test_state_wait_ms_is_longest_link_delay_beyond_queue_s(parent_with: Any, make: Any) -> None:
    """``wait_ms`` is the longest delay of any link, here or further up, beyond QUEUE_S."""
    parent = parent_with(window_bytes=2 * ONE)
    parent.attach()

    def tells(state: State, now_s: float) -> int:
        parent.child().state_due = True
        return sent(parent.children.tick(state, now_s), State, 5)[0].wait_ms

    parent.commit(2)
    assert tells(make.state(), 1.0) == 0, "its rate is not known"
    parent.now_s = 2.0
    parent.report(2)
    assert (parent.child().link.rate, tells(make.state(), 2.0)) == (ONE, 0)
    for _ in range(5):
        parent.commit()
    parent.child(6)  # not attached, so no data wait for it
    assert tells(make.state(), 3.0) == 5000 - 1000 * QUEUE_S
    assert tells(make.state(wait_ms=9000), 4.0) == 9000


def test_state_acknowledges_each_childs_own_stamp(parent: Any, make: Any) -> None:
    """Each child's state acknowledges that child's own newest stamp."""
    parent.attach(node=5)
    parent.attach(node=6)
    parent.report(0, node=5, stamp=7)
    effects = parent.children.tick(make.state(), 1.0)
    assert [s.stamp for s in sent(effects, State, 5)] == [7]
    assert [s.stamp for s in sent(effects, State, 6)] == [0]
    assert parent.children.tick(make.state(), 2.0) == []


def test_heartbeats_are_answered_at_most_once_per_routine_spacing(parent: Any, make: Any) -> None:
    """Heartbeats are answered with a state, at most once per ROUTINE_SPACING_S."""
    parent.attach()
    parent.children.tick(make.state(), 1.0)
    parent.report(0, stamp=3)
    parent.report(0, stamp=2)  # an overtaken heartbeat
    assert parent.children.tick(make.state(), 1.0 + STATE_SPACING_S) == []
    assert parent.children.state_due_s == 1.0 + ROUTINE_SPACING_S, (
        "who waits for frames has to look again when it is due"
    )
    effects = parent.children.tick(make.state(), 1.0 + ROUTINE_SPACING_S)
    assert parent.children.state_due_s == math.inf
    assert [s.stamp for s in sent(effects, State)] == [3]


def test_urgent_state_is_sent_after_state_spacing_s(parent: Any, make: Any) -> None:
    """An urgent state is sent after STATE_SPACING_S."""
    parent.attach()
    parent.children.tick(make.state(), 1.0)
    parent.children.announce_state()
    assert parent.children.tick(make.state(), 1.0 + STATE_SPACING_S / 2) == []
    assert parent.children.state_due_s == 1.0 + STATE_SPACING_S
    assert sent(parent.children.tick(make.state(), 1.0 + STATE_SPACING_S), State)


def test_many_unacknowledged_bytes_make_state_urgent(parent: Any, make: Any) -> None:
    """A state is urgent if PROMPT_ACK_BYTES are not acknowledged."""
    parent.attach()
    child = parent.child()
    parent.children.tick(make.state(), 1.0)
    child.state_due, child.bytes_forwarded = True, PROMPT_ACK_BYTES - 1
    assert parent.children.tick(make.state(), 1.0 + STATE_SPACING_S) == []
    child.bytes_forwarded += 1
    (state,) = sent(parent.children.tick(make.state(), 1.0 + STATE_SPACING_S), State)
    assert state.bytes_forwarded == PROMPT_ACK_BYTES


def test_announced_state_is_sent_to_all_children(parent: Any, make: Any) -> None:
    """An announced state is sent to all children, even before they have attached."""
    parent.child(5)
    parent.child(6)
    parent.children.tick(make.state(), 1.0)
    parent.children.announce_state()
    assert [e.to for e in every(parent.children.tick(make.state(), 2.0), ev.Send)] == [5, 6]
