"""Tests of a relay: what it does for the nodes below it. It is node 1, its parent node 4."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import (
    ChildSilent,
    ChunkRequest,
    Commit,
    CommitsRequest,
    Disown,
    Heartbeat,
    LeaveNotice,
    MergedRange,
    Phase,
    Probe,
    ResendRequest,
    SnapshotRequired,
    State,
    Update,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import FlowLimits
from sparkstrom.protocol.common.flow_control import HEADER_BYTES
from sparkstrom.protocol.worker.parent_link import AGAIN_LEAST_S
from tests.unit.protocol.effect_filters import every, only, sent, sent_directly

PARENT = 4
LEASE_S = 10.0


@pytest.fixture
def relay(node: Any) -> Any:
    """A node that trains and has the children 5 and 6."""
    node.parent = PARENT
    return node.training().with_child(5).with_child(6)


def report_nodes_below(relay: Any, *nodes: int, via: int = 5) -> Any:
    """Let the child ``via`` report statuses of these nodes."""
    statuses = [relay.make.status(node, edge=60) for node in nodes]
    relay.hear(relay.make.report(*statuses), sender=via)
    return relay


# -- to the parent -----------------------------------------------------------------------------


def test_updates_of_nodes_below_are_forwarded_unchanged(relay: Any, make: Any) -> None:
    """Updates of nodes below are forwarded unchanged and not stored."""
    update = make.update(8, 3)
    assert relay.hear(update, sender=5) == [ev.Send(PARENT, update)]
    assert relay.me.in_flight.uncommitted == ()  # the origin stores them


def test_unchanged_status_of_node_below_is_forwarded_once(relay: Any, make: Any) -> None:
    """Statuses of nodes below are forwarded unchanged; an unchanged one is not forwarded again."""
    report_nodes_below(relay, 8)
    (report,) = sent(relay.tick(0.1), Heartbeat, PARENT)
    assert make.status(8, edge=60) in report.statuses
    relay.alive(stamp=report.stamp)
    report_nodes_below(relay, 8)  # unchanged
    assert not relay.me.subtree.statuses.has_pending


def test_statuses_of_departed_child_and_its_subtree_are_not_reported(relay: Any) -> None:
    """After a child has left, its status and those of all nodes below it are no longer reported."""
    report_nodes_below(relay, 5, 8)
    relay.hear(LeaveNotice(node=5, reason="done", checkpoint=None), sender=5)
    (report,) = sent(relay.tick(0.1), Heartbeat)
    assert not {5, 8} & {status.node for status in report.statuses}


# -- to the children ---------------------------------------------------------------------------


def test_commit_is_applied_and_forwarded_to_all_children(relay: Any, make: Any) -> None:
    """A commit is applied and forwarded to all children."""
    effects = relay.hear(make.committed(1))
    assert only(effects, ev.ApplyCommit).update.commit == 1
    for child in (5, 6):
        assert sent(effects, Commit, child) == [make.committed(1)]


def test_commit_of_own_update_is_forwarded_with_payload(relay: Any, make: Any) -> None:
    """The commit of the relay's own update comes without a payload and is forwarded with it."""
    relay.step(make.published(1, b"mine"))
    effects = relay.hear(make.committed(1, origin=1, payload=b""))
    assert effects[0] == ev.OwnCommitted(1)
    assert [c.payload.data for c in sent(effects, Commit)] == [b"mine", b"mine"]


def test_sum_is_forwarded_whole_and_child_inside_it_needs_snapshot(relay: Any, make: Any) -> None:
    """A sum is forwarded as a whole; a child that is inside the sum needs a snapshot."""
    relay.step(make.published(1))
    relay.hear(make.committed(1))
    merged = make.merged(1, 5, [(9, 4), (1, 1)])
    effects = relay.hear(merged)
    assert len(only(effects, ev.ApplyMergedRange).own) == 1
    assert sent(effects, MergedRange, 5) == [merged]
    assert [b.base for b in sent(relay.hear(CommitsRequest(3), sender=6), SnapshotRequired)] == [5]


def test_children_are_served_while_relay_has_no_parent(relay: Any, make: Any) -> None:
    """Children are served while the relay has no parent."""
    relay.hear(make.committed(1))
    relay.opened()
    assert [c.commit for c in sent(relay.hear(CommitsRequest(0), sender=5), Commit)] == [1]
    relay.hear(make.report(received=1, bytes_received=10**6), sender=5)
    assert relay.hear(ChunkRequest(0), sender=5) == [ev.SendChunk(5, 0)]


def test_requests_for_missing_commits_or_chunks_are_ignored(relay: Any, make: Any) -> None:
    """Requests for commits or chunks that the relay does not have are ignored."""
    assert relay.hear(CommitsRequest(1), sender=5) == []
    assert relay.hear(ChunkRequest(1), sender=5) == []
    relay.hear(make.behind(7))  # its own replica will be replaced
    assert relay.hear(ChunkRequest(0), sender=5) == []


def test_relay_reports_head_0_to_children_while_it_fetches_snapshot(relay: Any, make: Any) -> None:
    """While a relay fetches a snapshot, its states report head 0 to the children."""
    relay.hear(make.behind(7))
    assert [s.head for s in sent(relay.alive() + relay.tick(0.1), State, 5)] == [0]
    relay.step(ev.TrainerPaused(2))
    only(relay.hear(make.chunk(7)), ev.InstallSnapshot)
    relay.step(ev.ReplicaInstalled())
    assert sent(relay.hear(CommitsRequest(0), sender=5), SnapshotRequired) == [
        SnapshotRequired(7, [])
    ]
    assert [s.head for s in sent(relay.alive() + relay.tick(0.1), State, 5)] == [7]


def test_forwarded_state_has_relays_own_newest_commit(relay: Any, make: Any) -> None:
    """A forwarded state has the relay's own newest commit, and otherwise the master's values."""
    relay.hear(make.committed(1))
    relay.tick(0.1)
    relay.alive(Phase.RUNNING, head=9, slowest=3, training=6, minibatches=70, closed=[77])
    (state,) = sent(relay.tick(0.1), State, 5)
    assert (state.head, state.slowest, state.closed, state.beat) == (1, 3, [77], relay.beat)
    assert (state.training, state.minibatches) == (6, 70)


def test_full_window_of_child_delays_neither_relay_nor_sibling(node_with: Any, make: Any) -> None:
    """A child whose window is full delays neither the relay nor the other child."""
    one = HEADER_BYTES + 4
    relay = node_with(parent=PARENT, flow_limits=FlowLimits(2 * one, 10**6, 1, 10)).training()
    relay.with_child(5).with_child(6)
    fed: dict[int, list[int]] = {5: [], 6: []}
    for commit in range(1, 7):
        effects = relay.hear(make.committed(commit))
        assert only(effects, ev.ApplyCommit).update.commit == commit
        report = make.report(received=commit, bytes_received=commit * one)
        effects += relay.hear(report, sender=6)
        for child in (5, 6):
            fed[child] += [c.commit for c in sent(effects, Commit, child)]
    assert fed == {5: [1, 2], 6: [1, 2, 3, 4, 5, 6]}


# -- resend requests ---------------------------------------------------------------------------


def test_resend_request_goes_to_child_that_leads_to_origin(relay: Any) -> None:
    """A resend request goes to the child that leads to the origin; it is ignored without one."""
    report_nodes_below(relay, 8)
    assert relay.hear(ResendRequest(8)) == [ev.Send(5, ResendRequest(8))]
    assert relay.hear(ResendRequest(8), AGAIN_LEAST_S / 2) == [
        ev.Send(5, ResendRequest(8))
    ]  # spaced by the sender
    assert relay.hear(ResendRequest(5), 1.0) == []  # no status of 5 has come yet
    assert relay.hear(ResendRequest(77)) == []


def test_resend_request_for_own_updates_is_not_forwarded(relay: Any, make: Any) -> None:
    """A resend request for the relay's own updates is not forwarded."""
    relay.step(make.published(1))
    effects = relay.hear(ResendRequest(1), 1.0)
    assert [update.seq for update in sent(effects, Update, PARENT)] == [1]
    assert sent(effects, ResendRequest) == []


def test_resend_request_without_origin_is_obeyed_and_forwarded(relay: Any, make: Any) -> None:
    """A resend request without an origin is obeyed and forwarded to all children."""
    relay.step(make.published(1))
    effects = relay.hear(ResendRequest(None), 1.0)
    assert [update.seq for update in sent(effects, Update, PARENT)] == [1]
    assert [send.to for send in every(effects, ev.Send) if send.message == ResendRequest(None)] == [
        5,
        6,
    ]


# -- leases ------------------------------------------------------------------------------------


def collect_silence_reports(relay: Any, seconds: float, *speaking: int) -> list[ChildSilent]:
    """Let time pass in which only ``speaking`` children send heartbeats; return the reports."""
    effects: list[ev.Effect] = []
    for _ in range(int(seconds * 2)):
        relay.alive()
        for child in speaking:
            relay.hear(relay.make.report(), sender=child)
        effects += relay.tick(0.5)
    return sent_directly(effects, ChildSilent)


def test_silent_child_is_reported_until_disowned(relay: Any) -> None:
    """A silent child is reported every quarter lease until the master disowns it."""
    edge = relay.me.children.by_node[5].edge
    assert collect_silence_reports(relay, LEASE_S, 6) == []
    assert collect_silence_reports(relay, 1.0, 6) == [ChildSilent(1, 5, edge)]
    repeated = collect_silence_reports(relay, LEASE_S, 6)
    assert 3 <= len(repeated) <= 4
    assert set(repeated) == {ChildSilent(1, 5, edge)}
    relay.told(Disown(5, edge))
    assert collect_silence_reports(relay, 2 * LEASE_S, 6) == []


@pytest.mark.parametrize("say", ["report", "update", "attach", "ask"])
def test_any_message_of_child_renews_its_lease(relay: Any, make: Any, say: str) -> None:
    """Any message of a child renews its lease."""
    words = {
        "report": make.report(),
        "update": make.update(5, 1),
        "attach": make.attach(whole=True),
        "ask": ChunkRequest(9),
    }
    for _ in range(2):
        assert collect_silence_reports(relay, LEASE_S - 1, 6) == []
        relay.hear(words[say], sender=5)


def test_process_pause_causes_no_silence_reports(relay: Any) -> None:
    """After a pause of its own process, a relay reports no child as silent at once."""
    relay.hear(relay.make.state(beat=5), 60.0)
    assert sent_directly(relay.tick(), ChildSilent) == []


# -- edges -------------------------------------------------------------------------------------


def test_order_to_adopt_own_parent_is_ignored(relay: Any, make: Any) -> None:
    """An order to adopt the node's own parent is ignored, as it would form a cycle."""
    assert relay.told(make.adopt(PARENT, 99)) == []
    assert PARENT not in relay.me.children.by_node


def test_child_that_becomes_parent_is_removed_from_children(relay: Any, make: Any) -> None:
    """A child that becomes the parent is removed from the children."""
    effects = relay.told(make.welcome(parent=5, edge=70))
    assert ev.CloseEdge(5) in effects
    assert ev.CloseEdge(PARENT) in effects
    assert [opened.node for opened in every(effects, ev.OpenEdge)] == [5]
    assert list(relay.me.children.by_node) == [6]


def test_only_master_can_add_and_remove_children(relay: Any, make: Any) -> None:
    """Only the master can add and remove children."""
    assert relay.hear(make.adopt(7)) == []
    assert relay.hear(Disown(5, 1000)) == []
    assert list(relay.me.children.by_node) == [5, 6]
    assert only(relay.told(make.adopt(7)), ev.OpenEdge).node == 7


def test_disown_over_older_edge_is_ignored(relay: Any, make: Any) -> None:
    """An order to disown a child over an older edge is ignored."""
    old = relay.me.children.by_node[5].edge
    relay.told(make.adopt(5, old + 1))
    assert relay.told(Disown(5, old)) == []
    assert relay.told(Disown(5, old + 1)) == [ev.CloseEdge(5)]


def test_new_edge_to_child_removes_statuses_received_through_it(relay: Any, make: Any) -> None:
    """A new edge to a child removes the statuses that came through it; they are reported again."""
    report_nodes_below(relay, 8)
    relay.told(make.adopt(5, relay.me.children.by_node[5].edge + 1))
    assert relay.me.subtree.statuses.child_towards(8) is None
    report_nodes_below(relay, 8)
    assert relay.me.subtree.statuses.child_towards(8) == 5


def test_new_edge_to_parent_keeps_edges_to_children(relay: Any) -> None:
    """A new edge to the parent leaves the children's edges open."""
    relay.opened()
    assert list(relay.me.children.by_node) == [5, 6]


def test_death_of_media_driver_closes_all_edges(relay: Any) -> None:
    """After the media driver died, all edges are closed."""
    effects = relay.opened(alone=True)
    assert {closed.node for closed in every(effects, ev.CloseEdge)} == {PARENT, 5, 6}
    assert relay.me.children.by_node == {}


def test_messages_reserved_for_parent_or_master_are_ignored_from_child(
    relay: Any, make: Any
) -> None:
    """Messages that only a parent or the master may send are ignored from a child."""
    for message in (make.committed(1), make.state(Phase.DONE), make.welcome(edge=99), Probe(1)):
        assert relay.hear(message, sender=5) == []
    assert relay.me.replication.received == 0
    assert relay.me.link.parent == PARENT != MASTER
