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
from tests.unit.protocol.effect_filters import every, only, sent, sent_directly

# -- joining -----------------------------------------------------------------------------------


def test_node_repeats_join_until_welcome_and_attach_until_reply(node: Any, make: Any) -> None:
    """A node repeats its join until the welcome, and then its attach message until the reply."""
    first = sent_directly(node.opened(), Join)
    assert [(join.count, join.request, join.alone) for join in first] == [(1, 1, False)]
    assert sent_directly(node.tick(0.1), Join) == []
    assert len(sent_directly(node.tick(0.5), Join)) == 1
    effects = node.told(make.welcome())
    assert only(effects, ev.IdAssigned).node == 1
    assert only(effects, ev.OpenEdge).node == 0
    (attach,) = sent(effects, Attach, 0)
    assert (attach.have, attach.whole, attach.catching, attach.ids) == (0, False, False, [1])
    assert sent(node.tick(ATTACH_RETRY_S / 2), Attach) == []
    assert sent(node.tick(ATTACH_RETRY_S), Attach) == [attach]
    node.hear(make.attached())
    later = node.tick(1.0)
    assert (sent_directly(later, Join), sent(later, Attach)) == ([], [])


@pytest.mark.parametrize("other", [{"token": 2}, {"count": 2}, {"request": 2}])
def test_a_welcome_for_another_join_is_ignored(node: Any, make: Any, other: dict[str, int]) -> None:
    node.opened()
    assert node.told(make.welcome(**other)) == []
    assert node.me.node is None


def test_welcome_with_same_or_older_edge_is_ignored(node: Any, make: Any) -> None:
    """A welcome with the present or a lower edge number is ignored."""
    node.joined()
    assert node.told(make.welcome()) == []
    node.told(make.welcome(edge=7, parent=3))
    assert node.told(make.welcome(edge=6, parent=4)) == []
    assert (node.me.link.parent, node.me.link.edge) == (3, 7)


def test_welcome_from_parent_is_ignored(node: Any, make: Any) -> None:
    """A welcome that the parent sends is ignored."""
    node.parent = 4
    node.joined()
    assert node.hear(make.welcome(edge=9)) == []
    assert node.me.link.edge == 1


def test_fatal_refusal_fails_task_and_other_refusal_ends_task(node_with: Any) -> None:
    """A refusal of this node's join fails the task if it is fatal, and otherwise ends the task."""
    for fatal, order in ((True, Command.FAIL), (False, Command.END)):
        node = node_with()
        node.opened()
        node.told(JoinRefusal(token=1, count=2, reason="for somebody else", fatal=fatal))
        assert node.order is Command.WAIT
        node.told(JoinRefusal(token=1, count=1, reason="no", fatal=fatal))
        assert (node.order, node.machine.directive.reason) == (order, "no")


def test_messages_that_overtake_attach_reply_are_dropped(node: Any, make: Any) -> None:
    """Data and requests that overtake the attach reply are dropped."""
    node.opened()
    node.told(make.welcome())
    data = make.committed(1), make.merged(0, 2), make.chunk(0)
    for message in (*data, make.behind(3), ResendRequest(None)):
        assert node.hear(message) == []
    assert node.me.replication.received == 0


@pytest.mark.parametrize("snapshot", [True, False])
def test_commits_dropped_before_attach_reply_are_requested_at_once(
    node: Any, make: Any, snapshot: bool
) -> None:
    """Commits dropped before the reply are requested at once: no later one may show the gap."""
    node.opened()
    node.told(make.welcome())
    node.hear(make.committed(1))
    effects = node.hear(make.attached(snapshot=snapshot))
    asked = [send.message for send in every(effects, ev.Send)]
    assert asked[0] == CommitsRequest(0)  # before the chunk requests, as chunks follow commits
    assert sent(node.opened(), CommitsRequest) == []


def test_attach_reply_without_dropped_commits_requests_none(node: Any, make: Any) -> None:
    """No commits are requested with the attach reply if none were dropped before it."""
    node.training().opened_anew()
    node.opened()
    node.told(make.welcome(edge=9, request=node.me.membership.request))
    assert sent(node.hear(make.attached(snapshot=False)), CommitsRequest) == []


def test_messages_from_non_neighbours_are_ignored(node: Any, make: Any) -> None:
    """Messages from a node that is not a neighbour are ignored."""
    node.training()
    for message in (make.committed(1), make.state(Phase.DONE), make.report(), make.update(7, 1)):
        assert node.hear(message, sender=7) == []
    assert node.me.replication.received == 0
    assert node.order is Command.TRAIN


def test_node_answers_probes_of_own_id_only(node: Any) -> None:
    """A node answers probes of its own id only."""
    node.training()
    assert sent_directly(node.told(Probe(1)), ProbeReply) == [ProbeReply(1)]
    assert sent_directly(node.told(Probe(2)), ProbeReply) == []  # another id


def test_moved_node_continues_over_new_edge(node: Any, make: Any) -> None:
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


def test_new_parent_gets_all_uncommitted_updates_and_statuses(node: Any, make: Any) -> None:
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


def test_parent_silence_of_half_a_lease_reopens_streams(node: Any) -> None:
    node.training()
    assert not every(node.tick(4.9), ev.ReopenStreams)
    assert isinstance(node.tick(0.2)[0], ev.ReopenStreams)
    assert node.order is Command.TRAIN  # training continues


def test_silence_before_attach_reply_requests_new_edge(node: Any, make: Any) -> None:
    """If a new parent sends nothing for half a lease, the node asks for another edge."""
    node.opened()
    node.told(make.welcome())
    assert not every(node.tick(4.9), ev.ReopenStreams)
    assert every(node.tick(0.2), ev.ReopenStreams)
    (join,) = sent_directly(node.opened(), Join)
    assert (join.count, join.request) == (1, 2)


def test_alone_is_repeated_in_joins_until_welcome(node: Any, make: Any) -> None:
    """``alone`` is repeated in each join until a welcome shows that the master has received it."""
    node.training()
    (first,) = sent_directly(node.opened(alone=True), Join)
    (second,) = sent_directly(node.opened(), Join)  # as if the first join was lost
    assert (first.alone, second.alone) == (True, True)
    node.told(make.welcome(edge=7, request=3))
    (third,) = sent_directly(node.opened(), Join)
    assert not third.alone


def test_node_with_own_id_closed_in_state_opens_fresh_streams(node: Any, make: Any) -> None:
    """A node that finds its id among the closed ids in a state opens fresh streams."""
    node.training()
    assert node.alive(closed=[2, 3]) == []
    assert node.alive(closed=[1]) == [ev.ReopenStreams()]


# -- training ----------------------------------------------------------------------------------


def test_node_waits_in_gathering_phase_and_trains_in_running_phase(node: Any, make: Any) -> None:
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


def test_updates_are_numbered_sent_and_removed_on_commit(node: Any, make: Any) -> None:
    """Published updates are numbered from 1 and sent; a commit removes its update."""
    node.training()
    updates = [sent(node.step(make.published(batch)), Update)[0] for batch in (1, 2)]
    assert [(u.origin, u.seq, u.batch) for u in updates] == [(1, 1, 1), (1, 2, 2)]
    effects = node.hear(make.committed(1, origin=1, payload=b""))
    assert effects == [ev.OwnCommitted(1)]
    assert [u.seq for u in node.me.in_flight.uncommitted] == [2]


def test_commits_are_applied_once_and_in_order(node: Any, make: Any) -> None:
    """Commits are applied once and in order; after a gap the missing ones are requested."""
    node.training()
    first = node.hear(make.committed(1))
    assert only(first, ev.ApplyCommit).update.commit == 1
    assert node.hear(make.committed(1)) == []
    assert sent(node.hear(make.committed(3)), CommitsRequest) == [CommitsRequest(1)]
    assert sent(node.hear(make.committed(4)), CommitsRequest) == []  # requested just before
    assert only(node.hear(make.committed(2)), ev.ApplyCommit).update.commit == 2


def test_late_commits_are_not_requested(node: Any, make: Any) -> None:
    """Commits that are late but were sent are not requested, as a slow link may take long."""
    node.training()
    for _ in range(8):
        effects = node.alive(head=5, sent=5) + node.tick(1.0)
        assert sent(effects, CommitsRequest) == []


def test_commits_requests_after_gap_are_ask_spacing_s_apart(node: Any, make: Any) -> None:
    """Requests are ASK_SPACING_S apart, as commits under way show the same gap."""
    node.training()
    assert sent(node.hear(make.committed(3)), CommitsRequest) == [CommitsRequest(0)]
    assert sent(node.hear(make.committed(4), ASK_SPACING_S / 2), CommitsRequest) == []
    assert sent(node.hear(make.committed(5), ASK_SPACING_S / 2), CommitsRequest) == [
        CommitsRequest(0)
    ]


def test_full_update_window_pauses_training_until_commit(node_with: Any, make: Any) -> None:
    """Training waits while the window of uncommitted updates is full."""
    node = node_with(window_bytes=1).training()
    node.step(make.published(1))
    assert (node.order, node.machine.directive.reason[:11]) == (Command.WAIT, "its updates")
    node.hear(make.committed(1, origin=1))
    assert node.order is Command.TRAIN


def test_publications_max_stops_publishing_until_commit(node_with: Any, make: Any) -> None:
    """With ``publications_max``, training continues unpublished until a commit comes."""
    node = node_with(window_bytes=1, publications_max=1).training()
    assert node.machine.directive.publishes
    node.step(make.published(1))
    assert (node.order, node.machine.directive.publishes) == (Command.TRAIN, False)
    node.hear(make.committed(1, origin=1), 5.0)
    assert node.machine.directive.publishes
    assert node.machine.directive.round_s == 5.0


@pytest.mark.parametrize(("max_lead", "round_s"), [(3, 20.0), (None, 5.0)])
def test_round_s_with_max_lead_is_at_least_longest_link_delay(
    node_with: Any, make: Any, max_lead: int | None, round_s: float
) -> None:
    """With ``max_lead``, ``round_s`` is at least the longest link delay in the state."""
    node = node_with(publications_max=1, max_lead=max_lead).training()
    node.hear(make.state(wait_ms=20_000))
    assert node.machine.directive.round_s == 0.0, "nothing of it was committed"
    node.step(make.published(1))
    node.hear(make.committed(1, origin=1), 5.0)
    assert node.machine.directive.round_s == round_s


def test_round_s_of_relay_is_at_least_delay_of_links_to_children(
    node_with: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``max_lead``, ``round_s`` is at least the delay of the links to children."""
    monkeypatch.setattr(Children, "max_link_delay_s", property(lambda children: 7.0))
    node = node_with(publications_max=1, max_lead=3).training()
    node.step(make.published(1))
    node.hear(make.committed(1, origin=1), 5.0)
    assert node.machine.directive.round_s == 7.0


def test_training_waits_at_max_lead_steps_ahead_of_slowest(node_with: Any, make: Any) -> None:
    """Training waits when it is ``max_lead`` steps ahead of the slowest worker."""
    node = node_with(max_lead=3).training()
    node.hear(make.state(training=2))
    assert node.machine.directive.steps_max == 3
    node.step(ev.StepCompleted(0, 3, 3))
    assert node.order is Command.WAIT
    node.hear(make.state(training=2, slowest=1))
    assert (node.order, node.machine.directive.steps_max) == (Command.TRAIN, 4)


def test_commit_updates_steps_of_slowest_worker(node_with: Any, make: Any) -> None:
    """The steps of the slowest worker are also taken from commits."""
    node = node_with(max_lead=1).training()
    node.hear(make.state(training=2))
    node.step(ev.StepCompleted(0, 1, 1))
    assert node.order is Command.WAIT
    node.hear(msgspec.structs.replace(make.committed(1), slowest=1))
    assert node.order is Command.TRAIN


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_max_staleness_limits_steps_after_uncommitted_update(
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


def test_lone_worker_has_no_step_limit(node_with: Any, make: Any) -> None:
    """A worker that trains alone has no step limit."""
    node = node_with(max_lead=1, max_staleness=0).training()
    node.step(make.published(5))
    assert (node.order, node.machine.directive.steps_max) == (Command.TRAIN, None)


def test_directive_has_workers_minibatches_and_epochs_of_state(node: Any, make: Any) -> None:
    """The directive has the numbers of workers, committed minibatches and finished epochs."""
    node.training()
    node.hear(make.state(training=4, minibatches=30, epochs=2))
    command = node.machine.directive
    assert (command.order, command.workers, command.minibatches) == (Command.TRAIN, 4, 30)
    assert command.epochs == 2
    node.hear(make.state(beat=1, training=0))  # the master does not know yet that it trains
    assert node.machine.directive.workers == 1


def test_resend_request_sends_all_uncommitted_updates(node: Any, make: Any) -> None:
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


def train_with_acknowledged_statuses(node: Any) -> Any:
    """Bring the node to training, with all its statuses acknowledged."""
    node.training()
    (report,) = sent(node.tick(1.0), Heartbeat)
    node.alive(stamp=report.stamp)
    return node


def test_new_status_is_sent_at_once_and_empty_heartbeats_renew_lease(node: Any) -> None:
    """A new status is sent at once; without news, empty heartbeats renew the lease."""
    train_with_acknowledged_statuses(node).step(ev.StepCompleted(0, 2, 2))
    (report,) = sent(node.tick(0.02), Heartbeat)
    (status,) = report.statuses
    assert (status.node, status.batch, status.steps, status.after_seq) == (1, 2, 2, 0)
    node.alive(stamp=report.stamp)
    renewed = [reports[0] for _ in range(40) if (reports := sent(node.tick(0.1), Heartbeat))]
    assert len(renewed) >= 40 * 0.1 / (node.me.limits.lease_s / 4)
    assert [report.statuses for report in renewed] == [[]] * len(renewed)


def test_status_is_repeated_until_acknowledged(node: Any) -> None:
    """A status is repeated until it is acknowledged."""
    train_with_acknowledged_statuses(node).step(ev.StepCompleted(0, 2, 2))
    first = sent(node.tick(0.02), Heartbeat)[0]
    again = [report for _ in range(10) for report in sent(node.tick(0.1), Heartbeat)]
    assert len(again) >= 3
    assert {tuple(report.statuses) for report in again} == {tuple(first.statuses)}


def test_status_names_update_that_its_position_waits_for(node: Any, make: Any) -> None:
    """A status names the update after whose commit its position counts."""
    train_with_acknowledged_statuses(node).step(make.published(1))
    node.step(ev.StepCompleted(0, 2, 2))
    status = own_status(node.tick(0.02))
    assert (status.after_seq, status.batch) == (1, 2)


def test_status_age_rises_with_change_and_with_new_edge(node: Any, make: Any) -> None:
    """``Status.age`` rises with each change, and with a new edge."""
    train_with_acknowledged_statuses(node).step(ev.StepCompleted(0, 1, 1))
    first = own_status(node.tick(0.02))
    node.step(ev.StepCompleted(0, 2, 2))
    second = own_status(node.tick(0.02))
    node.told(make.welcome(edge=7, parent=3))
    third = own_status(node.hear(make.attached(snapshot=False), sender=3))
    assert first.age < second.age < third.age


def test_new_counters_are_in_next_routine_heartbeat(node: Any) -> None:
    """New counters are in the next routine heartbeat, together with those of the node itself."""
    told = WorkerCounters(TrainingCounters(steps=1), NodeCounters(rejected=2))
    train_with_acknowledged_statuses(node).machine.set_counters(told)
    node.told(Probe(99))  # for another id
    node.machine.set_counters(told)
    own = NodeCounters(rejected=2, round_s=0.0, ignored=1)
    heard = own_status(node.tick(ROUTINE_SPACING_S)).stats
    assert from_wire(heard) == WorkerCounters(TrainingCounters(steps=1), own)
