"""Tests of a worker's node: joining, training and heartbeats."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sparkstrom.codec.messages import (
    Attach,
    CommitsRequest,
    Heartbeat,
    Join,
    JoinRefusal,
    Phase,
    Probe,
    ProbeReply,
    ResendRequest,
    Status,
    Update,
)
from sparkstrom.observe.telemetry import (
    NodeCounters,
    TrainingCounters,
    WorkerCounters,
    from_wire,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.events_and_effects import Command
from sparkstrom.protocol.common.flow_control import ROUTINE_SPACING_S
from sparkstrom.protocol.worker.parent_link import ATTACH_RETRY_S
from sparkstrom.protocol.worker.replication import ASK_SPACING_S
from tests.unit.protocol.spoken import every, only, said, sent

# -- joining -----------------------------------------------------------------------------------


def test_it_asks_for_a_place_until_it_has_one_and_then_its_parent(node: Any, make: Any) -> None:
    """A node repeats its join until the welcome, and then its attach message until the reply."""
    first = said(node.opened(), Join)
    assert [(join.count, join.request, join.alone) for join in first] == [(1, 1, False)]
    assert said(node.tick(0.1), Join) == []
    assert len(said(node.tick(0.5), Join)) == 1
    effects = node.told(make.welcome())
    assert only(effects, ev.IdAssigned).node == 1
    assert only(effects, ev.OpenEdge).node == 0
    (attach,) = sent(effects, Attach, 0)
    assert (attach.have, attach.whole, attach.catching, attach.ids) == (0, False, False, [1])
    assert sent(node.tick(ATTACH_RETRY_S / 2), Attach) == []
    assert sent(node.tick(ATTACH_RETRY_S), Attach) == [attach]
    node.hear(make.attached())
    later = node.tick(1.0)
    assert (said(later, Join), sent(later, Attach)) == ([], [])


@pytest.mark.parametrize("other", [{"token": 2}, {"count": 2}, {"request": 2}])
def test_a_welcome_for_another_join_is_ignored(node: Any, make: Any, other: dict[str, int]) -> None:
    node.opened()
    assert node.told(make.welcome(**other)) == []
    assert node.me.node is None


def test_the_same_or_an_older_place_is_ignored(node: Any, make: Any) -> None:
    """A welcome with the present or a lower edge number is ignored."""
    node.joined()
    assert node.told(make.welcome()) == []
    node.told(make.welcome(edge=7, parent=3))
    assert node.told(make.welcome(edge=6, parent=4)) == []
    assert (node.me.link.parent, node.me.link.edge) == (3, 7)


def test_a_place_comes_from_the_master_alone(node: Any, make: Any) -> None:
    """A welcome that the parent sends is ignored."""
    node.parent = 4
    node.joined()
    assert node.hear(make.welcome(edge=9)) == []
    assert node.me.link.edge == 1


def test_a_refusal_fails_or_ends_the_task(node_with: Any) -> None:
    """A refusal of this node's join fails the task if it is fatal, and otherwise ends the task."""
    for fatal, order in ((True, Command.FAIL), (False, Command.END)):
        node = node_with()
        node.opened()
        node.told(JoinRefusal(token=1, count=2, reason="for somebody else", fatal=fatal))
        assert node.order is Command.WAIT
        node.told(JoinRefusal(token=1, count=1, reason="no", fatal=fatal))
        assert (node.order, node.machine.directive.reason) == (order, "no")


def test_what_overtakes_the_answer_to_the_attach_is_dropped(node: Any, make: Any) -> None:
    """Data and requests that overtake the attach reply are dropped."""
    node.opened()
    node.told(make.welcome())
    data = make.committed(1), make.merged(0, 2), make.chunk(0)
    for message in (*data, make.behind(3), ResendRequest(None)):
        assert node.hear(message) == []
    assert node.me.replication.received == 0


@pytest.mark.parametrize("snapshot", [True, False])
def test_what_was_dropped_so_is_asked_for_at_once(node: Any, make: Any, snapshot: bool) -> None:
    """Commits dropped before the reply are requested at once: no later one may show the gap."""
    node.opened()
    node.told(make.welcome())
    node.hear(make.committed(1))
    effects = node.hear(make.attached(snapshot=snapshot))
    asked = [send.message for send in every(effects, ev.Send)]
    assert asked[0] == CommitsRequest(0)  # before the chunk requests, as chunks follow commits
    assert sent(node.opened(), CommitsRequest) == []


def test_nothing_is_asked_for_where_nothing_was_dropped(node: Any, make: Any) -> None:
    """No commits are requested with the attach reply if none were dropped before it."""
    node.training().opened_anew()
    node.opened()
    node.told(make.welcome(edge=9, request=node.me.membership.request))
    assert sent(node.hear(make.attached(snapshot=False)), CommitsRequest) == []


def test_what_a_stranger_says_is_dropped(node: Any, make: Any) -> None:
    """Messages from a node that is not a neighbour are ignored."""
    node.training()
    for message in (make.committed(1), make.state(Phase.DONE), make.report(), make.update(7, 1)):
        assert node.hear(message, sender=7) == []
    assert node.me.replication.received == 0
    assert node.order is Command.TRAIN


def test_it_says_that_it_is_here(node: Any) -> None:
    """A node answers probes of its own id only."""
    node.training()
    assert said(node.told(Probe(1)), ProbeReply) == [ProbeReply(1)]
    assert said(node.told(Probe(2)), ProbeReply) == []  # another id


def test_another_place_is_taken_without_a_request(node: Any, make: Any) -> None:
    """A node that the master moves drops its old edge and continues over the new one."""
    node.training()
    node.hear(make.committed(1))
    effects = node.told(make.welcome(edge=7, parent=3))
    assert every(effects, ev.CloseEdge) == [ev.CloseEdge(0)]
    assert every(effects, ev.IdAssigned) == []
    assert only(effects, ev.OpenEdge).node == 3
    (attach,) = sent(effects, Attach, 3)
    assert (attach.have, attach.whole) == (1, True)
    assert node.order is Command.TRAIN
    assert node.hear(make.committed(2)) == []  # from the old parent
    node.hear(make.attached(1, snapshot=False), sender=3)
    assert only(node.hear(make.committed(2), sender=3), ev.ApplyCommit).update.commit == 2


def test_a_new_parent_hears_everything_again(node: Any, make: Any) -> None:
    """A new parent gets all uncommitted updates and all statuses; children are asked to resend."""
    node.training().with_child(5)
    node.step(make.published(1))
    node.hear(make.report(make.status(5)), sender=5)
    node.hear(make.state(stamp=100))
    node.told(make.welcome(edge=7, parent=3))
    effects = node.hear(make.attached(snapshot=False), sender=3)
    assert [update.seq for update in sent(effects, Update, 3)] == [1]
    assert sent(effects, ResendRequest, 5) == [ResendRequest(None)]
    (report,) = sent(effects, Heartbeat, 3)
    assert sorted((status.node, status.edge) for status in report.statuses) == [(1, 7), (5, 1)]
    assert sent(node.hear(make.attached(snapshot=False), sender=3), Heartbeat) == []  # once


def test_silence_of_half_a_lease_opens_another_edge(node: Any) -> None:
    node.training()
    assert not every(node.tick(4.9), ev.ReopenStreams)
    assert isinstance(node.tick(0.2)[0], ev.ReopenStreams)
    assert node.order is Command.TRAIN  # training continues


def test_a_parent_that_does_not_answer_the_attach_is_left(node: Any, make: Any) -> None:
    """If a new parent sends nothing for half a lease, the node asks for another edge."""
    node.opened()
    node.told(make.welcome())
    assert not every(node.tick(4.9), ev.ReopenStreams)
    assert every(node.tick(0.2), ev.ReopenStreams)
    (join,) = said(node.opened(), Join)
    assert (join.count, join.request) == (1, 2)


def test_all_edges_being_gone_is_said_until_the_master_has_heard(node: Any, make: Any) -> None:
    """``alone`` is repeated in each join until a welcome shows that the master has received it."""
    node.training()
    (first,) = said(node.opened(alone=True), Join)
    (second,) = said(node.opened(), Join)  # as if the first join was lost
    assert (first.alone, second.alone) == (True, True)
    node.told(make.welcome(edge=7, request=3))
    (third,) = said(node.opened(), Join)
    assert not third.alone


def test_whoever_was_closed_hears_so_with_the_state(node: Any, make: Any) -> None:
    """A node that finds its id among the closed ids in a state opens fresh streams."""
    node.training()
    assert node.alive(closed=[2, 3]) == []
    assert node.alive(closed=[1]) == [ev.ReopenStreams()]


# -- training ----------------------------------------------------------------------------------


def test_it_waits_until_all_have_joined_and_then_trains(node: Any, make: Any) -> None:
    """A node pauses for its snapshot, waits in the gather phase, and trains in the run phase."""
    node.joined()
    assert node.order is Command.PAUSE
    node.hear(make.chunk(0))
    node.step(ev.TrainerPaused(1))
    node.tick()
    node.step(ev.ReplicaInstalled())
    assert node.order is Command.WAIT
    node.hear(make.state(Phase.GATHERING))
    assert (node.order, node.machine.directive.steps_max) == (Command.WAIT, None)
    node.hear(make.state(Phase.RUNNING))
    assert node.order is Command.TRAIN


def test_updates_are_numbered_and_sent_and_struck_when_committed(node: Any, make: Any) -> None:
    """Published updates are numbered from 1 and sent; a commit removes its update."""
    node.training()
    updates = [sent(node.step(make.published(batch)), Update)[0] for batch in (1, 2)]
    assert [(u.origin, u.seq, u.batch) for u in updates] == [(1, 1, 1), (1, 2, 2)]
    effects = node.hear(make.committed(1, origin=1, payload=b""))
    assert effects == [ev.OwnCommitted(1)]
    assert [u.seq for u in node.me.in_flight.uncommitted] == [2]


def test_others_updates_are_delivered_in_order_once(node: Any, make: Any) -> None:
    """Commits are applied once and in order; after a gap the missing ones are requested."""
    node.training()
    first = node.hear(make.committed(1))
    assert only(first, ev.ApplyCommit).update.commit == 1
    assert node.hear(make.committed(1)) == []
    assert sent(node.hear(make.committed(3)), CommitsRequest) == [CommitsRequest(1)]
    assert sent(node.hear(make.committed(4)), CommitsRequest) == []  # requested just before
    assert only(node.hear(make.committed(2)), ev.ApplyCommit).update.commit == 2


def test_commits_that_are_merely_late_are_not_asked_for(node: Any, make: Any) -> None:
    """Commits that are late but were sent are not requested, as a slow link may take long."""
    node.training()
    for _ in range(8):
        effects = node.alive(head=5, sent=5) + node.tick(1.0)
        assert sent(effects, CommitsRequest) == []


def test_a_gap_is_asked_about_once_in_a_while(node: Any, make: Any) -> None:
    """Requests are ASK_SPACING_S apart, as commits under way show the same gap."""
    node.training()
    assert sent(node.hear(make.committed(3)), CommitsRequest) == [CommitsRequest(0)]
    assert sent(node.hear(make.committed(4), ASK_SPACING_S / 2), CommitsRequest) == []
    assert sent(node.hear(make.committed(5), ASK_SPACING_S / 2), CommitsRequest) == [
        CommitsRequest(0)
    ]


def test_a_full_window_stops_training_and_a_commit_lets_it_go_on(node_with: Any, make: Any) -> None:
    """Training waits while the window of uncommitted updates is full."""
    node = node_with(window_bytes=1).training()
    node.step(make.published(1))
    assert (node.order, node.machine.directive.reason[:11]) == (Command.WAIT, "its updates")
    node.hear(make.committed(1, origin=1))
    assert node.order is Command.TRAIN


def test_one_publication_at_a_time_where_the_link_sets_the_pace(node_with: Any, make: Any) -> None:
    """With ``publications_max``, training continues unpublished until a commit comes."""
    node = node_with(window_bytes=1, publications_max=1).training()
    assert node.machine.directive.publishes
    node.step(make.published(1))
    assert (node.order, node.machine.directive.publishes) == (Command.TRAIN, False)
    node.hear(make.committed(1, origin=1), 5.0)
    assert node.machine.directive.publishes
    assert node.machine.directive.round_s == 5.0


@pytest.mark.parametrize(("max_lead", "round_s"), [(3, 20.0), (None, 5.0)])
def test_where_all_wait_for_the_slowest_link_a_round_is_as_long(
    node_with: Any, make: Any, max_lead: int | None, round_s: float
) -> None:
    """With ``max_lead``, ``round_s`` is at least the longest link delay in the state."""
    node = node_with(publications_max=1, max_lead=max_lead).training()
    node.hear(make.state(wait_ms=20_000))
    assert node.machine.directive.round_s == 0.0, "nothing of it was committed"
    node.step(make.published(1))
    node.hear(make.committed(1, origin=1), 5.0)
    assert node.machine.directive.round_s == round_s


def test_a_relay_reckons_with_its_own_children_too(
    node_with: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``max_lead``, ``round_s`` is at least the delay of the links to children."""
    monkeypatch.setattr(Children, "max_link_delay_s", property(lambda children: 7.0))
    node = node_with(publications_max=1, max_lead=3).training()
    node.step(make.published(1))
    node.hear(make.committed(1, origin=1), 5.0)
    assert node.machine.directive.round_s == 7.0


def test_it_goes_no_further_ahead_than_allowed(node_with: Any, make: Any) -> None:
    """Training waits when it is ``max_lead`` steps ahead of the slowest worker."""
    node = node_with(max_lead=3).training()
    node.hear(make.state(training=2))
    assert node.machine.directive.steps_max == 3
    node.step(ev.StepCompleted(0, 3, 3))
    assert node.order is Command.WAIT
    node.hear(make.state(training=2, slowest=1))
    assert (node.order, node.machine.directive.steps_max) == (Command.TRAIN, 4)


def test_a_commit_tells_the_pace(node_with: Any, make: Any) -> None:
    """The steps of the slowest worker are also taken from commits."""
    node = node_with(max_lead=1).training()
    node.hear(make.state(training=2))
    node.step(ev.StepCompleted(0, 1, 1))
    assert node.order is Command.WAIT
    node.hear(msgspec.structs.replace(make.committed(1), slowest=1))
    assert node.order is Command.TRAIN


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_so_many_steps_go_on_beside_an_uncommitted_update(
    node_with: Any, make: Any, staleness: int
) -> None:
    """Up to ``max_staleness`` steps follow the oldest uncommitted update.

    Once that update is committed, all updates that the others had sent by then are committed, too.
    """
    node = node_with(max_staleness=staleness).training()
    node.hear(make.state(training=2))
    assert node.machine.directive.steps_max == 1 + staleness  # counted from the next update
    node.step(make.published(1))
    for step in range(2, 2 + staleness):
        assert (node.order, node.machine.directive.steps_max) == (Command.TRAIN, 1 + staleness)
        node.step(ev.StepCompleted(0, 1, step))
    assert node.order is Command.WAIT
    node.hear(make.committed(1, origin=1))
    assert (node.order, node.machine.directive.steps_max) == (Command.TRAIN, 2 + 2 * staleness)


def test_who_trains_alone_waits_for_nobody(node_with: Any, make: Any) -> None:
    """A worker that trains alone has no step limit."""
    node = node_with(max_lead=1, max_staleness=0).training()
    node.step(make.published(5))
    assert (node.order, node.machine.directive.steps_max) == (Command.TRAIN, None)


def test_its_trainer_hears_how_many_train_and_how_far_they_are(node: Any, make: Any) -> None:
    """The directive has the numbers of workers, committed minibatches and finished epochs."""
    node.training()
    node.hear(make.state(training=4, minibatches=30, epochs=2))
    command = node.machine.directive
    assert (command.order, command.workers, command.minibatches) == (Command.TRAIN, 4, 30)
    assert command.epochs == 2
    node.hear(make.state(beat=1, training=0))  # the master does not know yet that it trains
    assert node.machine.directive.workers == 1


def test_asked_again_it_sends_all_that_is_uncommitted(node: Any, make: Any) -> None:
    """A resend request makes the node send all uncommitted updates, unless it has just done so."""
    node.training()
    for batch in (1, 2):
        node.step(make.published(batch))
    assert [u.seq for u in sent(node.hear(ResendRequest(1), 1.0), Update)] == [1, 2]
    assert sent(node.hear(ResendRequest(1)), Update) == []
    assert [u.seq for u in sent(node.hear(ResendRequest(None)), Update)] == [
        1,
        2,
    ]  # a new edge above


# -- heartbeats --------------------------------------------------------------------------------


def own_status(effects: list[ev.Effect]) -> Status:
    """Return the only status of the only heartbeat."""
    (report,) = sent(effects, Heartbeat)
    (status,) = report.statuses
    assert isinstance(status, Status)
    return status


def hushed(node: Any) -> Any:
    """Bring the node to training, with all its statuses acknowledged."""
    node.training()
    (report,) = sent(node.tick(1.0), Heartbeat)
    node.alive(stamp=report.stamp)
    return node


def test_news_is_told_at_once_and_the_lease_renewed_without(node: Any) -> None:
    """A new status is sent at once; without news, empty heartbeats renew the lease."""
    hushed(node).step(ev.StepCompleted(0, 2, 2))
    (report,) = sent(node.tick(0.02), Heartbeat)
    (status,) = report.statuses
    assert (status.node, status.batch, status.steps, status.after_seq) == (1, 2, 2, 0)
    node.alive(stamp=report.stamp)
    renewed = [reports[0] for _ in range(40) if (reports := sent(node.tick(0.1), Heartbeat))]
    assert len(renewed) >= 40 * 0.1 / (node.me.limits.lease_s / 4)
    assert [report.statuses for report in renewed] == [[]] * len(renewed)


def test_news_that_may_not_have_been_heard_is_told_again(node: Any) -> None:
    """A status is repeated until it is acknowledged."""
    hushed(node).step(ev.StepCompleted(0, 2, 2))
    first = sent(node.tick(0.02), Heartbeat)[0]
    again = [report for _ in range(10) for report in sent(node.tick(0.1), Heartbeat)]
    assert len(again) >= 3
    assert {tuple(report.statuses) for report in again} == {tuple(first.statuses)}


def test_a_report_says_which_update_its_position_waits_for(node: Any, make: Any) -> None:
    """A status names the update after whose commit its position counts."""
    hushed(node).step(make.published(1))
    node.step(ev.StepCompleted(0, 2, 2))
    status = own_status(node.tick(0.02))
    assert (status.after_seq, status.batch) == (1, 2)


def test_of_two_statuses_the_newer_one_is_known_by_its_age(node: Any, make: Any) -> None:
    """``Status.age`` rises with each change, and with a new edge."""
    hushed(node).step(ev.StepCompleted(0, 1, 1))
    first = own_status(node.tick(0.02))
    node.step(ev.StepCompleted(0, 2, 2))
    second = own_status(node.tick(0.02))
    node.told(make.welcome(edge=7, parent=3))
    third = own_status(node.hear(make.attached(snapshot=False), sender=3))
    assert first.age < second.age < third.age


def test_counters_go_with_the_next_report(node: Any) -> None:
    """New counters are in the next routine heartbeat, together with those of the node itself."""
    told = WorkerCounters(TrainingCounters(steps=1), NodeCounters(rejected=2))
    hushed(node).machine.set_counters(told)
    node.told(Probe(99))  # for another id
    node.machine.set_counters(told)
    own = NodeCounters(rejected=2, round_s=0.0, ignored=1)
    heard = own_status(node.tick(ROUTINE_SPACING_S)).stats
    assert from_wire(heard) == WorkerCounters(TrainingCounters(steps=1), own)
