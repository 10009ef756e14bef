"""A worker's machine: joining, training, reporting."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import (
    Again,
    AskAfter,
    Join,
    Message,
    Phase,
    Refused,
    Report,
    Update,
)
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.events import Order
from sparkstrom.protocol.following import HUNGRY_S


def sent(effects: list[ev.Effect], kind: type[Message]) -> list[Any]:
    messages = [effect.message for effect in effects if isinstance(effect, ev.Send)]
    return [message for message in messages if isinstance(message, kind)]


def only(effects: list[ev.Effect], kind: type[Any]) -> Any:
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


# -- joining -----------------------------------------------------------------------------------


def test_it_asks_to_join_until_it_is_welcomed(node: Any, make: Any) -> None:
    first = sent(node.step(ev.Opened(make.join().address)), Join)
    assert [(join.count, join.edge, join.have, join.has_replica) for join in first] == [
        (1, 1, 0, False)
    ]
    assert sent(node.tick(0.1), Join) == []
    assert len(sent(node.tick(0.5), Join)) == 1
    effects = node.hear(make.welcome())
    assert only(effects, ev.Admitted).node == 1
    assert only(effects, ev.OpenEdge).node == 0
    assert sent(node.tick(0.6), Join) == []


@pytest.mark.parametrize("other", [{"token": 2}, {"count": 2}, {"edge": 2}])
def test_a_welcome_for_another_join_is_ignored(node: Any, make: Any, other: dict[str, int]) -> None:
    node.step(ev.Opened(make.join().address))
    assert node.hear(make.welcome(**other)) == []
    assert node.me.node == -1


def test_a_second_welcome_is_ignored(node: Any, make: Any) -> None:
    node.joined()
    assert node.hear(make.welcome()) == []


def test_a_refusal_fails_or_ends_the_task(node_with: Any, make: Any) -> None:
    for fatal, order in ((True, Order.FAIL), (False, Order.END)):
        node = node_with()
        node.step(ev.Opened(make.join().address))
        node.hear(Refused(token=1, count=2, reason="for somebody else", fatal=fatal))
        assert node.order is Order.WAIT
        node.hear(Refused(token=1, count=1, reason="no", fatal=fatal))
        assert (node.order, node.machine.command.reason) == (order, "no")


def test_what_overtakes_the_welcome_is_dropped(node: Any, make: Any) -> None:
    node.step(ev.Opened(make.join().address))
    assert node.hear(make.committed(1)) == []
    assert node.hear(make.state()) == []
    assert node.me.received == 0


def test_silence_of_half_a_lease_opens_another_edge(node: Any) -> None:
    node.training()
    assert not any(isinstance(effect, ev.Reopen) for effect in node.tick(4.9))
    assert isinstance(node.tick(0.2)[0], ev.Reopen)
    assert node.order is Order.TRAIN  # training goes on meanwhile


def rejoins(node: Any, make: Any, message: Message) -> bool:
    """Does it open another edge within a lease and a bit of hearing only this?"""
    effects: list[ev.Effect] = []
    for _ in range(24):
        effects += node.hear(message) + node.tick(0.5)
    return any(isinstance(effect, ev.Reopen) for effect in effects)


def test_an_edge_on_which_all_is_well_stays(node: Any, make: Any) -> None:
    assert not rejoins(node.training(), make, make.state())


def test_updates_that_are_never_committed_open_another_edge(node: Any, make: Any) -> None:
    node.training().step(make.published(1))
    assert rejoins(node, make, make.state())


def test_commits_that_never_arrive_open_another_edge(node: Any, make: Any) -> None:
    assert rejoins(node.training(), make, make.state(head=3))


def test_chunks_that_never_arrive_open_another_edge(node: Any, make: Any) -> None:
    assert rejoins(node.joined(), make, make.state())


# -- training ----------------------------------------------------------------------------------


def test_it_waits_until_all_have_joined_and_then_trains(node: Any, make: Any) -> None:
    node.joined()
    assert node.order is Order.PAUSE
    node.hear(make.chunk(0))
    node.step(ev.Paused(1))
    node.tick()
    node.step(ev.Installed())
    assert node.order is Order.WAIT
    node.hear(make.state(Phase.GATHERING))
    assert (node.order, node.machine.command.steps_max) == (Order.WAIT, None)
    node.hear(make.state(Phase.RUNNING))
    assert node.order is Order.TRAIN


def test_updates_are_numbered_and_sent_and_struck_when_committed(node: Any, make: Any) -> None:
    node.training()
    updates = [sent(node.step(make.published(batch)), Update)[0] for batch in (1, 2)]
    assert [(u.origin, u.seq, u.batch) for u in updates] == [(1, 1, 1), (1, 2, 2)]
    effects = node.hear(make.committed(1, origin=1, payload=b""))
    assert effects == [ev.Passed(1)]
    assert [u.seq for u in node.me.uplink.uncommitted] == [2]


def test_others_updates_are_delivered_in_order_once(node: Any, make: Any) -> None:
    node.training()
    first = node.hear(make.committed(1))
    assert only(first, ev.Deliver).update.commit == 1
    assert node.hear(make.committed(1)) == []
    assert sent(node.hear(make.committed(3)), AskAfter) == [AskAfter(1)]
    assert sent(node.hear(make.committed(4)), AskAfter) == []  # asked a moment ago
    assert only(node.hear(make.committed(2)), ev.Deliver).update.commit == 2


def test_it_asks_when_commits_are_known_to_exist_and_none_comes(node: Any, make: Any) -> None:
    node.training()
    node.hear(make.state(head=5))
    assert sent(node.tick(HUNGRY_S + 0.1), AskAfter) == [AskAfter(0)]
    assert sent(node.tick(0.1), AskAfter) == []


def test_a_full_window_stops_training_and_a_commit_lets_it_go_on(node_with: Any, make: Any) -> None:
    node = node_with(window_bytes=1).training()
    node.step(make.published(1))
    assert (node.order, node.machine.command.reason[:11]) == (Order.WAIT, "its updates")
    node.hear(make.committed(1, origin=1))
    assert node.order is Order.TRAIN


def test_it_goes_no_further_ahead_than_allowed(node_with: Any, make: Any) -> None:
    node = node_with(max_lead=3).training()
    assert node.machine.command.steps_max == 3
    node.step(ev.Progressed(0, 3, 3))
    assert node.order is Order.WAIT
    node.hear(make.state(slowest=1))
    assert (node.order, node.machine.command.steps_max) == (Order.TRAIN, 4)


def test_asked_again_it_sends_all_that_is_uncommitted(node: Any, make: Any) -> None:
    node.training()
    for batch in (1, 2):
        node.step(make.published(batch))
    assert [u.seq for u in sent(node.hear(Again(0), 1.0), Update)] == [1, 2]
    assert sent(node.hear(Again(0)), Update) == []
    assert [u.seq for u in sent(node.tick(1.0), Update)] == [1, 2]  # overdue


# -- reports -----------------------------------------------------------------------------------


def test_news_is_told_at_once_and_the_lease_renewed_without(node: Any, make: Any) -> None:
    node.training()
    node.tick(1.0)
    node.step(ev.Progressed(0, 2, 2))
    report = sent(node.tick(0.02), Report)[0]
    assert (report.batch, report.steps, report.after_seq) == (2, 2, 0)
    renewed = [after for after in range(1, 40) if sent(node.tick(0.1), Report)]
    assert renewed
    assert renewed[0] * 0.1 <= node.me.limits.lease_s / 4


def test_a_report_says_which_update_its_position_waits_for(node: Any, make: Any) -> None:
    node.training()
    node.step(make.published(1))
    node.step(ev.Progressed(0, 2, 2))
    report = sent(node.tick(0.02), Report)[0]
    assert (report.after_seq, report.batch) == (1, 2)
