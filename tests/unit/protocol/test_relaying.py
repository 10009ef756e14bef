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
from tests.unit.protocol.spoken import every, only, said, sent

PARENT = 4
LEASE_S = 10.0


@pytest.fixture
def relay(node: Any) -> Any:
    """A node that trains and has the children 5 and 6."""
    node.parent = PARENT
    return node.training().with_child(5).with_child(6)


def below(relay: Any, *nodes: int, via: int = 5) -> Any:
    """Let the child ``via`` report statuses of these nodes."""
    statuses = [relay.make.status(node, edge=60) for node in nodes]
    relay.hear(relay.make.report(*statuses), sender=via)
    return relay


# -- to the parent -----------------------------------------------------------------------------


def test_updates_from_below_go_up_as_they_are(relay: Any, make: Any) -> None:
    """Updates of nodes below are forwarded unchanged and not stored."""
    update = make.update(8, 3)
    assert relay.hear(update, sender=5) == [ev.Send(PARENT, update)]
    assert relay.me.in_flight.uncommitted == ()  # the origin stores them


def test_words_from_below_go_up_as_they_are_and_once(relay: Any, make: Any) -> None:
    """Statuses of nodes below are forwarded unchanged; an unchanged one is not forwarded again."""
    below(relay, 8)
    (report,) = sent(relay.tick(0.1), Heartbeat, PARENT)
    assert make.status(8, edge=60) in report.statuses
    relay.alive(stamp=report.stamp)
    below(relay, 8)  # unchanged
    assert not relay.me.subtree.statuses.has_pending


def test_whoever_leaves_is_not_told_of_any_more(relay: Any) -> None:
    """After a child has left, its status and those of all nodes below it are no longer reported."""
    below(relay, 5, 8)
    relay.hear(LeaveNotice(node=5, reason="done", checkpoint=None), sender=5)
    (report,) = sent(relay.tick(0.1), Heartbeat)
    assert not {5, 8} & {status.node for status in report.statuses}


# -- to the children ---------------------------------------------------------------------------


def test_what_comes_down_goes_on_to_all_children(relay: Any, make: Any) -> None:
    """A commit is applied and forwarded to all children."""
    effects = relay.hear(make.committed(1))
    assert only(effects, ev.ApplyCommit).update.commit == 1
    for child in (5, 6):
        assert sent(effects, Commit, child) == [make.committed(1)]


def test_its_own_update_goes_on_with_the_payload_that_it_has(relay: Any, make: Any) -> None:
    """The commit of the relay's own update comes without a payload and is forwarded with it."""
    relay.step(make.published(1, b"mine"))
    effects = relay.hear(make.committed(1, origin=1, payload=b""))
    assert effects[0] == ev.OwnCommitted(1)
    assert [c.payload.data for c in sent(effects, Commit)] == [b"mine", b"mine"]


def test_a_sum_goes_on_whole_and_a_child_that_is_not_there_takes_a_snapshot(
    relay: Any, make: Any
) -> None:
    """A sum is forwarded as a whole; a child that is inside the sum needs a snapshot."""
    relay.step(make.published(1))
    relay.hear(make.committed(1))
    merged = make.merged(1, 5, [(9, 4), (1, 1)])
    effects = relay.hear(merged)
    assert len(only(effects, ev.ApplyMergedRange).own) == 1
    assert sent(effects, MergedRange, 5) == [merged]
    assert [b.base for b in sent(relay.hear(CommitsRequest(3), sender=6), SnapshotRequired)] == [5]


def test_a_child_is_served_while_the_parent_is_away(relay: Any, make: Any) -> None:
    """Children are served while the relay has no parent."""
    relay.hear(make.committed(1))
    relay.opened()
    assert [c.commit for c in sent(relay.hear(CommitsRequest(0), sender=5), Commit)] == [1]
    relay.hear(make.report(received=1, bytes_received=10**6), sender=5)
    assert relay.hear(ChunkRequest(0), sender=5) == [ev.SendChunk(5, 0)]


def test_nobody_is_served_what_it_does_not_have(relay: Any, make: Any) -> None:
    """Requests for commits or chunks that the relay does not have are ignored."""
    assert relay.hear(CommitsRequest(1), sender=5) == []
    assert relay.hear(ChunkRequest(1), sender=5) == []
    relay.hear(make.behind(7))  # its own replica will be replaced
    assert relay.hear(ChunkRequest(0), sender=5) == []


def test_while_it_catches_up_its_children_are_not_told_that_there_is_more(
    relay: Any, make: Any
) -> None:
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


def test_a_state_goes_on_with_what_this_node_has(relay: Any, make: Any) -> None:
    """A forwarded state has the relay's own newest commit, and otherwise the master's values."""
    relay.hear(make.committed(1))
    relay.tick(0.1)
    relay.alive(Phase.RUNNING, head=9, slowest=3, training=6, minibatches=70, closed=[77])
    (state,) = sent(relay.tick(0.1), State, 5)
    assert (state.head, state.slowest, state.closed, state.beat) == (1, 3, [77], relay.beat)
    assert (state.training, state.minibatches) == (6, 70)


def test_a_slow_child_holds_up_neither_the_node_nor_its_brothers(node_with: Any, make: Any) -> None:
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


def test_the_question_for_an_origin_goes_to_the_child_that_leads_to_it(relay: Any) -> None:
    """A resend request goes to the child that leads to the origin; it is ignored without one."""
    below(relay, 8)
    assert relay.hear(ResendRequest(8)) == [ev.Send(5, ResendRequest(8))]
    assert relay.hear(ResendRequest(8), AGAIN_LEAST_S / 2) == [
        ev.Send(5, ResendRequest(8))
    ]  # spaced by the sender
    assert relay.hear(ResendRequest(5), 1.0) == []  # no status of 5 has come yet
    assert relay.hear(ResendRequest(77)) == []


def test_a_question_for_itself_goes_no_further(relay: Any, make: Any) -> None:
    """A resend request for the relay's own updates is not forwarded."""
    relay.step(make.published(1))
    effects = relay.hear(ResendRequest(1), 1.0)
    assert [update.seq for update in sent(effects, Update, PARENT)] == [1]
    assert sent(effects, ResendRequest) == []


def test_a_question_for_all_goes_to_all(relay: Any, make: Any) -> None:
    """A resend request without an origin is obeyed and forwarded to all children."""
    relay.step(make.published(1))
    effects = relay.hear(ResendRequest(None), 1.0)
    assert [update.seq for update in sent(effects, Update, PARENT)] == [1]
    assert [send.to for send in every(effects, ev.Send) if send.message == ResendRequest(None)] == [
        5,
        6,
    ]


# -- leases ------------------------------------------------------------------------------------


def complaints(relay: Any, seconds: float, *speaking: int) -> list[ChildSilent]:
    """Let time pass in which only ``speaking`` children send heartbeats; return the reports."""
    effects: list[ev.Effect] = []
    for _ in range(int(seconds * 2)):
        relay.alive()
        for child in speaking:
            relay.hear(relay.make.report(), sender=child)
        effects += relay.tick(0.5)
    return said(effects, ChildSilent)


def test_a_silent_child_is_complained_of_until_something_is_done(relay: Any) -> None:
    """A silent child is reported every quarter lease until the master disowns it."""
    edge = relay.me.children.by_node[5].edge
    assert complaints(relay, LEASE_S, 6) == []
    assert complaints(relay, 1.0, 6) == [ChildSilent(1, 5, edge)]
    repeated = complaints(relay, LEASE_S, 6)
    assert 3 <= len(repeated) <= 4
    assert set(repeated) == {ChildSilent(1, 5, edge)}
    relay.told(Disown(5, edge))
    assert complaints(relay, 2 * LEASE_S, 6) == []


@pytest.mark.parametrize("say", ["report", "update", "attach", "ask"])
def test_anything_that_a_child_says_renews_its_lease(relay: Any, make: Any, say: str) -> None:
    """Any message of a child renews its lease."""
    words = {
        "report": make.report(),
        "update": make.update(5, 1),
        "attach": make.attach(whole=True),
        "ask": ChunkRequest(9),
    }
    for _ in range(2):
        assert complaints(relay, LEASE_S - 1, 6) == []
        relay.hear(words[say], sender=5)


def test_a_node_that_slept_complains_of_nobody_at_once(relay: Any) -> None:
    """After a pause of its own process, a relay reports no child as silent at once."""
    relay.hear(relay.make.state(beat=5), 60.0)
    assert said(relay.tick(), ChildSilent) == []


# -- edges -------------------------------------------------------------------------------------


def test_its_own_parent_is_never_its_child(relay: Any, make: Any) -> None:
    """An order to adopt the node's own parent is ignored, as it would form a cycle."""
    assert relay.told(make.adopt(PARENT, 99)) == []
    assert PARENT not in relay.me.children.by_node


def test_a_child_that_becomes_its_parent_is_its_child_no_more(relay: Any, make: Any) -> None:
    """A child that becomes the parent is removed from the children."""
    effects = relay.told(make.welcome(parent=5, edge=70))
    assert ev.CloseEdge(5) in effects
    assert ev.CloseEdge(PARENT) in effects
    assert [opened.node for opened in every(effects, ev.OpenEdge)] == [5]
    assert list(relay.me.children.by_node) == [6]


def test_children_come_and_go_by_the_masters_word_alone(relay: Any, make: Any) -> None:
    """Only the master can add and remove children."""
    assert relay.hear(make.adopt(7)) == []
    assert relay.hear(Disown(5, 1000)) == []
    assert list(relay.me.children.by_node) == [5, 6]
    assert only(relay.told(make.adopt(7)), ev.OpenEdge).node == 7


def test_a_goodbye_of_an_older_edge_does_not_end_the_newer_one(relay: Any, make: Any) -> None:
    """An order to disown a child over an older edge is ignored."""
    old = relay.me.children.by_node[5].edge
    relay.told(make.adopt(5, old + 1))
    assert relay.told(Disown(5, old)) == []
    assert relay.told(Disown(5, old + 1)) == [ev.CloseEdge(5)]


def test_over_a_newer_edge_everything_is_told_again(relay: Any, make: Any) -> None:
    """A new edge to a child removes the statuses that came through it; they are reported again."""
    below(relay, 8)
    relay.told(make.adopt(5, relay.me.children.by_node[5].edge + 1))
    assert relay.me.subtree.statuses.child_towards(8) is None
    below(relay, 8)
    assert relay.me.subtree.statuses.child_towards(8) == 5


def test_the_children_stay_when_the_edge_upwards_is_opened_anew(relay: Any) -> None:
    """A new edge to the parent leaves the children's edges open."""
    relay.opened()
    assert list(relay.me.children.by_node) == [5, 6]


def test_all_edges_are_gone_with_the_media_driver(relay: Any) -> None:
    """After the media driver died, all edges are closed."""
    effects = relay.opened(alone=True)
    assert {closed.node for closed in every(effects, ev.CloseEdge)} == {PARENT, 5, 6}
    assert relay.me.children.by_node == {}


def test_what_only_parents_or_the_master_say_is_nothing_from_a_child(relay: Any, make: Any) -> None:
    """Messages that only a parent or the master may send are ignored from a child."""
    for message in (make.committed(1), make.state(Phase.DONE), make.welcome(edge=99), Probe(1)):
        assert relay.hear(message, sender=5) == []
    assert relay.me.replication.received == 0
    assert relay.me.link.parent == PARENT != MASTER
